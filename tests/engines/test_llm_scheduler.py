"""Tests of the opt-in scheduler class for vLLM: its order, its guard, and vLLM with it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from teola_plugin.engines.bundled import llama as tiny_llama
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.engines.vllm import scheduler as llm_scheduler
from teola_plugin.engines.vllm.scheduler import KEY, PATIENCE, TopologyOrder
from teola_plugin.errors import ConfigError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, Generate, Generation, Prompt, Request, Sampling

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

_numbers = itertools.count()


@dataclass(order=True)
class Waiting:
    """The attributes of vLLM's request that the order reads."""

    priority: int
    request_id: str = field(compare=False)
    sampling_params: Any = field(compare=False, default=None)


def wait(name: str, query: str, depth: int, objective: str = "latency") -> Waiting:
    return Waiting(next(_numbers), name, SimpleNamespace(extra_args={KEY: [query, depth, objective]}))


def order(waiting: list[Waiting], running: list[Waiting], late: list[Waiting] | None = None) -> list[str]:
    """Return the order in which requests start, one slot at a time. One of `late` arrives after each start."""
    made, late = TopologyOrder(), list(late or [])
    for request in waiting:
        made.add(request)
    running, taken = list(running), []
    while made.waiting:
        request = made.next(running)
        made.start(request)
        running.append(request)
        taken.append(request.request_id)
        if late:
            made.add(late.pop(0))
    return taken


def test_query_with_deeper_request_running_yields_to_others() -> None:
    """Figure 7 of the paper, with A running: H before B."""
    a, b = wait("A", "q1", 3), wait("B", "q1", 1)
    g, h = wait("G", "q2", 1), wait("H", "q2", 3)
    assert order([b, g, h], [a]) == ["H", "B", "G"]
    assert order([b, g, h], []) == ["B", "H", "G"], "by priority alone B, G, H"


def test_latency_requests_precede_throughput_and_background() -> None:
    warm_up, maps = wait("w", "q0", 9, "background"), [wait(f"m{i}", "q1", 5, "throughput") for i in range(2)]
    other = Waiting(next(_numbers), "from elsewhere")
    assert order([warm_up, *maps, other, wait("answer", "q2", 0)], []) == ["from elsewhere", "answer", "m0", "m1", "w"]


def test_waiting_request_is_overtaken_a_limited_number_of_times() -> None:
    gang = wait("m", "q1", 5, "throughput")
    taken = order([gang], [], [wait(f"a{i}", f"late{i}", 0) for i in range(3 * PATIENCE)])
    assert taken[0] == "m", "nobody else was there"
    first, gang = wait("a", "q0", 0), wait("m", "q1", 5, "throughput")
    taken = order([first, gang], [], [wait(f"a{i}", f"late{i}", 0) for i in range(3 * PATIENCE)])
    assert taken.index("m") == PATIENCE + 1


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "unknown"])
def test_untested_vllm_raises_only_with_scheduler_option(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"tested with vLLM 0.32; {version} is installed") as refused:
        llm_scheduler.check("topology", version, "llm")
    assert "leave `scheduler` out" in str(refused.value)
    llm_scheduler.check("topology", "0.32.1.dev3+cpu", "llm")
    llm_scheduler.check("", version, "llm")


async def test_unknown_scheduler_raises_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teola_plugin.engines.vllm.args.check_installed", lambda engine: "0.32.0")
    with pytest.raises(ConfigError, match="there is no scheduler 'fifo'"):
        await VllmEngine("llm", "no model", scheduler="fifo").start()


def test_gpu_engine_keeps_asynchronous_scheduling() -> None:
    assert llm_scheduler.class_name(cpu=True, engine_args={}).endswith("vllm.scheduler.TopologyScheduler")
    assert llm_scheduler.class_name(cpu=False, engine_args={}).endswith(".TopologyAsyncScheduler")
    assert llm_scheduler.class_name(cpu=False, engine_args={"async_scheduling": False}).endswith(".TopologyScheduler")
    with pytest.raises(AttributeError, match="Nothing"):
        _ = llm_scheduler.Nothing


def ask(name: str, query: str, depth: int, priority: int, tokens: int = 12) -> Request:
    payload = Generate(Prompt(text=f"{name} and the rest of it"), Sampling(max_tokens=tokens, ignore_eos=True))
    return Request(name, PrimitiveKind.PREFILLING, payload, query=query, priority=priority, depth=depth)


async def ends(engine: VllmEngine, *requests: Request) -> dict[str, str]:
    """Return the answers in the order in which they ended."""
    found = {}
    async for result in engine.execute(requests):
        if isinstance(result, Done):
            assert isinstance(result.value, Generation)
            found[result.request_id] = result.value.text
    return found


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize(("scheduler", "order"), [("", "ZBGHA"), ("topology", "ZHGBA")])
def test_vllm_uses_the_scheduler_and_answers_stay_equal(session_llm: SessionLlm, scheduler: str, order: str) -> None:
    """Two slots; A runs for long, so its query has had its turn when the other slot comes free."""
    requests = [ask("A", "q1", 3, 0, tokens=90), ask("Z", "q0", 9, 1, tokens=20)]
    requests += [ask("B", "q1", 1, 2), ask("G", "q2", 1, 3), ask("H", "q2", 3, 4)]
    plain = session_llm.run(ends(session_llm.engine, *requests))
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 512, "max_num_seqs": 2}
    engine = VllmEngine("topology", tiny_llama.make(), engine_args=args, cores="1", scheduler=scheduler)
    try:
        session_llm.run(engine.start(), timeout=280)
        found = session_llm.run(ends(engine, *requests))
    finally:
        session_llm.run(engine.stop())
    assert found == plain
    assert "".join(found) == order
