"""A LlamaIndex agent, accelerated by one line: its engines run ahead, its next prompt is prefilled while tools run.

    python examples/11_llamaindex_agent.py

prints, with fake engines::

    warm-up      5.35 s
    plain        5.35 s
    accelerated  4.68 s
    same answer: True, same events: True
"""

import asyncio
import time
from typing import Any

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.schema import TextNode
from llama_index.core.tools import QueryEngineTool

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM, TeolaVectorStore
from teola_plugin.engines.fake import FakeLLM, answer_words, fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.requests.payloads import Prompt, Sampling

FARM = ["Oats are sown in spring.", "Lambs eat oats and ivy.", "Ivy climbs walls."]
NEWS = "Prices of oats have risen again this week, say farmers in the north. " * 120
CALLS = """<tool_call>{"name": "farm", "arguments": {"input": "What do lambs eat?"}}</tool_call>
<tool_call>{"name": "news", "arguments": {"about": "oats"}}</tool_call>
<tool_call>{"name": "weather", "arguments": {"where": "north"}}</tool_call>"""


def answer(prompt: Prompt, sampling: Sampling) -> str:
    """What the model says: first its calls, then something that depends on the prompt alone."""
    first = prompt.tools and prompt.messages[-1].role == "user"
    return CALLS if first else answer_words(prompt.flat(), 24)


async def news(about: str) -> str:
    """What is new."""
    await asyncio.sleep(0.3)
    return NEWS


async def weather(where: str) -> str:
    """From a slow service."""
    await asyncio.sleep(2.0)
    return "Rain."


def agent(pool: EnginePool) -> FunctionAgent:
    """Nothing in here knows of `accelerate`."""
    llm = TeolaLLM(pool=pool, is_function_calling_model=True)
    storage = StorageContext.from_defaults(vector_store=TeolaVectorStore(pool=pool, collection="farm"))
    nodes = [TextNode(id_=f"farm-{i}", text=text) for i, text in enumerate(FARM)]
    index = VectorStoreIndex(nodes, storage_context=storage, embed_model=TeolaEmbedding(pool=pool))
    engine = index.as_query_engine(llm=llm, response_mode="tree_summarize")
    farm = QueryEngineTool.from_defaults(engine, name="farm", description="Answers questions about farming.")
    return FunctionAgent(tools=[farm, news, weather], llm=llm, system_prompt="Answer with the help of your tools.")


async def timed(label: str, agent: Any) -> tuple[str, list[str]]:
    begun = time.perf_counter()
    handler = agent.run(user_msg="Will lambs be dear this year?")
    events = [type(event).__name__ async for event in handler.stream_events()]
    said = str(await handler)
    print(f"{label:12} {time.perf_counter() - begun:.2f} s")
    return said, events


engines = fake_engines(rtx3090())
with EnginePool.local([FakeLLM("llm", rtx3090()["llm"], answer), *engines[1:]]) as pool:
    asyncio.run(timed("warm-up", agent(pool)))
    pool.reset()
    plain = asyncio.run(timed("plain", agent(pool)))
    pool.reset()
    fast = asyncio.run(timed("accelerated", accelerate(agent(pool))))  # the one line
    print(f"same answer: {plain[0] == fast[0]}, same events: {plain[1] == fast[1]}")
