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
    """Return an accelerated side on engines that take a few milliseconds."""
    with side(accelerated=True, made=engines(pace=0.005)) as made:
        yield made


def _differs(seed: int, original_side: Side, accelerated_side: Side) -> list[str]:
    case = program(seed)
    way = random.Random(seed).choice(["ainvoke", "astream all"] if case.only else ["invoke", "ainvoke", "stream all"])
    return differences(original_side.see(case, way), accelerated_side.see(case, way), case)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 15))
def test_generated_graph_program_behaves_as_the_original(
    seed: int, original_side: Side, accelerated_side: Side
) -> None:
    assert not _differs(seed, original_side, accelerated_side)


@pytest.mark.long
@pytest.mark.parametrize("pace", ["no latency", "some"])
def test_many_generated_graph_programs_behave_as_the_original(
    pace: str, original_side: Side, accelerated_side: Side, slower: Side
) -> None:
    fast = slower if pace == "some" else accelerated_side
    found = {seed: _differs(seed, original_side, fast) for seed in range(FIRST + 15, FIRST + 165)}
    assert not {seed: how for seed, how in found.items() if how}
