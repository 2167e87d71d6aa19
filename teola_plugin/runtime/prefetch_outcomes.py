"""Outcomes of a query's prefetches: those that failed, and warm-ups that a later prompt used.

A prefetch fails when a function that makes a prompt, or a value, raises where the original has no trouble. The answer
is the original's, so nothing is wrong with it. But its call is not prefetched, query after query. So a warning is
logged, once for each cause.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import ClientCalls, LeftToOriginal, Primitive
from teola_plugin.requests.payloads import Generate, Generation, Warmed, Warmup
from teola_plugin.runtime.engine_requests import EngineRequest

_log = logging.getLogger("teola_plugin")
_MAX_CAUSES = 1000
"""Number of causes that are remembered."""


@dataclass(frozen=True, slots=True)
class FailedPrefetch:
    """A prefetch that failed in a query, kept until it is known whether the original succeeds."""

    component: str
    """Name of the component."""
    object: str
    """Description of the object to which it belongs; empty if that is not known."""
    error: Exception

    @property
    def cause(self) -> tuple[str, ...]:
        """A key of the failure, equal in all queries in which it happens."""
        return self.component, self.object, *cause_of(self.error)

    def __str__(self) -> str:
        owner = f" of the {self.object}" if self.object else ""
        return f"{self.component!r}{owner} raised {type(self.error).__name__}: {self.error}"


def failed_prefetch(
    p: Primitive, calls: Mapping[str, Callable[..., Any]], error: BaseException
) -> FailedPrefetch | None:
    """Return the failure to log for a client's function that has raised for this primitive, if any.

    None for functions that may end the original's run as well (parsers, the user's own), and for calls that are left to
    the original on purpose.
    """
    function = calls.get(p.call)
    if function is None or getattr(function, "teola_may_raise", False):
        return None
    if not isinstance(error, Exception) or isinstance(error, LeftToOriginal):
        return None
    return FailedPrefetch(p.call, calls.object_of(p.call) if isinstance(calls, ClientCalls) else "", error)


def cause_of(error: BaseException) -> tuple[str, ...]:
    """Return a key that is equal for errors of one type from one place in the code.

    It holds the type's name and, if the error has a traceback, the file and the line of the last frame.
    """
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in last)


class OncePerCause:
    """A guard of messages that are logged once for each cause. Used from any thread."""

    def __init__(self) -> None:
        self._causes: set[Any] = set()
        self._lock = threading.Lock()

    def __call__(self, cause: Hashable, log: Callable[[], None], owner: object = None) -> None:
        """Call `log` unless it was called for this cause before.

        `owner`: an object for which causes count separately; they are forgotten with it.
        """
        cause = (cause, id(owner))
        with self._lock:
            if cause in self._causes or len(self._causes) >= _MAX_CAUSES:
                return
            self._causes.add(cause)
        if owner is not None:
            with contextlib.suppress(TypeError):  # an object without weak references
                weakref.finalize(owner, self._causes.discard, cause).atexit = False
        log()


def log_failed_prefetch(failure: FailedPrefetch) -> None:
    """Log a warning with the traceback."""
    _log.warning(
        "a planned part died, and runs at its usual time: %s. Answers are unaffected, only later than they could "
        "be; this is said once. Next: report it with this traceback",
        failure,
        exc_info=failure.error,
    )


@dataclass(slots=True)
class WarmedPrefix:
    """A warm-up that has ended, and whether it was of use so far."""

    primitive: str
    """As it is traced."""
    engine: str
    text: str
    """What was prefilled."""
    tokens: int
    cached: int
    """Tokens of it that were in the cache before."""
    used: bool = False


def warmed(entry: EngineRequest, value: Any) -> WarmedPrefix | None:
    """Return what a warm-up that has ended with this value has left in the cache; None for another request."""
    payload = entry.request.payload
    if not isinstance(payload, Warmup) or not isinstance(value, Warmed):
        return None
    return WarmedPrefix(entry.primitive, entry.engine, payload.prompt.known_prefix(), value.tokens, value.cached_tokens)


def note_use(warmups: Sequence[WarmedPrefix], entry: EngineRequest, value: Any, *, tells: bool | None) -> None:
    """Mark the warm-ups that were of use to a generation: it has ended, and found what its prompt begins with cached.

    `tells`: True if its engine says how much it found; if None, that is not known, and then only a number counts. Among
    prefixes that grew, each is of use that added to what was found.
    """
    payload = entry.request.payload
    if not isinstance(payload, Generate) or not isinstance(value, Generation):
        return
    candidates = [warmup for warmup in warmups if warmup.engine == entry.engine]
    if not candidates:
        return
    text = payload.prompt.flat()
    prefixes = sorted((warmup for warmup in candidates if text.startswith(warmup.text)), key=lambda one: one.tokens)
    counts_cached = bool(value.cached_tokens) if tells is None else tells
    longest = 0
    for prefix in prefixes:
        base = max(longest, prefix.cached)
        prefix.used |= (min(value.cached_tokens, prefix.tokens) if counts_cached else prefix.tokens) > base
        longest = max(longest, prefix.tokens)
