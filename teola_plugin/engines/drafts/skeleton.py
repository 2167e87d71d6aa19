"""What of an answer is known beforehand, with gaps between: a list's numbering, the keys of JSON, a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence

GAP_TOKEN = -1
"""Stands for any number of tokens; no model writes it."""


class Skeleton:
    """The position of the output in a text with gaps. It begins at the first token of the text, or in a gap before it.

    Unlike a text that may be repeated (`FollowedText`), it is one of several alternatives. The first token that differs
    rules it out, unless there was a gap before: then the search continues after the next gap.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._place = 0
        self.agreed = 0
        """Tokens of it that were written; 0 once it is ruled out, or at its end."""
        self.over = not tokens
        """Whether nothing more can come of it."""

    def follow(self, new: Sequence[int]) -> None:
        """Update the position after the output has grown by these tokens."""
        for token in new:
            if not self.over:
                self._take(token)

    def _take(self, token: int) -> None:
        tokens, place = self._tokens, self._place
        in_gap = tokens[place] == GAP_TOKEN
        expected = place + 1 if in_gap else place
        if expected < len(tokens) and tokens[expected] == token:
            self._place = expected + 1
            self.agreed += 1
        elif not in_gap:
            later = range(place + 1, len(tokens)) if GAP_TOKEN in tokens[:place] else ()
            self._place = next((at for at in later if tokens[at] == GAP_TOKEN), len(tokens))
        if self._place >= len(tokens) or tokens[self._place :] == [GAP_TOKEN]:
            self.over, self.agreed = True, 0

    def next(self, most: int) -> list[int]:
        """Return the next tokens of the text, up to the next gap; [] if the output has not begun with it."""
        if self.over or not self.agreed:
            return []
        found = self._tokens[self._place : self._place + most]
        return found[: found.index(GAP_TOKEN)] if GAP_TOKEN in found else found


def with_gaps(text: str, gap: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Return the token ids of a text, with `GAP_TOKEN` for each gap.

    The parts between gaps are encoded separately, without spaces before a gap: most tokenizers take such a space as the
    beginning of the next word.
    """
    *before, last = text.split(gap)
    found: list[int] = []
    for part in before:
        words = part.rstrip(" ")
        found += [*(encode(words) if words else ()), GAP_TOKEN]
    return [*found, *(encode(last) if last else ())]
