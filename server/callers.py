"""Callers: their limits, what the headers of their requests ask for, and the names of their tenants in the pool."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from teola_plugin.server.errors import HttpError, bad_request
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


QUERY, APP, DEADLINE, GOAL = "x-teola-query", "x-teola-app", "x-teola-deadline", "x-teola-goal"
DEPTH, GANG = "x-teola-depth", "x-teola-gang"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """Who asks. Without keys there is one, `anonymous`."""

    key: KeySettings
    limits: KeyLimits

    @property
    def tenant(self) -> str:
        return self.key.tenant or self.key.name

    def may_ask(self, model: str) -> bool:
        return not self.key.models or model in self.key.models

    def tokens(self, asked: int) -> int:
        """Of an answer that may be so long."""
        most = self.key.max_output_tokens
        return asked if most is None else min(asked, most)


@dataclass(frozen=True, slots=True)
class Told:
    """What the headers say; None and empty for nothing. Seconds count from `since`."""

    query: str = ""
    """The query that the request joins."""
    app: str = ""
    deadline: float | None = None
    goal: float | None = None
    depth: int = 0
    """Requests of the query that are to come behind it, one after the other."""
    gang: str = ""
    since: float | None = None
    """When the first byte of the request came, on the server's clock: what its seconds count from. None: now."""

    @classmethod
    def of(cls, headers: Mapping[str, str], since: float | None = None) -> Told:
        """Raises `HttpError` for what makes no sense."""
        return cls(
            _name(headers, QUERY),
            _name(headers, APP),
            _seconds(headers, DEADLINE),
            _seconds(headers, GOAL),
            _depth(headers),
            _name(headers, GANG),
            since,
        )

    def deadline_within(self, key: KeySettings) -> float | None:
        """Seconds: of the caller's and the key's the earlier."""
        return min((at for at in (self.deadline, key.max_seconds) if at is not None), default=None)


def _name(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "")
    if value and not _ID.fullmatch(value):
        raise _wrong(name, value, "up to 128 letters, digits and the signs _ . : -")
    return value


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _wrong(name, value, "a positive number of seconds, e.g. 2.5")
    return seconds


def _depth(headers: Mapping[str, str]) -> int:
    value = headers.get(DEPTH, "0")
    if not (value.isascii() and value.isdigit() and len(value) <= 4):
        raise _wrong(DEPTH, value, "a whole number from 0 to 9999")
    return int(value)


def _wrong(name: str, value: str, wanted: str) -> HttpError:
    return bad_request(f"the header {name} is {value!r:.80}.", f"give {wanted}, or leave it out", param=name)


class KeptNames(Protocol):
    """Where names outlive the server: those of tenants that were forgotten."""

    async def names(self) -> dict[str, str]: ...

    async def put_name(self, tenant: str, name: str) -> None: ...


class PoolNames:
    """A tenant that is forgotten has another name from then on: what caches still hold under the old one is reached by
    nobody, until its place is needed. One owner: the server's loop."""

    def __init__(self) -> None:
        self._renewed: dict[str, str] = {}
        self._kept: KeptNames | None = None

    async def open(self, kept: KeptNames) -> None:
        """Goes on with the names that a server before had: the engines of a shared pool outlive it. Raises what the
        store raises."""
        self._renewed, self._kept = await kept.names(), kept

    def of(self, tenant: str) -> str:
        return self._renewed.get(tenant, tenant)

    async def renewed(self, tenant: str) -> str:
        """The name that the tenant had. The new one is kept before it counts. Raises what the store raises."""
        name = f"{tenant}#{secrets.token_hex(8)}"
        if self._kept is not None:
            await self._kept.put_name(tenant, name)
        old = self.of(tenant)
        self._renewed[tenant] = name
        return old
