"""LlamaIndex apps as people write them."""

from __future__ import annotations

from typing import assert_type

from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import fake_engines
from teola_plugin.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore


def engines(pool: EnginePool, index: VectorStoreIndex, llm: TeolaLLM) -> None:
    engine = index.as_query_engine(llm=llm)
    fast = accelerate(engine, pool=pool, app="desk")
    print(fast.query("?"), fast.explain("?"), fast.report().parts, fast.plan("?"))
    on_context: BaseQueryEngine = fast.with_request_context(tenant="acme", deadline_s=5.0)
    if trace := fast.last_trace():
        print(on_context, trace.seconds)
    engine = accelerate(engine, engines="auto")
    retriever = accelerate(index.as_retriever())
    assert_type(retriever.retrieve("?"), list[NodeWithScore])
    own = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=[TeolaRerank(pool=pool, top_n=2)])
    own = accelerate(own, bind=[(llm, "llm")], strict=False)
    print(own.retrieve(QueryBundle("?")), accelerate(get_response_synthesizer(llm=llm)).get_response("?", ["oats"]))
    print(accelerate(index.as_chat_engine(llm=llm)).chat("?").response)


def writing(index: VectorStoreIndex) -> None:
    assert_type(accelerate(index), VectorStoreIndex)
    pipeline = accelerate(IngestionPipeline(), app="desk")
    print(pipeline.run(documents=[Document(text="Oats.")]))


async def agents(llm: TeolaLLM) -> str:
    agent = FunctionAgent(tools=[], llm=llm)
    fast = accelerate(agent)
    agent = accelerate(agent)
    handler = fast.run(user_msg="?")
    async for event in handler.stream_events():
        print(event)
    return str(await handler)


with EnginePool.local(fake_engines()) as started:
    storage = StorageContext.from_defaults(vector_store=TeolaVectorStore(pool=started, collection="farm"))
    made = VectorStoreIndex([], storage_context=storage, embed_model=TeolaEmbedding(pool=started))
    engines(started, made, TeolaLLM(pool=started, max_tokens=8))
    writing(made)
