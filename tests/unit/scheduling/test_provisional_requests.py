"""Answers begun on a guess at an engine's scheduler: where nobody else runs, and until somebody comes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_events import (
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Dropped,
    Enqueue,
    QueuedRequest,
    RequestsEnded,
    RunBatch,
)
from teola_plugin.scheduling.objectives import Objective
from teola_plugin.scheduling.validate import VIOLATIONS

K = PrimitiveKind
LLM = EngineProfile(batching=Batching.CONTINUOUS, max_batch=64, max_requests=8, prefix_caching=True)


@pytest.fixture(params=[("0",), ("0", "1")], ids=["one instance", "two"])
def scheduler(request: pytest.FixtureRequest) -> EngineScheduler:
    VIOLATIONS.clear()
    return EngineScheduler(LLM, request.param)


def asks(name: str, query: str = "q", **more: object) -> Enqueue:
    made = Enqueue(0.0, query, name, K.PREFILLING, (QueuedRequest(name, 4),))
    return replace(made, **more)  # type: ignore[arg-type]


def guess(name: str, query: str = "q") -> Enqueue:
    return asks(name, query, objective=Objective.PROVISIONAL)


def warm_up(name: str, query: str = "q") -> Enqueue:
    return asks(name, query, kind=K.PARTIAL_PREFILLING, objective=Objective.BACKGROUND)


def ran(instructions: list[object]) -> list[str]:
    return [r for i in instructions if isinstance(i, RunBatch) for r in i.requests]


def stopped(instructions: list[object]) -> list[str]:
    return [r for i in instructions if isinstance(i, CancelRunning) for r in i.requests]


def test_it_begins_at_an_idle_engine(scheduler: EngineScheduler) -> None:
    assert ran(scheduler.handle(guess("a"))) == ["a"]
    assert not VIOLATIONS


@pytest.mark.parametrize("query", ["q", "other"])
def test_it_waits_while_anything_runs(scheduler: EngineScheduler, query: str) -> None:
    scheduler.handle(asks("real", query))
    assert not ran(scheduler.handle(guess("a")))
    assert ran(scheduler.handle(RequestsEnded(1.0, ("real",)))) == ["a"]


def test_it_waits_for_guesses_of_others_but_not_of_its_own_query(scheduler: EngineScheduler) -> None:
    assert ran(scheduler.handle(guess("a"))) == ["a"]
    assert ran(scheduler.handle(guess("b"))) == ["b"]
    assert not ran(scheduler.handle(guess("c", "other")))
    assert ran(scheduler.handle(RequestsEnded(1.0, ("a", "b")))) == ["c"]


EMBEDDER = EngineProfile(batching=Batching.STATIC, max_batch=64)


def embeds(at: float, name: str, objective: Objective = Objective.LATENCY) -> Enqueue:
    asked = (QueuedRequest(name, 1),)
    return Enqueue(at, name, name, K.EMBEDDING, asked, objective=objective)


def busy_for(share: float, until: float) -> EngineScheduler:
    """An embedder that had something to do for such a share of each second."""
    scheduler = EngineScheduler(EMBEDDER, ("0",))
    for second in range(int(until)):
        scheduler.handle(embeds(second, f"{second}"))
        scheduler.handle(RequestsEnded(second + share, (f"{second}",)))
    return scheduler


@pytest.mark.parametrize(("share", "begun"), [(0.2, ["a"]), (0.8, [])])
def test_what_cannot_be_stopped_begins_where_it_is_mostly_idle(share: float, begun: list[str]) -> None:
    scheduler = busy_for(share, until=30.0)
    assert ran(scheduler.handle(embeds(30.0, "a", Objective.PROVISIONAL))) == begun
    ended = RequestsEnded(30.1, tuple(begun))
    scheduler.handle(ended)
    assert ran(scheduler.handle(embeds(60.0, "b", Objective.PROVISIONAL))) == (["b"] if begun else ["a"])
    assert not VIOLATIONS


def test_what_is_claimed_begins_where_it_is_mostly_busy() -> None:
    scheduler = busy_for(0.8, until=30.0)
    scheduler.handle(embeds(30.0, "a", Objective.PROVISIONAL))
    claim = DepthChanged(30.0, "a", {"a": 3}, {"a": (Objective.LATENCY, "")})
    assert ran(scheduler.handle(claim)) == ["a"]


def test_a_busy_past_does_not_keep_an_answer_waiting(scheduler: EngineScheduler) -> None:
    """It makes room for whoever comes."""
    scheduler.handle(asks("real", "other"))
    assert ran(scheduler.handle(replace(guess("a"), at=29.0))) == []
    assert ran(scheduler.handle(RequestsEnded(30.0, ("real",)))) == ["a"]


def test_a_warm_up_of_its_query_is_in_nobodys_way(scheduler: EngineScheduler) -> None:
    scheduler.handle(warm_up("w"))
    assert ran(scheduler.handle(guess("a"))) == ["a"]
    assert not stopped(scheduler.handle(warm_up("v")))
    assert stopped(scheduler.handle(warm_up("u", "other"))) == ["a"]


@pytest.mark.parametrize("query", ["q", "other"])
def test_whoever_comes_stops_it(scheduler: EngineScheduler, query: str) -> None:
    scheduler.handle(guess("a"))
    out = scheduler.handle(asks("real", query))
    assert (stopped(out), ran(out)) == (["a"], ["real"])
    scheduler.handle(RequestsEnded(1.0, ("a",)))
    assert not stopped(scheduler.handle(asks("more", query)))


def test_one_that_is_claimed_is_like_any_other(scheduler: EngineScheduler) -> None:
    scheduler.handle(guess("a"))
    scheduler.handle(DepthChanged(0.5, "q", {"a": 3}, {"a": (Objective.LATENCY, "")}))
    assert not stopped(scheduler.handle(asks("real", "other")))
    assert not ran(scheduler.handle(guess("b")))


def test_one_that_is_claimed_while_it_waits_goes_to_its_place_in_the_queue(scheduler: EngineScheduler) -> None:
    scheduler.handle(asks("real", "other"))
    scheduler.handle(guess("a"))
    assert ran(scheduler.handle(DepthChanged(0.5, "q", {"a": 3}, {"a": (Objective.LATENCY, "")}))) == ["a"]


def test_one_that_waits_can_be_cancelled(scheduler: EngineScheduler) -> None:
    scheduler.handle(asks("real", "other"))
    scheduler.handle(guess("a"))
    assert scheduler.handle(CancelRequests(0.5, ("a",))) == [Dropped(("a",))]
    assert not ran(scheduler.handle(RequestsEnded(1.0, ("real",))))


def test_what_finds_no_slot_waits_on() -> None:
    scheduler = EngineScheduler(replace(LLM, max_requests=1))
    assert ran(scheduler.handle(warm_up("w"))) == ["w"]
    assert not ran(scheduler.handle(guess("a"))) and not scheduler.queue
    assert ran(scheduler.handle(RequestsEnded(1.0, ("w",)))) == ["a"]


def test_it_costs_its_app_no_turn(scheduler: EngineScheduler) -> None:
    scheduler.handle(guess("a"))
    assert scheduler.running.served.had(["default"]) == {"default": 0.0}
