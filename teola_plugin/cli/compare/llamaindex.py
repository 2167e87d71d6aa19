"""How objects of LlamaIndex are called. Imported only for an object of LlamaIndex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.workflow import Workflow

from teola_plugin.adapters.llamaindex.checking import snapshot
from teola_plugin.cli.compare.entries import Entries


def entries(obj: Any) -> Entries | None:
    """Of an object of LlamaIndex; None for one that nobody asks anything."""
    return next((made(obj) for kind, made in _KINDS if isinstance(obj, kind)), None)


def _of_engine(obj: BaseQueryEngine) -> Entries:
    return Entries("query engine", "query, aquery", _query, _aquery, snapshot, wrong=_no_text)


def _query(engine: Any, text: str) -> Any:
    made = engine.query(text)
    return made.get_response() if isinstance(made, StreamingResponse) else made


async def _aquery(engine: Any, text: str) -> Any:
    made = await engine.aquery(text)
    return await made.get_response() if isinstance(made, AsyncStreamingResponse) else made


def _of_retriever(obj: BaseRetriever) -> Entries:
    return Entries(
        "retriever",
        "retrieve, aretrieve",
        lambda one, text: one.retrieve(text),
        lambda one, text: one.aretrieve(text),
        snapshot,
        wrong=_no_text,
    )


def _of_synthesizer(obj: BaseSynthesizer) -> Entries:
    return Entries(
        "synthesizer",
        "synthesize, asynthesize",
        lambda one, given: one.synthesize(given["query"], _nodes(given)),
        lambda one, given: one.asynthesize(given["query"], _nodes(given)),
        snapshot,
        wrong=_no_query_with_nodes,
    )


def _nodes(given: dict[str, Any]) -> list[NodeWithScore]:
    texts = given["nodes"]
    return [NodeWithScore(node=TextNode(text=text, id_=f"node {i}"), score=1.0) for i, text in enumerate(texts)]


def _of_chat_engine(obj: BaseChatEngine) -> Entries:
    return Entries(
        "chat engine",
        "chat, achat",
        lambda one, text: one.chat(text),
        lambda one, text: one.achat(text),
        lambda made: made.response,
        wrong=_no_text,
        fresh=lambda one: one.reset(),
    )


def _of_agent(obj: Any) -> Entries:
    async def run(agent: Any, given: Any) -> Any:
        return await (agent.run(user_msg=given) if isinstance(given, str) else agent.run(**given))

    return Entries("agent", "run", None, run, _said, wrong=_no_text_nor_arguments)


def _of_workflow(obj: Workflow) -> Entries:
    async def run(workflow: Any, given: Any) -> Any:
        return await workflow.run(**given)

    return Entries("workflow", "run", None, run, snapshot, wrong=_no_arguments)


def _said(made: Any) -> Any:
    """Of an agent: text and tools; not what a provider says of its response, nor ids of calls."""
    if not isinstance(made, AgentOutput):
        return snapshot(made)
    tools = [(call.tool_name, call.tool_kwargs) for call in made.tool_calls]
    return snapshot({"response": made.response.content, "agent": made.current_agent_name, "tools": tools})


# ------------------------------------------------------------ what is wrong with an input


def _no_text(value: Any) -> str:
    return "" if isinstance(value, str) and value.strip() else 'it takes a text: "What do lambs eat?"'


def _no_arguments(value: Any) -> str:
    return "" if isinstance(value, dict) else 'it takes the arguments of run(): {"question": "What do lambs eat?"}'


def _no_text_nor_arguments(value: Any) -> str:
    if isinstance(value, dict) or not _no_text(value):
        return ""
    return 'it takes a text, or the arguments of run(): {"user_msg": "What do lambs eat?"}'


def _no_query_with_nodes(value: Any) -> str:
    good = isinstance(value, dict) and value.keys() == {"query", "nodes"} and isinstance(value["nodes"], list)
    if good and not _no_text(value["query"]) and all(isinstance(text, str) for text in value["nodes"]):
        return ""
    return 'it takes a query and texts: {"query": "What do lambs eat?", "nodes": ["Lambs eat grass."]}'


_KINDS: tuple[tuple[Any, Callable[[Any], Entries]], ...] = (
    (BaseQueryEngine, _of_engine),
    (BaseRetriever, _of_retriever),
    (BaseSynthesizer, _of_synthesizer),
    (BaseChatEngine, _of_chat_engine),
    ((BaseWorkflowAgent, AgentWorkflow), _of_agent),
    (Workflow, _of_workflow),
)
