"""The line at an instance: the order in which it begins what it was given, told as numbers (vLLM's priorities).

An LLM is given more prompts than it computes at once, so that it is never idle. They stand in line there, where a
policy no longer chooses. A request comes to the end of the line, but may pass the last ones there if its policy says
so. Numbers are told once: who passes gets one that is in front of theirs.
"""

from __future__ import annotations

from collections.abc import Callable

from teola_plugin.scheduling.engine_queue import OnInstance, RunningRequest
from teola_plugin.scheduling.objectives import Objective

MOST_QUERIES = 10_000

Passes = Callable[[RunningRequest, RunningRequest], bool]


class QueryOrder:
    """Numbers queries in the order in which they came to an engine.

    It is not told when a query is over: of very many it forgets the first, which would count as new ones.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = 0

    def number(self, query: str) -> int:
        found = self._numbers.get(query)
        if found is None:
            found = self._numbers[query] = self._next
            self._next += 1
            if len(self._numbers) > MOST_QUERIES:
                del self._numbers[next(iter(self._numbers))]
        return found


def in_line(coming: RunningRequest, here: OnInstance, last: int, passes: Passes) -> int:
    """Number of a request that comes to an instance: `last`, the end of the line, or that of the first that it does
    not pass, beginning at the end (of equal numbers, who came first is first).

    Only prompts that are not computed yet stand in line; warm-ups are behind all others anyway.
    """
    line = [one for one in here.requests.values() if one.prefilling and one.number is not None and not _warm_up(one)]
    passed = [one.number for one in line if one.number is not None and passes(coming, one)]
    if not passed:
        return last
    stay = max((one.number for one in line if one.number is not None and not passes(coming, one)), default=None)
    if stay is None:
        return min(passed) - 1
    return stay if max(passed) > stay else last


def _warm_up(request: RunningRequest) -> bool:
    return request.source.objective is Objective.BACKGROUND
