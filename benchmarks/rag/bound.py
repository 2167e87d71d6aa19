"""The least time an app can take: its data dependencies, written by hand, with the latencies of idle engines.

Nothing of the product's graphs, passes or schedulers is used. Everything overlaps perfectly and for nothing: no
overhead, no interference, prefix caches without block sizes. What remains are the data dependencies between an app's
primitives (user code such as a union is one step that needs all of its input), and that one engine does one batch, and
one GPU one prefilling, at a time. All times are in seconds since the query came.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from benchmarks.rag.apps import CHUNKS, PASSAGE, Observed, tokens_of
from teola_plugin.engines.fake import split_tokens
from teola_plugin.graph import EngineProfile, PrimitiveKind

K = PrimitiveKind


class Machine:
    """Latencies of idle engines."""

    def __init__(self, profiles: Mapping[str, EngineProfile]) -> None:
        self.profiles = profiles

    def prefill(self, tokens: int) -> float:
        return self.profiles["llm"].seconds(K.PREFILLING, max(0, tokens))

    def decode(self, text: str) -> float:
        return self.profiles["llm"].seconds(K.DECODING, tokens_of(text))

    def embed(self, n: int) -> float:
        return self.profiles["embedder"].seconds(K.EMBEDDING, n)

    def ingest(self, n: int) -> float:
        return self.profiles["store"].seconds(K.INGESTION, n)

    def search(self, n: int) -> float:
        return self.profiles["store"].seconds(K.SEARCHING, n)

    def rerank(self, n: int) -> float:
        return self.profiles["reranker"].seconds(K.RERANKING, n)

    def indexed(self) -> float:
        """All chunks can be found: embedded in stages, each ingested while the next is embedded."""
        step = self.profiles["embedder"].max_efficient_batch
        stages = [min(step, CHUNKS - at) for at in range(0, CHUNKS, step)]
        embedded = itertools.accumulate(self.embed(n) for n in stages)
        return max(at + self.ingest(n) for at, n in zip(embedded, stages, strict=True))


def naive_rag(machine: Machine, observed: Observed) -> float:
    """The question is embedded while chunks are ingested; the 3 leaves decode side by side."""
    leaves, combine = observed.generated[:3], observed.generated[3]
    known = machine.indexed() + machine.search(1)
    ends, prefilled = [], known
    for prompt, answer in leaves:
        prefilled += machine.prefill(_after(prompt, _head(prompt)))
        ends.append(prefilled + machine.decode(answer))
    last = leaves[2][1]
    return max(ends) + machine.prefill(_after(combine[0], _before(combine[0], last))) + machine.decode(combine[1])


def advanced_rag(machine: Machine, observed: Observed) -> float:
    """Expansion beside indexing; each expanded question is embedded and searched when its item is closed."""
    (expand, items), *answers = observed.generated
    start = machine.prefill(tokens_of(expand))
    asked = [start + machine.profiles["llm"].seconds(K.DECODING, n) for n in closed_at(items)]
    found = max(max(machine.indexed(), at + machine.embed(1)) + machine.search(1) for at in asked)
    return _refined(machine, found + machine.rerank(observed.reranked), answers)


def _refined(machine: Machine, known: float, answers: Sequence[tuple[str, str]]) -> float:
    """All passages are known at once: the later prompts are prefilled up to the previous answer meanwhile."""
    prefilled, ended, previous = known, known, ""
    for prompt, answer in answers:
        early = _before(prompt, previous) if previous else prompt
        prefilled += machine.prefill(_after(early, _head(prompt)))
        ended = max(ended, prefilled) + machine.prefill(_after(prompt, early)) + machine.decode(answer)
        previous = answer
    return ended


def closed_at(text: str) -> list[int]:
    """After how many tokens each string of a JSON list is closed (strings of plain words)."""
    ends = [found.end() for found in re.finditer(r'"[^"]*"', text)]
    written = list(itertools.accumulate(len(token) for token in split_tokens(text)))
    return [1 + bisect_left(written, end) for end in ends]


def _head(prompt: str) -> str:
    """What is known of an answering prompt from the start."""
    return prompt[: prompt.index(PASSAGE) + len(PASSAGE)]


def _before(prompt: str, value: str) -> str:
    return prompt[: prompt.index(value)]


def _after(prompt: str, known: str) -> int:
    """Tokens of `prompt` behind what is known of it."""
    return tokens_of(prompt) - tokens_of(known)
