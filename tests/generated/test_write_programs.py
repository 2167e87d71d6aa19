"""Tests of random programs that write: the answer, the rows in the end and the results of searches are the original's.

`TEOLA_TEST_SEED` sets the first seed. A failure prints the program, shrunk, for `test_regressions.py`.
"""

from __future__ import annotations

import pytest
from generated.hunting import FIRST, KINDS, differing
from generated.postgres import stage
from generated.write_programs import program, tree


@pytest.mark.parametrize("first", range(FIRST, FIRST + 20, 10))
def test_writes_and_searches_equal_the_original(first: int) -> None:
    assert not (report := differing(KINDS["writes"], range(first, first + 10))), report


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_writes_and_searches_equal_the_original_in_many_programs(first: int) -> None:
    assert not (report := differing(KINDS["writes"], range(first, first + 50))), report


@pytest.mark.postgres
def test_postgresql_writes_and_searches_equal_the_original(postgres_dsn: str) -> None:
    kind = (stage(postgres_dsn), tree, program)
    assert not (report := differing(kind, range(FIRST, FIRST + 8), threads=1)), report


@pytest.mark.long
@pytest.mark.postgres
@pytest.mark.parametrize("first", range(1000, 1060, 20))
def test_postgresql_writes_equal_the_original_in_many_programs(first: int, postgres_dsn: str) -> None:
    kind = (stage(postgres_dsn), tree, program)
    assert not (report := differing(kind, range(first, first + 20), threads=1)), report
