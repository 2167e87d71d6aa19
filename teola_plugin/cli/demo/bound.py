"""What no schedule could beat, from the plain run's own engine times and the data dependencies, written by hand.

It knows nothing of our graphs: it says for this one chain which call needs which, assumes that everything that does
not depend on each other overlaps, and that every prompt was prefilled as far as it was known.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from teola_plugin.observe import QueryTrace, Span


def uploaded_bound(traces: Sequence[QueryTrace]) -> float:
    """Seconds; the median over plain runs of the uploaded-document chain."""
    return statistics.median(_bound(trace) for trace in traces)


def stock_bound(traces: Sequence[QueryTrace], index: float) -> float:
    """The same for the chain of stock classes, which indexes outside the engines, in `index` seconds."""
    return statistics.median(_stock_bound(trace, index) for trace in traces)


def _stock_bound(trace: QueryTrace, index: float) -> float:
    calls = _calls(trace)
    expansion, *answers = calls["PREFILLING"]
    ask = expansion.seconds + min(s.seconds for s in calls["EMBEDDING"])
    return max(index, ask) + _answered(calls["RERANKING"], answers)


def _bound(trace: QueryTrace) -> float:
    calls = _calls(trace)
    documents, *queries = calls["EMBEDDING"]
    expansion, *answers = calls["PREFILLING"]
    index = documents.seconds + min(s.seconds for s in calls["INGESTION"])
    ask = expansion.seconds + min(s.seconds for s in queries)  # the last question is embedded when it is closed
    search = min(s.seconds for s in calls["SEARCHING"])
    return max(index, ask) + search + _answered(calls["RERANKING"], answers)


def _calls(trace: QueryTrace) -> dict[str, list[Span]]:
    return {kind: [s for s in trace.spans if s.kind == kind] for kind in {s.kind for s in trace.spans}}


def _answered(rerankings: Sequence[Span], answers: Sequence[Span]) -> float:
    return sum(s.seconds for s in rerankings) + _prefill(answers[0]) + sum(_decode(span) for span in answers)


def _prefill(span: Span) -> float:
    """Of the first answer: its passage is known last. Of the later ones only the previous answer is, a few tokens."""
    return 0.5 * (span.seconds - _decode(span))


def _decode(span: Span) -> float:
    return span.done - span.first if span.done is not None and span.first is not None else span.seconds
