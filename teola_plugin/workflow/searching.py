"""Components that find passages: searching in a collection, on the web, reranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.graph import ITEM, Attributes, PrimitiveKind, Ref, Role, named, on_loop, simple
from teola_plugin.graph import Component as Part
from teola_plugin.requests.payloads import Hit
from teola_plugin.workflow.component import Component
from teola_plugin.workflow.decomposition import Decomposition
from teola_plugin.workflow.indexing import number, own_collection, resource, several, static_collection
from teola_plugin.workflow.settings import on_engine, reads, setting
from teola_plugin.workflow.values import Kind, Value, text_size

_K = PrimitiveKind
_RRF = 60
"""Reciprocal rank fusion: what is added to a rank (Cormack, Clarke, Buettcher 2009)."""


class _Finding(Component):
    """Searches, one for each question that is read."""

    k: int

    def find(self, decomposition: Decomposition, query: Value) -> Value:
        """The passages of all questions."""
        many, count = several(query), number(query.width)
        if query.written:  # a search for each, so that it begins as the model has written its question

            def one(body: Decomposition) -> Value:
                return Value(self.search(body, Value(Ref(ITEM), Kind.TEXT), "one"), Kind.PASSAGES)

            lists = decomposition.hold(
                "", Role.MAP, named(items=query.ref), decomposition.made_by_hand(one), expected=count
            )
        else:
            lists = self.search(decomposition, query, "")
        if not many:
            return Value(lists, Kind.PASSAGES, self.k)
        width = None if count is None else self.k * count
        return Value(decomposition.call("fused", fused, lists=lists), Kind.PASSAGES, width)

    def search(self, decomposition: Decomposition, query: Value, suffix: str) -> Ref:
        """A request for each question, or one."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Searching(_Finding):
    """A question (a text, or its vector) -> the nearest passages of a collection, best first.

    For a list of questions, the passages of all of them, each once, ordered by reciprocal rank fusion. `filter`:
    metadata that passages must have.
    """

    query: str = reads("question", Kind.TEXT, Kind.TEXTS, Kind.VECTOR, Kind.VECTORS)
    k: int = setting(4, "passages for each question", minimum=1)
    collection: str = "documents"
    filter: tuple[tuple[str, Any], ...] = ()
    engine: str = on_engine("store", _K.SEARCHING)
    embedder: str = on_engine("embedder", _K.EMBEDDING)

    def decompose(self, decomposition: Decomposition) -> Value:
        return self.find(decomposition, decomposition.read("query"))

    def search(self, decomposition: Decomposition, query: Value, suffix: str) -> Ref:
        """Add a search with a vector, or with the embedding of a text; one for each item of a list."""
        vectors = query.kind in (Kind.VECTOR, Kind.VECTORS)
        part = Part(
            decomposition.part(suffix),
            Role.SEARCHING if vectors else Role.RETRIEVAL,
            (("vectors" if vectors else "query", query.ref), *own_collection(decomposition, self.collection)),
            self.engine,
            "" if vectors else self.embedder,
            batchable=several(query),
            expected=number(query.width),
            effects=(resource(self.engine, self.collection),),
            attributes=Attributes(collection=static_collection(self.collection), k=self.k, filter=tuple(self.filter)),
        )
        return decomposition.add(part, width=query.width)

    def collections(self) -> tuple[tuple[str, str], ...]:
        return ((self.engine, self.collection),)


@dataclass(frozen=True, kw_only=True)
class WebSearch(_Finding):
    """A question -> the best results of a search of the web, or of documents by their words, best first.

    For a list of questions as `Searching`.
    """

    query: str = reads("question", Kind.TEXT, Kind.TEXTS)
    k: int = setting(4, "hits for each question", minimum=1)
    engine: str = on_engine("web", _K.SEARCHING)

    def decompose(self, decomposition: Decomposition) -> Value:
        return self.find(decomposition, decomposition.read("query"))

    def search(self, decomposition: Decomposition, query: Value, suffix: str) -> Ref:
        """Add a search by words; one for each item of a list."""
        part = Part(
            decomposition.part(suffix),
            Role.SEARCHING,
            (("queries" if several(query) else "query", query.ref),),
            self.engine,
            batchable=several(query),
            expected=number(query.width),
            attributes=Attributes(k=self.k),
        )
        return decomposition.add(part, width=query.width)


@dataclass(frozen=True, kw_only=True)
class Reranking(Component):
    """Passages -> the `k` that go best with the question, best first, each with the reranker's score."""

    query: str = reads("question", Kind.TEXT)
    passages: str = reads("passages", Kind.PASSAGES)
    k: int = setting(3, "passages that are kept", minimum=1)
    engine: str = on_engine("reranker", _K.RERANKING)

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the scoring of the passages, and the choice of the `k` best ones."""
        passages = decomposition.read("passages")
        part = Part(
            decomposition.part("scores"),
            Role.RERANKING,
            named(query=decomposition.ref("query"), texts=decomposition.call("texts", texts_of, passages=passages.ref)),
            self.engine,
            batchable=True,
            expected=number(passages.width),
        )
        k = self.k

        @simple(text_size)
        def best(passages: Sequence[Hit], scores: Sequence[float]) -> tuple[Hit, ...]:
            order = sorted(range(len(passages)), key=lambda i: -scores[i])
            return tuple(replace(passages[i], score=scores[i]) for i in order[:k])

        scores = decomposition.add(part)
        count = number(passages.width)
        width = k if count is None else min(k, count)
        return Value(decomposition.call("kept", best, passages=passages.ref, scores=scores), Kind.PASSAGES, width)


@on_loop
def texts_of(passages: Sequence[Hit]) -> list[str]:
    return [passage.text for passage in passages]


@simple(text_size)
def fused(lists: Sequence[Sequence[Hit]]) -> tuple[Hit, ...]:
    """Passages of several searches, each once, by the sum of `1 / (60 + rank)` over the searches."""
    points: dict[str, float] = {}
    first: dict[str, Hit] = {}
    for hits in lists:
        for rank, hit in enumerate(hits, 1):
            points[hit.id] = points.get(hit.id, 0.0) + 1 / (_RRF + rank)
            first.setdefault(hit.id, hit)
    return tuple(sorted(first.values(), key=lambda hit: -points[hit.id]))
