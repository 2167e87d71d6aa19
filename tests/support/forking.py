"""Runs work in a forked child process with a time limit, so that a hanging child does not hang the tests."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import pickle
import select
import signal
import time
import traceback
import weakref
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

T = TypeVar("T")


def in_fork(work: Callable[[], T], *, seconds: float = 20.0, exits: bool = False) -> T:
    """Return the result of `work` in a child made by `os.fork`. Raise here what it raises there.

    Args:
        work: the function to call in the child.
        seconds: time limit. A child that takes longer is killed, and the test fails.
        exits: True if the child ends as programs do, and runs the exit handlers that it inherited from its parent.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run(work, writing, exits=exits)
    os.close(writing)
    try:
        reply = _read(reading, time.monotonic() + seconds)
        if reply is not None:
            _wait(child, seconds)
    finally:
        os.close(reading)
        _kill(child)
    assert reply, f"the child said nothing within {seconds:g} s"
    succeeded, outcome, traceback_text = pickle.loads(reply)
    if not succeeded:
        raise outcome from RuntimeError(traceback_text)
    return outcome  # type: ignore[no-any-return]


def _run(work: Callable[[], Any], writing: int, *, exits: bool) -> None:
    status = 1
    try:
        try:
            reply: Any = (True, work(), "")
        except BaseException as error:
            reply = (False, error, traceback.format_exc())
        if exits:
            _keep_folders()
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        os.write(writing, pickle.dumps(reply))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _keep_folders() -> None:
    """Keep temporary folders of the parent, which the child's exit handlers would delete.

    They hold, for example, the sockets of servers that are starting.
    """
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = one.peek()
        if alive is not None and isinstance(alive[0], TemporaryDirectory):
            one.atexit = False


def _read(reading: int, deadline: float) -> bytes | None:
    """Return all bytes until the pipe is closed, or None if that takes until the deadline."""
    data = b""
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        more = os.read(reading, 1 << 16)
        if not more:
            return data
        data += more
    return None


_ended_children: set[int] = set()


def _wait(child: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            _ended_children.add(child)
            return
        time.sleep(0.01)


def _kill(child: int) -> None:
    if child not in _ended_children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    _ended_children.discard(child)
