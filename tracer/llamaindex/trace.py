"""Trace a LlamaIndex object into the workflow template of one entry, without running the user's code.

The query's input is a dictionary: `query` (its text), `texts` (what is embedded instead, if anything), `nodes` for
`synthesize` and `chunks` for `respond`, which is a synthesizer's `get_response`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from teola_plugin.graph import INPUT, Ref
from teola_plugin.shims.llamaindex.engines import AnsweringParts
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.llamaindex import engines
from teola_plugin.tracer.llamaindex.classes import refuse_unknown_attributes, report_level
from teola_plugin.tracer.llamaindex.lowering import Guard, Lowering, SymbolicQuery, Value
from teola_plugin.tracer.llamaindex.model_calls import OwnModels
from teola_plugin.tracer.llamaindex.retrieval import lower_retriever
from teola_plugin.tracer.llamaindex.synthesizers import lower_synthesizer
from teola_plugin.tracer.report import TraceNode
from teola_plugin.tracer.symbols import NotUnderstood

QUERY_TEXT, TEXTS, NODES, CHUNKS = "query", "texts", "nodes", "chunks"
"""Keys of the query's input."""

_PLANNED_LATER = "its parts are planned by themselves, when they are called"


@dataclass(frozen=True, slots=True)
class TracedEntry:
    """The traced template of one entry of an object, with the guards that keep it valid."""

    traced: TraceResult
    guards: tuple[Guard, ...]
    lowered: frozenset[int]
    """Ids of the engines and retrievers whose work the graph does."""
    own_code: tuple[str, ...] = ()
    """Beginnings of the names of components that come from the source of the user's own classes."""

    @property
    def holds(self) -> bool:
        """True while the object is as it was when traced."""
        return all(guard.holds for guard in self.guards)


def _find_reader() -> Callable[[OwnModels], Any] | None:
    """Return what makes readers of methods; None without LangChain's core, which the reader of functions needs."""
    try:
        from teola_plugin.tracer.llamaindex.steps import make_reader
    except ImportError:
        return None
    return make_reader


def trace(
    node: Any, entry: str = "query", texts: int = 0, own_models: OwnModels | None = None, *, is_async: bool = False
) -> TracedEntry:
    """Return the traced template of an entry of an object.

    `entry`: query, retrieve, synthesize or respond. `texts`: how many texts it is embedded by, 0 for its own.
    `own_models`: says which models and stores of the user's own the graph may call; None for none. `is_async`: the
    async method of the entry is called.
    """
    lowering = Lowering(own_models=own_models, runs_in_loop=is_async, make_reader=_find_reader())
    kind = _kind_of(node)
    try:
        with refuse_unknown_attributes():
            text = Ref(INPUT, (QUERY_TEXT,))
            query = SymbolicQuery(text, tuple(Ref(INPUT, (TEXTS, i)) for i in range(texts)) or (text,))
            output = _lower_entry(lowering, node, entry, query, kind)
    except NotUnderstood as error:
        lowering.add_report_row(kind, node, report_level(node), reason=str(error))
        output = None
    if not lowering.draft.components and (inner := list(_report_parts(node, kind))):
        rows = [replace(row, reason=f"{row.reason}; {_PLANNED_LATER}") for row in lowering.draft.nodes]
        lowering.draft.nodes[:] = [*rows, *inner]
    last = next(reversed(lowering.draft.components), INPUT)
    traced = lowering.draft.finish(Ref(last) if output is None else output, kind)
    return TracedEntry(traced, tuple(lowering.guards), frozenset(lowering.lowered), tuple(sorted(lowering.own_code)))


def _report_parts(node: Any, kind: str) -> Iterator[TraceNode]:
    """Yield rows of the engines, retrievers and synthesizers inside `node`, each of which has a plan of its own."""
    for name, part in vars(node).items():
        entry = next((name_of_entry for cls, name_of_entry in _ENTRIES if isinstance(part, cls)), "")
        for row in trace(part, entry).traced.report if entry else ():
            yield replace(row, path=f"{kind}.{name}{row.path.removeprefix(_kind_of(part))}")


_ENTRIES = ((BaseQueryEngine, "query"), (BaseRetriever, "retrieve"), (BaseSynthesizer, "synthesize"))
"""Classes of parts, and the entry that is traced of each."""


def entries_of(part: Any) -> tuple[str, ...]:
    """Return the entry of an engine, a retriever or a synthesizer that is called inside of other objects."""
    if isinstance(part, BaseSynthesizer):
        return ("respond",)
    return ("retrieve",) if isinstance(part, BaseRetriever) else ("query",)


def _lower_entry(lowering: Lowering, node: Any, entry: str, query: SymbolicQuery, kind: str) -> Value:
    """Lower one entry of an object. Return the ref of its result; None if the graph does not compute all of it.

    `entry`: query, retrieve, synthesize or respond. Raise `NotUnderstood` if the object is not known or has no such
    entry.
    """
    if entry == "respond":
        nodes = lowering.add_call("chunks", nodes_of, chunks=Ref(INPUT, (CHUNKS,)))
        return lower_synthesizer(lowering, node, query.text, nodes, kind, "synthesize")
    if entry == "synthesize":
        if isinstance(node, BaseSynthesizer):
            return lower_synthesizer(lowering, node, query.text, Ref(INPUT, (NODES,)), kind, "synthesize")
        parts = lowering.read_parts(AnsweringParts, node)
        if parts.response_synthesizer is None:
            raise NotUnderstood(f"{type(node).__name__} has no synthesizer of its own")
        where = parts.path(kind, "response_synthesizer")
        return lower_synthesizer(
            lowering, parts.response_synthesizer, query.text, Ref(INPUT, (NODES,)), where, "synthesize"
        )
    if isinstance(node, BaseRetriever):
        return lower_retriever(lowering, node, query, kind, "retrieve")
    if not isinstance(node, BaseQueryEngine):
        raise NotUnderstood(f"{type(node).__name__} is not known")
    if entry == "retrieve":
        return engines.lower_retrieve(lowering, node, query, kind)
    return engines.lower_query(lowering, node, query, kind).text


def nodes_of(chunks: Sequence[str]) -> list[NodeWithScore]:
    """Return nodes from which `synthesize` makes the chunks that `get_response` was called with."""
    return [NodeWithScore(node=TextNode(text=chunk)) for chunk in chunks]


def _kind_of(node: Any) -> str:
    if isinstance(node, BaseRetriever):
        return "retriever"
    return "synthesizer" if isinstance(node, BaseSynthesizer) else "engine"
