"""The simulator is what it says, and E2 gains what the documents say, exactly, in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.placement.baselines import LeastLoaded, RayServe, RoundRobin, VllmRouter
from benchmarks.placement.simulator import BLOCK, Cache, Job, prefill_seconds, simulate, step_seconds
from benchmarks.placement.workloads import Workload, percent_common
from benchmarks.routing import LIMITED, NO_LIMIT, WAYS, Way, case, decisions, e2, latencies, scheduled
from teola_plugin.scheduling import EngineScheduler, block_hashes
from teola_plugin.scheduling.placement import Asked


def job(name: str, arrives: float, tokens: int, *, prompt: int = 1, output: int = 1) -> Job:
    return Job(name, arrives, tokens, block_hashes([prompt] * tokens), output)


def run(*jobs: Job, instances: int = 1) -> list[Job]:
    names = tuple(str(i) for i in range(instances))
    return simulate(jobs, EngineScheduler(NO_LIMIT, names, placement=RoundRobin()))


def test_a_prompt_alone_takes_what_its_chunks_take() -> None:
    (done,) = run(job("a", 0.5, 1200))
    chunks = [step_seconds(512, 512, [(512, 512)]), step_seconds(512, 1024, [(512, 1024)])]
    assert done.ended == pytest.approx(0.5 + sum(chunks) + step_seconds(176, 1200, [(176, 1200)]))
    assert done.ended - 0.5 == pytest.approx(prefill_seconds(1200))


def test_a_cached_prompt_computes_one_token_and_the_next_in_line_fills_the_step() -> None:
    first, again, behind = run(job("a", 0.0, 1024), job("b", 5.0, 1024), job("c", 5.0, 1024, prompt=2))
    assert (first.cached, again.cached, behind.cached) == (0, 1023, 0)
    # at 5.0 b begins alone; c comes when that step is under way
    assert again.ended == pytest.approx(5.0 + step_seconds(1, 1024, [(1, 1024)]))
    assert behind.ended == pytest.approx(again.ended + prefill_seconds(1024))


def test_decodings_share_a_step_with_prefillings() -> None:
    long, late = run(job("a", 0.0, 64, output=20), job("b", 0.1, 64, prompt=2, output=1))
    alone = run(job("a", 0.0, 64, output=20))[0]
    assert long.made == 20
    assert late.ended < long.ended
    assert long.ended >= alone.ended


def test_a_cache_forgets_the_end_of_the_oldest_prompt_first_and_keeps_what_runs() -> None:
    cache = Cache(tokens=4 * BLOCK)
    one, two, three = (block_hashes([n] * 2 * BLOCK) for n in (1, 2, 3))
    assert cache.take(one) and cache.take(two)
    assert not cache.take(three), "all of it is in use"
    cache.give_back(one)
    assert cache.take(three[:1])
    assert cache.hits(one) == 1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_request_ends_and_runs_are_repeatable(way: Way) -> None:
    workload = Workload("short", 3, 10, 60, 4.0, alone=0.2, examples=2)

    def once() -> list[float]:
        names = tuple("012")
        scheduler = EngineScheduler(way.profile, names, placement=way.make(way.profile))
        return [done.ended for done in simulate(workload.jobs(), scheduler)]

    times = once()
    assert len(times) == 60
    assert all(end > 0 for end in times)
    assert times == once()


def test_preble_s_workloads_share_what_they_say() -> None:
    jobs = percent_common(0.4, 3).jobs()
    assert len(jobs) == 1800
    assert {job.tokens for job in jobs} == {8192}
    assert len({job.blocks for job in jobs}) == 120
    assert len({job.blocks[: 8192 * 4 // 10 // 16] for job in jobs}) == 1
    assert len({job.blocks[: 8192 * 4 // 10 // 16 + 1] for job in jobs}) == 120
    alone = Workload("x", 2, 30, 300, 2.0, alone=0.2, examples=16).jobs()
    firsts = [job.blocks[0] for job in alone]
    assert len(set(firsts)) == 30 + 60


def test_others_stick_to_a_prefix_until_loads_are_far_apart() -> None:
    for router, last in ((VllmRouter(), "0"), (RayServe(), "1")):
        for name in ("0", "1"):
            router.up(name)
        blocks = block_hashes([1] * 160)
        chosen = []
        for number in range(13):
            asked = Asked(f"r{number}", 160, blocks)
            placed = router.place(asked, lambda name, units: True)
            assert placed is not None
            router.sent(asked, placed)
            chosen.append(placed.instance)
        assert chosen[:11] == ["0"] * 11
        assert chosen[-2] == last, "Ray Serve balances from a difference of ten"


def test_the_least_loaded_is_chosen() -> None:
    router = LeastLoaded()
    router.up("0")
    router.up("1")
    order = []
    for number in range(4):
        asked = Asked(str(number), 1)
        placed = router.place(asked, lambda name, units: True)
        assert placed is not None
        order.append(placed.instance)
        router.sent(asked, placed)
    router.ended(0.0, ["1"])
    assert order == ["0", "1", "0", "1"]
    assert router.least() == "1"


def test_e2_beats_round_robin_and_the_least_loaded_where_prompts_are_shared() -> None:
    found = case(Workload("some", 4, 40, 400, 6.0, common=0.4), lambda: None)
    assert found["mean_ratio"]["round robin"] > 2
    assert found["mean_ratio"]["least loaded"] > 2
    assert found["ways"]["E2"]["cached"] > found["ways"]["round robin"]["cached"]


def test_nothing_is_lost_where_nothing_is_shared() -> None:
    """Many one-block questions: E2 is a load balancer then."""
    jobs = [Job(f"r{n}", 0.4 * n, 2048, block_hashes([n + 1] * 2048)) for n in range(120)]
    took = {}
    for name, placement, limits in (("E2", e2(LIMITED), LIMITED), ("least loaded", LeastLoaded(), NO_LIMIT)):
        scheduler = EngineScheduler(limits, ("0", "1"), placement=placement)
        took[name] = latencies(simulate([Job(j.name, j.arrives, j.tokens, j.blocks) for j in jobs], scheduler))
    assert took["E2"]["mean_s"] <= 1.02 * took["least loaded"]["mean_s"]


@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_the_timed_loops_run(shared: float) -> None:
    assert decisions(shared, 20, 0)["wall"] > 0
    assert scheduled(shared, 20, 0)["cpu"] > 0
