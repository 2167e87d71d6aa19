"""Objects that must change in a forked child, which has its parent's objects and none of its threads.

A lock that another thread held in the parent is held in the child for ever. Objects that depend on threads or locks
register here; their `forked` is called in the child before anything else runs there. Elsewhere this costs nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """An object that must behave otherwise in a forked child."""

    def forked(self) -> None:
        """Adapt to the child, where only the caller's thread exists. Make new locks; change nothing of the parent's."""


_registered: WeakSet[Forkable] = WeakSet()


def tell_of_forks(obj: Forkable) -> None:
    """Call `obj.forked()` in every forked child from now on, as long as the object exists. Idempotent."""
    _registered.add(obj)


def in_child(function: Callable[[], object]) -> None:
    """Call a function in every child that is forked from now on, before anything else runs there."""
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=function)


class ForkedLock:
    """A lock of the whole process, in its attribute `lock`: a forked child has one of its own, which nobody holds."""

    def __init__(self) -> None:
        self.forked()
        tell_of_forks(self)

    def forked(self) -> None:
        self.lock = threading.Lock()


def _call_registered() -> None:
    for obj in list(_registered):
        obj.forked()


in_child(_call_registered)
