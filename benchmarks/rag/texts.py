"""What the fake LLM answers: a share of its tokens copied from the prompt, in runs as long as recorded ones.

The runs are those of `recorded.json`: outputs of the bundled model, which was trained to copy. Its share of copied
tokens is not taken over (it copies nearly everything), the lengths of its runs are. Fixed before anything was measured:

* The share is met exactly. Runs of two tokens and more are drawn as they were recorded, the last one is cut; new
  tokens stand between them at random.
* In an answer runs come from anywhere in the passage. In a refinement a run that was recorded as copied from the
  earlier answer stands where it stood there (as nearly all of them did), others come from the passage.
* New tokens, and all that is drawn, depend on the whole prompt: one with another passage or another earlier answer is
  answered with other new tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded.json"
SHARES = (0.0, 0.3, 0.6, 0.9)
"""Of the tokens of an answer, those that are copied."""

Run = tuple[str, int]
"""Where a run comes from: `answer` for the earlier answer, or another text. How many tokens it has."""


@cache
def recorded_runs(kind: str) -> tuple[Run, ...]:
    """Of `answer` or `refine`: those of two tokens and more."""
    outputs = json.loads(RECORDED.read_text())["outputs"]
    runs = [run for output in outputs if output["kind"] == kind for run in output["runs"]]
    return tuple((source, length) for source, _, length in runs if source and length >= 2)


def written(prompt: str, tokens: int, share: float, words: Sequence[str]) -> str:
    """An answer of so many words, each a token. `words`: what new ones are drawn from."""
    rng = random.Random(prompt)
    copied = round(share * tokens)
    new = rng.choices(words, k=tokens - copied)
    passages, answers = _texts(prompt)
    runs = _drawn(rng, recorded_runs("refine" if answers else "answer"), copied)
    text: list[str] = []
    left = iter(new)
    for run in _order(rng, runs, len(new)):
        text += [next(left)] if run is None else _copied(rng, run, passages, answers, len(text))
    return " ".join(text)


def _texts(prompt: str) -> tuple[list[list[str]], list[list[str]]]:
    """The words of the prompt's passages, and of its earlier answers: see the prompts in `apps`."""
    passages = re.findall(r"^Passage: (.*)$", prompt, re.MULTILINE)
    answers = re.findall(r"^(?:An answer without this passage:|\d\.) (.*)$", prompt, re.MULTILINE)
    return [text.split() for text in passages], [text.split() for text in answers]


def _drawn(rng: random.Random, runs: Sequence[Run], copied: int) -> list[Run]:
    """Runs that have so many tokens together."""
    found: list[Run] = []
    while copied:
        source, length = rng.choice(runs)
        found.append((source, min(length, copied)))
        copied -= found[-1][1]
    return found


def _order(rng: random.Random, runs: Sequence[Run], new: int) -> list[Run | None]:
    """The runs with new tokens (None) between them."""
    places = sorted(rng.randint(0, len(runs)) for _ in range(new)) if runs else [0] * new
    found: list[Run | None] = []
    for i in range(len(runs) + 1):
        found += [None] * places.count(i)
        found += runs[i : i + 1]
    return found


def _copied(
    rng: random.Random, run: Run, passages: Sequence[list[str]], answers: Sequence[list[str]], at: int
) -> list[str]:
    source, length = run
    if answers and (source == "answer" or not passages):
        text = rng.choice(answers)
        place = at if at + length <= len(text) else 0
    else:
        text = rng.choice(passages)
        place = rng.randint(0, max(0, len(text) - length))
    return text[place : place + length]
