"""A process that is forked has its parent's objects and none of its threads; locks may be held for ever.

What rests on a thread says so here. In the child it is told before anything else runs there; elsewhere this costs
nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """What must behave otherwise in a forked child."""

    def forked(self) -> None:
        """This is the child: no thread but the caller's is there. New locks; nothing of the parent's is touched."""


_told: WeakSet[Forkable] = WeakSet()


def tell_of_forks(one: Forkable) -> None:
    """From now on, as long as it is there. Idempotent."""
    _told.add(one)


def in_child(function: Callable[[], object]) -> None:
    """Call it in every child that is forked from now on, before anything else runs there."""
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=function)


class ForkedLock:
    """A lock of the whole process, `here`: a forked child has its own, which nobody holds."""

    def __init__(self) -> None:
        self.forked()
        tell_of_forks(self)

    def forked(self) -> None:
        self.here = threading.Lock()


def _tell() -> None:
    for one in list(_told):
        one.forked()


in_child(_tell)
