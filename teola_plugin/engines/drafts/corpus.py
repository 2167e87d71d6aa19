"""An index of tokens that finds what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

LONGEST = 24
"""Maximum number of tokens that are compared: longer matches are as good."""
_MAX_POSITIONS = 12
"""Maximum number of earlier positions that are compared, the latest first."""
_NONE = -1
"""Stands for no position."""
_MAX_SCANS, _MAX_SCANNED_TOKENS = 8, 1024
"""The first look-ups in a corpus of at most so many tokens scan it from its end, before an index is built."""


class Corpus:
    """A growing sequence of tokens in which continuations are looked up.

    A position is the index of the token after a match. `add` takes O(1) per token, and `best` O(positions * longest),
    whatever the length. The first look-ups in a short corpus scan it in O(its length), which is quicker than an index.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._last: tuple[dict[int, int], dict[int, int]] = {}, {}
        """The latest position after each token, and after each pair of tokens."""
        self._earlier: tuple[list[int], list[int]] = [_NONE], [_NONE]
        """For each position, the previous one after the same token or pair."""
        self._scans = 0
        self.add(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens

    def _index(self) -> None:
        """Index the tokens that were added since the last look-up."""
        ones, pairs = self._last
        ones_earlier, pairs_earlier = self._earlier
        tokens, done = self.tokens, len(ones_earlier) - 1
        before = tokens[done - 1] if done else None
        for position, token in enumerate(tokens[done:], done + 1):
            ones_earlier.append(ones.get(token, _NONE))
            ones[token] = position
            if before is None:
                pairs_earlier.append(_NONE)
            else:
                pair = before << 32 | token
                pairs_earlier.append(pairs.get(pair, _NONE))
                pairs[pair] = position
            before = token

    def best(self, last: Sequence[int], *, min_match: int = 2, after: int = 0) -> tuple[int, int]:
        """Return the position with the longest match of the last tokens before it, and the length of that match.

        Args:
            last: The last tokens.
            min_match: Minimum number of matching tokens, 1 or 2.
            after: Of equally long matches, take the first at or after this position; the latest of all if 0.

        Returns:
            (position, number of matching tokens); (-1, 0) if nothing matches.
        """
        best_position, best_match, positions_left = _NONE, 0, _MAX_POSITIONS
        longest = min(LONGEST, len(last))
        for position in self._positions(last, min_match):
            match = self._match_length(last, position, min_match, longest)
            if match > best_match or (after and match == best_match and after <= position < best_position):
                best_position, best_match = position, match
                if match >= LONGEST and not after:
                    break
            positions_left -= 1
            if not positions_left:
                break
        return best_position, best_match

    def latest(self, token: int) -> int:
        """Return the latest position after the token that is not the end; -1 if there is none."""
        return next(self._positions((token,), 1), _NONE)

    def _positions(self, last: Sequence[int], min_match: int) -> Iterator[int]:
        """Return the positions after the last one or two tokens, the latest first, without the end of the corpus."""
        if len(last) < min_match:
            return iter(())
        if len(self._earlier[0]) == 1 and self._scans < _MAX_SCANS and len(self.tokens) <= _MAX_SCANNED_TOKENS:
            self._scans += 1
            return self._scanned_positions(last, min_match)
        self._index()
        return self._indexed_positions(last, min_match)

    def _scanned_positions(self, last: Sequence[int], min_match: int) -> Iterator[int]:
        """Find earlier occurrences of the last one or two tokens by scanning backwards, which needs no index."""
        reversed_tokens, token = self.tokens[::-1], last[-1]
        size, at = len(reversed_tokens), 0
        while True:
            try:
                at = reversed_tokens.index(token, at + 1)
            except ValueError:
                return
            if min_match == 1 or reversed_tokens[at + 1 : at + 2] == [last[-2]]:
                yield size - at

    def _indexed_positions(self, last: Sequence[int], min_match: int) -> Iterator[int]:
        """Find earlier occurrences of the last one or two tokens in the index."""
        key = last[-1] if min_match == 1 else last[-2] << 32 | last[-1]
        position, earlier = self._last[min_match - 1].get(key, _NONE), self._earlier[min_match - 1]
        if position == len(self.tokens):
            position = earlier[position]
        while position != _NONE:
            yield position
            position = earlier[position]

    def _match_length(self, last: Sequence[int], position: int, min_match: int, longest: int) -> int:
        """Return the number of the last tokens that match those before the position."""
        tokens, limit = self.tokens, min(longest, position)
        match = min_match
        while match < limit and tokens[position - 1 - match] == last[-1 - match]:
            match += 1
        return match

    def continuation(self, position: int, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens from the position on, up to a negative token, which ends a text."""
        tokens = self.tokens[position : position + max_tokens]
        if tokens and min(tokens) < 0:
            return next(tokens[:i] for i, token in enumerate(tokens) if token < 0)
        return tokens
