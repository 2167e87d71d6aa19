"""Tests of the runtime against a sequential model.

Random queries have prefetches, outside writes, faults and cancellations. `TEOLA_TEST_SEED` sets the first seed. A
failure prints the queries of its seed, and `run_case(seed)` runs them again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from generated.another import Another, OtherProcess, other_process
from generated.hunting import FIRST
from generated.model_cases import COLLECTION
from generated.model_run import cases_of, run_case
from generated.model_steps import Steps
from generated.worlds import Latency, fakes
from support.request_counts import row

from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.pool import EnginePool


def report(seeds: range) -> str:
    """Return the first case with an error in full, and the others in short. It is empty if there are none."""
    found = {seed: wrong for seed in seeds if (wrong := run_case(seed))}
    if not found:
        return ""
    seed, wrong = next(iter(found.items()))
    queries = "\n".join(f"query {seed}-{n} {case}" for n, case in enumerate(cases_of(seed)))
    return f"{len(found)} of {len(seeds)}: seeds {list(found)}\n\n{queries}\n\n" + "\n".join(wrong)


@pytest.mark.parametrize("first", range(FIRST, FIRST + 300, 100))
def test_results_equal_those_of_a_sequential_store(first: int) -> None:
    assert not (wrong := report(range(first, first + 100))), wrong


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 20_000, 1000))
def test_results_equal_those_of_a_sequential_store_in_many_cases(first: int) -> None:
    assert not (wrong := report(range(first, first + 1000))), wrong


# ------------------------------------------------------------ two processes on PostgreSQL


@pytest.fixture(scope="module")
def other(postgres_dsn: str) -> Iterator[OtherProcess]:
    with other_process(postgres_dsn) as process:
        yield process


def in_steps(dsn: str, other: OtherProcess, seeds: range) -> None:
    engines = [engine for engine in fakes(Latency(seeds[0])) if engine.name != "store"]
    with EnginePool.local([*engines, PgVectorEngine(dsn=dsn, pool_size=4)]) as pool:
        for seed in seeds:
            steps = Steps(pool, other.do, seed)
            wrong = steps.run(seed)
            held = sorted(f"{COLLECTION} {row(chunk)}" for chunk, _ in steps.state.values())
            if (found := Another(dsn).rows()) != held:
                wrong.append(f"the store holds {found}, not {held}")
            assert not wrong, "\n".join([f"seed {seed}", *steps.story, *wrong])


@pytest.mark.postgres
def test_results_stay_sequential_with_a_second_process(postgres_dsn: str, other: OtherProcess) -> None:
    in_steps(postgres_dsn, other, range(FIRST, FIRST + 10))


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_results_stay_sequential_with_a_second_process_in_many_cases(
    first: int, postgres_dsn: str, other: OtherProcess
) -> None:
    in_steps(postgres_dsn, other, range(first, first + 50))
