"""Tests of simulated clusters in virtual time: latencies worked by hand, repeatable runs, and counts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines import machines
from teola_plugin.engines.fake import own_score
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.errors import ConfigError, RegistrationError, TeolaError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText, ScorePair
from teola_plugin.runtime.query_run import current_run
from teola_plugin.simulation import (
    Arrival,
    Cluster,
    QueryOutcome,
    Run,
    arriving,
    figures,
    machine_named,
    poisson,
    quantile,
    run_alone,
    simulate,
)

EMBEDDING = 0.022 + 0.00115
"""Seconds of one text."""
CLUSTER = Cluster.of(rtx3090())


def embeds(pool: EnginePool) -> Any:
    async def ask(text: str) -> None:
        await pool.call(PrimitiveKind.EMBEDDING, "embedder", [EmbedText(text)], run=current_run.get())

    return ask


def two_steps(pool: EnginePool, *, fast: bool = False) -> Any:
    llm = ChatTeola(pool=pool, max_tokens=12)
    draft = ChatPromptTemplate.from_template("Draft: {question}") | llm | StrOutputParser()
    facts = ChatPromptTemplate.from_template("Facts on {question}") | llm | StrOutputParser()
    chain = (
        RunnablePassthrough.assign(draft=draft)
        | RunnablePassthrough.assign(facts=facts)
        | ChatPromptTemplate.from_template("{question} {draft} {facts}")
        | llm
        | StrOutputParser()
    )
    return (accelerate(chain) if fast else chain).ainvoke


def questions(count: int, rate: float = 1.0) -> list[Arrival]:
    return arriving(poisson(rate, 1), {"app": [{"question": f"number {n}"} for n in range(count)]}, count)


def test_simulated_reranker_returns_its_own_scores() -> None:
    pairs, scores = [ScorePair("what do lambs eat", text) for text in ("lambs eat oats", "ivy", "what do they eat")], []

    def asks(pool: EnginePool) -> Any:
        async def ask(_: str) -> None:
            scores.extend(await pool.call(PrimitiveKind.RERANKING, "reranker", pairs, run=current_run.get()))

        return ask

    assert not simulate(CLUSTER, {"rank": asks}, [Arrival(0.0, "rank", "x")]).queries[0].error
    assert scores == [own_score(pair.query, pair.text) for pair in pairs]


def test_a_static_engine_serves_one_batch_at_a_time() -> None:
    run = simulate(CLUSTER, {"app": embeds}, [Arrival(at, "app", str(at)) for at in (0.0, 0.01, 5.0)])
    first, second, third = run.queries
    assert first.seconds == pytest.approx(EMBEDDING)
    assert second.seconds == pytest.approx(2 * EMBEDDING - 0.01)
    assert second.queued == pytest.approx(EMBEDDING - 0.01)
    assert third.seconds == pytest.approx(EMBEDDING)
    assert run.busy["embedder"] == (pytest.approx(3 * EMBEDDING),)
    assert run.seconds == pytest.approx(5 + EMBEDDING)


def test_replicas_share_the_requests_of_an_engine() -> None:
    cluster = Cluster.of(rtx3090(), replicas={"embedder": 2})
    run = simulate(cluster, {"app": embeds}, [Arrival(0.0, "app", str(n)) for n in range(2)])
    assert [one.seconds for one in run.queries] == pytest.approx([EMBEDDING, EMBEDDING])
    assert run.busy["embedder"] == pytest.approx((EMBEDDING, EMBEDDING))


def test_setup_requests_are_not_counted_in_the_run() -> None:
    async def make(pool: EnginePool) -> Any:
        ask = embeds(pool)
        await ask("before")
        return ask

    run = simulate(CLUSTER, {"app": make}, [Arrival(0.0, "app", "x")])
    assert run.queries[0].seconds == pytest.approx(EMBEDDING) == run.seconds
    assert run.busy["embedder"] == (pytest.approx(EMBEDDING),)


def test_accelerated_app_is_faster_than_the_original() -> None:
    fast = simulate(CLUSTER, {"app": lambda pool: two_steps(pool, fast=True)}, questions(20, 0.3))
    plain = simulate(CLUSTER, {"app": two_steps}, questions(20, 0.3))
    assert not any(one.error for one in (*fast.queries, *plain.queries))
    ratios = [slow.seconds / quick.seconds for slow, quick in zip(plain.queries, fast.queries, strict=True)]
    assert 1.2 < sum(ratios) / 20 < 1.6
    for one in (*fast.queries, *plain.queries):
        assert one.first_token is not None and one.at < one.first_token < one.ended_at
        assert one.work > 0


def test_failing_query_does_not_affect_others() -> None:
    def make(pool: EnginePool) -> Any:
        ask = embeds(pool)

        async def sometimes(text: str) -> None:
            if text == "bad":
                raise KeyError("mine")
            await ask(text)

        return sometimes

    run = simulate(CLUSTER, {"app": make}, [Arrival(0.0, "app", "bad"), Arrival(0.0, "app", "good")])
    assert run.queries[0].error == "KeyError: 'mine'"
    assert run.queries[1].seconds == pytest.approx(EMBEDDING)
    found = figures(run, {"app": 1.0})
    assert (found["failed"], found["within_slo"]) == (1, 0.5)


def test_blocking_call_fails_instead_of_hanging() -> None:
    def make(pool: EnginePool) -> Any:
        def blocking() -> None:
            pool.call(PrimitiveKind.EMBEDDING, "embedder", [EmbedText("x")]).result()

        return lambda value: asyncio.to_thread(blocking)

    run = simulate(CLUSTER, {"app": make}, [Arrival(0.0, "app", "x")])
    assert "use the async form" in run.queries[0].error


def test_endless_wait_raises_teola_error() -> None:
    async def never(value: Any) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TeolaError, match="virtual time stands still"):
        simulate(CLUSTER, {"app": lambda pool: never}, [Arrival(0.0, "app", "x")])


PROGRAM = """
from test_simulated_runs import CLUSTER, questions, simulate, two_steps
run = simulate(CLUSTER, {"app": lambda pool: two_steps(pool, fast=True)}, questions(12))
print([repr(one.seconds) for one in run.queries], run.busy)
"""


def test_simulation_is_reproducible_across_processes() -> None:
    """Hashes of texts differ from process to process."""

    def printed(seed: str) -> str:
        path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert printed("1") == printed("2")


def test_output_tokens_of_an_arrival_override_those_of_the_cluster() -> None:
    def make(pool: EnginePool) -> Any:
        return ChatTeola(pool=pool, max_tokens=100).ainvoke

    def seconds(cluster: Cluster, arrival: Arrival) -> float:
        return simulate(cluster, {"app": make}, [arrival]).queries[0].seconds

    long = Cluster.of(rtx3090(), output_tokens=80)
    plain = Arrival(0.0, "app", "q0000001 why?")
    marked = Arrival(0.0, "app", "q0000001 why?", 20, "q0000001")
    assert seconds(long, plain) - seconds(long, marked) == pytest.approx(60 * 0.0285)


def test_figures_report_latency_goodput_and_utilisation() -> None:
    served = tuple(
        QueryOutcome("app", at, at + took, at + took / 2) for at, took in ((0.0, 1.0), (1.0, 2.0), (2.0, 12.0))
    )
    found = figures(Run(served, {"llm": (7.0, 0.0)}, 14.0), {"app": 1.0}, slo=5)
    assert found["latency"] == {"mean": 5.0, "p50": 2.0, "p95": 11.0, "p99": 11.8}
    assert found["first_token"]["mean"] == 2.5
    assert found["within_slo"] == 0.6667 and found["goodput"] == pytest.approx(2 / 14, abs=1e-4)
    assert found["utilisation"] == {"llm": [0.5, 0.0]}
    assert quantile([3.0], 0.99) == 3.0
    with pytest.raises(ValueError, match="needs values"):
        quantile([], 0.5)


def test_figures_separate_the_apps_of_one_run() -> None:
    arrivals = [Arrival(0.0, "one", "x"), Arrival(0.0, "two", "y")]
    found = figures(simulate(CLUSTER, {"one": embeds, "two": embeds}, arrivals), {"one": 1.0, "two": 0.001})
    assert found["apps"]["one"]["within_slo"] == 1 and found["apps"]["two"]["within_slo"] == 0


def test_run_alone_gives_each_query_its_own_cluster() -> None:
    arrivals = [Arrival(float(at), "app", "x") for at in (3, 3)]
    assert [one.seconds for one in run_alone(CLUSTER, {"app": embeds}, arrivals)] == pytest.approx([EMBEDDING] * 2)


# ------------------------------------------------------------ clusters


def yaml(folder: Path, text: str) -> Path:
    path = folder / "pool.yaml"
    path.write_text(text)
    return path


def test_a_cluster_is_read_from_a_pools_file(tmp_path: Path) -> None:
    path = yaml(
        tmp_path,
        "engines:\n"
        "  main: {kind: vllm, model: some/model, replicas: 3, policy: throughput-oriented}\n"
        "  store: {kind: pgvector, dsn: embedded, replicas: 2}\n"
        "  web: {kind: websearch, options: {service: brave}}\n",
    )
    cluster = Cluster.read(path, machine_named("a100-8b"))
    assert cluster.policies == {"main": "throughput-oriented", "store": "topology-aware", "web": "topology-aware"}
    assert {name: len(found) for name, found in cluster.make_engines().items()} == {"main": 3, "store": 2, "web": 1}
    assert cluster.engines["main"].profile.cache_tokens > 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines:\n  llm: {kind: vllm, model: m}\n", "nothing says how fast engine 'llm' is"),
        ("engines:\n  mine: {factory: 'a.b:c'}\n", "nobody knows its speed"),
        ("engines:\n  mine: {kind: tools, options: {tools: ['a:b']}}\n", "made by tools, and nobody knows"),
        ("engines:\n  x: {kind: fake, options: {machine: rtx3090}}\n", "no profile of engine 'x'"),
        ("engines:\n  llm: {kind: fake, options: {machine: cray}}\n", "no machine 'cray'"),
    ],
)
def test_incomplete_pool_file_raises_config_error_with_hint(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.read(yaml(tmp_path, text))
    assert message in str(caught.value) and caught.value.hint


def test_unknown_engine_or_policy_raises_registration_error() -> None:
    with pytest.raises(RegistrationError, match="reader"):
        Cluster.of(rtx3090(), replicas={"reader": 2})
    with pytest.raises(RegistrationError, match="batch policy"):
        simulate(Cluster.of(rtx3090(), policy="best"), {"app": embeds}, [])


def test_calibrated_profiles_are_read_from_a_file(tmp_path: Path) -> None:
    import json

    from teola_plugin.engines.profiles import to_json

    path = tmp_path / "mine.json"
    path.write_text(json.dumps({name: to_json(profile) for name, profile in rtx3090().items()}))
    assert machine_named(str(path)) == rtx3090()
    path.write_text('{"llm": 3}')
    with pytest.raises(ConfigError, match="holds no profiles"):
        machine_named(str(path))


@pytest.mark.parametrize("name", list(machines.MACHINES))
def test_each_machine_has_the_four_engines(name: str) -> None:
    assert set(machine_named(name)) == {"llm", "embedder", "reranker", "store"}


def test_formula_reproduces_the_measured_card() -> None:
    kinds = (PrimitiveKind.DECODING, PrimitiveKind.PREFILLING)
    known, worked_out = rtx3090()["llm"], machines.llm(machines.LLAMA2_7B, machines.RTX_3090)
    for kind in kinds:
        assert worked_out.seconds(kind, 1000) == pytest.approx(known.seconds(kind, 1000), rel=0.02)
    with pytest.raises(ValueError, match="do not fit"):
        machines.llm(machines.LLAMA3_70B, machines.A100)


def test_work_in_threads_runs_at_once_and_without_a_loop() -> None:
    seen: list[Any] = []

    def make(pool: EnginePool) -> Any:
        async def inner() -> str:
            return "ran"

        def work(number: int) -> None:
            seen.append((number, asyncio.run(inner())))

        async def ask(value: Any) -> None:
            jobs: list[Awaitable[None]] = [asyncio.to_thread(work, n) for n in range(3)]
            await asyncio.gather(*jobs)

        return ask

    run = simulate(CLUSTER, {"app": make}, [Arrival(1.0, "app", "x")])
    assert seen == [(0, "ran"), (1, "ran"), (2, "ran")] and run.queries[0].seconds == 0
