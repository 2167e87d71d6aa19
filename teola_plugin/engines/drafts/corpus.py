"""Tokens in which is looked up what followed the last ones before: an index of pairs, and of single tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

LONGEST = 24
"""Tokens that are compared at most: longer matches are as good."""
_PLACES = 12
"""Earlier places that are compared, the latest first."""
_NOWHERE = -1
_SCANS, _SCANNED = 8, 1024
"""Looks for which a corpus of so many tokens at most is searched from its end, before an index is made of it."""


class Corpus:
    """A growing sequence of tokens in which continuations are looked up.

    A place is the index of the token after a match. `add` takes O(1) per token, and `best` O(places * longest),
    whatever the length. The first look-ups in a short corpus scan it in O(its length), which is quicker than an index.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._last: tuple[dict[int, int], dict[int, int]] = {}, {}
        """The latest place behind a token, and behind a pair."""
        self._earlier: tuple[list[int], list[int]] = [_NOWHERE], [_NOWHERE]
        """For each place, the one before it behind the same token or pair."""
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
        known, done = self.tokens, len(ones_earlier) - 1
        before = known[done - 1] if done else None
        for place, token in enumerate(known[done:], done + 1):
            ones_earlier.append(ones.get(token, _NOWHERE))
            ones[token] = place
            if before is None:
                pairs_earlier.append(_NOWHERE)
            else:
                pair = before << 32 | token
                pairs_earlier.append(pairs.get(pair, _NOWHERE))
                pairs[pair] = place
            before = token

    def best(self, last: Sequence[int], *, least: int = 2, after: int = 0) -> tuple[int, int]:
        """The place where most of the last tokens stand before it, and how many do: (place, 0) with none.

        Of two with as many, the later one; with `after`, the first at or behind that place. `least`: 1 or 2.
        """
        found, most, left = _NOWHERE, 0, _PLACES
        longest = min(LONGEST, len(last))
        for place in self._places(last, least):
            agreed = self._agreed(last, place, least, longest)
            if agreed > most or (after and agreed == most and after <= place < found):
                found, most = place, agreed
                if agreed >= LONGEST and not after:
                    break
            left -= 1
            if not left:
                break
        return found, most

    def latest(self, token: int) -> int:
        """The latest place behind the token that has something behind it; below 0 for none."""
        return next(self._places((token,), 1), _NOWHERE)

    def _places(self, last: Sequence[int], least: int) -> Iterator[int]:
        """Places behind the last token, or the last two, that have something behind them, the latest first."""
        if len(last) < least:
            return iter(())
        if len(self._earlier[0]) == 1 and self._scans < _SCANS and len(self.tokens) <= _SCANNED:
            self._scans += 1
            return self._scanned(last, least)
        self._index()
        return self._indexed(last, least)

    def _scanned(self, last: Sequence[int], least: int) -> Iterator[int]:
        turned, token = self.tokens[::-1], last[-1]
        size, at = len(turned), 0
        while True:
            try:
                at = turned.index(token, at + 1)
            except ValueError:
                return
            if least == 1 or turned[at + 1 : at + 2] == [last[-2]]:
                yield size - at

    def _indexed(self, last: Sequence[int], least: int) -> Iterator[int]:
        key = last[-1] if least == 1 else last[-2] << 32 | last[-1]
        place, earlier = self._last[least - 1].get(key, _NOWHERE), self._earlier[least - 1]
        if place == len(self.tokens):
            place = earlier[place]
        while place != _NOWHERE:
            yield place
            place = earlier[place]

    def _agreed(self, last: Sequence[int], place: int, least: int, longest: int) -> int:
        """Return the number of the last tokens that match those before the place."""
        tokens, most = self.tokens, min(longest, place)
        agreed = least
        while agreed < most and tokens[place - 1 - agreed] == last[-1 - agreed]:
            agreed += 1
        return agreed

    def behind(self, place: int, most: int) -> list[int]:
        """Return at most `most` tokens from the place on, up to a negative token, which ends a text."""
        found = self.tokens[place : place + most]
        if found and min(found) < 0:
            return next(found[:i] for i, token in enumerate(found) if token < 0)
        return found
