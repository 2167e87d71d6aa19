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
    """The draft of a row, with its expected value."""

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
    """The schedule of drafting of one replica. Rows are those of vLLM's batch, by id of their requests."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Forget all that was learned."""
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
        """Return True if a step of these requests needs no drafts. Counts the step."""
        if self._left_out and self._last is not None and self._last.names == names:
            self._left_out -= 1
            return True
        return False

    def pause(self, names: Sequence[str]) -> int:
        """Return the number of steps of these requests that need no drafts. They count as made."""
        if self._last is None or self._last.names != names:
            return 0
        steps, self._left_out = self._left_out, 0
        return steps

    def resume(self, left: int) -> None:
        """Take back `left` of these steps, which were not made."""
        self._left_out = left

    def most(self, told: bool, rows: int) -> int:
        """Return the number of rows that may draft in this step.

        Of rows with texts, only a part per affordable draft: a few are enough to find out if drafting pays again, and
        texts take long to read.
        """
        left = self._allowances[told].left(rows)
        if left < self._least:
            return 0
        return min(rows, math.ceil(_PART * rows * left / self._least)) if told and self._least else rows

    def left(self, kinds: Iterable[bool], rows: int) -> float:
        """Return the steps that drafts of these rows may cost in this step.

        This is half of the allowance, so that several guesses are tried even if the first ones are wrong.
        """
        return max(self._least, min(self._allowances[told].left(rows) for told in kinds) / 2)

    def slower(self, rows: int) -> float:
        """Return the ratio of measured to expected duration of steps with drafts."""
        return self._costs.slower(rows)

    def waited_for(self, rows: int) -> float:
        """Return the frequency, 0 to 1, with which the slot of a row is soon reused once the row ends."""
        return self._places.taken(rows)

    def begin(self) -> None:
        """Record that a request is new in this step. Reading its prompt does not count as a cost of drafting."""
        self._begun = True

    def over(self, names: Sequence[str], written: Sequence[Sequence[int]], together: Together) -> Sequence[bool]:
        """Record the end of a step and its output. Return which rows should be drafted for, of `TOLD` and `UNTOLD`."""
        last, rows = self._last, sum(map(bool, written))
        self._last = this = _Step(list(names), rows, self._clock())
        if last is not None:
            self._judge(rows, written, last, this, together)
        self._left_out, self._begun = 0, False
        self._least = self._cost(together.least(rows), rows)
        return [told for told in self._allowances if not self._debt(told, rows)]

    def _debt(self, told: bool, rows: int) -> int:
        """Return the number of steps until rows are drafted for. The first step is made without drafts."""
        return 1 if self._costs.without(rows) is None else self._allowances[told].debt(rows, self._least)

    def _cost(self, expected: float, rows: int) -> float:
        """Return the extra steps that a step of the expected duration costs."""
        return max(0.0, expected * self._costs.slower(rows) - 1.0)

    def _judge(self, rows: int, written: Sequence[Sequence[int]], last: _Step, this: _Step, together: Together) -> None:
        """Charge the last step to the allowances, unless its requests differ from those of the step before."""
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
        """Return True if all requests had ended before the new ones came."""
        if any(name in this.names for name in last.names):
            return False
        plain = self._costs.without(last.rows)
        return plain is None or this.over - last.over > (steps + SOON) * plain

    def said(
        self, rows: int, stakes: Mapping[int, Stake], looked: Mapping[bool, int], rests: Mapping[bool, int]
    ) -> None:
        """Record the drafts of a step.

        Args:
            rows: Number of rows in the step.
            stakes: Drafts by row.
            looked: Number of rows for which drafts were searched, for rows with and without texts.
            rests: Number of steps in which no draft need be searched, for rows with and without texts.
        """
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
    """Return, by row of this step, the drafts of the last one. Requests may have left, and others come."""
    if not last.stakes:
        return {}
    rows = {name: i for i, name in enumerate(this.names)}
    return {rows[last.names[i]]: stake for i, stake in last.stakes.items() if last.names[i] in rows}
