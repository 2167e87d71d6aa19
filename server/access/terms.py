"""What the headers of a request ask for, within what its key may have."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from teola_plugin.server.access.limits import KeyLimits
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.settings import KeySettings

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
