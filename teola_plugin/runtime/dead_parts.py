"""Planned parts that die: a function that makes a prompt, or a value, raises where the plain object has no trouble.

The answer is the plain object's, so nothing is wrong with it; but what was to run ahead does not, query after query.
So it is said, once a cause.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import ClientCalls, LeftToOriginal, Primitive

_log = logging.getLogger("teola_plugin")
_MOST = 1000
"""Causes that are remembered."""


@dataclass(frozen=True, slots=True)
class DeadPart:
    """What died in a query, kept until it is known how the plain object fared."""

    part: str
    """The component's name."""
    object: str
    """What it is of, in words; empty where that is not known."""
    error: Exception

    @property
    def cause(self) -> tuple[str, ...]:
        """The same for each query that it befalls."""
        return self.part, self.object, *cause_of(self.error)

    def __str__(self) -> str:
        of = f" of the {self.object}" if self.object else ""
        return f"{self.part!r}{of} raised {type(self.error).__name__}: {self.error}"


def died(p: Primitive, calls: Mapping[str, Callable[..., Any]], error: BaseException) -> DeadPart | None:
    """What is to be said of a client's function that has raised for this primitive, if anything.

    Nothing of those that may end the plain object's run as well (parsers, functions of the user's), nor of what is left
    to the plain object on purpose.
    """
    function = calls.get(p.call)
    if function is None or getattr(function, "teola_may_raise", False):
        return None
    if not isinstance(error, Exception) or isinstance(error, LeftToOriginal):
        return None
    return DeadPart(p.call, calls.object_of(p.call) if isinstance(calls, ClientCalls) else "", error)


def cause_of(error: BaseException) -> tuple[str, ...]:
    """The same for errors of one type from one place in the code."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in last)


class Once:
    """Says a thing once a cause, from any thread."""

    def __init__(self) -> None:
        self._said: set[Any] = set()
        self._lock = threading.Lock()

    def __call__(self, cause: Hashable, say: Callable[[], None], owner: object = None) -> None:
        """`owner`: once for each such object; it is forgotten with it."""
        cause = (cause, id(owner))
        with self._lock:
            if cause in self._said or len(self._said) >= _MOST:
                return
            self._said.add(cause)
        if owner is not None:
            with contextlib.suppress(TypeError):  # it cannot be referred to weakly
                weakref.finalize(owner, self._said.discard, cause).atexit = False
        say()


def warn(dead: DeadPart) -> None:
    """Says it, with the traceback."""
    _log.warning(
        "a planned part died, and runs in its place instead: %s. Answers are unaffected, only later than they could "
        "be; this is said once. Next: report it with this traceback",
        dead,
        exc_info=dead.error,
    )
