"""Tests of the known differences of accelerated LlamaIndex objects: see docs/compatibility-llamaindex.md."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from differential.llamaindex import synthesis
from differential.llamaindex.compare import Seen, differences, see
from differential.llamaindex.recording import Recorder
from differential.llamaindex.test_llamaindex_engines import CASES, SMALL, fast, make_bench
from llama_index.core.callbacks import CallbackManager
from llama_index.core.storage.kvstore import SimpleKVStore

from benchmarks.llamaindex.engines import advanced_rag, compact, fusion
from benchmarks.llamaindex.kits import Kit, Sizes, bound_kit, own_kit, pool_kit
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.errors import TraceError

JOINED = {
    "structured",
    "recursive",
    "own_retriever",
    "own_retriever_fused",
    "over_mmr",
    "over_hybrid",
    "fused_modes",
    "step_decomposed",
    "multi_step",
    "multi_step_known",
    "retry",
    "retry_guideline",
    "custom",
    "subclass",
    "condense_question",
    "context",
    "condense_plus_context",
    "chat_by_mode",
}
"""Not known from end to end; what they call is."""


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def manager(recorder: Recorder) -> CallbackManager:
    return CallbackManager([recorder])


def test_engines_on_a_pool_are_lowered() -> None:
    """This covers every engine of the suite on a pool."""
    bench = make_bench("pool")
    assert bench.kit.pool is not None
    with bench.kit.in_force(), bench.kit.pool:
        levels = {name: _levels(fast(bench, case)) for name, case in CASES.items() if "run" not in case.ways}
    assert {name for name, found in levels.items() if found != {"lowered"}} == JOINED
    assert all("lowered" in found for found in levels.values())


def test_engine_without_pool_objects_is_not_planned() -> None:
    kit = own_kit(profiles.noop(), SMALL)
    with kit.in_force():
        engine = accelerate(advanced_rag(kit))
    assert _levels(engine) == {"original"} and engine.plan("question") is None


def test_models_with_cache_or_rate_limiter_are_not_lowered() -> None:
    limiters = pytest.importorskip(
        "llama_index.core.rate_limiter", reason="models have rate limiters since llama-index-core 0.14.16"
    )

    class Limiter(limiters.BaseRateLimiter):
        def acquire(self, num_tokens: int = 0) -> None: ...

        async def async_acquire(self, num_tokens: int = 0) -> None: ...

    kit = pool_kit(profiles.noop(), SMALL)
    assert kit.pool is not None
    with kit.in_force(), kit.pool:
        kit.llm.rate_limiter = Limiter()
        kit.embedding.embeddings_cache = SimpleKVStore()
        engine = accelerate(advanced_rag(kit))
        found = [(node.level, node.reason) for node in engine.report().parts.nodes]
        assert str(engine.query("terms")) == str(advanced_rag(kit).query("terms"))
    assert {level for level, _ in found} == {"joined"}
    assert {why.split()[1] for _, why in found} >= {"rate"}


def _levels(engine: Any) -> set[str]:
    return {node.level for node in engine.report().parts.nodes}


def test_accelerated_engine_class_is_subclass_of_the_same_name() -> None:
    kit = own_kit(profiles.noop(), SMALL)
    with kit.in_force():
        plain = compact(kit)
    engine: Any = accelerate(plain)
    assert isinstance(engine, type(plain)) and type(engine) is not type(plain)
    assert type(engine).__name__ == type(plain).__name__ and engine.original is plain


def test_equal_texts_of_a_fusion_are_embedded_once(manager: CallbackManager, recorder: Recorder) -> None:
    """Events tell of each, as the plain engine's do."""
    kit = pool_kit(profiles.noop(), SMALL, manager)
    assert kit.pool is not None
    with kit.in_force(), kit.pool:
        before, after = (
            see(kit, recorder, engine, "aquery", "terms") for engine in (fusion(kit), accelerate(fusion(kit)))
        )
    assert sum(after.texts.values()) < sum(before.texts.values()) and after.texts.keys() == before.texts.keys()
    assert _embeddings(before) == _embeddings(after) == sum(before.texts.values())


def _embeddings(seen: Seen) -> int:
    return sum(n for event, n in seen.events.items() if "EmbeddingEndEvent" in event)


def test_accelerated_engine_differs_only_in_cached_token_counts(manager: CallbackManager, recorder: Recorder) -> None:
    """The LLM's own count of tokens that it had cached: prompts are prefilled ahead. Nothing else differs."""
    kit = pool_kit(profiles.scaled(profiles.rtx3090(), 0.05), Sizes(chunks=20), manager)
    assert kit.pool is not None
    with kit.in_force(), kit.pool:
        engines = advanced_rag(kit), accelerate(advanced_rag(kit))
        seen = [see(kit, recorder, engine, "query", "terms") for engine in engines]
    assert differences(*seen, merged=True)
    before, after = map(_without_cached_tokens, seen)
    assert not differences(before, after, merged=True)


def _without_cached_tokens(seen: Seen) -> Seen:
    def without(some: Counter[str]) -> Counter[str]:
        found: Counter[str] = Counter()
        for key, n in some.items():
            found[re.sub(r"'cached_tokens': \d+", "", key)] += n
        return found

    return replace(seen, callbacks=without(seen.callbacks), events=without(seen.events))


@pytest.mark.parametrize("name", ["multi_step", "multi_step_known", "retry", "retry_guideline"])
async def test_loop_is_not_blocked_by_sync_model_calls(name: str) -> None:
    """LlamaIndex asks for these in the sync way, also in `aquery`: plain, the loop stands still between two prompts."""
    kit = pool_kit(profiles.scaled(profiles.rtx3090(), 0.02), SMALL)
    assert kit.pool is not None
    with kit.in_force(), kit.pool:
        engine = CASES[name].make(kit)
        plain, accelerated = await _turns_at_prompts(kit, engine), await _turns_at_prompts(kit, accelerate(engine))
    assert plain[0] == plain[1]
    assert sorted(set(accelerated)) == accelerated


async def _turns_at_prompts(kit: Kit, engine: Any) -> list[int]:
    """Return how many turns the event loop had taken when each prompt came."""
    loop, turns, seen = asyncio.get_running_loop(), 0, []

    def turn() -> None:
        nonlocal turns
        turns += 1
        timer[0] = loop.call_later(0.0002, turn)

    timer = [loop.call_soon(turn)]
    kit.ledger.asked = lambda prompt: seen.append(turns)  # type: ignore[method-assign]
    await engine.aquery("terms")
    timer[0].cancel()
    return seen


# ------------------------------------------------------------ bound to engines


@pytest.fixture
def bound(manager: CallbackManager, recorder: Recorder) -> Iterator[tuple[Seen, Seen]]:
    """Return a streamed answer of own models, and the same with both models bound to engines."""
    kit = bound_kit(profiles.noop(), SMALL, manager)
    assert kit.pool is not None
    make = synthesis.STREAMING["compact_streaming"]
    with kit.pool, kit.in_force():
        served = accelerate(make(kit), pool=kit.pool, bind=kit.bind)
        yield tuple(see(kit, recorder, engine, "query", "terms") for engine in (make(kit), served))  # type: ignore[misc]


def test_spans_of_bound_models_have_the_users_class(bound: tuple[Seen, Seen]) -> None:
    before, after = bound
    assert any("OwnLLM" in span for span in before.spans)
    assert any("OwnLLM" in span for span in after.spans)
    assert not any("Teola" in span for span in after.spans)


def test_streams_of_bound_models_have_other_chunk_borders(bound: tuple[Seen, Seen]) -> None:
    before, after = bound
    assert before.result != after.result and before.result.replace("|", "") == after.result.replace("|", "")


# ------------------------------------------------------------ refused


def test_query_pipeline_raises_trace_error() -> None:
    old = type("QueryPipeline", (), {"__module__": "llama_index.core.query_pipeline.query"})()
    with pytest.raises(TraceError, match=r"removed query pipelines(?s:.*)RetrieverQueryEngine"):
        accelerate(old)
