"""The end of a query, or of a part of one: who still waits learns of it, and what nobody has claimed is stopped."""

from __future__ import annotations

from teola_plugin.graph import InstancePath
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.driver.engine_work import EngineWork
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun


def settle(run: QueryRun, outcome: str, error: BaseException | None, engines: EngineWork) -> None:
    """Nobody waits for its works any more but who has claimed them; with an error, not even they."""
    engines.guesses.settle(run)
    works = list(engines.works.of(run.id))
    for work in works if error is not None else ():
        work.resolve(None, error)
    for work in works:
        unclaimed = not work.claims.open_by_original
        work.claims.open_by_planner = 0
        if error is not None:
            work.claims.open_by_original = 0
        engines.give_up(work, Caller.PLANNER)
        if unclaimed and run.ahead and outcome == "closed" and not work.is_cancelled:
            engines.settled(run, work)
    engines.ahead.withdraw(run)


def settle_part(run: QueryRun, name: str, engines: EngineWork) -> None:
    """A part is over: what was made for it, no other part has, and has ended, is let go."""
    for key in [key for key in run.errors if InstancePath(key).inside(name) is not None]:
        del run.errors[key]
    engines.guesses.settle(run, name)
    over = [key for key in run.primitives if InstancePath(key).inside(name) is not None]
    engines.ahead.withdraw(run, name)
    for key in over:
        _leave(run, run.primitives[key], engines)
    works = {id(work): work for key in over for work in run.primitives[key].works}
    left = [work for work in works.values() if work.claims.remove_graph(name)]
    for work in left:
        if not work.claims.open_by_original:
            engines.settled(run, work)
    for key in over:  # what was adopted is run, and traced, as the primitive that asked first
        if all(work.primitive != key for work in run.primitives[key].works):
            del run.primitives[key]
    engines.let_go(run, left)


def _leave(run: QueryRun, live: LivePrimitiveRun, engines: EngineWork) -> None:
    """A prefilling may be done whose decodings were cancelled just now: others may go on with them."""
    works = engines.leave(run, live)
    if works and live.group is not None and all(work.claims.is_wanted for work in works):
        for member in live.group.members:
            engines.used(run, member.id)
