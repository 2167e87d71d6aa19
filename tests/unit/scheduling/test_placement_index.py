"""Tests of the prefix index against a list of all prefixes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from teola_plugin.graph.prefix_blocks import PrefixBlocks, block_hashes
from teola_plugin.scheduling.placement import PrefixIndex, Run
from teola_plugin.scheduling.placement.prefix_index import key_portion

REPLICAS = ("a", "b", "c")
LARGE = 10_000


def blocks(text: str) -> PrefixBlocks:
    """Return one block for each letter."""
    return block_hashes(text, size=1)


def held_blocks(index: PrefixIndex, replica: str) -> set[int]:
    return {block for run in index.runs() if replica in run.holders for block in run.blocks}


def sound(index: PrefixIndex) -> None:
    for run in index.runs():
        assert run.blocks and run.holders, "nobody's runs are forgotten"
        assert run.parent is not None
        assert run.parent.end == run.start
        if run.start:
            assert all(run.parent.holders[i] >= tick for i, tick in run.holders.items())
    for replica in REPLICAS:
        assert index.blocks_on(replica) == len(held_blocks(index, replica)) <= index.capacity


prompts = st.text("xy", min_size=1, max_size=8)
steps = st.one_of(
    st.tuples(st.just("hold"), st.sampled_from(REPLICAS), prompts, st.just(0)),
    st.tuples(st.just("cut"), st.sampled_from(REPLICAS), prompts, st.integers(0, 8)),
    st.tuples(st.just("forget"), st.sampled_from(REPLICAS), st.just(""), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=25), prompts)
def test_prefix_match_equals_brute_force_search(changes: list[tuple[str, str, str, int]], prompt: str) -> None:
    index = PrefixIndex(LARGE)
    known: dict[str, set[str]] = {name: set() for name in REPLICAS}
    for at, (what, name, text, keeps) in enumerate(changes):
        if what == "hold":
            index.hold(name, blocks(text), at)
            known[name] |= {text[: i + 1] for i in range(len(text))}
        elif what == "cut":
            index.cut(name, blocks(text), keeps)
            known[name] = {k for k in known[name] if keeps >= len(text) or not k.startswith(text[: keeps + 1])}
        else:
            index.forget_replica(name)
            known[name] = set()
        sound(index)
    match = index.match(blocks(prompt))
    longest = {
        name: max((i for i in range(len(prompt) + 1) if prompt[:i] in known[name]), default=0) for name in REPLICAS
    }
    assert match.depth == max(longest.values())
    assert {name: match.at(name) for name in REPLICAS} == longest
    assert match.by_replica() == {name: depth for name, depth in longest.items() if depth}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(REPLICAS), prompts), max_size=40), st.integers(1, 12))
def test_index_memory_is_bounded_and_the_newest_prompt_kept(changes: list[tuple[str, str]], capacity: int) -> None:
    index = PrefixIndex(capacity)
    for at, (name, text) in enumerate(changes):
        index.hold(name, blocks(text), at)
        sound(index)
        assert index.match(blocks(text)).at(name) == min(len(text), capacity)


def test_coldest_prompt_is_evicted_before_shared_prefixes() -> None:
    index = PrefixIndex(8)
    for at, text in enumerate(["sys.A1", "sys.B"]):  # 4 shared blocks, then 2, then 1
        index.hold("a", blocks(text), at)
    assert index.blocks_on("a") == 7
    index.hold("a", blocks("zz"), 2)
    assert index.match(blocks("sys.A1")).depth == 4, "what A1 alone had is gone"
    assert index.match(blocks("sys.B")).depth == 5


def test_recently_used_prompt_is_not_evicted() -> None:
    index = PrefixIndex(4)
    for at, text in enumerate(["aa", "bb", "aa", "cc"]):
        index.hold("a", blocks(text), at)
    assert [index.match(blocks(text)).depth for text in ("aa", "bb", "cc")] == [2, 0, 2]


def test_eviction_loss_is_weighted_by_sharing_requests() -> None:
    index = PrefixIndex(10)
    for at in range(3):
        index.hold("a", blocks("pppp"), at)
    index.hold("a", blocks("qqqq"), 3)
    assert index.loss("a", 2, 4) == 0.0, "two blocks are free"
    assert index.loss("a", 4, 4) == 2 * 3
    assert index.loss("a", 8, 4) == 4 * 3 + 2 * 1
    index.hold("b", blocks("pppp"), 4)
    assert index.loss("a", 4, 4) == 2 * 4 / 2, "another one holds it, too"
    index.use("a", 1.0)
    assert index.loss("a", 2, 4) == 2 * 4 / 2, "its cache is full of running requests"
    assert index.loss("a", 4, 1000.0) == 0.0, "nobody has asked for it lately"


def test_prompt_longer_than_the_cache_is_indexed_up_to_capacity() -> None:
    index = PrefixIndex(3)
    index.hold("a", blocks("abcdef"), 0)
    assert index.match(blocks("abcdef")).depth == 3


def test_key_portion_is_the_last_run_longer_than_earlier_ones() -> None:
    index = PrefixIndex(LARGE)
    for at, text in enumerate(["ss" + "t" * 9 + "q1", "ss" + "t" * 9 + "q2", "ss" + "u" * 9]):
        path = index.hold("a", blocks(text), at)
    runs: list[Run] = list(index.hold("a", blocks("ss" + "t" * 9 + "q3"), 3))
    assert [len(run.blocks) for run in runs] == [2, 10, 1]
    assert key_portion(tuple(runs)) == runs[1].name
    assert key_portion(path) != key_portion(tuple(runs))
    assert key_portion(()) == 0


def test_key_portion_keeps_its_name_when_its_run_is_split() -> None:
    index = PrefixIndex(LARGE)
    for at, text in enumerate(["s" + "t" * 9 + "q1", "s" + "t" * 9 + "q2"]):
        path = index.hold("a", blocks(text), at)
    name = key_portion(path)
    assert [len(run.blocks) for run in path] == [11, 1]
    other = index.hold("a", blocks("s" + "u" * 9), 2)
    again = index.hold("a", blocks("s" + "t" * 9 + "q3"), 3)
    assert [len(run.blocks) for run in again] == [1, 10, 1]
    assert key_portion(again) == name == again[1].name
    assert name not in {run.name for run in other}


def test_stale_index_entries_do_not_accumulate() -> None:
    index = PrefixIndex(LARGE)
    for at in range(5000):
        index.hold("a", blocks("same prompt"), at)
    assert len(index._caches["a"].cold) < 100
