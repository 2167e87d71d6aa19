"""Tests that accelerated chains behave like the original: results, types, events, prompts and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from differential.chains import CHAINS, QUESTION, TEXTS, Parts, independent_assigns, parts
from differential.recording import WAYS, Outcome, observe
from support.request_counts import RequestCounts, rows, watch

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.engines.fake import fake_engines
from teola_plugin.pool import EnginePool


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as pool:
        yield pool


@pytest.fixture(scope="module")
def p(pool: EnginePool) -> Parts:
    made = parts(pool)
    made.store.add_texts(TEXTS)
    return made


@pytest.fixture(scope="module")
def counts(pool: EnginePool, p: Parts) -> RequestCounts:
    made = RequestCounts()
    watch(pool, [pool.engine(name) for name in pool.engine_names], made)
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_chain_behaves_as_the_original(name: str, way: str, p: Parts, pool: EnginePool, counts: RequestCounts) -> None:
    make, given = CHAINS[name]
    plain_chain = make(p)
    fast = accelerate(plain_chain, pool=pool)
    assert isinstance(fast, AcceleratedRunnable) and fast.original is plain_chain

    def seen(chain: Any) -> tuple[Outcome, RequestCounts, list[str]]:
        pool.admin("store", "delete_collection", "uploads").result(5)
        counts.clear()
        outcome = observe(chain, way, given)
        return outcome, counts.copy(), rows(pool.engine("store"))

    (plain, plainly, before), (accelerated, early, after) = seen(plain_chain), seen(fast)
    assert accelerated.result == plain.result
    assert after == before
    if plain.failed and (way not in ("invoke", "ainvoke") or name == "parallel_with_failure"):
        return  # how far siblings got when one failed is a race in the plain object, too
    assert accelerated.prompts == plain.prompts
    assert accelerated.events == plain.events
    assert early.original_requests == plainly.original_requests
    assert early.writes == plainly.writes
    assert not plainly.missing(early)


@pytest.mark.parametrize(
    "options", [{"passes": ()}, {"speculate": "off"}, {"speculate": "all"}, {"passes": ("prune-dependencies",)}]
)
@pytest.mark.parametrize("name", ["mapped_retrieval", "independent_assigns", "lines_in_a_lambda"])
def test_chain_with_other_options_behaves_as_the_original(name: str, options: dict[str, Any], p: Parts) -> None:
    make, given = CHAINS[name]
    plain = observe(make(p), "ainvoke", given)
    accelerated = observe(accelerate(make(p), **options), "ainvoke", given)
    assert accelerated.result == plain.result
    assert accelerated.events == plain.events


def test_streamed_chunks_add_up_to_the_invoked_value(p: Parts) -> None:
    fast = accelerate(CHAINS["string_prompt"][0](p))
    chunks = list(fast.stream(QUESTION))
    assert len(chunks) > 1
    assert "".join(chunks) == fast.invoke(QUESTION)


async def test_astream_events_v2_gives_the_originals_events(p: Parts) -> None:
    async def events(chain: Any) -> list[str]:
        seen = [e async for e in chain.astream_events(QUESTION, version="v2")]
        return sorted(f"{e['event']} {e['name']} {e['tags']} {len(e['parent_ids'])}" for e in seen)

    chain = independent_assigns(p)
    assert await events(accelerate(chain)) == await events(chain)


def test_chain_called_from_many_threads_and_loops_gives_same_results(p: Parts) -> None:
    chain = independent_assigns(p)
    fast = accelerate(chain)
    given = [{"question": f"question {i}"} for i in range(12)]
    expected = [chain.invoke(x) for x in given]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(fast.invoke, given)) == expected
        assert list(threads.map(lambda x: asyncio.run(fast.ainvoke(x)), given)) == expected


def test_sync_invoke_works_inside_a_running_loop(p: Parts) -> None:
    """A notebook cell: a loop runs in this thread, and the user calls the sync entry."""
    fast = accelerate(independent_assigns(p))

    async def cell() -> Any:
        return fast.invoke(QUESTION)

    assert asyncio.run(cell()) == fast.invoke(QUESTION)


def test_accelerated_chain_keeps_schemas_name_and_composition(p: Parts) -> None:
    chain = independent_assigns(p)
    fast = accelerate(chain)
    assert fast.get_input_jsonschema() == chain.get_input_jsonschema()
    assert fast.get_output_jsonschema() == chain.get_output_jsonschema()
    assert fast.get_name() == chain.get_name()
    assert (fast | (lambda x: x["c"])).invoke(QUESTION) == (chain | (lambda x: x["c"])).invoke(QUESTION)
    assert fast.with_config(tags=["t"]).invoke(QUESTION) == chain.invoke(QUESTION)
    assert fast.with_retry().invoke(QUESTION) == chain.invoke(QUESTION)


def test_disabled_accelerate_returns_original_and_wrong_input_raises(p: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = independent_assigns(p)
    monkeypatch.setenv("TEOLA_DISABLE", "1")
    assert accelerate(chain) is chain
    monkeypatch.delenv("TEOLA_DISABLE")
    with pytest.raises(Exception, match="cannot accelerate"):
        accelerate(object())
    with pytest.raises(Exception, match="speculate"):
        accelerate(chain, speculate="maybe")
    with pytest.raises(Exception, match="unknown pass"):
        accelerate(chain, passes=["prune-dependency"])


def test_closed_pool_raises_the_originals_error() -> None:
    with EnginePool.local(fake_engines()) as pool:
        chain = independent_assigns(parts(pool))
        fast = accelerate(chain)
    plain, accelerated = observe(chain, "invoke", QUESTION), observe(fast, "invoke", QUESTION)
    assert "the engine pool is closed" in plain.result
    assert accelerated.result == plain.result


def test_explain_lists_parts_graphs_and_passes(p: Parts) -> None:
    text = accelerate(CHAINS["mapped_retrieval"][0](p)).explain(QUESTION, details=True)
    for expected in ("What was understood", "p-graph", "e-graph", "PARTIAL_DECODING", "decoding-pipelining", "fired"):
        assert expected in text
