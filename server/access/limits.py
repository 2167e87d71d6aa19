"""What one key may ask for: requests and tokens per minute, requests at a time. Pure: time is told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from teola_plugin.server.settings import KeySettings


@dataclass(slots=True)
class Bucket:
    """Fills by `rate` a minute, up to a minute's worth; may be overdrawn by what is known only afterwards."""

    rate: float
    level: float
    at: float

    @classmethod
    def full(cls, rate: float, now: float) -> Bucket:
        return cls(rate, max(1.0, rate), now)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until it holds so much; 0 for now."""
        self.level = min(max(1.0, self.rate), self.level + (now - self.at) * self.rate / 60)
        self.at = now
        return max(0.0, (amount - self.level) * 60 / self.rate)

    def take(self, amount: float) -> None:
        self.level -= amount


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken now."""

    what: str
    """What there is too much of: `rate`, `concurrency`, `tokens`, `uploads`."""
    seconds: float
    """After which it may be taken."""

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one."""
        return max(1, math.ceil(self.seconds))


class KeyLimits:
    """Of one key. One owner: the server's loop."""

    def __init__(self, key: KeySettings, now: float) -> None:
        self._most = key.concurrent
        self._requests = None if key.requests_per_minute is None else Bucket.full(key.requests_per_minute, now)
        self._tokens = None if key.tokens_per_minute is None else Bucket.full(key.tokens_per_minute, now)
        self._uploads = None if key.uploads_per_minute is None else Bucket.full(key.uploads_per_minute, now)
        self.running = 0

    def upload(self, now: float) -> Refusal | None:
        """A document is read, unless a reason not to is given."""
        if self._uploads is not None:
            if (seconds := self._uploads.wait(1.0, now)) > 0:
                return Refusal("uploads", seconds)
            self._uploads.take(1.0)
        return None

    def begin(self, now: float, *, always: bool = False) -> Refusal | None:
        """A request begins, unless a reason not to is given. `end` is to be called for one that has begun."""
        if always:
            self.running += 1
            return None
        if self._most is not None and self.running >= self._most:
            return Refusal("concurrency", 1.0)
        if self._tokens is not None and (seconds := self._tokens.wait(1.0, now)) > 0:
            return Refusal("tokens", seconds)
        if self._requests is not None:
            if (seconds := self._requests.wait(1.0, now)) > 0:
                return Refusal("rate", seconds)
            self._requests.take(1.0)
        self.running += 1
        return None

    def end(self, tokens: int) -> None:
        """It has ended, and has cost so many tokens."""
        self.running -= 1
        self.charge(tokens)

    def charge(self, tokens: int) -> None:
        """A request that has ended has cost so many tokens."""
        if self._tokens is not None:
            self._tokens.take(tokens)
