"""When drafts are searched where several rows share a step, for which rows, and what they may cost.

The search holds up all rows. Rows with texts are distinguished from those without: the guesses of the ones may be right
where those of the others are not. For either, drafts are searched as long as that brings more than it costs, and now
and then where it does not: once the shortest drafts that pay could be paid for (see `StepAllowance`). A new request is
begun in any case; nothing is drafted for it before that.

What a draft is worth is a forecast (see `SharedStepModel`). Here its outcome is recorded: what verifying took, what
searching for drafts took, and what the accepted tokens saved. However wrong the forecasts are, drafting costs at most a
small share of the time where it does not pay.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from teola_plugin.engines.drafts.draft_lengths import SharedStepModel

WITH_TEXTS, WITHOUT_TEXTS = True, False
"""Rows that came with a text, and those that did not."""
_TRYING_SHARE = 0.25
"""Share of the rows with texts that try again as soon as drafts could be paid for."""
_LONGEST_PAUSE = 64
"""Maximum pause, in steps: so many tokens at the end of a request may be missing in its recent output."""


class ChosenDraft(NamedTuple):
    """The draft of a row that is verified, with its expected value."""

    has_texts: bool
    tokens: int
    token_value: float
    """Value of each accepted token, in steps."""


@dataclass(slots=True)
class _Step:
    names: list[str]
    rows: int
    """Number of rows that wrote something in it; the others were still prefilling."""
    end_s: float
    """Time at which its drafts were known."""
    drafts: Mapping[int, ChosenDraft] = field(default_factory=dict)
    skipped: int = 0
    """Number of steps of the same requests after it that need no drafts."""


class DraftBudget:
    """The schedule of drafting of one replica. Rows are those of vLLM's batch, by id of their requests."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Forget all that was learned."""
        self._costs = StepCosts()
        self._allowances = {WITH_TEXTS: StepAllowance(_SEARCH_SHARE_OF_TEXTS), WITHOUT_TEXTS: StepAllowance()}
        self._slots = SlotReuseEstimator()
        self._last: _Step | None = None
        self._steps_to_skip = 0
        self._has_new_request = False
        """True if a request is new in this step."""
        self._least_cost = 0.0
        """Steps that the shortest drafts of this step cost."""

    def skip_step(self, names: Sequence[str]) -> bool:
        """Return True if a step of these requests needs no drafts. Counts the step.

        `names` are the ids of the running requests by row. Return False if they are others than those of the last step.
        """
        if self._steps_to_skip and self._last is not None and self._last.names == names:
            self._steps_to_skip -= 1
            return True
        return False

    def pause(self, names: Sequence[str]) -> int:
        """Return the number of steps of these requests that need no drafts. They count as made.

        `names` are the ids of the running requests by row. Return 0 if they are others than those of the last step.
        """
        if self._last is None or self._last.names != names:
            return 0
        steps, self._steps_to_skip = self._steps_to_skip, 0
        return steps

    def resume(self, left: int) -> None:
        """Take back `left` of these steps, which were not made."""
        self._steps_to_skip = left

    def max_rows(self, has_texts: bool, rows: int) -> int:
        """Return the number of rows that may draft in this step.

        Of rows with texts, only a part per affordable draft: a few are enough to find out if drafting pays again, and
        texts take long to read.
        """
        left = self._allowances[has_texts].left(rows)
        if left < self._least_cost:
            return 0
        if not has_texts or not self._least_cost:
            return rows
        return min(rows, math.ceil(_TRYING_SHARE * rows * left / self._least_cost))

    def max_cost(self, kinds: Iterable[bool], rows: int) -> float:
        """Return the steps that drafts of these rows may cost in this step.

        This is half of the allowance, so that several guesses are tried even if the first ones are wrong.
        """
        return max(self._least_cost, min(self._allowances[has_texts].left(rows) for has_texts in kinds) / 2)

    def slowdown(self, rows: int) -> float:
        """Return the ratio of measured to expected duration of steps with drafts."""
        return self._costs.slowdown(rows)

    def slot_reuse(self, rows: int) -> float:
        """Return the frequency, 0 to 1, with which the slot of a row is soon reused once the row ends."""
        return self._slots.reuse(rows)

    def begin_request(self) -> None:
        """Record that a request is new in this step. Reading its prompt does not count as a cost of drafting."""
        self._has_new_request = True

    def end_step(
        self, names: Sequence[str], written: Sequence[Sequence[int]], model: SharedStepModel
    ) -> Sequence[bool]:
        """Record the end of a step and its output.

        Return for which rows drafts should be searched, of `WITH_TEXTS` and `WITHOUT_TEXTS`.
        """
        last, rows = self._last, sum(map(bool, written))
        self._last = this = _Step(list(names), rows, self._clock())
        if last is not None:
            self._account(rows, written, last, this, model)
        self._steps_to_skip, self._has_new_request = 0, False
        self._least_cost = self._cost(model.shortest_duration(rows), rows)
        return [has_texts for has_texts in self._allowances if not self._debt(has_texts, rows)]

    def _debt(self, has_texts: bool, rows: int) -> int:
        """Return the number of steps until rows are drafted for. The first step is made without drafts."""
        if self._costs.undrafted(rows) is None:
            return 1
        return self._allowances[has_texts].debt(rows, self._least_cost)

    def _cost(self, expected: float, rows: int) -> float:
        """Return the extra steps that a step of the expected duration costs."""
        return max(0.0, expected * self._costs.slowdown(rows) - 1.0)

    def _account(
        self, rows: int, written: Sequence[Sequence[int]], last: _Step, this: _Step, model: SharedStepModel
    ) -> None:
        """Charge the last step to the allowances, unless its requests differ from those of the step before."""
        seconds, steps = this.end_s - last.end_s, 1 + last.skipped - self._steps_to_skip
        same = last.names == this.names and rows == last.rows == len(last.names)
        verified = _verified(last, this)
        drafted = sum(draft.tokens for draft in verified.values())
        expected = model.duration(rows, drafted)
        self._slots.record_steps(last.names, this.names, steps, idle=self._was_idle(last, this, steps))
        if same and drafted:
            self._costs.record_drafted(rows, seconds, expected)
        elif same:
            self._costs.record_undrafted(rows, seconds / steps)
        cost = self._cost(expected, rows)
        for has_texts, allowance in self._allowances.items():
            allowance.earn(rows, steps, self._least_cost)
            drafts = {i: draft for i, draft in verified.items() if draft.has_texts is has_texts}
            if drafts:
                part = sum(draft.tokens for draft in drafts.values()) / drafted
                saved = sum(draft.token_value * max(0, len(written[i]) - 1) for i, draft in drafts.items())
                allowance.charge_drafts(rows, part * cost, saved, self.slot_reuse(rows))

    def _was_idle(self, last: _Step, this: _Step, steps: int) -> bool:
        """Return True if all requests had ended before the new ones came."""
        if any(name in this.names for name in last.names):
            return False
        undrafted = self._costs.undrafted(last.rows)
        return undrafted is None or this.end_s - last.end_s > (steps + _SOON) * undrafted

    def record_drafts(
        self, rows: int, drafts: Mapping[int, ChosenDraft], searched: Mapping[bool, int], rests: Mapping[bool, int]
    ) -> None:
        """Record the drafts of a step.

        Args:
            rows: Number of rows in the step.
            drafts: Drafts by row.
            searched: Number of rows for which drafts were searched, for rows with and without texts.
            rests: Number of steps in which no draft need be searched, for rows with and without texts.
        """
        if (last := self._last) is None:
            return
        now = self._clock()
        total = sum(searched.values())
        if total and not self._has_new_request and (undrafted := self._costs.undrafted(rows)):
            for has_texts, count in searched.items():
                self._allowances[has_texts].charge_search(rows, (now - last.end_s) / undrafted * count / total)
        last.end_s, last.drafts = now, drafts
        if not drafts:
            pauses = [max(rest, self._debt(has_texts, rows)) for has_texts, rest in rests.items()]
            self._steps_to_skip = last.skipped = min(_LONGEST_PAUSE, *pauses) if pauses else _LONGEST_PAUSE


def _verified(last: _Step, this: _Step) -> Mapping[int, ChosenDraft]:
    """Return, by row of this step, the drafts of the last one. Requests may have left, and others come."""
    if not last.drafts:
        return {}
    rows = {name: i for i, name in enumerate(this.names)}
    return {rows[last.names[i]]: draft for i, draft in last.drafts.items() if last.names[i] in rows}


_SEARCH_SHARE, _SEARCH_SHARE_OF_TEXTS = 0.0025, 0.001
"""Share of the time that searching for drafts may cost while it brings nothing; and for rows with texts, which take
longer to read."""
_MAX_CREDIT, _MAX_DEBT, _MAX_SEARCH_DEBT = 2.0, 1.0, 0.15
"""Maximum credit and debt in steps, and maximum debt for searches alone: what was longer ago does not count. Drafts may
cost the credit, so that there is a debt only where they cost more than was expected."""
_INITIAL_CREDIT = 2.0
"""Steps that may be spent before anything was saved: with less it is chance whether a gain is ever found."""
_REALISED, _REALISED_IF_REUSED = 0.4, 0.9
"""Share of the saved steps that is realised, as rows that are ahead wait for others in the end; and where other
requests wait for their slots."""


class StepAllowance:
    """The cost that drafting may have, by number of rows in a step. The unit is a step without drafts."""

    def __init__(self, share: float = _SEARCH_SHARE) -> None:
        """`share`: share of the steps that may be spent while drafting brings nothing."""
        self._share = share
        self._left: dict[int, float] = {}
        """Steps that may be spent, by number of rows rounded up to a power of two."""

    def debt(self, rows: int, least_cost: float) -> int:
        """Return the number of steps until drafts that cost `least_cost` are tried again; 0 for now."""
        return max(0, math.ceil((least_cost - self.left(rows)) / self._share))

    def left(self, rows: int) -> float:
        """Return the steps that drafts for so many rows may cost; negative if they cost more than they saved."""
        return self._left.get(next_power_of_two(rows), _INITIAL_CREDIT)

    def charge_search(self, rows: int, cost: float) -> None:
        """Record that the search for drafts took the time of `cost` steps."""
        self._add(rows, -cost, _MAX_SEARCH_DEBT)

    def earn(self, rows: int, steps: int, least_cost: float) -> None:
        """Record that `steps` steps were made. A share of them may be spent, up to `least_cost` in any case.

        The share is of steps, not of time: an idle engine earns nothing.
        """
        self._add(rows, self._share * steps, _MAX_DEBT, max(_MAX_CREDIT, least_cost))

    def charge_drafts(self, rows: int, cost: float, saved: float, slot_reuse: float = 0.0) -> None:
        """Record that the verification took `cost` steps and the accepted tokens save `saved` steps.

        `slot_reuse` is the frequency with which the slots of ended rows are reused (see `SlotReuseEstimator`).
        """
        realised = _REALISED + (_REALISED_IF_REUSED - _REALISED) * slot_reuse
        self._add(rows, realised * saved - cost, _MAX_DEBT)

    def _add(self, rows: int, steps: float, max_debt: float, max_credit: float = _MAX_CREDIT) -> None:
        left = self.left(rows)
        self._left[next_power_of_two(rows)] = max(min(left, -max_debt), min(max(left, max_credit), left + steps))


_STEP_CORRECTION = 0.03
"""Relative correction of a duration by each longer or shorter one: this finds the median, whatever else runs on the
machine now and then."""
_FIRST_CORRECTION = 0.5
"""The first relative correction; the second is a half of it, the third a third: at first the duration is only
expected."""


class StepCosts:
    """The durations of steps, in seconds, by number of rows.

    Measurements of an idle engine say what a token more or less costs. A step with drafts takes longer under load:
    contexts are longer, and what is done only now and then is done slowly. A number of rows without data takes the data
    of the nearest one up to the same power of two.
    """

    def __init__(self) -> None:
        self._undrafted: dict[int, _RunningMedian] = {}
        """Seconds of a step without drafts."""
        self._slowdown: dict[int, _RunningMedian] = {}
        """Ratio of measured to expected duration of a step with drafts, by rows rounded up to a power of two."""

    def record_undrafted(self, rows: int, seconds: float) -> None:
        """Record the seconds of a step without drafts."""
        self._undrafted.setdefault(rows, _RunningMedian(seconds)).add(seconds)

    def undrafted(self, rows: int) -> float | None:
        """Return the seconds of a step without drafts; None if unknown for about as many rows.

        Numbers of rows that round up to the same power of two count as similar; the nearest measured one is used.
        """
        size = next_power_of_two(rows)
        similar = [rows] if rows in self._undrafted else [n for n in self._undrafted if next_power_of_two(n) == size]
        return self._undrafted[min(similar, key=lambda n: abs(n - rows))].median if similar else None

    def record_drafted(self, rows: int, seconds: float, expected: float) -> None:
        """Record the seconds of a step with drafts, which was expected to take `expected` steps without drafts."""
        undrafted = self.undrafted(rows)
        if undrafted:
            ratio = seconds / undrafted / expected
            self._slowdown.setdefault(next_power_of_two(rows), _RunningMedian(1.0)).add(ratio)

    def slowdown(self, rows: int) -> float:
        """Return the ratio of measured to expected duration of steps with drafts, 1 at least and by default.

        Below 1 it would be wrong: where drafts are frequent, data on steps without drafts may be old.
        """
        ratio = self._slowdown.get(next_power_of_two(rows))
        return 1.0 if ratio is None else max(1.0, ratio.median)


class _RunningMedian:
    """The approximate median of the values that were added."""

    def __init__(self, expected: float) -> None:
        self.median, self._count = expected, 0

    def add(self, value: float) -> None:
        """Move the approximate median towards a value, by at most a small part of the median.

        The first corrections are the largest, so that a wrong expectation is soon forgotten.
        """
        self._count += 1
        correction = max(_STEP_CORRECTION, _FIRST_CORRECTION / self._count)
        if abs(value - self.median) < correction * self.median:
            self.median = value
        else:
            self.median *= 1 + correction if value > self.median else 1 - correction


_SOON = 16
"""Number of steps within which a slot counts as soon reused: a caller that sends one request after the other needs
some steps to send the next."""
_REUSE_CORRECTION = 0.125
"""Share of the difference by which each request that ends corrects the frequency."""


class SlotReuseEstimator:
    """The frequency with which slots of ended requests are reused, by number of rows up to a power of two.

    Where requests wait for a slot, each token that a row is ahead makes room for them. Where none does, a row that ends
    sooner gains little: the others' steps are only shorter by its part.
    """

    def __init__(self) -> None:
        self._reuse: dict[int, float] = {}
        self._free_slots: deque[tuple[int, int]] = deque()
        """Slots that may still be reused: of how many rows, and the step in which each became free."""
        self._step = 0

    def reuse(self, rows: int) -> float:
        """Return the recent share of slots that were soon reused; 0 if none has become free yet."""
        return self._reuse.get(next_power_of_two(rows), 0.0)

    def record_steps(self, before: Sequence[str], names: Sequence[str], steps: int, *, idle: bool) -> None:
        """Record `steps` steps, from one with the requests `before` to one with `names`.

        `idle` is True if the engine had nothing to do in between, so that the new requests did not wait.
        """
        self._step += steps
        if before != names:
            ended_requests = set(before).difference(names)
            self._free_slots.extend([(next_power_of_two(len(before)), self._step)] * len(ended_requests))
        while self._free_slots and (idle or self._step - self._free_slots[0][1] > _SOON):
            self._record_oldest(0.0)
        if self._free_slots and before != names:
            new_names = set(names).difference(before)
            for _ in range(min(len(new_names), len(self._free_slots))):
                self._record_oldest(1.0)

    def _record_oldest(self, reused: float) -> None:
        """Record if the slot that has been free for longest was reused (1.0) or not (0.0)."""
        rows, _ = self._free_slots.popleft()
        before = self._reuse.get(rows, 0.0)
        self._reuse[rows] = before + _REUSE_CORRECTION * (reused - before)


def next_power_of_two(rows: int) -> int:
    """Return the number of rows, rounded up to a power of two."""
    return 1 << (rows - 1).bit_length()
