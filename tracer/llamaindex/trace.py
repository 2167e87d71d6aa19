"""LlamaIndex object -> workflow template of one of its entries. Runs no code of the user's, changes nothing.

The query's input is a dictionary: `query` (its text), `texts` (what is embedded instead, if anything), `nodes` for
`synthesize` and `chunks` for `respond`, which is a synthesizer's `get_response`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from teola_plugin.graph import INPUT, Ref
from teola_plugin.shims.llamaindex.copies import attributes
from teola_plugin.shims.llamaindex.engines import AnsweringParts
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.llamaindex import engines
from teola_plugin.tracer.llamaindex.classes import as_made, level
from teola_plugin.tracer.llamaindex.lowering import Guard, SymbolicQuery, Value, Walk
from teola_plugin.tracer.llamaindex.model_calls import OwnModels
from teola_plugin.tracer.llamaindex.retrieval import retrieve
from teola_plugin.tracer.llamaindex.synthesizers import synthesize
from teola_plugin.tracer.report import TraceNode
from teola_plugin.tracer.symbols import NotUnderstood

QUERY_TEXT, TEXTS, NODES, CHUNKS = "query", "texts", "nodes", "chunks"
"""Keys of the query's input."""

PLANNED = "its parts are planned by themselves, when they are called"


@dataclass(frozen=True, slots=True)
class TracedEntry:
    """What an entry of an object looks like to the graph, and what that rests on."""

    traced: TraceResult
    guards: tuple[Guard, ...]
    lowered: frozenset[int]
    """Ids of the engines and retrievers that are in the graph."""

    @property
    def holds(self) -> bool:
        """Whether the object still is what it was."""
        return all(guard.holds for guard in self.guards)


def trace(node: Any, entry: str = "query", texts: int = 0, own_models: OwnModels | None = None) -> TracedEntry:
    """Return what an entry of an object looks like to the graph.

    `entry`: query, retrieve, synthesize or respond. `texts`: how many texts it is embedded by, 0 for its own.
    `own_models`: says which models and stores of the user's own the graph may call; None for none.
    """
    walk = Walk(own_models=own_models)
    word = _word(node)
    try:
        with as_made():
            made = _traced(walk, node, entry, _asked(texts), word)
    except NotUnderstood as why:
        walk.note(word, node, level(node), reason=str(why))
        made = None
    if not walk.draft.components and (inner := list(_parts(node, word))):
        own = [replace(row, reason=f"{row.reason}; {PLANNED}") for row in walk.draft.nodes]
        walk.draft.nodes[:] = [*own, *inner]
    last = next(reversed(walk.draft.components), INPUT)
    traced = walk.draft.finish(Ref(last) if made is None else made, word)
    return TracedEntry(traced, tuple(walk.guards), frozenset(walk.lowered))


def _parts(node: Any, word: str) -> Iterator[TraceNode]:
    """Rows of the engines and retrievers in it, which are planned by themselves when they are called."""
    for name, part in attributes(node).items():
        kind = next((entry for cls, entry in _ENTRIES if isinstance(part, cls)), "")
        for row in trace(part, kind).traced.report if kind else ():
            yield replace(row, path=f"{word}.{name}{row.path.removeprefix(_word(part))}")


_ENTRIES = ((BaseQueryEngine, "query"), (BaseRetriever, "retrieve"), (BaseSynthesizer, "synthesize"))
"""Parts, and what is asked of them."""


def _asked(texts: int) -> SymbolicQuery:
    text = Ref(INPUT, (QUERY_TEXT,))
    return SymbolicQuery(text, tuple(Ref(INPUT, (TEXTS, i)) for i in range(texts)) or (text,))


def _traced(walk: Walk, node: Any, entry: str, asked: SymbolicQuery, word: str) -> Value:
    if entry == "respond":
        nodes = walk.call("chunks", nodes_of, chunks=Ref(INPUT, (CHUNKS,)))
        return synthesize(walk, node, asked.text, nodes, word, "synthesize")
    if entry == "synthesize":
        if isinstance(node, BaseSynthesizer):
            return synthesize(walk, node, asked.text, Ref(INPUT, (NODES,)), word, "synthesize")
        parts = walk.parts(AnsweringParts, node)
        if parts.response_synthesizer is None:
            raise NotUnderstood(f"{type(node).__name__} has no synthesizer of its own")
        where = parts.path(word, "response_synthesizer")
        return synthesize(walk, parts.response_synthesizer, asked.text, Ref(INPUT, (NODES,)), where, "synthesize")
    if isinstance(node, BaseRetriever):
        return retrieve(walk, node, asked, word, "retrieve")
    if not isinstance(node, BaseQueryEngine):
        raise NotUnderstood(f"{type(node).__name__} is not known")
    if entry == "retrieve":
        return engines.found(walk, node, asked, word)
    return engines.answer(walk, node, asked, word).text


def nodes_of(chunks: Sequence[str]) -> list[NodeWithScore]:
    """Nodes of which `synthesize` makes these chunks."""
    return [NodeWithScore(node=TextNode(text=chunk)) for chunk in chunks]


def _word(node: Any) -> str:
    if isinstance(node, BaseRetriever):
        return "retriever"
    return "synthesizer" if isinstance(node, BaseSynthesizer) else "engine"
