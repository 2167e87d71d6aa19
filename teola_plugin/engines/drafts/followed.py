"""A text that a request may repeat, followed while the output agrees and picked up again behind a difference."""

from __future__ import annotations

from collections.abc import Sequence

from teola_plugin.engines.drafts.corpus import Corpus

_NEAR = 16
"""Tokens behind a difference within which a single equal one is taken for the place to go on."""
_LAST = 8
"""Tokens behind a difference that are looked up, of more that have come at once."""


class FollowedText:
    """The position of the output in a text that it may repeat. It begins at the first token of the text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = Corpus(tokens)
        self._place, self._lost = 0, False
        self.agreed = 1
        """One more than the tokens in a row that were its own; 0 where the output has left it."""

    def follow(self, output: Sequence[int], new: int) -> None:
        """Update the position after the output has grown by `new` tokens."""
        tokens, end = self._text.tokens, len(output)
        at = end - new
        while at < end:
            if not self._lost and self._place < len(tokens) and tokens[self._place] == output[at]:
                self._place += 1
                self.agreed += 1
                at += 1
            else:
                at = max(at + 1, end - _LAST)
                self._find(output[:at])

    def _find(self, output: Sequence[int]) -> None:
        """The place to go on: behind the last two tokens, or behind the last one where that is near."""
        place, agreed = self._text.best(output, after=self._place)
        if not agreed:
            near = self._text.tokens[self._place : self._place + _NEAR]
            place = self._place + near.index(output[-1]) + 1 if output[-1] in near else -1
        self._lost = place < 0
        self.agreed = 0 if self._lost else 1 + max(1, agreed)
        if not self._lost:
            self._place = place

    def next(self, most: int) -> list[int]:
        """Return the next tokens of the text; [] if the output has left the text."""
        return [] if self._lost else self._text.behind(self._place, most)
