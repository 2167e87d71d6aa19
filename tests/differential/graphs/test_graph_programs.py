"""Tests of random graphs, original and accelerated, without latencies and with some."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from differential.graphs.seen import differences
from differential.graphs.sides import Side, side
from support.graphs.kit import engines
from support.graphs.programs import program

FIRST = int(os.environ.get("TEOLA_FIRST_PROGRAM", "0"))
"""Another number gives other programs."""


@pytest.fixture(scope="module")
def slower() -> Iterator[Side]:
    """Accelerated, on engines that take a few milliseconds."""
    with side(accelerated=True, made=engines(pace=0.005)) as made:
        yield made


def _differs(seed: int, plainly: Side, sooner: Side) -> list[str]:
    case = program(seed)
    way = random.Random(seed).choice(["ainvoke", "astream all"] if case.only else ["invoke", "ainvoke", "stream all"])
    return differences(plainly.see(case, way), sooner.see(case, way), case)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 15))
def test_generated_graph_program_behaves_as_the_original(seed: int, plainly: Side, sooner: Side) -> None:
    assert not _differs(seed, plainly, sooner)


@pytest.mark.long
@pytest.mark.parametrize("pace", ["no latency", "some"])
def test_many_generated_graph_programs_behave_as_the_original(
    pace: str, plainly: Side, sooner: Side, slower: Side
) -> None:
    fast = slower if pace == "some" else sooner
    found = {seed: _differs(seed, plainly, fast) for seed in range(FIRST + 15, FIRST + 165)}
    assert not {seed: how for seed, how in found.items() if how}
