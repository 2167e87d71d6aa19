"""Tests of the identity of prompts: chained hashes, equal in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.scheduling import block_hashes


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_equal_block_hashes_count_the_common_whole_blocks(one: list[int], other: list[int]) -> None:
    common = shared(tuple(one), tuple(other))
    assert shared(block_hashes(one, size=4), block_hashes(other, size=4)) == common // 4


def test_partial_block_is_not_hashed() -> None:
    assert len(block_hashes([7] * 47)) == 2
    assert len(block_hashes("x" * 127)) == 1
    assert block_hashes("") == block_hashes([]) == ()


def test_block_hashes_continue_from_an_earlier_hash() -> None:
    whole = block_hashes(range(64))
    assert whole[:2] + block_hashes(range(32, 64), after=whole[1]) == whole


def test_equal_blocks_at_other_positions_differ() -> None:
    assert len(set(block_hashes([0] * 160))) == 10


def test_hashes_differ_by_tenant_and_between_text_and_tokens() -> None:
    mine, yours = block_hashes("a" * 64, tenant="me"), block_hashes("a" * 64, tenant="you")
    text, ids = block_hashes("a" * 8, size=8), block_hashes([97] * 8, size=8)
    assert mine != yours
    assert text != ids


def test_text_is_cut_by_characters_not_bytes() -> None:
    assert len(block_hashes("é" * 64)) == len(block_hashes("水" * 64)) == len(block_hashes("a" * 64)) == 1


def test_oversized_token_ids_raise_overflow_error() -> None:
    with pytest.raises(OverflowError):
        block_hashes([2**63] * 16)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_block_hashes_are_equal_in_every_process(seed: str) -> None:
    code = (
        "from teola_plugin.scheduling import block_hashes; print(block_hashes('water' * 26), block_hashes(range(33)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == f"{block_hashes('water' * 26)} {block_hashes(range(33))}"
    assert block_hashes(range(16)) == (6754188051480708068,), "all machines of a pool must agree"
