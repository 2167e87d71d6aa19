"""Methods of other packages' classes that are replaced by wrappers, and put back exactly as they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Wrap = Callable[[Any], Any]
"""Return the wrapper of a function. It keeps the function as `__wrapped__` (`functools.wraps`)."""


class MethodInterceptors:
    """The wrapped methods of a process.

    A method is wrapped in the class whose `__dict__` defines it, and nowhere else. `uninstall` puts the original
    function back where our wrapper is still in its place; a wrapper that somebody else has wrapped stays, and has to
    pass calls on while `is_installed` is False.
    """

    def __init__(self) -> None:
        self.is_installed = False
        self._originals: dict[tuple[type, str], tuple[Any, Any]] = {}
        """By class and method: the original function, and the wrapper that stands for it."""
        self._renew_lock()
        if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def install(self, classes: Iterable[type], methods: Mapping[str, Wrap]) -> None:
        """Wrap those of the methods that the classes define themselves. Idempotent."""
        with self._lock:
            self.is_installed = True
            for cls in classes:
                for name in methods.keys() & vars(cls).keys():
                    self._wrap(cls, name, methods[name])

    def _wrap(self, cls: type, name: str, wrap: Wrap) -> None:
        current = vars(cls)[name]
        if not callable(current) or isinstance(current, type):
            return
        known = self._originals.get((cls, name))
        if known is not None and _is_below(known[1], current):
            return
        wrapper = wrap(current)
        setattr(cls, name, wrapper)
        self._originals[cls, name] = (current, wrapper)

    def original_of(self, cls: type, name: str) -> Any:
        """Return the function that calls of a method reach below our wrapper; None if they do not come to a wrapper."""
        definer = next((base for base in cls.__mro__ if name in vars(base)), cls)
        original, wrapper = self._originals.get((definer, name), (None, None))
        reaches = self.is_installed and wrapper is not None and _is_below(wrapper, vars(definer)[name])
        return original if reaches else None

    def uninstall(self) -> None:
        """Put every original function back."""
        with self._lock:
            self.is_installed = False
            for (cls, name), (original, wrapper) in list(self._originals.items()):
                current = vars(cls).get(name)
                if current is wrapper:
                    setattr(cls, name, original)
                if current is wrapper or not _is_below(wrapper, current):
                    del self._originals[cls, name]


def _is_below(wrapper: object, function: object) -> bool:
    """Return True if a function is the wrapper, or wraps it."""
    seen = 0
    while function is not None and seen < 100:
        if function is wrapper:
            return True
        function, seen = getattr(function, "__wrapped__", None), seen + 1
    return False
