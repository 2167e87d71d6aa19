"""The runtime against a sequential model: random queries with their early work, outside writes, faults and cancellations.

`TEOLA_TEST_SEED` sets the first seed. A failure prints the queries of its seed; `run_case(seed)` runs them again.
"""

from __future__ import annotations

import pytest
from generated.hunting import FIRST
from generated.model_run import cases_of, run_case


def report(seeds: range) -> str:
    """Of the cases in which something is wrong, the first one in full; empty without any."""
    found = {seed: wrong for seed in seeds if (wrong := run_case(seed))}
    if not found:
        return ""
    seed, wrong = next(iter(found.items()))
    queries = "\n".join(f"query {seed}-{n} {case}" for n, case in enumerate(cases_of(seed)))
    return f"{len(found)} of {len(seeds)}: seeds {list(found)}\n\n{queries}\n\n" + "\n".join(wrong)


@pytest.mark.parametrize("first", range(FIRST, FIRST + 300, 100))
def test_what_plain_objects_get_is_what_a_sequential_store_gives(first: int) -> None:
    assert not (wrong := report(range(first, first + 100))), wrong


@pytest.mark.long
@pytest.mark.parametrize("first", range(10_000, 20_000, 1000))
def test_what_plain_objects_get_is_what_a_sequential_store_gives_in_many_cases(first: int) -> None:
    assert not (wrong := report(range(first, first + 1000))), wrong
