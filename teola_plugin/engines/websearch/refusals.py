"""When a service refuses: whether asking again may help, when, and what its user can do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from teola_plugin.errors import EngineError

AGAIN = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a search may be asked for again: it changes nothing."""
_SHOWN = 300
"""Characters of a service's own message."""


def wait_of(headers: Mapping[str, str], attempt: int) -> float:
    """Seconds until the next attempt: what the answer says (`Retry-After`, or Brave's `X-RateLimit-Reset`), else
    0.5, 1, 2, ... `attempt` counts from 0."""
    said = headers.get("retry-after", "") or headers.get("x-ratelimit-reset", "").split(",")[0]
    seconds = _seconds(said.strip())
    return 0.5 * 2**attempt if seconds is None else max(0.0, seconds)


def _seconds(said: str) -> float | None:
    try:
        seconds = float(said)
        return seconds if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(said).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None


def refused(engine: str, service: str, status: int, content: str, secret: str, wait: float | None) -> EngineError:
    """The error for an answer that is none. `wait`: what the service asked for, if that was too long."""
    told = _message(content)
    if secret:
        told = told.replace(secret, "***")
    reason = f"{engine}: {service} answered {status}: {told[:_SHOWN] or 'no message'}"
    hint = _HINTS.get(status, f"see what {service} says of it")
    if wait is not None:
        hint = f"it asks to wait for {wait:.0f} s: search less often, or raise the engine's patience"
    return EngineError(reason, engine=engine, hint=hint)


_HINTS = {
    401: "give the engine a key of the service that holds",
    403: "give the engine a key that may do this; a SearXNG must have json among the formats in its settings",
    404: "check base_url",
    422: "check the engine's key and its options",
    429: "lower max_requests of the engine, or search less often",
    432: "the plan of the key is used up",
    433: "the limit of the key is used up",
}


def _message(content: str) -> str:
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        return " ".join(content.split())
    for key in ("detail", "error", "message"):
        while isinstance(found, dict) and key in found:
            found = found[key]
    if isinstance(found, dict):
        found = found.get("detail") or found.get("error") or found
    return str(found)
