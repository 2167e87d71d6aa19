"""Prompts to token ids, whole and up to the first unknown slot. Runs where the tokenizer is: in the engine's host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from teola_plugin.requests.bad_input import lone_surrogate
from teola_plugin.requests.payloads import UNKNOWN, Prompt

_LONG_TEXT = 20_000
"""Characters from which tokenising goes to a thread: about 5 ms of work, more than a token stream should wait."""
_MAX_UNSTABLE = 8
"""Maximum number of tokens at the end of a prefix that count as unstable."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The ids of a prompt, or of its beginning."""

    prompt: Prompt
    text: str
    """The prompt as the chat template renders it."""
    ids: list[int]
    encoding: Any = None
    """The encoding of a fast tokenizer, which knows the positions of tokens in the text; None for others."""

    def ends(self, block: int) -> list[int] | None:
        """Return the characters of `prompt.flat()` before the end of each block of tokens; None if unknown."""
        if self.encoding is None:
            return None
        return block_ends(self.prompt, self.text, self.encoding, len(self.ids), block)


class PromptTokens:
    """The token ids that vLLM's own front ends would make of a prompt.

    Messages go through the tokenizer's chat template; plain text, and messages where there is no template, are
    encoded with the tokenizer's usual special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    async def encode_whole(self, prompt: Prompt) -> EncodedPrompt:
        """Encode a whole prompt, every character as it is. Raise ValueError if the template refuses it."""
        text, special = self.render(prompt)
        return await _run_encoder(len(text), lambda: self._encode(prompt, text, text, special))

    async def encode_prefix(self, prompt: Prompt) -> EncodedPrompt:
        """Return the tokens before the first placeholder, without the last ones that more text could change.

        The result is always a correct prefix, only more or less long: a full prefilling sends all token ids of the
        prompt, and finds as many blocks cached as agree.
        """
        text, special = self.render(prompt)
        known_text, unknown, _ = text.partition(UNKNOWN)
        return await _run_encoder(
            len(known_text), lambda: self._encode(prompt, text, known_text, special, stable=bool(unknown))
        )

    def render(self, prompt: Prompt) -> tuple[str, bool]:
        """Return the prompt's text, and if special tokens are still to be added (a chat template writes its own)."""
        if not prompt.messages or not self._has_template:
            return prompt.flat(), True
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        tools = {"tools": json.loads(prompt.tools)} if prompt.tools else {}
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools)
        except Exception as error:  # jinja's errors: templates raise for roles that they do not know
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return str(text), False

    def _encode(self, prompt: Prompt, text: str, part: str, special: bool, *, stable: bool = False) -> EncodedPrompt:
        """Encode a part of a text. With `stable`, leave its last word out: more text may extend it."""
        try:
            return self._encode_part(prompt, text, part, special, stable)
        except Exception as error:  # tokenizers do not name the fault
            if fault := lone_surrogate(part):
                raise UnicodeError(fault) from error
            raise

    def _encode_part(self, prompt: Prompt, text: str, part: str, special: bool, stable: bool) -> EncodedPrompt:
        if self._fast is None:
            ids = list(self._tokenizer.encode(part, add_special_tokens=special))
            return EncodedPrompt(prompt, text, ids[:-_MAX_UNSTABLE] if stable else ids)
        encoding = self._fast.encode(part, add_special_tokens=special)  # stateless: safe from several threads
        ids = list(encoding.ids)
        return EncodedPrompt(prompt, text, ids[: _stable_length(encoding.word_ids)] if stable else ids, encoding)


def _stable_length(words: Sequence[int | None]) -> int:
    """Return the number of tokens before the last word; a special token (None) is a boundary and stays."""
    keep = len(words)
    if not keep or words[-1] is None:
        return keep
    while keep and len(words) - keep < _MAX_UNSTABLE and words[keep - 1] == words[-1]:
        keep -= 1
    return keep


async def _run_encoder(characters: int, encode: Callable[[], EncodedPrompt]) -> EncodedPrompt:
    return encode() if characters < _LONG_TEXT else await asyncio.to_thread(encode)


class TextSpan(NamedTuple):
    """The same text in what a chat template rendered and in the flat text."""

    rendered: int
    flat: int
    length: int


def block_ends(prompt: Prompt, rendered: str, encoding: Any, count: int, block: int) -> list[int] | None:
    """Return the characters of the flat text before the end of each whole block of the first `count` tokens.

    `encoding` is that of `rendered`, by a fast tokenizer. None if the template changes the text of a message.
    """
    spans = _spans(prompt, rendered)
    if spans is None:
        return None
    ends, at = [], 0
    for last in range(block - 1, count, block):
        characters = encoding.token_to_chars(last)  # None for tokens without text
        if characters is not None:
            at = max(at, _flat(spans, characters[1]))
        ends.append(at)
    return ends


def _spans(prompt: Prompt, rendered: str) -> list[TextSpan] | None:
    """Return the spans of messages. Text that a template writes between them belongs to the message before."""
    flat = prompt.flat()
    if rendered == flat:
        return [TextSpan(0, 0, len(flat))]
    spans, end = [], 0
    start = len(flat) - len(Prompt(prompt.messages).flat())  # after the tools
    for message in prompt.messages:
        start += len(message.role) + 2
        text = message.content.strip()  # as most templates do
        at = rendered.find(text, end)
        if at < 0:
            return None
        spans.append(TextSpan(at, start + message.content.find(text), len(text)))
        end, start = at + len(text), start + len(message.content) + 1
    return spans


def _flat(spans: Sequence[TextSpan], rendered: int) -> int:
    before = [span for span in spans if span.rendered <= rendered]
    if not before:
        return 0
    last = before[-1]
    return last.flat + min(last.length, rendered - last.rendered)
