"""`shadow=` for LlamaIndex: some calls are made once more by the original, and the two answers are compared.

Answers are compared without the ids of nodes, since engines make nodes anew for each call. Streamed answers are not
compared: they are counted as skipped.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Generator, Mapping
from contextvars import Context, copy_context
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.memory import BaseMemory
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import BaseNode, QueryBundle
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Workflow

from teola_plugin.adapters import comparison
from teola_plugin.adapters.comparison import Fields
from teola_plugin.adapters.shadow import Shadow
from teola_plugin.errors import RegistrationError
from teola_plugin.runtime.context import current_run
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
    return "" if isinstance(original, _SHADOWED) else "what it does is not known"


# ------------------------------------------------------------ answers


def snapshot(value: Any) -> Any:
    """Return plain data that stands for an answer; later changes of the answer do not reach it."""
    if isinstance(value, _STREAMS):
        raise TypeError("a streamed answer is read once, by its caller")
    return comparison.snapshot(value, fields_of=_fields)


def _fields(value: Any) -> Fields | None:
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
    yield "response", response.response
    yield "source_nodes", response.source_nodes
    metadata = response.metadata or {}
    ids = {scored.node.node_id: f"of source node {index}" for index, scored in enumerate(response.source_nodes)}
    yield "metadata", {ids.get(key, key): value for key, value in metadata.items()}


# ------------------------------------------------------------ calls


class OriginalCall:
    """A call that the original makes once more, see `adapters/shadow.py`."""

    def __init__(self, original: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._original, self._name = original, name
        self._args = tuple(map(_copy_argument, args))
        self._kwargs = {key: _copy_argument(value) for key, value in kwargs.items()}
        self.context: Context = _silent_context()

    def call(self) -> Any:
        return getattr(self._original, self._name)(*self._args, **self._kwargs)

    async def acall(self) -> Any:
        return await getattr(self._original, self._name)(*self._args, **self._kwargs)


def _copy_argument(value: Any) -> Any:
    """Return a copy of an argument that LlamaIndex writes into: queries get vectors, nodes get scores."""
    if isinstance(value, QueryBundle):
        return copy.copy(value)
    return [copy.deepcopy(one) for one in value] if isinstance(value, list) else value


def _silent_context() -> Context:
    """Return a copy of the caller's context in which no handler is called."""

    def quiet() -> None:
        current_run.set(None)
        silence_context()

    context = copy_context()
    context.run(quiet)
    return context


hide_from_stack_levels(globals())
