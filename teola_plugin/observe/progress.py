"""Progress bars for long tasks: loading models, ingestion, profiling, benchmarks. Silent unless at a terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """One bar. `advance` and `describe` may be called from any thread; on a silent bar they only count."""

    def __init__(self, total: float | None, display: Progress | None = None, task: TaskID | None = None) -> None:
        self.total = total
        self.completed = 0.0
        self._display = display
        self._task = task

    @property
    def silent(self) -> bool:
        return self._display is None

    def advance(self, amount: float = 1.0) -> None:
        """Note that `amount` more units are done."""
        self.completed += amount
        if self._display is not None and self._task is not None:
            self._display.advance(self._task, amount)

    def describe(self, description: str) -> None:
        """Change the text beside the bar."""
        if self._display is not None and self._task is not None:
            self._display.update(self._task, description=description)


_lock = threading.Lock()
_display: Progress | None = None
_users = 0


@contextmanager
def progress(total: float | None, description: str, *, quiet: bool | None = None) -> Iterator[Bar]:
    """Show a bar on stderr while the block runs; `total` in any unit, None where unknown.

    Silent when `quiet`, or, where that is None, when TEOLA_QUIET is set (to anything but 0) or stderr is no terminal.
    Bars that run at the same time, nested or in other threads, are shown together.
    """
    if _is_quiet(quiet):
        yield Bar(total)
        return
    display = _acquire()
    task = display.add_task(description, total=total)
    try:
        yield Bar(total, display, task)
    finally:
        display.stop_task(task)
        _release()


def _is_quiet(quiet: bool | None) -> bool:
    """Return True if no progress is to be shown.

    Args:
        quiet: The caller's wish; None leaves it to `TEOLA_QUIET`, and to whether stderr is a terminal.
    """
    if quiet is not None:
        return quiet
    return os.environ.get("TEOLA_QUIET", "0") not in ("", "0") or not sys.stderr.isatty()


def _acquire() -> Progress:
    """Return the display that all bars of the process share: a terminal can have only one that is live."""
    global _display, _users
    with _lock:
        if _display is None:
            _display = _new_display()
            _display.start()
        _users += 1
        return _display


def _release() -> None:
    """Note that a bar is done, and stop the common display with the last of them."""
    global _display, _users
    with _lock:
        _users -= 1
        if not _users and _display is not None:
            _display.stop()
            _display = None


def _new_display() -> Progress:
    """Return a display of progress bars on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
    )
