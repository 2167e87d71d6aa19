"""Tests of prompts as token ids, with the tokenizer of the tiny model and without vLLM."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from teola_plugin.engines.bundled import llama as tiny_llama
from teola_plugin.engines.vllm.runner import PromptTokens
from teola_plugin.requests.payloads import UNKNOWN, Message, Prompt

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

ALPHABET = "ab cd  e\n\n\tf,.;'s n't 12 345 é ü 東京 🙂 e\u0301 _() <|user|> </s> \\ \" {} don't"


@pytest.fixture(scope="module")
def tokens() -> PromptTokens:
    return PromptTokens(transformers.AutoTokenizer.from_pretrained(tiny_llama.make()))


def chat(text: str) -> Prompt:
    return Prompt((Message("system", "Be brief."), Message("user", text), Message("assistant", "Yes?")))


async def test_prefix_tokens_are_a_prefix_of_whole_prompt_tokens(tokens: PromptTokens) -> None:
    """Wherever a text is cut, also within words, runs of blanks, accents and what looks like special tokens."""
    source = random.Random(0)
    given_up = []
    for number in range(600):
        text = "".join(source.choice(ALPHABET) for _ in range(source.randint(1, 120)))
        cut = source.randint(0, len(text))
        whole = chat if number % 2 else lambda t: Prompt(text=t)
        ids, prefix = (
            (await tokens.encode_whole(whole(text))).ids,
            (await tokens.encode_prefix(whole(text[:cut] + UNKNOWN))).ids,
        )
        assert ids[: len(prefix)] == prefix, (text, cut)
        given_up.append(len((await tokens.encode_prefix(whole(text[:cut]))).ids) - len(prefix))
    assert sum(given_up) / len(given_up) < 20  # the template's tail and a few tokens, not the text


async def test_prefix_ends_at_the_first_unknown_slot(tokens: PromptTokens) -> None:
    def late(slot: str) -> Prompt:
        return Prompt((Message("system", "Known."), Message("user", slot), Message("user", "Late.")))

    known = (await tokens.encode_prefix(late(UNKNOWN))).ids
    whole, other = (await tokens.encode_whole(late("x"))).ids, (await tokens.encode_whole(late("y"))).ids
    common = next(i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
    assert 0 < len(known) <= common and whole[: len(known)] == known


async def test_template_writes_its_own_special_tokens(tokens: PromptTokens) -> None:
    begin = tiny_llama.SPECIAL.index(tiny_llama.BOS)
    for prompt in (chat("hello"), Prompt(text="hello")):
        ids = (await tokens.encode_whole(prompt)).ids
        assert ids[0] == begin and begin not in ids[1:]


async def test_messages_are_joined_if_template_is_missing() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama.make())
    tokenizer.chat_template = None
    text, special = PromptTokens(tokenizer).render(Prompt((Message("user", "hello"),)))
    assert (text, special) == ("user: hello\nassistant:", True)


async def test_error_of_chat_template_is_reported() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama.make())
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        await PromptTokens(tokenizer).encode_whole(chat("x"))


async def test_whole_prompt_may_contain_the_placeholder_character(tokens: PromptTokens) -> None:
    with_it, without = (
        (await tokens.encode_whole(chat(f"a {UNKNOWN} b"))).ids,
        (await tokens.encode_whole(chat("a  b"))).ids,
    )
    assert len(with_it) > len(without)


async def test_long_text_tokens_start_like_short_text_tokens(tokens: PromptTokens) -> None:
    short = (await tokens.encode_whole(Prompt(text="one two three " * 10))).ids
    long = (await tokens.encode_whole(Prompt(text="one two three " * 5000))).ids
    assert long[: len(short) - 1] == short[:-1] and len(long) > 10_000


def test_tiny_model_is_created_once_and_reproducibly(tmp_path: Path) -> None:
    shape = tiny_llama.Shape(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=64, vocab=600, context=128)
    one, two = tiny_llama.make(tmp_path / "one", shape), tiny_llama.make(tmp_path / "two", shape)
    for name in sorted(path.name for path in one.iterdir()):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    stamp = (one / "model.safetensors").stat().st_mtime_ns
    assert tiny_llama.make(one, shape) == one and (one / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_default_folder_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiny_llama.default_folder().is_relative_to(tmp_path)
    assert tiny_llama.default_folder() != tiny_llama.default_folder(tiny_llama.Shape(seed=1))
