"""Traces of one question about an uploaded document, original and accelerated, made by hand."""

from __future__ import annotations

from dataclasses import replace

from teola_plugin.observe.spans import GraphEdge, GraphView, QueryTrace, Span
from teola_plugin.observe.steps import Step

Row = tuple[str, str, str, float, float, float, tuple[str, ...]]

PLAIN: tuple[Row, ...] = (
    # id, kind, engine, queued, started, done, parents
    ("index.chunking", "CHUNKING", "", 0.0, 0.0, 0.05, ()),
    ("index.embedding", "EMBEDDING", "minilm", 0.05, 0.06, 0.78, ("index.chunking",)),
    ("index.ingestion", "INGESTION", "store", 0.78, 0.79, 0.96, ("index.embedding",)),
    ("expand.prefilling", "PREFILLING", "llm", 0.96, 0.97, 1.10, ("index.ingestion",)),
    ("expand.decoding", "DECODING", "llm", 1.10, 1.10, 1.72, ("expand.prefilling",)),
    ("retrieve.embedding", "EMBEDDING", "minilm", 1.72, 1.73, 1.80, ("expand.decoding",)),
    ("retrieve.searching", "SEARCHING", "store", 1.80, 1.80, 1.89, ("retrieve.embedding",)),
    ("rerank", "RERANKING", "cross", 1.89, 1.89, 2.33, ("retrieve.searching",)),
    ("answer.prefilling", "PREFILLING", "llm", 2.33, 2.34, 2.66, ("rerank",)),
    ("answer.decoding", "DECODING", "llm", 2.66, 2.66, 3.31, ("answer.prefilling",)),
)

INGESTED = ("index.ingestion.1", "index.ingestion.2", "index.ingestion.3")

FAST: tuple[Row, ...] = (
    ("index.chunking", "CHUNKING", "", 0.0, 0.0, 0.05, ()),
    ("index.embedding.1", "EMBEDDING", "minilm", 0.05, 0.05, 0.29, ("index.chunking",)),
    ("index.embedding.2", "EMBEDDING", "minilm", 0.05, 0.29, 0.53, ("index.chunking",)),
    ("index.embedding.3", "EMBEDDING", "minilm", 0.05, 0.53, 0.77, ("index.chunking",)),
    ("index.ingestion.1", "INGESTION", "store", 0.29, 0.30, 0.36, ("index.embedding.1",)),
    ("index.ingestion.2", "INGESTION", "store", 0.53, 0.54, 0.60, ("index.embedding.2",)),
    ("index.ingestion.3", "INGESTION", "store", 0.77, 0.77, 0.83, ("index.embedding.3",)),
    ("expand.prefilling", "PREFILLING", "llm", 0.0, 0.01, 0.14, ()),
    ("expand.partial_decoding.1", "PARTIAL_DECODING", "llm", 0.14, 0.14, 0.35, ("expand.prefilling",)),
    ("expand.partial_decoding.2", "PARTIAL_DECODING", "llm", 0.35, 0.35, 0.56, ("expand.partial_decoding.1",)),
    ("expand.partial_decoding.3", "PARTIAL_DECODING", "llm", 0.56, 0.56, 0.78, ("expand.partial_decoding.2",)),
    ("retrieve.embedding.1", "EMBEDDING", "minilm", 0.35, 0.77, 0.80, ("expand.partial_decoding.1",)),
    ("retrieve.embedding.2", "EMBEDDING", "minilm", 0.56, 0.77, 0.80, ("expand.partial_decoding.2",)),
    ("retrieve.embedding.3", "EMBEDDING", "minilm", 0.78, 0.80, 0.83, ("expand.partial_decoding.3",)),
    ("retrieve.searching.1", "SEARCHING", "store", 0.83, 0.83, 0.87, ("retrieve.embedding.1", *INGESTED)),
    ("retrieve.searching.2", "SEARCHING", "store", 0.83, 0.83, 0.87, ("retrieve.embedding.2", *INGESTED)),
    ("retrieve.searching.3", "SEARCHING", "store", 0.83, 0.83, 0.88, ("retrieve.embedding.3", *INGESTED)),
    ("retrieve.aggregate", "AGGREGATE", "", 0.88, 0.88, 0.885, tuple(f"retrieve.searching.{i}" for i in (1, 2, 3))),
    ("rerank", "RERANKING", "cross", 0.885, 0.89, 1.31, ("retrieve.aggregate",)),
    ("answer.partial_prefilling", "PARTIAL_PREFILLING", "llm", 0.0, 0.02, 0.17, ()),
    ("answer.full_prefilling", "FULL_PREFILLING", "llm", 1.31, 1.32, 1.49, ("rerank", "answer.partial_prefilling")),
    ("answer.decoding", "DECODING", "llm", 1.49, 1.49, 2.14, ("answer.full_prefilling",)),
    ("lookahead.embedding", "EMBEDDING", "minilm", 0.0, 0.005, 0.03, ()),
    ("lookahead.searching", "SEARCHING", "store", 0.83, 0.84, 0.88, ("lookahead.embedding", *INGESTED)),
)


def trace(
    name: str = "accelerated", rows: tuple[Row, ...] = FAST, *, origin: float = 100.0, tail: float = 0.02
) -> QueryTrace:
    """Return a trace of `rows` with times from the query's start, which is at `origin` seconds."""
    spans = tuple(_span(name, row, origin) for row in rows)
    view = GraphView.of_spans(spans)
    order: tuple[GraphEdge, ...] = tuple(
        (a, b, "order" if "ingestion" in a and "searching" in b else kind) for a, b, kind in view.edges
    )
    return QueryTrace(
        f"q-{name}",
        name,
        origin,
        origin + max((row[5] for row in rows), default=0.0) + tail,
        spans,
        graph_text="%a = CHUNKING()\nreturn %a",
        pgraph_text="%a = CHUNKING() after(%b)\nreturn %a",
        passes=(("prune_dependencies", True, 0.00012), ("stage_decomposition", False, 0.00004)),
        graph=GraphView(view.nodes, order),
        wall=1_700_000_000.0,
    )


def _span(name: str, row: Row, origin: float) -> Span:
    primitive, kind, engine, queued, started, done, parents = row
    llm = engine == "llm"
    guess = primitive.startswith("lookahead")
    return Span(
        f"q-{name}",
        name,
        primitive,
        kind,
        origin + queued,
        origin + started,
        origin + started + 0.03 if kind == "DECODING" else None,
        origin + done,
        engine=engine,
        replica=f"{engine}-0" if engine else "",
        batch=7 if engine else -1,
        scope=(primitive.split(".")[0],),
        outcome="wasted" if guess else "done",
        size=16 if "EMBEDDING" in kind else 1,
        tokens=round(300 * (done - started)) if llm else 0,
        cached=32 if kind == "FULL_PREFILLING" else 0,
        speculative=guess,
        parents=parents,
    )


STEPPED: tuple[Row, ...] = (
    ("search.embedding", "EMBEDDING", "minilm", 0.0, 0.0, 0.1, ()),
    ("search.searching", "SEARCHING", "store", 0.1, 0.1, 0.2, ("search.embedding",)),
    ("grade.prefilling", "PREFILLING", "llm", 0.2, 0.2, 0.3, ("search.searching",)),
    ("grade.decoding", "DECODING", "llm", 0.3, 0.3, 0.5, ("grade.prefilling",)),
    ("llm.call#1", "PREFILLING", "llm", 0.3, 0.3, 0.6, ()),
    ("lookahead", "EMBEDDING", "minilm", 0.6, 0.6, 0.7, ()),
    ("answer.decoding", "DECODING", "llm", 0.6, 0.6, 1.0, ("grade.decoding",)),
)
"""A graph of two supersteps and a tool; the searching began before its node, the last embedding was for nothing."""


def stepped() -> QueryTrace:
    found = trace("graph", STEPPED, origin=10.0, tail=0.0)
    steps = (
        Step(1, "superstep", "1", 10.1, 10.6, facts=(("nodes", "grade, search"),)),
        Step(2, "node", "search", 10.15, 10.25, parent=1, facts=(("task", "a1"),)),
        Step(3, "node", "grade", 10.15, 10.6, parent=1, outcome="failed"),
        Step(4, "tool", "lookup", 10.05, 10.2, parent=3, facts=(("early", True),)),
        Step(5, "superstep", "2", 10.6, None, outcome="cancelled"),
    )
    of = {"search.embedding": 2, "search.searching": 2, "grade.prefilling": 3, "grade.decoding": 3, "llm.call#1": 3}
    spans = tuple(replace(span, step=of.get(span.primitive, 0)) for span in found.spans)
    return replace(found, spans=spans, steps=steps)
