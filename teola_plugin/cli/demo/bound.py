"""What no schedule could beat, from the plain run's own engine times and the data dependencies, written by hand.

It knows nothing of our graphs: it says for this one chain which call needs which, assumes that everything that does
not depend on each other overlaps, and that every prompt was prefilled as far as it was known.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from teola_plugin.observe import QueryTrace, Span

LLM_PREFILLS = ("FULL_PREFILLING", "PREFILLING")
LLM_DECODINGS = ("PARTIAL_DECODING", "DECODING")


def uploaded_bound(traces: Sequence[QueryTrace]) -> float:
    """Seconds; the median over plain runs of the uploaded-document chain."""
    return statistics.median(_bound(trace) for trace in traces)


def stock_bound(traces: Sequence[QueryTrace], accelerated: Sequence[QueryTrace], index: float) -> float:
    """The same for the chain of stock classes, which indexes outside the engines, in `index` seconds.

    Its answers come whole: how much of their time is decoding is taken from the accelerated runs, where they stream.
    """
    shares = [share for trace in accelerated for share in _decoding_shares(trace)]
    share = statistics.median(shares) if shares else 1.0
    return statistics.median(_stock_bound(trace, index, share) for trace in traces)


def _decoding_shares(trace: QueryTrace) -> Iterator[float]:
    """Yield the share of decoding in the duration of each streamed generation."""
    for span in trace.spans:
        if span.kind not in LLM_PREFILLS or not span.seconds:
            continue
        name = span.primitive.removesuffix("prefilling")
        of = (s for s in trace.spans if s.kind in LLM_DECODINGS and s.primitive.startswith(f"{name}decoding"))
        decoded = sum(s.seconds for s in of)
        yield decoded / (span.seconds + decoded)


def _stock_bound(trace: QueryTrace, index: float, share: float) -> float:
    calls = _calls(trace)
    expansion, *answers = calls["GENERATION"]
    ask = expansion.seconds + min(s.seconds for s in calls["EMBEDDING"])
    return max(index, ask) + _answered(calls["RERANKING"], answers, share)


def _bound(trace: QueryTrace) -> float:
    calls = _calls(trace)
    documents, *queries = calls["EMBEDDING"]
    expansion, *answers = calls["GENERATION"]
    index = documents.seconds + min(s.seconds for s in calls["INGESTION"])
    ask = expansion.seconds + min(s.seconds for s in queries)  # the last question is embedded when it is closed
    search = min(s.seconds for s in calls["SEARCHING"])
    return max(index, ask) + search + _answered(calls["RERANKING"], answers)


def _calls(trace: QueryTrace) -> dict[str, list[Span]]:
    return {kind: [s for s in trace.spans if s.kind == kind] for kind in {s.kind for s in trace.spans}}


def _answered(rerankings: Sequence[Span], answers: Sequence[Span], share: float = 1.0) -> float:
    """Half of the first answer's prompt, its passage, is known last; of the later ones only the answer before."""
    decoded = [_decode(span, share) for span in answers]
    return sum(s.seconds for s in rerankings) + 0.5 * (answers[0].seconds - decoded[0]) + sum(decoded)


def _decode(span: Span, share: float = 1.0) -> float:
    """Seconds of decoding; that share of the whole where nothing tells when it began."""
    return span.done - span.first if span.done is not None and span.first is not None else share * span.seconds
