"""Tests of the LlamaIndex benchmark without latency: every pattern runs, and all ways give the same answer."""

from __future__ import annotations

import argparse
import asyncio

from benchmarks.llamaindex.engines import PATTERNS
from benchmarks.llamaindex.kits import Sizes, pool_kit
from benchmarks.llamaindex_patterns import CROWDS, crowd_rows, measure, measure_crowd
from teola_plugin.engines import profiles


def test_every_pattern_is_measured() -> None:
    kit = pool_kit(profiles.noop(), Sizes(chunks=20, chunk_tokens=40, answer=8))
    options = argparse.Namespace(at_once=3, repeats=1)
    assert kit.pool is not None
    with asyncio.Runner() as runner, kit.in_force(), kit.pool:
        for name, pattern in PATTERNS.items():
            row = measure(runner, name, pattern, kit, 1)
            assert row["nothing_to_gain"] == ("behind_ms" in row)
        [shown] = crowd_rows([measure_crowd(runner, "HyDE", PATTERNS["HyDE"], kit, options)])
    assert {f"{way} s" for way in CROWDS} <= shown.keys()
