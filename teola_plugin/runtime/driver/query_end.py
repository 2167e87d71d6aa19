"""The end of a query, or of a part of one: everybody who waits is told, and what nobody has claimed is stopped."""

from __future__ import annotations

from teola_plugin.graph import InstancePath
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.driver.request_driver import RequestDriver
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun


def settle(run: QueryRun, outcome: str, error: BaseException | None, engines: RequestDriver) -> None:
    """Give up the requests of a query, but for those that the original has claimed; with an error, those too."""
    entries = list(engines.table.of(run.id))
    for entry in entries if error is not None else ():
        entry.resolve(None, error)
    for entry in entries:
        is_unclaimed = not entry.claims.open_by_original
        entry.claims.open_by_planner = 0
        if error is not None:
            entry.claims.open_by_original = 0
        engines.give_up(entry, Caller.PLANNER)
        if is_unclaimed and run.ahead and outcome == "closed" and not entry.is_cancelled:
            engines.settled(run, entry)
    engines.prescheduling.withdraw(run)


def settle_part(run: QueryRun, name: str, engines: RequestDriver) -> None:
    """Forget what was made for a part that is over, if it has ended and no other part has it."""
    for primitive in [key for key in run.errors if InstancePath(key).inside(name) is not None]:
        del run.errors[primitive]
    primitives = [key for key in run.primitives if InstancePath(key).inside(name) is not None]
    engines.prescheduling.withdraw(run, name)
    for primitive in primitives:
        _leave(run, run.primitives[primitive], engines)
    entries = {id(entry): entry for primitive in primitives for entry in run.primitives[primitive].entries}
    released = [entry for entry in entries.values() if entry.claims.remove_graph(name)]
    for entry in released:
        if not entry.claims.open_by_original:
            engines.settled(run, entry)
    for primitive in primitives:  # what was adopted is run, and traced, as the primitive that requested it first
        if all(entry.primitive != primitive for entry in run.primitives[primitive].entries):
            del run.primitives[primitive]
    engines.release(run, released)


def _leave(run: QueryRun, live: LivePrimitiveRun, engines: RequestDriver) -> None:
    """Let a primitive wait no more. Note its decodings as used if others go on with its requests: a prefilling may be
    done whose decodings were cancelled just now."""
    entries = engines.leave(run, live)
    if entries and live.group is not None and all(entry.claims.is_wanted for entry in entries):
        for member in live.group.members:
            engines.used(run, member.id)
