"""Tests of the load of replicas against a sum over all requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind
from teola_plugin.scheduling.placement import LoadModel
from teola_plugin.scheduling.placement.load_model import SlidingMean, prefill_cost


def model(*replicas: str, decode: float = 0.0) -> LoadModel:
    loads = LoadModel(decode)
    for name in replicas:
        loads.add_replica(name)
    return loads


def send(loads: LoadModel, at: float, request: str, replica: str = "a", cost: float = 1.0, new: int = 100) -> None:
    loads.expire(at)
    loads.record_sent(at, request, replica, cost, new=new, tokens=100, key=7)


def test_load_sums_window_prefillings_and_pending_decodings() -> None:
    loads = model("a", decode=2.0)
    send(loads, 0.0, "r1", cost=1.0)
    send(loads, 100.0, "r2", cost=3.0)
    assert loads.load("a") == 4.0 + 2 * 2.0
    loads.record_prefilled(100.0, "r1")
    loads.record_ended(102.0, "r1")
    assert loads.load("a") == 4.0 + 2.0
    loads.expire(181.0)
    assert loads.load("a") == 3.0 + 2.0
    assert loads["a"].shares[7].requests == 1


def test_mean_decoding_time_is_learned() -> None:
    loads = model("a")
    for number in range(3):
        send(loads, 0.0, f"r{number}")
        loads.record_prefilled(1.0, f"r{number}")
        loads.record_ended(5.0, f"r{number}")
    assert loads.decode == pytest.approx(4.0)


def test_slot_wait_is_time_to_prefill_or_next_end() -> None:
    loads = model("a", decode=6.0)
    send(loads, 0.0, "r1", cost=1.0)
    send(loads, 0.0, "r2", cost=2.0)
    assert loads.wait_s("a", 0.0) == 3.0
    assert loads.wait_s("a", 0.5) == 2.5
    loads.record_prefilled(1.0, "r1")
    assert loads.wait_s("a", 1.0) == 2.0
    assert loads.wait_s("a", 9.0) == 0.0, "it is late"
    assert not loads.idle
    loads.record_prefilled(9.0, "r2")
    assert loads.wait_s("a", 9.0) == 6.0 / 2, "two decode"
    assert loads.queue_s("a", 9.0) == 0.0
    assert loads.idle == {"a"}


def test_prefill_share_is_the_fraction_of_time_prefilling() -> None:
    loads = model("a", "b")
    assert loads.prefill_share("a", 5.0) == 0.0
    send(loads, 10.0, "r1", cost=6.0)
    assert loads.prefill_share("a", 22.0) == 0.5
    assert loads.prefill_share("a", 11.0) == 1.0
    assert loads.prefill_share("b", 22.0) == 0.0


def test_hit_ratio_covers_the_last_half_minute() -> None:
    loads = model("a")
    send(loads, 0.0, "r1", new=10)
    assert loads["a"].hit_ratio == 0.9
    loads.expire(31.0)
    assert loads["a"].hit_ratio == 0.0


def test_forgotten_replica_starts_again_without_load() -> None:
    loads = model("a", "b")
    send(loads, 0.0, "r1", "a")
    loads.forget_replica("a")
    loads.record_ended(1.0, "r1")
    loads.add_replica("a")
    loads.expire(1000.0)
    assert loads.load("a") == 0.0
    assert loads["a"].running == 0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 60), st.floats(0.001, 9), st.booleans()), max_size=40),
    st.integers(1, 20),
)
def test_load_equals_the_brute_force_sum(sent: list[tuple[str, float, float, bool]], most: int) -> None:
    loads = LoadModel(0.5, max_history=most)
    for name in "ab":
        loads.add_replica(name)
    now, all_sent, running = 0.0, [], {"a": 0, "b": 0}
    for number, (name, later, cost, ends) in enumerate(sent):
        now += later
        loads.expire(now)
        loads.record_sent(now, f"r{number}", name, cost, new=1, tokens=2, key=number % 3)
        all_sent.append((now, name, cost))
        running[name] += not ends
        if ends:
            loads.record_ended(now, f"r{number}")
    loads.expire(now)
    recent = [entry for entry in all_sent[-most:] if entry[0] >= now - 180.0]
    for name in "ab":
        expected = sum(cost for _, other, cost in recent if other == name)
        assert loads.load(name) == pytest.approx(expected + 0.5 * running[name], abs=1e-6)
        shared = sum(share.requests for share in loads[name].shares.values())
        assert shared <= loads[name].requests == sum(other == name for _, other, _ in recent)


@pytest.mark.parametrize(
    ("before", "now", "grown"), [([1] * 5, [2] * 5, True), ([1] * 5, [1.9] * 5, False), ([1] * 4, [9] * 5, False)]
)
def test_growth_is_detected_between_window_halves(before: list[float], now: list[float], grown: bool) -> None:
    seen = SlidingMean(90.0)
    for value in before:
        seen.add(10.0, value)
    for value in now:
        seen.add(100.0, value)
    assert seen.has_grown(100.0, 2.0, 5) is grown
    assert not seen.has_grown(1000.0, 2.0, 5), "all of it is long ago"


def test_prefill_cost_uses_the_profile_or_a_token_estimate() -> None:
    measured = EngineProfile({PrimitiveKind.PREFILLING: Curve.linear(0.5, 0.01)})
    assert prefill_cost(measured)(100) == pytest.approx(1.5)
    assert prefill_cost(EngineProfile())(100) == pytest.approx(0.01)
