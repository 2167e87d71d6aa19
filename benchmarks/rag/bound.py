"""The least time an app can take: its data dependencies, written by hand, with the latencies of idle engines.

Nothing of the product's graphs, passes or schedulers is used. Everything overlaps perfectly and for nothing: no
overhead, no interference, prefix caches without block sizes. What remains are the data dependencies between an app's
primitives (user code such as a union is one step that needs all of its input), and that one engine does one batch, and
one GPU one prefilling, at a time. All times are in seconds since the query came.

Where an engine verifies drafts, decoding takes as many steps as ideal drafting could need: see `steps`.
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
    """Latencies of idle engines. `least`: tokens of a draft, see `steps`."""

    def __init__(self, profiles: Mapping[str, EngineProfile], least: int = 1) -> None:
        self.profiles, self._least = profiles, least

    def prefill(self, tokens: int) -> float:
        return self.profiles["llm"].seconds(K.PREFILLING, max(0, tokens))

    def decode(self, text: str, prompt: str) -> float:
        return self.written(text, prompt)[-1]

    def written(self, text: str, prompt: str) -> list[float]:
        """When each token of an answer to the prompt is there, since its decoding began."""
        llm, tokens = self.profiles["llm"], split_tokens(text)
        if not llm.drafts:
            return [llm.seconds(K.DECODING, n) for n in range(1, len(tokens) + 1)]
        found, now = [], 0.0
        for drafted, new in steps(tokens, split_tokens(prompt), llm.drafts, self._least):
            now += llm.step(drafted, 1)
            found += [now] * new
        return found

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


def steps(text: Sequence[str], known: Sequence[str], most: int, least: int = 1) -> list[tuple[int, int]]:
    """The fewest steps in which `text` can be written: tokens drafted, and tokens written, in each.

    A draft is `least` to `most` tokens that stand one after the other in what is known by then: the prompt, which holds
    the earlier answers of the query that it depends on, and the text so far. An ideal drafter knows which ones will be
    right, and drafts no other; the model adds a token of its own. The first step writes one token: drafts follow one.
    """
    length = len(text)
    longest = [_longest([*known, _END, *text], len(known) + 1 + at, text[at:], most) for at in range(length)]
    fewest, chosen = [0] * (length + 1), [0] * length
    for at in range(length - 1, 0, -1):
        drafts = (0, *range(least, longest[at] + 1))
        chosen[at] = min(reversed(drafts), key=lambda drafted: fewest[min(length, at + drafted + 1)])
        fewest[at] = 1 + fewest[min(length, at + chosen[at] + 1)]
    found, at = [], 0
    while at < length:
        found.append((chosen[at], min(chosen[at] + 1, length - at)))
        at += found[-1][1]
    return found


_END = "\0"
"""Between a prompt and its answer: no token."""


def _longest(seen: Sequence[str], until: int, text: Sequence[str], most: int) -> int:
    """How many of the text's first tokens stand together in what was seen, beginning before `until`."""
    return max((_common(seen, place, text[:most]) for place in range(until)), default=0)


def _common(seen: Sequence[str], place: int, text: Sequence[str]) -> int:
    count = 0
    while count < len(text) and seen[place + count] == text[count]:
        count += 1
    return count


def naive_rag(machine: Machine, observed: Observed) -> float:
    """The question is embedded while chunks are ingested; the 3 leaves decode side by side."""
    leaves, combine = observed.generated[:3], observed.generated[3]
    known = machine.indexed() + machine.search(1)
    ends, prefilled = [], known
    for prompt, answer in leaves:
        prefilled += machine.prefill(_after(prompt, _head(prompt)))
        ends.append(prefilled + machine.decode(answer, prompt))
    last = leaves[2][1]
    return (
        max(ends)
        + machine.prefill(_after(combine[0], _before(combine[0], last)))
        + machine.decode(combine[1], combine[0])
    )


def advanced_rag(machine: Machine, observed: Observed) -> float:
    """Expansion beside indexing; each expanded question is embedded and searched when its item is closed."""
    (expand, items), *answers = observed.generated
    start = machine.prefill(tokens_of(expand))
    written = machine.written(items, expand)
    asked = [start + written[n - 1] for n in closed_at(items)]
    found = max(max(machine.indexed(), at + machine.embed(1)) + machine.search(1) for at in asked)
    return _refined(machine, found + machine.rerank(observed.reranked), answers)


def _refined(machine: Machine, known: float, answers: Sequence[tuple[str, str]]) -> float:
    """All passages are known at once: the later prompts are prefilled up to the previous answer meanwhile."""
    prefilled, ended, previous = known, known, ""
    for prompt, answer in answers:
        early = _before(prompt, previous) if previous else prompt
        prefilled += machine.prefill(_after(early, _head(prompt)))
        ended = max(ended, prefilled) + machine.prefill(_after(prompt, early)) + machine.decode(answer, prompt)
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
