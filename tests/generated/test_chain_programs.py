"""Tests of random chains, original and accelerated, by every entry point.

They compare results, errors, events, requests and stored rows. Differences between two runs of the original do not
count. `TEOLA_TEST_SEED` sets the first seed. A failure prints the chain, shrunk, for `test_regressions.py`.
"""

from __future__ import annotations

import pytest
from generated.hunting import FIRST, KINDS, differing

# Streams that fail leave generators behind that complain when they are collected, in the plain object, too.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("first", range(FIRST, FIRST + 40, 20))
def test_random_chains_equal_the_original(first: int) -> None:
    assert not (report := differing(KINDS["chains"], range(first, first + 20))), report


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_random_chains_equal_the_original_in_many_programs(first: int) -> None:
    assert not (report := differing(KINDS["chains"], range(first, first + 100))), report
