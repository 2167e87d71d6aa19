"""Random programs that write: the answer, what is stored in the end and what searches saw are the plain object's.

`TEOLA_TEST_SEED` sets the first seed. A failure prints the program, made small, for `test_found.py`.
"""

from __future__ import annotations

import pytest
from generated.hunting import FIRST, KINDS, differing


@pytest.mark.parametrize("first", range(FIRST, FIRST + 40, 10))
def test_writes_and_searches_are_the_plain_objects(first: int) -> None:
    assert not (report := differing(KINDS["writes"], range(first, first + 10))), report


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1400, 50))
def test_writes_and_searches_are_the_plain_objects_in_many_programs(first: int) -> None:
    assert not (report := differing(KINDS["writes"], range(first, first + 50))), report
