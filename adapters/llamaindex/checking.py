"""Comparison of LlamaIndex objects with their originals, for `shadow=` and `teola compare`.

With `shadow=`, some calls are made once more by the original, and the two answers are compared, without the ids of
nodes, since engines make nodes anew for each call. Streamed answers are not compared: they are counted as skipped.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

from llama_index.core.agent.workflow import AgentOutput, AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.memory import BaseMemory
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Workflow

from teola_plugin.adapters import comparison
from teola_plugin.adapters.comparison import Entries, Fields
from teola_plugin.adapters.shadow import OriginalCall, Shadow
from teola_plugin.errors import RegistrationError
from teola_plugin.runtime.usage import Tokens
from teola_plugin.shims.interception import CallObserver, observers
from teola_plugin.shims.llamaindex.interceptors import intercept_models
from teola_plugin.shims.llamaindex.silent_calls import install_silencing, silence_context
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.llamaindex.classes import reachable_objects

_STREAMS = (StreamingResponse, AsyncStreamingResponse, Generator, AsyncGenerator)
_SHADOWED = (BaseQueryEngine, BaseRetriever, BaseSynthesizer)
_SIDE_EFFECTS: tuple[tuple[type, str], ...] = (
    (Workflow, "a workflow's steps may do anything"),
    (BaseChatEngine, "a chat engine keeps its history"),
    (BaseMemory, "it keeps a memory"),
    (IngestionPipeline, "it writes into its stores"),
    (BaseIndex, "it writes into its stores"),
    (FunctionTool, "it calls a function of yours as a tool"),
)
"""Classes of objects that must not run twice, and the reason."""
_CODE_ENGINES = ("sql", "pandas", "polars")
"""Words in the names of modules whose engines run code that a model has written."""


def shadow_of(share: float, original: Any) -> Shadow:
    """Create the comparison of a share of the calls of an engine, a retriever or a synthesizer.

    Raise `RegistrationError` for a number that is no share, for an object that may have side effects, and if the
    user's handlers could not be kept from hearing of a second run.
    """
    shadow = Shadow(share, snapshot)
    reason = _side_effect(original)
    if reason:
        raise RegistrationError(
            f"shadow= would run the {type(original).__name__} a second time, and {reason}.",
            hint="use shadow= only for query engines, retrievers and synthesizers without side effects",
        )
    install_silencing()
    return shadow


def _side_effect(original: Any) -> str:
    """Return the reason why an object must not run twice; empty for none."""
    for one in (original, *reachable_objects(original)):
        if isinstance(one, BaseIndex) and one is not original:
            continue  # retrievers hold the index that they read
        for kind, reason in _SIDE_EFFECTS:
            if isinstance(one, kind):
                return reason
        if isinstance(one, BaseQueryEngine) and any(word in type(one).__module__ for word in _CODE_ENGINES):
            return f"a {type(one).__name__} runs what its model has written"
    return "" if isinstance(original, _SHADOWED) else "its effects are not known"


# ------------------------------------------------------------ answers


def snapshot(value: Any) -> Any:
    """Return plain data that stands for an answer; later changes of the answer do not reach it."""
    if isinstance(value, _STREAMS):
        raise TypeError("a streamed answer is read once, by its caller")
    return comparison.snapshot(value, fields_of=_fields)


def _fields(value: Any) -> Fields | None:
    """Return the fields of a node or a response that are compared; None for values that are compared as they are."""
    if isinstance(value, BaseNode):
        return _node_fields(value)
    if isinstance(value, Response):
        return _response_fields(value)
    return None


def _node_fields(node: BaseNode) -> Fields:
    """Yield the fields that are compared: those of the node without ids and hashes, its own and its relations'."""
    left_out = {"id_", "embedding", "relationships", "index_id"}
    yield from ((name, getattr(node, name, None)) for name in type(node).model_fields if name not in left_out)


def _response_fields(response: Response) -> Fields:
    """Yield the fields of a response that are compared, with positions in place of the ids of its source nodes."""
    yield "response", response.response
    yield "source_nodes", response.source_nodes
    metadata = response.metadata or {}
    ids = {scored.node.node_id: f"of source node {index}" for index, scored in enumerate(response.source_nodes)}
    yield "metadata", {ids.get(key, key): value for key, value in metadata.items()}


# ------------------------------------------------------------ calls


def original_call(original: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OriginalCall:
    """Return the call that the original makes once more, see `adapters/shadow.py`."""
    args = tuple(map(_copy_argument, args))
    kwargs = {key: _copy_argument(value) for key, value in kwargs.items()}
    return OriginalCall.of(lambda: getattr(original, name)(*args, **kwargs), silence_context)


def _copy_argument(value: Any) -> Any:
    """Return a copy of an argument for the second call: LlamaIndex writes vectors into queries, scores into nodes."""
    if isinstance(value, QueryBundle):
        return copy.copy(value)
    return [copy.deepcopy(one) for one in value] if isinstance(value, list) else value


# ------------------------------------------------------------ how `teola compare` calls objects


def _query(engine: Any, text: str) -> Any:
    answer = engine.query(text)
    return answer.get_response() if isinstance(answer, StreamingResponse) else answer


async def _aquery(engine: Any, text: str) -> Any:
    answer = await engine.aquery(text)
    return await answer.get_response() if isinstance(answer, AsyncStreamingResponse) else answer


def _nodes(value: dict[str, Any]) -> list[NodeWithScore]:
    texts = value["nodes"]
    return [NodeWithScore(node=TextNode(text=text, id_=f"node {i}"), score=1.0) for i, text in enumerate(texts)]


async def _run_agent(agent: Any, value: Any) -> Any:
    return await (agent.run(user_msg=value) if isinstance(value, str) else agent.run(**value))


async def _run_workflow(workflow: Any, value: Any) -> Any:
    return await workflow.run(**value)


def _answer_of_agent(answer: Any) -> Any:
    """Return the text and the tools of an agent's answer, without the provider's data and the ids of calls."""
    if not isinstance(answer, AgentOutput):
        return snapshot(answer)
    tools = [(call.tool_name, call.tool_kwargs) for call in answer.tool_calls]
    return snapshot({"response": answer.response.content, "agent": answer.current_agent_name, "tools": tools})


# ------------------------------------------------------------ what is wrong with an input


def _fault_in_text(value: Any) -> str:
    return "" if isinstance(value, str) and value.strip() else 'it takes a text: "What do lambs eat?"'


def _fault_in_arguments(value: Any) -> str:
    return "" if isinstance(value, dict) else 'it takes the arguments of run(): {"question": "What do lambs eat?"}'


def _no_text_nor_arguments(value: Any) -> str:
    if isinstance(value, dict) or not _fault_in_text(value):
        return ""
    return 'it takes a text, or the arguments of run(): {"user_msg": "What do lambs eat?"}'


def _fault_in_query_with_nodes(value: Any) -> str:
    """Return what is wrong with the input for a synthesizer, as text; empty if nothing is."""
    good = isinstance(value, dict) and value.keys() == {"query", "nodes"} and isinstance(value["nodes"], list)
    if good and not _fault_in_text(value["query"]) and all(isinstance(text, str) for text in value["nodes"]):
        return ""
    return 'it takes a query and texts: {"query": "What do lambs eat?", "nodes": ["Lambs eat grass."]}'


_ENTRIES: tuple[tuple[Any, Entries], ...] = (
    (BaseQueryEngine, Entries("query engine", "query, aquery", _query, _aquery, snapshot, fault_in=_fault_in_text)),
    (
        BaseRetriever,
        Entries(
            "retriever",
            "retrieve, aretrieve",
            lambda one, text: one.retrieve(text),
            lambda one, text: one.aretrieve(text),
            snapshot,
            fault_in=_fault_in_text,
        ),
    ),
    (
        BaseSynthesizer,
        Entries(
            "synthesizer",
            "synthesize, asynthesize",
            lambda one, value: one.synthesize(value["query"], _nodes(value)),
            lambda one, value: one.asynthesize(value["query"], _nodes(value)),
            snapshot,
            fault_in=_fault_in_query_with_nodes,
        ),
    ),
    (
        BaseChatEngine,
        Entries(
            "chat engine",
            "chat, achat",
            lambda one, text: one.chat(text),
            lambda one, text: one.achat(text),
            lambda answer: answer.response,
            fault_in=_fault_in_text,
            fresh=lambda one: one.reset(),
        ),
    ),
    (
        (BaseWorkflowAgent, AgentWorkflow),
        Entries("agent", "run", None, _run_agent, _answer_of_agent, fault_in=_no_text_nor_arguments),
    ),
    (Workflow, Entries("workflow", "run", None, _run_workflow, snapshot, fault_in=_fault_in_arguments)),
)


def entries_of(obj: Any) -> Entries | None:
    """Return the entries of an object; None for one that takes no input."""
    return next((entries for kind, entries in _ENTRIES if isinstance(obj, kind)), None)


# ------------------------------------------------------------ the tokens that LLMs report

_PROMPT, _COMPLETION = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
"""The names that providers have for the tokens of prompts, and of answers."""


def tokens_of(value: Any) -> Tokens | None:
    """Return the tokens that the answer of an LLM, or a chunk of it, reports; None if it reports none."""
    if not isinstance(value, (ChatResponse, CompletionResponse)):
        return None
    for usage in (value.additional_kwargs, _field(value.raw, "usage")):
        prompt, completion = _first_number(usage, _PROMPT), _first_number(usage, _COMPLETION)
        if prompt is not None or completion is not None:
            return Tokens(prompt or 0, 0, completion or 0)
    return None


def observe_models(observer: CallObserver) -> None:
    """Tell an observer of the calls of all LLMs whose classes are imported by now."""
    intercept_models()
    observers[:] = [observer]


def _first_number(usage: Any, names: tuple[str, ...]) -> int | None:
    return next((number for name in names if isinstance(number := _field(usage, name), int)), None)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


hide_from_stack_levels(globals())
