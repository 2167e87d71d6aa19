"""Tokens in which is looked up what followed the last ones before: an index of pairs, and of single tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 24
"""Tokens that are compared at most: longer matches are as good."""
_PLACES = 12
"""Earlier places that are compared, the latest first."""
_NOWHERE = -1


class Corpus:
    """Tokens, which grow at their end. A place is the index of the token that comes next there.

    `add` takes O(1) a token, `best` O(places * longest), whatever the length.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._last: tuple[dict[int, int], dict[int, int]] = {}, {}
        """The latest place behind a token, and behind a pair."""
        self._earlier: tuple[list[int], list[int]] = [_NOWHERE], [_NOWHERE]
        """For each place, the one before it behind the same token or pair."""
        self.add(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens

    def _index(self) -> None:
        """Of the tokens that have come since something was looked up: where nothing is, none is made."""
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
        self._index()
        found, most, left, size = _NOWHERE, 0, _PLACES, len(self.tokens)
        place = self._latest(last, least)
        earlier, longest = self._earlier[least - 1], min(LONGEST, len(last))
        while place != _NOWHERE and left:
            if place < size:
                left -= 1
                agreed = self._agreed(last, place, least, longest)
                if agreed > most or (after and agreed == most and after <= place < found):
                    found, most = place, agreed
                    if agreed >= LONGEST and not after:
                        break
            place = earlier[place]
        return found, most

    def latest(self, token: int) -> int:
        """The latest place behind the token that has something behind it; below 0 for none."""
        self._index()
        place = self._last[0].get(token, _NOWHERE)
        return self._earlier[0][place] if place == len(self.tokens) else place

    def _latest(self, last: Sequence[int], least: int) -> int:
        if len(last) < least:
            return _NOWHERE
        key = last[-1] if least == 1 else last[-2] << 32 | last[-1]
        return self._last[least - 1].get(key, _NOWHERE)

    def _agreed(self, last: Sequence[int], place: int, least: int, longest: int) -> int:
        """How many of the last tokens stand before the place."""
        tokens, most = self.tokens, min(longest, place)
        agreed = least
        while agreed < most and tokens[place - 1 - agreed] == last[-1 - agreed]:
            agreed += 1
        return agreed

    def behind(self, place: int, most: int) -> list[int]:
        """What came there, at most so many; nothing of what comes behind a token below 0, which ends a text."""
        found = self.tokens[place : place + most]
        if found and min(found) < 0:
            return next(found[:i] for i, token in enumerate(found) if token < 0)
        return found
