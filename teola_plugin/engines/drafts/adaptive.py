"""How many tokens are drafted for a request: as many as were accepted lately, none where none are."""

from __future__ import annotations

_MOST_PAUSE = 8


class DraftLength:
    """Grows while all of a draft is accepted, shrinks to what was. After misses it drafts nothing for some steps."""

    def __init__(self, most: int, first: int = 4) -> None:
        self._most, self._now = most, min(first, most)
        self._pause, self._left = 0, 0

    @property
    def trusted(self) -> bool:
        """Whether the last draft was of use."""
        return not self._pause

    def now(self) -> int:
        """Tokens to draft in this step."""
        if self._left:
            self._left -= 1
            return 0
        return self._now

    def verified(self, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        if not drafted:
            return
        if accepted:
            self._pause = 0
            self._now = min(self._most, 2 * drafted if accepted == drafted else max(2, accepted + 1))
        else:
            self._pause = min(_MOST_PAUSE, 2 * self._pause or 1)
            self._left, self._now = self._pause, 2
