"""Callers: their API keys, their limits, the headers of their requests, and the names of their tenants in the pool."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.settings import KeySettings

PREFIX = "sk-teola-"


class StoredKey(Protocol):
    """A key in the settings, where only its hash is stored."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...


K = TypeVar("K", bound=StoredKey)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key of 256 random bits, so one fast hash of it is enough."""

    secret: str
    hash: str


def new_key() -> NewKey:
    secret = PREFIX + secrets.token_urlsafe(32)
    return NewKey(secret, hash_secret(secret))


def hash_secret(secret: str) -> str:
    """Return the hash of a key, as it stands in the settings."""
    return "sha256:" + hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def find_key(secret: str, keys: Sequence[K]) -> K | None:
    """Return the key that the secret belongs to. All keys are compared, so that the time reveals nothing."""
    digest, match = hash_secret(secret).encode(), None
    for key in keys:
        if hmac.compare_digest(digest, key.hash.encode()):
            match = key
    return match


def secret_from_headers(authorization: str, x_api_key: str) -> str:
    """Return the secret that a request sends as `Authorization: Bearer ...` or `X-Api-Key`; empty for none.

    A bearer token counts before `X-Api-Key`, which clients of Anthropic's protocol send. Other schemes of
    `Authorization` are ignored.
    """
    scheme, _, rest = authorization.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" and rest.strip() else x_api_key.strip()


# ------------------------------------------------------------ callers


@dataclass(slots=True)
class Bucket:
    """A token bucket that fills by `rate` a minute, up to one minute's worth.

    It may be overdrawn by amounts that are known only afterwards.
    """

    rate: float
    level: float
    at: float

    @classmethod
    def full(cls, rate: float, now: float) -> Bucket:
        return cls(rate, max(1.0, rate), now)

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds `amount`; 0 if it does now.

        The bucket is filled up to the time `now` first, in seconds on the caller's clock. Nothing is taken: call `take`
        for that.
        """
        self.level = min(max(1.0, self.rate), self.level + (now - self.at) * self.rate / 60)
        self.at = now
        return max(0.0, (amount - self.level) * 60 / self.rate)

    def take(self, amount: float) -> None:
        self.level -= amount


@dataclass(frozen=True, slots=True)
class LimitRefusal:
    """The refusal of a request because its key has reached a limit."""

    limit: str
    """`rate`, `concurrency`, `tokens` or `uploads`."""
    seconds: float
    """Time after which the request may be sent again."""

    @property
    def retry_after(self) -> int:
        """Whole seconds, at least one."""
        return max(1, math.ceil(self.seconds))


class KeyLimits:
    """The limits of one key. The clock is passed in. Used on the server's loop alone."""

    def __init__(self, key: KeySettings, now: float) -> None:
        """Begin with full buckets at the time `now`, on the server's clock in seconds.

        A limit that the key's settings leave out (None) is not applied.
        """
        self._max_running = key.concurrent
        self._requests = None if key.requests_per_minute is None else Bucket.full(key.requests_per_minute, now)
        self._tokens = None if key.tokens_per_minute is None else Bucket.full(key.tokens_per_minute, now)
        self._uploads = None if key.uploads_per_minute is None else Bucket.full(key.uploads_per_minute, now)
        self.running = 0

    def begin_upload(self, now: float) -> LimitRefusal | None:
        """Count the reading of a document, or return why it is refused."""
        if self._uploads is not None:
            if (seconds := self._uploads.wait(1.0, now)) > 0:
                return LimitRefusal("uploads", seconds)
            self._uploads.take(1.0)
        return None

    def begin(self, now: float, *, always: bool = False) -> LimitRefusal | None:
        """Count the begin of a request, or return why it is refused. Call `end` for each that has begun.

        `always`: begin it whatever the limits.
        """
        if always:
            self.running += 1
            return None
        if self._max_running is not None and self.running >= self._max_running:
            return LimitRefusal("concurrency", 1.0)
        if self._tokens is not None and (seconds := self._tokens.wait(1.0, now)) > 0:
            return LimitRefusal("tokens", seconds)
        if self._requests is not None:
            if (seconds := self._requests.wait(1.0, now)) > 0:
                return LimitRefusal("rate", seconds)
            self._requests.take(1.0)
        self.running += 1
        return None

    def end(self, tokens: int) -> None:
        """Count the end of a request that has cost `tokens`.

        Call it once for each request that `begin` accepted. The tokens may overdraw the bucket; requests are then
        refused until it has filled up again.
        """
        self.running -= 1
        self.charge(tokens)

    def charge(self, tokens: int) -> None:
        """Take `tokens` that an ended request has cost from the limit.

        Apps' tokens are known only when the trace of their query has ended, which may be after the request. Nothing
        happens for a key without a limit of tokens.
        """
        if self._tokens is not None:
            self._tokens.take(tokens)


QUERY, APP, DEADLINE, GOAL = "x-teola-query", "x-teola-app", "x-teola-deadline", "x-teola-goal"
DEPTH, GANG = "x-teola-depth", "x-teola-gang"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """The key that a request came with, and its limits. Without keys all requests have one, `anonymous`."""

    key: KeySettings
    limits: KeyLimits

    @property
    def tenant(self) -> str:
        return self.key.tenant or self.key.name

    def may_ask(self, model: str) -> bool:
        return not self.key.models or model in self.key.models

    def max_tokens(self, requested: int) -> int:
        """Return the tokens that an answer may have if the request allows `requested`.

        This is the smaller one of `requested` and the key's `max_output_tokens`, where the key has that limit.
        """
        limit = self.key.max_output_tokens
        return requested if limit is None else min(requested, limit)


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The values of a request's X-Teola headers; None and empty for absent ones. Seconds count from `since`."""

    query: str = ""
    """A name for the query that the request joins. It ends `server.joined_idle` seconds after its last request. Each
    tenant has names of its own."""
    app: str = ""
    """The name under which the query is scheduled, predicted and counted."""
    deadline: float | None = None
    """Seconds after which the query fails with 504."""
    goal: float | None = None
    """Seconds that the query should take. If it cannot, it is refused at once with 429."""
    depth: int = 0
    """Number of requests of the query that follow this one, one after the other."""
    gang: str = ""
    """A name for requests that are done when the last of them is done."""
    since: float | None = None
    """When the first byte of the request arrived, on the server's clock. None: now."""

    @classmethod
    def parse(cls, headers: Mapping[str, str], since: float | None = None) -> RequestHeaders:
        """Read the headers. Raise `HttpError` for malformed ones."""
        return cls(
            _parse_name_header(headers, QUERY),
            _parse_name_header(headers, APP),
            _parse_seconds_header(headers, DEADLINE),
            _parse_seconds_header(headers, GOAL),
            _parse_depth_header(headers),
            _parse_name_header(headers, GANG),
            since,
        )


def _parse_name_header(headers: Mapping[str, str], name: str) -> str:
    """Return the name in a header, of a query, app or gang; empty if it is absent. Raise `HttpError` if malformed."""
    value = headers.get(name, "")
    if value and not _ID.fullmatch(value):
        raise _malformed(name, value, "up to 128 letters, digits and the signs _ . : -")
    return value


def _parse_seconds_header(headers: Mapping[str, str], name: str) -> float | None:
    """Return the seconds in a header, for a deadline or goal; None if absent. Raise `HttpError` unless positive."""
    value = headers.get(name)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _malformed(name, value, "a positive number of seconds, e.g. 2.5")
    return seconds


def _parse_depth_header(headers: Mapping[str, str]) -> int:
    """Return the number of later requests, as the depth header says; 0 if it is absent. Raise `HttpError`."""
    value = headers.get(DEPTH, "0")
    if not (value.isascii() and value.isdigit() and len(value) <= 4):
        raise _malformed(DEPTH, value, "a whole number from 0 to 9999")
    return int(value)


def _malformed(name: str, value: str, expected: str) -> HttpError:
    return bad_request(f"the header {name} is {value!r:.80}.", f"give {expected}, or leave it out", param=name)


class NameStore(Protocol):
    """A store of the names of deleted tenants that outlives the server."""

    async def new_names(self) -> dict[str, str]:
        """Return the names that deleted tenants have in the pool from then on, by tenant. Read once, at the start."""
        ...

    async def put_new_name(self, tenant: str, name: str) -> None: ...


class PoolNames:
    """The names of tenants in the pool, which keep their caches, drafts and traces apart.

    A deleted tenant gets a new name: what caches still hold under the old one is unreachable, and evicted in time. Used
    on the server's loop alone.
    """

    def __init__(self) -> None:
        self._new_names: dict[str, str] = {}
        self._store: NameStore | None = None

    async def open(self, store: NameStore) -> None:
        """Load the names that an earlier server stored, since engines of a pool outlive it. Raise what the store
        raises."""
        self._new_names, self._store = await store.new_names(), store

    def name_of(self, tenant: str) -> str:
        return self._new_names.get(tenant, tenant)

    async def renew(self, tenant: str) -> str:
        """Give the tenant a new name, which is stored first; return the old one. Raise what the store raises."""
        name = f"{tenant}#{secrets.token_hex(8)}"
        if self._store is not None:
            await self._store.put_new_name(tenant, name)
        old = self.name_of(tenant)
        self._new_names[tenant] = name
        return old
