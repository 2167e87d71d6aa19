"""When drafts are looked for where several rows share a step, and for which of them: that holds up all of them.

Rows that came with a text are told from those that did not: the ones may be right where the others are not. Either are
looked at as long as that brings more than it costs, and now and then where it does not (see `Allowance`): once the
shortest drafts that pay could be paid for. A request that is new is begun in any case; nothing is drafted for it
before that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from teola_plugin.engines.drafts.allowance import SHARE_OF_TEXTS, Allowance
from teola_plugin.engines.drafts.costs import StepCosts
from teola_plugin.engines.drafts.places import SOON, Places
from teola_plugin.engines.drafts.together import Together

_PART = 0.25
"""Of the rows that are told, which try again as soon as drafts could be paid for."""
_LONGEST_PAUSE = 64
"""Steps: so many tokens at the end of a request may be missing in its recent output."""


TOLD, UNTOLD = True, False
"""Rows that came with a text, and those that did not."""


class Stake(NamedTuple):
    """Of a row that has a draft."""

    told: bool
    tokens: int
    worth: float
    """Of each that is accepted, in steps."""


@dataclass(slots=True)
class _Step:
    names: list[str]
    rows: int
    """That wrote something in it; the others were still prefilling."""
    over: float
    """When it was known what it drafts."""
    stakes: Mapping[int, Stake] = field(default_factory=dict)
    left_out: int = 0
    """Steps of the same requests behind it about which nothing is asked."""


class Pacing:
    """Of one instance. Rows are those of vLLM's batch, by the names of their requests."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """All that was learned."""
        self._costs, self._allowances = StepCosts(), {TOLD: Allowance(SHARE_OF_TEXTS), UNTOLD: Allowance()}
        self._places = Places()
        self._last: _Step | None = None
        self._left_out = 0
        """Of the steps that are left out, those to come."""
        self._begun = False
        """Whether a request is new in this step."""
        self._least = 0.0
        """Steps that the shortest drafts cost which are made in it."""

    def leaves_out(self, names: Sequence[str]) -> bool:
        """Whether nothing is to be asked about a step of these requests. Counts it."""
        if self._left_out and self._last is not None and self._last.names == names:
            self._left_out -= 1
            return True
        return False

    def pause(self, names: Sequence[str]) -> int:
        """Steps of these requests about which nothing is to be asked. They are taken for made."""
        if self._last is None or self._last.names != names:
            return 0
        steps, self._left_out = self._left_out, 0
        return steps

    def resume(self, left: int) -> None:
        """So many of those were not made."""
        self._left_out = left

    def most(self, told: bool, rows: int) -> int:
        """How many of such rows may draft in this step, beside so many. Of those that are told a part, for each of the
        shortest drafts that could be paid for: a few find out whether it pays again, as their texts take long to
        read."""
        left = self._allowances[told].left(rows)
        if left < self._least:
            return 0
        return min(rows, math.ceil(_PART * rows * left / self._least)) if told and self._least else rows

    def left(self, kinds: Iterable[bool], rows: int) -> float:
        """Steps that drafts of these rows, beside so many, may cost in this one: half of what is left, so that a few
        guesses are tried, however wrong the first ones are."""
        return max(self._least, min(self._allowances[told].left(rows) for told in kinds) / 2)

    def slower(self, rows: int) -> float:
        """How much longer than expected steps of so many rows with drafts take."""
        return self._costs.slower(rows)

    def waited_for(self, rows: int) -> float:
        """How often the place of one of so many rows is soon taken by another, once it ends: 0 to 1."""
        return self._places.taken(rows)

    def begin(self) -> None:
        """A request is new: looking at it takes as long as its prompt is, which is no fault of drafting."""
        self._begun = True

    def over(self, names: Sequence[str], written: Sequence[Sequence[int]], together: Together) -> Sequence[bool]:
        """A step is over, in which these requests have written that. Which rows are looked at, of `TOLD`, `UNTOLD`."""
        last, rows = self._last, sum(map(bool, written))
        self._last = this = _Step(list(names), rows, self._clock())
        if last is not None:
            self._judge(rows, written, last, this, together)
        self._left_out, self._begun = 0, False
        self._least = self._cost(together.least(rows), rows)
        return [told for told in self._allowances if not self._debt(told, rows)]

    def _debt(self, told: bool, rows: int) -> int:
        """Steps until rows are looked at. At first one without drafts is seen."""
        return 1 if self._costs.without(rows) is None else self._allowances[told].debt(rows, self._least)

    def _cost(self, expected: float, rows: int) -> float:
        """Steps that one costs which is expected to take so many."""
        return max(0.0, expected * self._costs.slower(rows) - 1.0)

    def _judge(self, rows: int, written: Sequence[Sequence[int]], last: _Step, this: _Step, together: Together) -> None:
        """Where other requests were in the step than in the one before, it took what such steps take."""
        seconds, steps = this.over - last.over, 1 + last.left_out - self._left_out
        same = last.names == this.names and rows == last.rows == len(last.names)
        verified = _verified(last, this)
        drafted = sum(stake.tokens for stake in verified.values())
        expected = together.takes(rows, drafted)
        self._places.passed(last.names, this.names, steps, idle=self._was_idle(last, this, steps))
        if same and drafted:
            self._costs.drafted(rows, seconds, expected)
        elif same:
            self._costs.plain(rows, seconds / steps)
        cost = self._cost(expected, rows)
        for told, allowance in self._allowances.items():
            allowance.passed(rows, steps, self._least)
            mine = {i: stake for i, stake in verified.items() if stake.told is told}
            if mine:
                part = sum(stake.tokens for stake in mine.values()) / drafted
                saved = sum(stake.worth * max(0, len(written[i]) - 1) for i, stake in mine.items())
                allowance.drafted(rows, part * cost, saved, self.waited_for(rows))

    def _was_idle(self, last: _Step, this: _Step, steps: int) -> bool:
        """Whether all had ended before the others came."""
        if any(name in this.names for name in last.names):
            return False
        plain = self._costs.without(last.rows)
        return plain is None or this.over - last.over > (steps + SOON) * plain

    def said(
        self, rows: int, stakes: Mapping[int, Stake], looked: Mapping[bool, int], rests: Mapping[bool, int]
    ) -> None:
        """What a step of so many rows drafts. Of rows that are told and of those that are not: how many were looked
        at, and steps in which none need be, where there are any."""
        if (last := self._last) is None:
            return
        now = self._clock()
        number = sum(looked.values())
        if number and not self._begun and (plain := self._costs.without(rows)):
            for told, some in looked.items():
                self._allowances[told].looked(rows, (now - last.over) / plain * some / number)
        last.over, last.stakes = now, stakes
        if not stakes:
            pauses = [max(rest, self._debt(told, rows)) for told, rest in rests.items()]
            self._left_out = last.left_out = min(_LONGEST_PAUSE, *pauses) if pauses else _LONGEST_PAUSE


def _verified(last: _Step, this: _Step) -> Mapping[int, Stake]:
    """By row of this step, what the last one drafted for it: requests may have left, and others come."""
    if not last.stakes:
        return {}
    rows = {name: i for i, name in enumerate(this.names)}
    return {rows[last.names[i]]: stake for i, stake in last.stakes.items() if last.names[i] in rows}
