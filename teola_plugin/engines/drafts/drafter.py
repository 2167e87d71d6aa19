"""All requests that run: what each of them drafts, how much at which load, and what stays of those that have ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from teola_plugin.engines.drafts.adaptive import Calibration, Experience
from teola_plugin.engines.drafts.lengths import Lengths, longest_drafts, unmeasured
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.drafts.pacing import TOLD, UNTOLD, Pacing, Stake
from teola_plugin.engines.drafts.recent import RecentOutputs, Source
from teola_plugin.engines.drafts.row import Row
from teola_plugin.engines.drafts.together import Steps, Together

_SOURCES = 64
"""Of which is remembered how often guesses were right."""
_SAMPLED = 64
"""Steps in which a request that samples, and runs by itself, is not asked about."""


@dataclass(slots=True)
class Running:
    """A request under way, or preempted."""

    row: Row | None
    """None: nothing is drafted for it."""
    source: Source
    kept: bool = True
    """Whether its output is a recent one, once it has ended."""


class Drafter:
    """The drafts of all requests of one replica, at most `most` tokens per request and step."""

    def __init__(self, options: Drafts, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._options, self._most = options, most
        self._running: dict[str, Running] = {}
        self._recent = RecentOutputs(options.recent)
        self._budget = options.budget or options.tokens
        self._unmeasured = unmeasured(most)
        self._lengths: Lengths = ()
        self._together = Together(())
        self._calibration = Calibration()
        self._pacing, self._clock = Pacing(clock), clock
        self._stakes: Mapping[int, Stake] = {}
        """Of this step."""
        self._looked = {TOLD: 0, UNTOLD: 0}
        """Rows that are looked at in it."""
        self._tried = {TOLD: 0, UNTOLD: 0}
        """Those of them that were to draft."""
        self._learned: OrderedDict[tuple[Source, bool], Experience] = OrderedDict()
        self._fixed: int | None = None
        self._steps: list[tuple[int, float]] = []
        """Rows and time of each step, while it is measured."""
        self._alone, self._rest = "", 0
        """A request that runs by itself, and steps in which it need not be looked at."""

    def afford(self, lengths: Lengths) -> None:
        """The longest draft of a row by rows in a step, as measured. A budget that the user has given holds instead.
        Drafts of one step are not weighed against each other any more, until `weigh` says how."""
        self._lengths = () if self._options.budget else lengths
        self._together = Together(())
        self._pacing.forget()

    def weigh(self, steps: Steps) -> None:
        """Set the measured durations of steps by the total of drafted tokens.

        Drafts of one step are then weighed against each other, unless the user has set a budget.
        """
        self._together = Together(() if self._options.budget else steps)

    def fix(self, tokens: int | None) -> list[tuple[int, float]]:
        """Draft exactly `tokens` tokens for every greedy row, for measurements; None ends this mode.

        Returns the steps since the last call as (rows that produced a token, seconds), for pairs of steps with as many
        rows. With 0 tokens for several rows, rows that are still prefilling are counted, too.
        """
        self._pacing.forget()
        self._alone = ""
        self._fixed, (steps, self._steps) = tokens, (self._steps, [])
        return [(rows, then - at) for (before, at), (rows, then) in pairwise(steps) if rows == before]

    def leaves_out(self, names: Sequence[str]) -> bool:
        """Return True if a step of these requests needs no drafts. Counts the step."""
        if self._fixed == 0 and len(names) > 1:  # what steps of several take that draft nothing: nobody is asked then
            self._steps.append((len(names), self._clock()))
            return True
        if len(names) == 1:
            self._rest -= 1
            return self._alone == names[0] and self._rest >= 0
        return self._pacing.leaves_out(names)

    def pause(self, names: Sequence[str]) -> int:
        """Steps of these requests, from the next one on, about which nothing is to be asked. They are taken for made,
        unless `resume` says how many were not."""
        if self._fixed is not None:
            return 0
        if len(names) == 1:
            steps, self._rest = (max(0, self._rest) if self._alone == names[0] else 0), 0
            return steps
        return self._pacing.pause(names)

    def resume(self, left: int) -> None:
        """Take back `left` steps of the last pause that were not made, because the requests have changed."""
        self._pacing.resume(left)

    def step(self, names: Sequence[str], written: Sequence[Sequence[int]]) -> Sequence[int]:
        """A step is over, in which each of these requests has written that. Those that are looked at, by number;
        `looked` has to follow."""
        rows = sum(map(bool, written))
        if self._fixed is not None:
            self._steps.append((rows, self._clock()))
        self._stakes, self._looked, self._tried = {}, {TOLD: 0, UNTOLD: 0}, {TOLD: 0, UNTOLD: 0}
        wrote = [i for i, new in enumerate(written) if new]
        if not self._weighs(rows):
            return wrote
        which = self._pacing.over(names, written, self._together)
        looked = [i for i in wrote if names[i] not in self._running or self._told(names[i]) in which]
        for i in looked:
            self._looked[self._told(names[i])] += 1
        return looked

    def looked(self, names: Sequence[str], rows: int) -> None:
        """Record that all drafts of a step of `rows` rows are known."""
        if len(names) == 1 and self._fixed is None:
            self._rests_alone(names[0])
        if self._weighs(rows):
            rests: dict[bool, list[int]] = {}
            for name in names:
                if name in self._running and (row := self._running[name].row) is not None:
                    rests.setdefault(row.told, []).append(row.rest)
            middle = {told: sorted(each)[len(each) // 2] for told, each in rests.items()}
            self._pacing.said(rows, self._stakes, self._looked, middle)

    def _rests_alone(self, name: str) -> None:
        """A row that came to rest is asked about when that is over; one that samples, or is still prefilling, soon."""
        one = self._running.get(name)
        self._alone, self._rest = name, 0 if one is None else _SAMPLED if one.row is None else one.row.rest

    def _told(self, name: str) -> bool:
        one = self._running.get(name)
        return one is not None and one.row is not None and one.row.told

    def _weighs(self, rows: int) -> bool:
        return bool(self._together) and rows > 1 and self._fixed is None

    def forget(self, tenant: str | None) -> None:
        """Recent outputs, and how often guesses were right: all of it, or a tenant's; those of requests that run are
        not kept either."""
        for learned in [one for one in self._learned if tenant in (None, one[0][1])]:
            del self._learned[learned]
        if tenant is None:
            self._calibration = Calibration()
            self._pacing.forget()
        for one in self._running.values():
            if tenant in (None, one.source[1]):
                one.kept = False
                if one.row is not None:
                    one.row.forget()
        self._recent.forget(tenant)

    def knows(self, name: str) -> bool:
        """Return True if the request has begun and has not ended."""
        return name in self._running

    def running(self, name: str) -> Running | None:
        return self._running.get(name)

    def begin(
        self,
        name: str,
        source: Source,
        tokens: Sequence[int],
        prompt: int,
        texts: Sequence[Sequence[int]],
        *,
        greedy: bool,
        kept: bool = True,
        ends: int | None = None,
    ) -> Row | None:
        """A request is new, or begins again. `tokens`: the prompt, which has `prompt` of them, and what is written
        already; `texts`: what it may repeat, likeliest first; `kept`: whether recent outputs are a source, and it
        one of them; `ends`: tokens that it has at most in the end. None where it samples: nothing is drafted."""
        row = None
        if greedy:
            recent = self._recent.of(source) if self._options.recent and kept else None
            learned = self._experience(source, bool(texts))
            row = Row(
                tokens,
                prompt,
                texts,
                recent,
                self._most,
                lookup=self._options.lookup,
                learned=learned,
                calibration=self._calibration,
                ends=ends,
            )
        self.end(name)
        self._running[name] = Running(row, source, kept)
        self._pacing.begin()
        return row

    def _experience(self, source: Source, told: bool) -> Experience:
        """Return the experience with requests of an app and tenant, separately for those with and without texts."""
        found = self._learned.setdefault((source, told), Experience())
        self._learned.move_to_end((source, told))
        if len(self._learned) > _SOURCES:
            self._learned.popitem(last=False)
        return found

    def end(self, name: str) -> None:
        """End a request. Its output becomes a recent output."""
        one = self._running.pop(name, None)
        if one is not None and one.row is not None and one.kept and self._options.recent:
            self._recent.add(one.source, one.row.output)

    def end_unless(self, runs: Callable[[str], bool]) -> None:
        """End the requests that no longer run."""
        for name in [one for one in self._running if not runs(one)]:
            self.end(name)

    def draft(self, row: Row, rows: int, room: int) -> list[int]:
        """Return the draft of a row in a step of `rows` rows, at most `room` tokens; [] if no draft pays."""
        rows = max(1, rows)
        room = min(room, self._most_of_one(rows))
        if room <= 0:
            return []
        if self._fixed is not None:
            return row.first_tokens(room)
        if self._weighs(rows) and not self._may(row.told, rows):
            return []
        return row.draft(room, self._longest(rows), rows if self._together else 1)

    def _may(self, told: bool, rows: int) -> bool:
        """Return True if one more row may draft in this step. Counts it."""
        self._tried[told] += 1
        return self._tried[told] <= self._pacing.most(told, rows)

    def weighed(self, drafts: Mapping[int, tuple[Row, list[int]]], rows: int) -> Mapping[int, list[int]]:
        """Drafts of one step of so many rows, each under its row's number, cut to what pays of them together."""
        if not self._weighs(rows):
            return {i: draft for i, (_, draft) in drafts.items()}
        offers, speeds = [row.offer for row, _ in drafts.values()], self._speeds(rows)
        left = self._pacing.left({row.told for row, _ in drafts.values()}, rows)
        waited_for = self._pacing.waited_for(rows)
        lengths = self._together.lengths(offers, speeds, self._pacing.slower(rows), left, waited_for)
        worths = self._together.worths([offer.speed for offer in offers], speeds, waited_for)
        each = zip(drafts.items(), lengths, worths, strict=True)
        self._stakes = {i: Stake(row.told, length, worth) for (i, (row, _)), length, worth in each if length}
        return {i: row.cut(length) for (i, (row, _)), length in zip(drafts.items(), lengths, strict=True)}

    def _speeds(self, rows: int) -> Sequence[float]:
        """Return the tokens per step of all rows.

        Running rows that produced nothing in this step count as well; sampled rows produce one token per step.
        """
        found = [1.0 if one.row is None else one.row.speed for one in self._running.values()][-rows:]
        return [*found, *[1.0] * (rows - len(found))]

    def _longest(self, rows: int) -> Sequence[int]:
        """Tokens that pay for each of so many rows, by the share of them that is right."""
        alone = self._options.budget or self._together
        return longest_drafts(self._lengths or self._unmeasured, 1 if alone else rows)

    def _most_of_one(self, rows: int) -> int:
        """Tokens that may be drafted for each of so many rows, whatever is right of them."""
        if self._fixed is not None:
            return min(self._most, self._fixed)
        return self._most if self._lengths or self._together else min(self._most, self._budget // rows)
