"""Tests of the benchmark of routing: its machine is the stated one, and E2 gains what the documents say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.placement.baselines import LeastLoaded, RayServe, RoundRobin, VllmRouter
from benchmarks.placement.machine import CHUNK, prefill_seconds, profile, step_seconds
from benchmarks.placement.workloads import Workload, asked, percent_common
from benchmarks.routing import NO_LIMIT, WAYS, Way, case, decisions, latencies, scheduled
from teola_plugin.graph import PrimitiveKind
from teola_plugin.scheduling import block_hashes
from teola_plugin.scheduling.placement import PlacementRequest
from teola_plugin.simulation import FlowArrival, Run, replay

ROUND = Way("round robin", lambda known: RoundRobin())


def job(arrives: float, tokens: int, *, prompt: int = 1, output: int = 1) -> FlowArrival:
    return asked(arrives, [prompt] * tokens, output)


def run(*jobs: FlowArrival, way: Way = ROUND, replicas: int = 1) -> Run:
    return replay(way.cluster(replicas), jobs)


DECODED = step_seconds(1, 2048)
"""One token, behind the prompt."""


def test_single_prompt_takes_the_sum_of_its_chunks() -> None:
    chunks = [step_seconds(CHUNK, CHUNK, [(CHUNK, CHUNK)]), step_seconds(CHUNK, 2 * CHUNK, [(CHUNK, 2 * CHUNK)])]
    assert prefill_seconds(1200) == pytest.approx(sum(chunks) + step_seconds(176, 1200, [(176, 1200)]))
    for tokens in (512, 4096, 8192):  # sizes that the profile has; between them it is a straight line
        (done,) = run(job(0.5, tokens)).queries
        assert done.first_token == pytest.approx(0.5 + prefill_seconds(tokens))
        assert done.seconds == pytest.approx(prefill_seconds(tokens) + DECODED)


def test_cached_prompt_computes_only_its_last_block() -> None:
    found = run(job(0.0, 1024), job(5.0, 1024), job(5.0, 1024, prompt=2))
    first, again, behind = found.queries
    assert found.cached["llm"] == pytest.approx(1008 / (3 * 1024))
    of_a_block = NO_LIMIT.seconds(PrimitiveKind.PREFILLING, 16)
    assert first.seconds == pytest.approx(prefill_seconds(1024) + DECODED)
    assert again.first_token == pytest.approx(5.0 + of_a_block)
    assert behind.first_token is not None and again.first_token is not None
    assert behind.first_token - again.first_token == pytest.approx(prefill_seconds(1024))


def test_decodings_continue_during_prefillings() -> None:
    long, late = run(job(0.0, 512, output=20), job(0.1, 512, prompt=2)).queries
    (alone,) = run(job(0.0, 512, output=20)).queries
    assert late.ended_at < long.ended_at
    assert long.seconds == pytest.approx(alone.seconds)


def test_cache_evicts_least_recently_used_prompts() -> None:
    way = replace(ROUND, profile=replace(profile(10**9, 10**9), cache_tokens=2048))
    prompts = [job(10.0 * at, 1024, prompt=prompt) for at, prompt in enumerate((1, 2, 1, 3, 1, 2))]
    firsts = [one.first_token - one.at for one in run(*prompts, way=way).queries if one.first_token is not None]
    assert [first < 0.1 for first in firsts] == [False, False, True, False, True, False]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_request_ends_and_runs_are_repeatable(way: Way) -> None:
    workload = Workload("short", 3, 10, 60, 4.0, alone=0.2, examples=2)

    def once() -> list[float]:
        return [done.ended_at for done in run(*workload.arrivals(), way=way, replicas=3).queries]

    times = once()
    assert len(times) == 60
    assert all(end > 0 for end in times)
    assert times == once()


def test_preble_workloads_share_the_stated_prefixes() -> None:
    jobs = [one.flow.works[0].asks[0] for one in percent_common(0.4, 3).arrivals()]
    assert len(jobs) == 1800
    assert {job.prompt for job in jobs} == {8192}
    assert len({job.blocks for job in jobs}) == 120
    assert len({job.blocks[: 8192 * 4 // 10 // 16] for job in jobs}) == 1
    assert len({job.blocks[: 8192 * 4 // 10 // 16 + 1] for job in jobs}) == 120
    alone = Workload("x", 2, 30, 300, 2.0, alone=0.2, examples=16).arrivals()
    firsts = [one.flow.works[0].asks[0].blocks[0] for one in alone]
    assert len(set(firsts)) == 30 + 60


def test_other_policies_keep_prefix_affinity_until_loads_diverge() -> None:
    for router, last in ((VllmRouter(), "0"), (RayServe(), "1")):
        for name in ("0", "1"):
            router.add_replica(name)
        blocks = block_hashes([1] * 160)
        chosen = []
        for number in range(13):
            request = PlacementRequest(f"r{number}", 160, blocks)
            placed = router.choose_replica(request, lambda name, units: True)
            assert placed is not None
            router.record_sent(request, placed)
            chosen.append(placed.replica)
        assert chosen[:11] == ["0"] * 11
        assert chosen[-2] == last, "Ray Serve balances from a difference of ten"


def test_least_loaded_policy_chooses_the_least_loaded_replica() -> None:
    router = LeastLoaded()
    router.add_replica("0")
    router.add_replica("1")
    order = []
    for number in range(4):
        request = PlacementRequest(str(number), 1)
        placed = router.choose_replica(request, lambda name, units: True)
        assert placed is not None
        order.append(placed.replica)
        router.record_sent(request, placed)
    router.record_ended(0.0, ["1"])
    assert order == ["0", "1", "0", "1"]
    assert router.least() == "1"


def test_e2_beats_other_policies_on_shared_prompts() -> None:
    found = case(Workload("some", 4, 40, 400, 6.0, common=0.4), lambda: None)
    assert found["mean_ratio"]["round robin"] > 2
    assert found["mean_ratio"]["least loaded"] > 2
    assert found["ways"]["E2"]["cached"] > found["ways"]["round robin"]["cached"]


def test_e2_loses_no_time_without_shared_prompts() -> None:
    """Many one-block questions: E2 is a load balancer then."""
    jobs = [job(0.4 * n, 2048, prompt=n + 1) for n in range(120)]
    others = Way("least loaded", lambda known: LeastLoaded())
    took = [latencies(run(*jobs, way=way, replicas=2))["mean_s"] for way in (WAYS[-1], others)]
    assert took[0] <= 1.02 * took[1]


@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_timed_loops_of_the_benchmark_run(shared: float) -> None:
    assert decisions(shared, 20, 0)["wall"] > 0
    assert scheduled(shared, 20, 0)["cpu"] > 0
