"""Which overlaps saved how much: what an answer waited for, plain and accelerated, part by part.

Every moment of a run is counted for one part of the app, so that what the parts save adds up to what the run saved.
Where several parts work at once, it is the one that goes on longest: the others wait for nothing but it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from teola_plugin.observe import QueryTrace, Span

INDEX, ASK, RERANK, ANSWER, REST = "index", "ask", "rerank", "answer", "rest"
TOLD = {
    ASK: "more questions are written and searched with while the document is indexed",
    ANSWER: "the known part of each prompt is read before the passages are there",
    INDEX: "passages are stored while the next ones are embedded",
}
"""What a part's saving comes from."""
_INDEXING, _ASKING = ("ids.", "collection"), ("passages.", "queries")
"""How primitives of an accelerated run begin: the names that the app's steps have."""
_SMALLEST = 0.01
"""Of the plain time: less is noise."""

Interval = tuple[float, float, str]


def saved(plain: Sequence[QueryTrace], accelerated: Sequence[QueryTrace]) -> dict[str, float]:
    """Return the seconds that each kind of overlap saved, the largest first. Medians over the runs."""
    before, after = (_medians([waited_for(trace) for trace in traces]) for traces in (plain, accelerated))
    gains = {part: before.get(part, 0.0) - after.get(part, 0.0) for part in TOLD}
    if not any(_is_stage(span) for trace in accelerated for span in trace.spans):
        del gains[INDEX]  # it is indexed as always, and was quicker by chance
    worth = [(part, gain) for part, gain in gains.items() if gain > _SMALLEST * sum(before.values())]
    return {TOLD[part]: gain for part, gain in sorted(worth, key=lambda one: -one[1])}


def _is_stage(span: Span) -> bool:
    """Return True for a stage of embedding, whose later stages run while earlier results are stored."""
    return span.kind == "EMBEDDING" and "#" in span.primitive and span.primitive.startswith(_INDEXING)


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(run.get(part, 0.0) for run in runs) for run in runs for part in run}


def waited_for(trace: QueryTrace) -> dict[str, float]:
    """Part -> seconds during which the answer waited for it. They add up to the trace's seconds."""
    found = sorted(_intervals(trace))
    edges = sorted({trace.started, trace.ended, *(at for begin, end, _ in found for at in (begin, end))})
    parts: dict[str, float] = {}
    for begin, end in pairwise(edges):
        going = [one for one in found if one[0] <= begin and one[1] >= end]
        part = max(going, key=lambda one: one[1])[2] if going else REST
        parts[part] = parts.get(part, 0.0) + end - begin
    return parts


def _intervals(trace: QueryTrace) -> Iterator[Interval]:
    """Yield the intervals in which each part of the query was at work."""
    asked = min((s.begin for s in trace.spans if s.engine == "llm" and s.done is not None), default=trace.ended)
    planned = any(s.primitive.startswith(_INDEXING) for s in trace.spans)
    if not planned:  # the plain app indexes first, also by means that no engine sees
        yield trace.started, asked, INDEX
    for span in trace.spans:
        part = _planned(span) if planned else _plain(span, asked)
        if part and span.done is not None and not span.unused:
            begin = span.queued if part == INDEX else span.begin
            yield max(begin, trace.started), min(span.done, trace.ended), part


def _planned(span: Span) -> str:
    if span.primitive.startswith(_INDEXING) or span.kind == "INGESTION":
        return INDEX
    if not span.engine:
        return ""
    if span.engine == "reranker":
        return RERANK
    if span.engine == "llm" and not span.primitive.startswith(_ASKING):
        return ANSWER
    return ASK


def _plain(span: Span, asked: float) -> str:
    if span.engine == "llm":
        return ASK if span.begin == asked else ANSWER
    if span.engine == "reranker":
        return RERANK
    return ASK if span.engine and span.begin >= asked else ""
