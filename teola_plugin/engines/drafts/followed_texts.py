"""Texts that came with a request, and the position of the output in each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from teola_plugin.engines.drafts.corpus import Corpus

_NEAR = 16
"""Number of tokens after a difference within which a single equal token continues the text."""
_MAX_SEARCHES = 8
"""After a difference, only so many of the last tokens are searched in the text."""
GAP_TOKEN = -1
"""Stands for any number of tokens; no model writes it."""


class FollowedText:
    """The position of the output in a text that it may repeat. It begins at the first token of the text.

    Where the output differs, the position is searched again.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = Corpus(tokens)
        self._position, self._is_lost = 0, False
        self.agreed = 1
        """One more than the number of tokens in a row that agreed; 0 if the output has left the text."""

    def follow(self, output: Sequence[int], new: int) -> None:
        """Update the position after the output has grown by `new` tokens."""
        tokens, end = self._text.tokens, len(output)
        at = end - new
        while at < end:
            if not self._is_lost and self._position < len(tokens) and tokens[self._position] == output[at]:
                self._position += 1
                self.agreed += 1
                at += 1
            else:
                at = max(at + 1, end - _MAX_SEARCHES)
                self._find(output[:at])

    def _find(self, output: Sequence[int]) -> None:
        """Search the position: after the last two tokens, or after the last one if that is near."""
        position, agreed = self._text.best(output, after=self._position)
        if not agreed:
            near = self._text.tokens[self._position : self._position + _NEAR]
            position = self._position + near.index(output[-1]) + 1 if output[-1] in near else -1
        self._is_lost = position < 0
        self.agreed = 0 if self._is_lost else 1 + max(1, agreed)
        if not self._is_lost:
            self._position = position

    def next(self, max_tokens: int) -> list[int]:
        """Return the next tokens of the text; [] if the output has left the text."""
        return [] if self._is_lost else self._text.continuation(self._position, max_tokens)


class Skeleton:
    """The position of the output in a text with gaps, such as the numbers of a list, the keys of JSON or a label.

    It begins at the first token of the text, or in a gap before it. Unlike a text that may be repeated
    (`FollowedText`), it is one of several alternatives. The first token that differs rules it out, unless there was a
    gap before: then the search continues after the next gap.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._position = 0
        self.agreed = 0
        """Number of its tokens that were written; 0 once it is ruled out, or at its end."""
        self.is_exhausted = not tokens
        """True if it has no more tokens that may follow."""

    def follow(self, new: Sequence[int]) -> None:
        """Update the position after the output has grown by these tokens."""
        for token in new:
            if not self.is_exhausted:
                self._follow_token(token)

    def _follow_token(self, token: int) -> None:
        """Move on in the text if the output's next token is the one expected; otherwise stay in the gap, or go to a
        later gap.

        The text is ruled out if there is no gap left to continue after.
        """
        tokens, position = self._tokens, self._position
        in_gap = tokens[position] == GAP_TOKEN
        expected = position + 1 if in_gap else position
        if expected < len(tokens) and tokens[expected] == token:
            self._position = expected + 1
            self.agreed += 1
        elif not in_gap:
            later = range(position + 1, len(tokens)) if GAP_TOKEN in tokens[:position] else ()
            self._position = next((at for at in later if tokens[at] == GAP_TOKEN), len(tokens))
        if self._position >= len(tokens) or tokens[self._position :] == [GAP_TOKEN]:
            self.is_exhausted, self.agreed = True, 0

    def next(self, max_tokens: int) -> list[int]:
        """Return the next tokens of the text, up to the next gap; [] if the output has not begun with it."""
        if self.is_exhausted or not self.agreed:
            return []
        tokens = self._tokens[self._position : self._position + max_tokens]
        return tokens[: tokens.index(GAP_TOKEN)] if GAP_TOKEN in tokens else tokens


def encode_with_gaps(text: str, gap: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Return the token ids of a text, with `GAP_TOKEN` for each gap.

    The parts between gaps are encoded separately, without spaces before a gap: most tokenizers take such a space as the
    beginning of the next word.
    """
    *parts_before_gaps, last = text.split(gap)
    tokens: list[int] = []
    for part in parts_before_gaps:
        words = part.rstrip(" ")
        tokens += [*(encode(words) if words else ()), GAP_TOKEN]
    return [*tokens, *(encode(last) if last else ())]
