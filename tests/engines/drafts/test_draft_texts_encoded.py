"""Tests that the worker turns draft texts into tokens when they are needed."""

from __future__ import annotations

import pytest

from teola_plugin.engines.drafts.followed_texts import GAP_TOKEN
from teola_plugin.engines.vllm.drafts.proposer import EncodedTexts, TextEncoder
from teola_plugin.graph import GAP


class Tokenizer:
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.encoded.append(text)
        if not text.isascii():
            raise TypeError("TextEncodeInput must be Union[TextInputSequence, ...]")
        return [ord(char) for char in text]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


def test_texts_are_encoded_only_when_read(tokenizer: Tokenizer) -> None:
    texts = EncodedTexts(["ab", "c"], TextEncoder(tokenizer))
    assert (len(texts), bool(texts), tokenizer.encoded) == (2, True, [])
    assert [*texts] == [[97, 98], [99]] and texts[1] == [99] and [*texts[:1]] == [[97, 98]]


def test_empty_list_of_texts_is_false(tokenizer: Tokenizer) -> None:
    assert not EncodedTexts([], TextEncoder(tokenizer))


def test_encodings_of_forms_are_cached_and_of_texts_are_not(tokenizer: Tokenizer) -> None:
    encode = TextEncoder(tokenizer)
    for _ in range(2):
        assert encode("a" + GAP) == [97, GAP_TOKEN] and encode("b") == [98]
    assert tokenizer.encoded == ["a", "b", "b"]


def test_text_that_tokenizer_refuses_is_empty(tokenizer: Tokenizer) -> None:
    assert [*EncodedTexts(["é", "é" + GAP, "a"], TextEncoder(tokenizer))] == [(), (), [97]]
