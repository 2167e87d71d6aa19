"""Prompts to token ids, whole and up to the first unknown slot. Runs where the tokenizer is: in the engine's host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.vllm.positions import block_ends
from teola_plugin.requests.bad_input import lone_surrogate
from teola_plugin.requests.payloads import UNKNOWN, Prompt

_LONG = 20_000
"""Characters from which tokenising goes to a thread: about 5 ms of work, more than a token stream should wait."""
_UNSTABLE = 8
"""At most this many tokens at the end of a prefix are taken for unstable."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a prompt, or of its beginning."""

    prompt: Prompt
    text: str
    """As the chat template renders it."""
    ids: list[int]
    encoding: Any = None
    """Of a fast tokenizer: it knows where in the text a token stands."""

    def ends(self, block: int) -> list[int] | None:
        """Characters of `prompt.flat()` before the end of each block of so many tokens; None if nobody can tell."""
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

    async def whole(self, prompt: Prompt) -> Encoded:
        """A whole prompt, every character of it as it is. Raises `ValueError` when the template refuses it."""
        text, special = self.render(prompt)
        return await _run(len(text), lambda: self._encode(prompt, text, text, special))

    async def prefix(self, prompt: Prompt) -> Encoded:
        """Return the tokens before the first placeholder, without the last ones that more text could change.

        The result is always a correct prefix, only more or less long: a full prefilling sends all token ids of the
        prompt, and finds as many blocks cached as agree.
        """
        text, special = self.render(prompt)
        known, unknown, _ = text.partition(UNKNOWN)
        return await _run(len(known), lambda: self._encode(prompt, text, known, special, stable=bool(unknown)))

    def render(self, prompt: Prompt) -> tuple[str, bool]:
        """The prompt's text, and whether special tokens are still to be added (a chat template writes its own)."""
        if not prompt.messages or not self._has_template:
            return prompt.flat(), True
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        tools = {"tools": json.loads(prompt.tools)} if prompt.tools else {}
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools)
        except Exception as refused:  # jinja's errors: templates raise for roles that they do not know
            raise ValueError(f"the model's chat template refuses the messages: {refused}") from refused
        return str(text), False

    def _encode(self, prompt: Prompt, text: str, known: str, special: bool, *, stable: bool = False) -> Encoded:
        """`stable`: without its last word. Tokenizers never look across words, but more text may extend one."""
        try:
            return self._encoded(prompt, text, known, special, stable)
        except Exception as error:  # tokenizers only say that it is no text
            if fault := lone_surrogate(known):
                raise UnicodeError(fault) from error
            raise

    def _encoded(self, prompt: Prompt, text: str, known: str, special: bool, stable: bool) -> Encoded:
        if self._fast is None:
            ids = list(self._tokenizer.encode(known, add_special_tokens=special))
            return Encoded(prompt, text, ids[:-_UNSTABLE] if stable else ids)
        encoding = self._fast.encode(known, add_special_tokens=special)  # stateless: safe from several threads
        ids = list(encoding.ids)
        return Encoded(prompt, text, ids[: _stable_length(encoding.word_ids)] if stable else ids, encoding)


def _stable_length(words: Sequence[int | None]) -> int:
    """Return the number of tokens before the last word; a special token (None) is a boundary and stays."""
    keep = len(words)
    if not keep or words[-1] is None:
        return keep
    while keep and len(words) - keep < _UNSTABLE and words[keep - 1] == words[-1]:
        keep -= 1
    return keep


async def _run(characters: int, encode: Callable[[], Encoded]) -> Encoded:
    return encode() if characters < _LONG else await asyncio.to_thread(encode)
