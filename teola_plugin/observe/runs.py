"""Runs of one thing: told by their median, shown by the one that is nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.text import duration


@dataclass(frozen=True, slots=True)
class Runs:
    """At least one run, each with the seconds that it took."""

    name: str
    traces: tuple[QueryTrace, ...]
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Their median."""
        return median(self.times)

    @property
    def shown(self) -> QueryTrace:
        """The trace of the run nearest to the median; of two equally near the earlier."""
        middle = self.seconds
        return min(zip(self.times, self.traces, strict=True), key=lambda run: abs(run[0] - middle))[1]

    @property
    def told(self) -> str:
        """The number of runs and their range of seconds, in words; empty for a single run."""
        if len(self.times) == 1:
            return ""
        least, most = duration(min(self.times)), duration(max(self.times))
        return f"median of {len(self.times)} runs" + (f", {least} to {most}" if least != most else "")


def grouped(traces: Sequence[QueryTrace], labels: Sequence[str], seconds: Sequence[float]) -> list[Runs]:
    """Traces of one label are runs of one thing. Without labels each is by itself, named after its app or its id.

    `seconds`: what the runs took, where that was measured outside. Raises `ValueError` for too few of them.
    """
    if seconds and len(seconds) != len(traces):
        raise ValueError(f"{len(seconds)} seconds were given for {len(traces)} traces. Next: give one for each trace")
    times = [*seconds] or [trace.seconds for trace in traces]
    names = [*labels[: len(traces)], *_names(traces)[len(labels) :]]
    found: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        found.setdefault(name, []).append(number)
    return [
        Runs(name, tuple(traces[at] for at in places), tuple(times[at] for at in places))
        for name, places in found.items()
    ]


def _names(traces: Sequence[QueryTrace]) -> list[str]:
    """Return different names for traces without labels."""
    for names in ([t.app for t in traces], [t.query_id for t in traces]):
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{t.app or t.query_id or 'query'} #{number}" for number, t in enumerate(traces, start=1)]
