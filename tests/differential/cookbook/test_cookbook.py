"""Tests that chains from cookbooks behave like the original, on a pool and with the user's own models."""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from differential.cookbook import control, retrieval
from differential.cookbook.bench import Bench, OwnChat, OwnEmbeddings, mixed_bench, own_bench, pool_bench
from differential.cookbook.compare import EVERY, Seen, differences, see
from differential.recording import plain
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.base import RunnableBindingBase

from benchmarks.langchain import cookbook
from benchmarks.langchain import kits as cookbook_kits
from benchmarks.rag.apps import document
from teola_plugin import accelerate

Chain = Runnable[Any, Any]
Make = Callable[[Bench], Chain]


def _of_the_benchmarks(pattern: cookbook.Pattern) -> tuple[Make, Any]:
    small = {"document": document(chunks=6)} if "document" in pattern.given else {}
    return lambda b: pattern.make(b.kit), {**pattern.given, **small}


CHAINS: dict[str, tuple[Make, Any]] = {
    **{name.replace(" ", "_"): _of_the_benchmarks(pattern) for name, pattern in cookbook.PATTERNS.items()},
    **retrieval.CHAINS,
    **control.CHAINS,
}
LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
KITS: dict[str, Callable[[], Bench]] = {"pool": pool_bench, "own": own_bench, "mixed": mixed_bench}


def all_chains(*groups: str, all_of_first: bool = False, kits: tuple[str, ...] = ("pool", "own")) -> Any:
    """Return a mark that runs a test for every kit and chain, each with one entry point of every group in turn.

    The long version takes all entry points.
    """
    cases = []
    for k, kit in enumerate(kits):
        for i, name in enumerate(CHAINS):
            for g, group in enumerate(map(str.split, groups)):
                every = LONG or (all_of_first and not g)
                cases += [(kit, name, way) for way in (group if every else [group[(i + k) % len(group)]])]
    assert {way for *_, way in cases} <= EVERY.keys()
    return pytest.mark.parametrize(("bench", "name", "way"), cases, indirect=["bench"])


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, Bench]]:
    made = {name: make() for name, make in KITS.items()}
    yield made
    for one in made.values():
        if one.kit.pool is not None:
            one.kit.pool.close()


@pytest.fixture(params=("pool", "own"))
def bench(request: pytest.FixtureRequest, benches: dict[str, Bench]) -> Bench:
    return benches[request.param]


def both(b: Bench, name: str, way: str, **options: Any) -> tuple[Seen, Seen]:
    """Return a call of the original and one of the accelerated chain. Each has a new chain, because some keep state."""
    make, given = CHAINS[name]
    key = (b.kit.name, name, way, b.ledger.broken)
    if key not in _plain:
        _plain[key] = see(b, make(b), way, given)
    return _plain[key], see(b, accelerate(make(b), pool=b.kit.pool, **options), way, given)


_plain: dict[Any, Seen] = {}
"""What the plain chains did; it is compared with more than one accelerated call."""


def same(before: Seen, after: Seen, way: str, *, merged: bool) -> None:
    if found := differences(before, after, way, merged=merged):
        pytest.fail("\n".join(one[:2000] for one in found), pytrace=False)


@all_chains("invoke ainvoke", "batch abatch", "stream astream", "astream_events", all_of_first=True)
def test_cookbook_chain_behaves_as_the_original(bench: Bench, name: str, way: str) -> None:
    before, after = both(bench, name, way)
    same(before, after, way, merged=bench.kit.pool is not None)


@all_chains("invoke ainvoke", kits=tuple(KITS))
def test_cookbook_chain_with_speculate_all_behaves_as_the_original(bench: Bench, name: str, way: str) -> None:
    before, after = both(bench, name, way, speculate="all")
    same(before, after, way, merged=True)


CONCURRENT = (OwnChat, OwnEmbeddings, cookbook_kits.Keywords)
"""What may be called on several threads: all of the user's own in these chains but the reranker."""


@all_chains("invoke", "batch ainvoke", "stream astream", "astream_events", all_of_first=True, kits=("own", "mixed"))
def test_cookbook_chain_with_concurrent_behaves_as_the_original(bench: Bench, name: str, way: str) -> None:
    before, after = both(bench, name, way, concurrent=CONCURRENT)
    same(before, after, way, merged=bench.kit.pool is not None)


@all_chains("invoke", kits=("own", "mixed"))
def test_cookbook_chain_with_concurrent_and_speculate_all_is_the_same(bench: Bench, name: str, way: str) -> None:
    before, after = both(bench, name, way, speculate="all", concurrent=CONCURRENT)
    same(before, after, way, merged=True)


@all_chains("invoke", kits=("own",), all_of_first=True)
def test_failing_concurrent_model_raises_the_originals_error(bench: Bench, name: str, way: str) -> None:
    """Each of its calls: the same exception, and in every run no more calls than the whole chain makes."""
    make, given = CHAINS[name]
    bench.kit.fresh()
    bench.ledger.clear()
    make(bench).invoke(copy.deepcopy(given))
    prompts, whole = list(dict.fromkeys(bench.ledger.prompts)), Counter(bench.ledger.prompts)
    try:
        for broken in prompts[:6]:
            bench.ledger.broken = broken
            before, after = both(bench, name, way, concurrent=CONCURRENT)
            same(before, after, way, merged=False)
            assert not before.outcome.failed or not after.prompts - whole - before.prompts
    finally:
        bench.ledger.broken = None


@all_chains("invoke ainvoke")
def test_failing_model_raises_the_originals_error(bench: Bench, name: str, way: str) -> None:
    """At the first and the last of its calls (all of them in the long version): the same exception, or the same end."""
    make, given = CHAINS[name]
    bench.kit.fresh()
    bench.ledger.clear()
    make(bench).invoke(copy.deepcopy(given))
    prompts = bench.ledger.prompts
    try:
        for broken in prompts if LONG else dict.fromkeys(prompts[:1] + prompts[-1:]):
            bench.ledger.broken = broken
            before, after = both(bench, name, way)
            same(before, after, way, merged=bench.kit.pool is not None)
    finally:
        bench.ledger.broken = None


def test_eight_concurrent_queries_give_the_originals_results(bench: Bench) -> None:
    """Queries over all chains, from eight threads, half of them by the async way."""
    made = {name: (make(bench), given) for name, (make, given) in CHAINS.items() if name not in _KEEPS}
    bench.kit.fresh()
    expected = {
        name: plain(chain.invoke(copy.deepcopy(given))) for name, (chain, given) in made.items() if name != "rephrased"
    }
    fast = {name: accelerate(made[name][0], pool=bench.kit.pool) for name in expected}
    order = [(name, asynchronous) for name in expected for asynchronous in (True, False)]
    random.Random(1).shuffle(order)

    def ask(one: tuple[str, bool]) -> str:
        name, asynchronous = one
        given = copy.deepcopy(made[name][1])
        return plain(asyncio.run(fast[name].ainvoke(given)) if asynchronous else fast[name].invoke(given))

    with ThreadPoolExecutor(8) as threads:
        for (name, _), found in zip(order, threads.map(ask, order), strict=True):
            assert found == expected[name], name


_KEEPS = ("upload", "conversational", "remembered", "configurable_model")


# ------------------------------------------------------------ the harness


class Wrong(RunnableBindingBase[Any, Any]):
    """An accelerated object that is not faithful."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self.spoil(input, config)

    def spoil(self, input: Any, config: RunnableConfig | None) -> Any:
        raise NotImplementedError


class OtherAnswer(Wrong):
    def spoil(self, input: Any, config: RunnableConfig | None) -> Any:
        return self.bound.invoke(input, config) + " "


class OtherType(Wrong):
    def spoil(self, input: Any, config: RunnableConfig | None) -> Any:
        return [self.bound.invoke(input, config)]


class NoEvents(Wrong):
    def spoil(self, input: Any, config: RunnableConfig | None) -> Any:
        return self.bound.invoke(input)


class AsksTwice(Wrong):
    def spoil(self, input: Any, config: RunnableConfig | None) -> Any:
        self.bound.invoke(input)
        return self.bound.invoke(input, config)


class Swallows(Wrong):
    def spoil(self, input: Any, config: RunnableConfig | None) -> Any:
        try:
            return self.bound.invoke(input, config)
        except Exception as error:
            raise type(error)("something else") from error


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(OtherAnswer, "result"), (OtherType, "result"), (NoEvents, "events"), (AsksTwice, "prompts")],
)
def test_comparison_detects_an_unfaithful_object(bench: Bench, wrong: type[Wrong], what: str) -> None:
    make, given = CHAINS["rag"]
    before, after = see(bench, make(bench), "invoke", given), see(bench, wrong(bound=make(bench)), "invoke", given)
    assert any(found.startswith(what) for found in differences(before, after, merged=bench.kit.pool is not None))


def test_comparison_detects_a_swallowed_error(bench: Bench) -> None:
    make, given = CHAINS["rag"]
    make(bench).invoke(given)
    bench.ledger.broken = bench.ledger.prompts[-1]
    try:
        before, after = (
            see(bench, make(bench), "invoke", given),
            see(bench, Swallows(bound=make(bench)), "invoke", given),
        )
    finally:
        bench.ledger.broken = None
    assert before.outcome.failed and differences(before, after)


def test_comparison_detects_tools_in_another_order(bench: Bench) -> None:
    def using(*names: str) -> Chain:
        return RunnableLambda(lambda _: [bench.ledger.used(name) for name in names])

    before, after = (see(bench, using(*names), "invoke", 0) for names in (("a", "b"), ("b", "a")))
    assert any(found.startswith("tools") for found in differences(before, after))


def test_comparison_requires_extra_requests_to_be_counted_as_wasted(bench: Bench) -> None:
    """Early work beyond what the trace admits is caught, and a text never embedded; once instead of twice is fine."""
    base = see(bench, RunnableLambda(lambda x: x), "invoke", 0)

    def with_(prompts: list[str], texts: list[str], wasted: int = 0) -> Seen:
        return Seen(base.outcome, Counter(prompts), Counter(texts), (), wasted)

    plain_ = with_(["p"], ["t", "t", "u"])
    assert not differences(plain_, with_(["p", "q"], ["t", "u"], wasted=1), merged=True)
    assert differences(plain_, with_(["p", "q"], ["t", "u"]), merged=True)
    assert differences(plain_, with_(["p"], ["t"]), merged=True)
    assert differences(plain_, with_(["p"], ["t", "u"]))


def test_cookbook_has_forty_chains_that_all_call_a_model(bench: Bench) -> None:
    """At least 40, and each asks a model or an embedder something: none is compared with nothing."""
    assert len(CHAINS) >= 40
    silent = []
    for name, (make, given) in CHAINS.items():
        seen = see(bench, make(bench), "invoke", given)
        if not seen.prompts and not seen.texts:
            silent.append(name)
    assert not silent
