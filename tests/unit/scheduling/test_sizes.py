"""Tests of small requests that share slots of a static engine, if their primitive has many of them."""

from __future__ import annotations

import pytest

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_queue import Enqueue, QueuedRequest, RunBatch

PROFILE = EngineProfile(max_efficient_batch=4)


def batch(*primitives: tuple[int, float]) -> list[str]:
    """Return the first batch after these primitives (requests, size of each) wait and a replica comes up."""
    scheduler = EngineScheduler(PROFILE, ())
    for number, (count, size) in enumerate(primitives):
        requests = tuple(QueuedRequest(f"{number}.{i}", size) for i in range(count))
        scheduler.handle(Enqueue(0.0, "q", f"p{number}", PrimitiveKind.EMBEDDING, requests))
    scheduler.replicas.append("0")
    found = scheduler._serve_replicas_in_turn()
    assert all(isinstance(one, RunBatch) for one in found)
    return list(found[0].requests)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("primitives", "taken"),
    [
        ([(10, 1.0)], 4),
        ([(40, 0.25)], 16),
        ([(4, 0.25), (4, 0.25)], 4),  # stages of a list are not put together
        ([(10, 0.25), (4, 0.25)], 10),  # 2.5 slots; the next would take four
        ([(10, 0.25), (1, 0.25)], 11),  # one of them
        ([(6, 0.25), (4, 0.25)], 8),  # 1.5: less than half, so that a part of the next goes along
    ],
)
def test_static_batch_holds_the_expected_number_of_requests(primitives: list[tuple[int, float]], taken: int) -> None:
    assert len(batch(*primitives)) == taken
