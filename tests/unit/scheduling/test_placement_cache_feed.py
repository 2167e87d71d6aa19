"""News of an engine's cache, in its own hashes, reach the placement as prefixes."""

from __future__ import annotations

import pytest
from support.placement import anywhere, ask, e2, prompt

from teola_plugin.errors import ConfigError
from teola_plugin.scheduling.events import CacheCleared, CacheStored
from teola_plugin.scheduling.placement import CacheFeed, Placed, Why
from teola_plugin.scheduling.prefix_blocks import block_hashes


def test_stored_blocks_follow_their_parents() -> None:
    feed = CacheFeed("a")
    tokens = prompt(("x", 64))
    assert feed.stored(1.0, ["h1", "h2"], tokens[:32]) == CacheStored(1.0, "a", block_hashes(tokens[:32]))
    assert feed.stored(2.0, ["h3", "h4"], tokens[32:], "h2") == CacheStored(2.0, "a", block_hashes(tokens))
    branch = feed.stored(3.0, ["h5"], [7] * 16, "h1")
    assert branch == CacheStored(3.0, "a", block_hashes(tokens[:16] + [7] * 16))


def test_an_engine_s_larger_blocks_are_several_of_ours() -> None:
    feed = CacheFeed("a")
    tokens = prompt(("x", 96), ("y", 96))
    feed.stored(0.0, ["h1", "h2"], tokens)
    (event,) = feed.removed(1.0, ["h2"])
    assert (event.blocks, event.keeps) == (block_hashes(tokens), 6)
    assert feed.stored(2.0, ["h3"], tokens[96:], "h1") == CacheStored(2.0, "a", block_hashes(tokens))


def test_blocks_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 24 tokens"):
        CacheFeed("a").stored(0.0, ["h1"], [1] * 24)


def test_lost_news_are_noticed() -> None:
    feed = CacheFeed("a")
    assert feed.stored(0.0, ["h2"], [1] * 16, "never seen") is None
    assert feed.removed(0.0, ["h2", "other"]) == []
    feed.stored(0.0, ["h1"], [1] * 16)
    assert feed.cleared(1.0) == CacheCleared(1.0, "a")
    assert feed.removed(2.0, ["h1"]) == []


def test_tenants_are_kept_apart() -> None:
    feed = CacheFeed("a")
    mine = feed.stored(0.0, ["h1"], [1] * 16, tenant="me")
    assert mine is not None and mine.blocks == block_hashes([1] * 16, tenant="me") != block_hashes([1] * 16)


def test_the_placement_follows_the_engine_block_by_block() -> None:
    placement, feed = e2("a", "b"), CacheFeed("b")
    tokens = prompt(("x", 320))
    names = [f"h{i}" for i in range(20)]
    stored = feed.stored(0.0, names, tokens)
    assert stored is not None
    placement.cached(stored)
    units = []
    for name in reversed(names):  # engines forget ends first
        placed = placement.place(ask("1", ("x", 320)), anywhere)
        assert placed is not None
        units.append((placed.instance, placed.units))
        for event in feed.removed(1.0, [name]):
            placement.cached(event)
    assert units[:9] == [("b", max(1, 16 * gone)) for gone in range(9)]
    assert placement.place(ask("2", ("x", 320)), anywhere) == Placed("a", 320, Why.EXPLORE)
    assert not list(placement.index.runs())
