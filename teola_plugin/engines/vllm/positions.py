"""Where in a prompt's text (`Prompt.flat`, by which senders name it) each block of its tokens ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from teola_plugin.requests.payloads import Prompt


class Span(NamedTuple):
    """The same text in what a chat template rendered and in the flat text."""

    rendered: int
    flat: int
    length: int


def block_ends(prompt: Prompt, rendered: str, encoding: Any, count: int, block: int) -> list[int] | None:
    """Characters of the flat text before the end of each whole block of the first `count` tokens of `rendered`.

    `encoding` is that of a fast tokenizer. None where the template shows a message otherwise than it is.
    """
    spans = _spans(prompt, rendered)
    if spans is None:
        return None
    ends, at = [], 0
    for last in range(block - 1, count, block):
        place = encoding.token_to_chars(last)  # None for tokens that stand for no text
        if place is not None:
            at = max(at, _flat(spans, place[1]))
        ends.append(at)
    return ends


def _spans(prompt: Prompt, rendered: str) -> list[Span] | None:
    """Messages in the order of the text. What a template writes between them belongs to the message before."""
    flat = prompt.flat()
    if rendered == flat:
        return [Span(0, 0, len(flat))]
    found, past = [], 0
    start = len(flat) - len(Prompt(prompt.messages).flat())  # after the tools
    for message in prompt.messages:
        start += len(message.role) + 2
        text = message.content.strip()  # as most templates do
        at = rendered.find(text, past)
        if at < 0:
            return None
        found.append(Span(at, start + message.content.find(text), len(text)))
        past, start = at + len(text), start + len(message.content) + 1
    return found


def _flat(spans: Sequence[Span], rendered: int) -> int:
    before = [span for span in spans if span.rendered <= rendered]
    if not before:
        return 0
    last = before[-1]
    return last.flat + min(last.length, rendered - last.rendered)
