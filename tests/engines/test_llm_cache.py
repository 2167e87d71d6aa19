"""Tests of vLLM's cache events, which are about tokens, and of the prefixes that placement derives from them."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
import transformers
from support.placement import anywhere, ask, e2

from teola_plugin.engines.bundled import llama as tiny_llama
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.engines.vllm.cache import CachedPrefixes
from teola_plugin.engines.vllm.runner import PromptTokens
from teola_plugin.graph import PrimitiveKind
from teola_plugin.graph.prefix_blocks import (
    PrefixBlocks,
    PrefixesCleared,
    PrefixEvents,
    PrefixRemoved,
    PrefixStored,
    block_hashes,
    request_prefix_events,
)
from teola_plugin.requests.payloads import UNKNOWN, Done, Generate, Generation, Message, Prompt, Request, Sampling
from teola_plugin.runtime.ports.engine_port import EnginePort, cache_events
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.scheduling import E2
from teola_plugin.scheduling.placement import PlacementRule

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

BLOCK = 4


class Cache:
    """A cache of blocks of 4 tokens, whose hashes are their content; a token is 32 characters of text."""

    def __init__(self) -> None:
        self.held = CachedPrefixes(BLOCK)

    def names(self, tokens: str, tenant: str = "") -> PrefixBlocks:
        return block_hashes("".join(token * 32 for token in tokens), tenant=tenant)

    def expect(self, tokens: str, tenant: str = "") -> PrefixBlocks:
        ids = [ord(token) for token in tokens]
        ends = [32 * end for end in range(BLOCK, len(ids) + 1, BLOCK)]
        names = self.names(tokens, tenant)
        self.held.expect(ids, ends, names, tenant)
        return names

    def hashes(self, tokens: str, tenant: str = "") -> list[str]:
        return [tenant + tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def store(self, tokens: str, after: str = "", tenant: str = "") -> PrefixEvents:
        ids = [ord(token) for token in tokens[len(after) :]]
        hashes = self.hashes(tokens, tenant)[len(after) // BLOCK :]
        self.held.stored(hashes, ids, tenant + after if after else None, tenant)
        return self.held.take()

    def forget(self, *hashes: str) -> PrefixEvents:
        for name in hashes:
            self.held.removed([name])
        return self.held.take()


def test_stored_blocks_are_mapped_to_the_known_prompt() -> None:
    cache = Cache()
    names = cache.expect("abcdefghijkl")
    assert cache.store("abcdefgh") == (PrefixStored(names[:4]),)
    assert cache.store("abcdefghijkl", after="abcdefgh") == (PrefixStored(names),)
    assert cache.store("abcdefgh") == (PrefixStored(names[:4]),), "found again"


def test_evicted_blocks_are_merged_into_one_event() -> None:
    cache = Cache()
    names = cache.expect("abcdefghijkl")
    cache.store("abcdefghijkl")
    assert cache.forget("abcdefghijkl", "abcdefgh") == (PrefixRemoved(names[:3], 2),)
    assert cache.forget("abcd") == (PrefixRemoved(names[:1], 0),)
    assert cache.forget("abcd", "never seen") == ()


def test_shared_text_stays_known_until_both_prompts_are_evicted() -> None:
    """The prompts part within a block of tokens, so that each has its own block for the shared text."""
    cache = Cache()
    one, two = cache.expect("abcdefgh"), cache.expect("abcdefxy")
    assert one[:3] == two[:3] and one[3] != two[3]
    cache.store("abcdefgh")
    cache.store("abcdefxy", after="abcd")
    assert cache.forget("abcdefgh") == (PrefixRemoved(one, 3),)
    assert cache.forget("abcdefxy") == (PrefixRemoved(two[:3], 2),)


def test_cached_answer_is_reported_once_a_prompt_contains_it() -> None:
    cache = Cache()
    cache.expect("abcd")
    cache.store("abcd")
    assert cache.store("abcdefgh", after="abcd") == (), "nobody asked for this"
    names = cache.expect("abcdefghijkl")
    assert cache.held.take() == (PrefixStored(names[:4]),)
    assert cache.forget("abcdefgh") == (PrefixRemoved(names[:3], 2),)


def test_tenants_are_separate_and_unknown_blocks_are_ignored() -> None:
    cache = Cache()
    mine, yours = cache.expect("abcd", "me"), cache.expect("abcd", "you")
    assert cache.store("abcd", tenant="you") == (PrefixStored(yours),) and mine != yours
    assert cache.store("abcdefgh", after="abcd", tenant="me") == (), "its parent was never heard of"
    cache.held.cleared()
    assert cache.held.take() == (PrefixesCleared(),)
    assert cache.forget("youabcd") == ()


# ---------------------------------------------------------------- where blocks of tokens end in the text


def chat(text: str) -> Prompt:
    return Prompt((Message("system", " Be brief. "), Message("user", text), Message("assistant", "Yes?")), tools="[]")


async def test_block_ends_of_a_shared_prefix_are_equal() -> None:
    """Two prompts that share tokens agree on the text of these; a template's own words belong to nobody's text."""
    tokens = PromptTokens(transformers.AutoTokenizer.from_pretrained(tiny_llama.make()))
    source = random.Random(3)
    words = ("Paris", "naïve ", "東京", " 🙂", "the\n\n", "x", "3.14 ")
    for number in range(60):
        whole = chat if number % 2 else lambda t: Prompt(text=t)
        shared = "".join(source.choice(words) for _ in range(source.randint(20, 60)))
        one, two = (
            await tokens.encode_whole(whole(shared + "left and on")),
            await tokens.encode_whole(whole(shared + "right")),
        )
        first, second = one.ends(8), two.ends(8)
        assert first is not None and second is not None and first == sorted(first)
        same = next(i for i, (a, b) in enumerate(zip(one.ids, two.ids, strict=False)) if a != b) // 8
        assert same >= 2 and first[:same] == second[:same]
        text = tokens._tokenizer.decode(one.ids[: 8 * same], skip_special_tokens=True)
        at = first[same - 1] - text.endswith("\ufffd")  # a block may end within a character
        assert text.rstrip("\ufffd").endswith(one.prompt.flat()[at - 6 : at])


async def test_prompt_with_unknown_slot_names_only_blocks_before_it() -> None:
    tokens = PromptTokens(transformers.AutoTokenizer.from_pretrained(tiny_llama.make()))
    known, whole = (
        await tokens.encode_prefix(chat("one two " * 20 + UNKNOWN)),
        await tokens.encode_whole(chat("one two " * 20 + "x")),
    )
    ends, all_ends = known.ends(8), whole.ends(8)
    assert ends and all_ends and ends == all_ends[: len(ends)]
    assert ends[-1] <= len(known.prompt.known_prefix())


# ---------------------------------------------------------------- up to placement


async def test_cache_events_of_a_replica_reach_the_router() -> None:
    engines = [next(e for e in fake_engines(rtx3090()) if e.name == "llm") for _ in range(2)]
    for engine in engines:
        engine.on_prefix_events = None  # type: ignore[attr-defined]
    port = EnginePort("llm", dict(zip("01", engines, strict=True)), PortListener(*[lambda *_: None] * 3))
    router = port.scheduler.router
    assert isinstance(router, E2)
    request = ask("r", ("a", 320))
    engines[1].on_prefix_events((PrefixStored(request.blocks),))  # type: ignore[attr-defined]
    placed = router.choose_replica(request, anywhere)
    assert placed is not None and (placed.replica, placed.rule) == ("1", PlacementRule.EXPLOIT)
    engines[1].on_prefix_events((PrefixRemoved(request.blocks[:11], 10),))  # type: ignore[attr-defined]
    assert router.index.match(request.blocks).by_replica() == {"1": 10}
    engines[1].on_prefix_events((PrefixesCleared(),))  # type: ignore[attr-defined]
    assert not list(router.index.runs())


def test_cache_events_are_enabled_only_for_several_replicas() -> None:
    one, two, no = (VllmEngine("llm", "model", tell_cache=setting) for setting in (None, None, False))
    request_prefix_events([one])
    assert one.tell_cache is None
    request_prefix_events([one, two, no, object()])
    assert [engine.tell_cache for engine in (one, two, no)] == [True, True, False]


# ---------------------------------------------------------------- vLLM's own events


def text(seed: int, words: int) -> str:
    source = random.Random(seed)
    return " ".join(
        source.choice(("Paris", "naïve", "東京", "the", "of 12", "🙂", "3.14", "times")) for _ in range(words)
    )


async def ask_for(engine: VllmEngine, prompt: Prompt, name: str) -> Generation:
    request = Request(name, PrimitiveKind.PREFILLING, Generate(prompt, Sampling(max_tokens=4, ignore_eos=True)))
    last = [result async for result in engine.execute([request])][-1]
    assert isinstance(last, Done) and isinstance(last.value, Generation)
    return last.value


async def until_reported(news: list[object], kind: type) -> None:
    """Waits until news of a kind have come."""
    for _ in range(200):
        if any(isinstance(event, kind) for event in news):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {kind.__name__} in {news}")


@pytest.mark.vllm
def test_vllm_reports_stored_blocks_and_cache_reset(session_llm: SessionLlm) -> None:
    prompt, engine = chat(text(1, 200)), session_llm.engine
    names = block_hashes(prompt.flat())
    news: list[object] = []
    held: list[PrefixBlocks] = []

    async def store_and_reset() -> None:
        await engine.reset()
        engine.on_prefix_events = news.extend
        try:
            found = await ask_for(engine, prompt, "told")
            await until_reported(news, PrefixStored)
            assert found.cached_tokens == 0
            held.extend(event.blocks for event in news if isinstance(event, PrefixStored))
            news.clear()
            await engine.reset()
            await until_reported(news, PrefixesCleared)
        finally:
            engine.on_prefix_events = None

    session_llm.run(store_and_reset())
    most = max(held, key=len)
    assert most == names[: len(most)] and len(names) - 3 <= len(most)
    assert news == [PrefixesCleared()]
    profile = engine.profile
    assert profile.cache_tokens >= 4096 and profile.cache_tokens % 32 == 0


@pytest.mark.vllm
@pytest.mark.long
def test_cache_predicted_by_placement_matches_vllm(session_llm: SessionLlm) -> None:
    """A cache of 2,048 tokens and prompts of some 600, half of them with one beginning: most have to go."""
    args = {"dtype": "float32", "num_gpu_blocks_override": 65, "max_model_len": 1024, "block_size": 32}
    engine = VllmEngine("small", tiny_llama.make(), engine_args=args, cores="1", tell_cache=True)
    placement, source = e2("0", "1"), random.Random(5)
    shared = text(2, 90)
    prompts = [Prompt(text=(shared if n % 2 else "") + text(10 + n, 60 + 30 * (n % 4))) for n in range(8)]
    gaps, hits = [], 0

    def hear(news: PrefixEvents) -> None:
        for event in cache_events(0.0, "0", news, 0.0):
            placement.record_cache_event(event)

    async def send_prompts() -> None:
        nonlocal hits
        await engine.start()
        engine.on_prefix_events = hear
        for number in range(40):
            prompt = source.choice(prompts)
            names = block_hashes(prompt.flat())
            believed = placement.index.match(names).at("0") / len(names)
            found = await ask_for(engine, prompt, f"r{number}")
            gaps.append(abs(believed - found.cached_tokens / found.prompt_tokens))
            hits += found.cached_tokens > 0
            await asyncio.sleep(0.4)

    try:
        session_llm.run(send_prompts(), timeout=280)
    finally:
        session_llm.run(engine.stop())
    assert engine.profile.cache_tokens == 65 * 32
    assert 8 < hits < 40, "some prefixes stay, some go"
    assert max(gaps) < 0.15 and sum(gaps) / len(gaps) < 0.06, gaps
