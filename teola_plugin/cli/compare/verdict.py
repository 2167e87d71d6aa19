"""Are the answers equal? The plain object is compared to itself first: only then does a difference mean anything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from teola_plugin.adapters.comparison import difference
from teola_plugin.cli.compare.measure import ASYNC, CONTROL, FAST_ASYNC, FAST_SYNC, SYNC, Run

State = Literal["equal", "different", "undecided"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the runs on one input say. `undecided`: the plain object does not agree with itself."""

    state: State
    detail: str = ""
    """Where and how two answers first differ."""


def verdict(runs: Sequence[Run]) -> Verdict:
    """The verdict on the runs of one input."""
    own = _own_difference(_of(runs, SYNC), _of(runs, ASYNC, CONTROL))
    if own:
        return Verdict("undecided", own)
    for fast, plain in ((FAST_SYNC, SYNC), (FAST_ASYNC, ASYNC)):
        reference = _of(runs, plain)[:1]
        for run in _of(runs, fast) if reference else ():
            if found := difference(run.answer, reference[0].answer):
                return Verdict("different", f"{fast} (here), {plain} (there): {found}")
    return Verdict("equal")


def overall(verdicts: Sequence[Verdict]) -> State:
    """The worst that was found."""
    states = {one.state for one in verdicts}
    return "different" if "different" in states else "undecided" if "undecided" in states else "equal"


def _of(runs: Sequence[Run], *ways: str) -> list[Run]:
    return [run for run in runs if run.way in ways]


def _own_difference(by_invoke: list[Run], by_ainvoke: list[Run]) -> str:
    """Of the plain object from itself. An object that works one way only is not held against it."""
    across = [runs[0] for runs in (by_invoke, by_ainvoke) if runs and not runs[0].raised]
    for group in (by_invoke, by_ainvoke, across):
        for first, second in itertools.pairwise(group):
            if found := difference(first.answer, second.answer):
                return f"{first.way} (here), {second.way} (there): {found}"
    return ""
