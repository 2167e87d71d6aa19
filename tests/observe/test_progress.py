"""Tests of progress bars: silent without a terminal, shared if several run."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from teola_plugin.observe.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def attach(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal. Not a fixture: pytest puts its own stderr back between set-up and test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("TEOLA_QUIET", raising=False)
    return found


def test_terminal_shows_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach(monkeypatch)
    with progress(3, "loading model") as bar:
        for _ in range(3):
            bar.advance()
    assert "loading model" in terminal.getvalue() and "3/3" in terminal.getvalue()


def test_nested_bars_share_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach(monkeypatch)
    with progress(2, "outer") as outer, progress(None, "inner") as inner:
        inner.describe("inner, renamed")
        inner.advance(5)
        outer.advance(2)
    assert "outer" in terminal.getvalue() and "inner, renamed" in terminal.getvalue()
    with progress(1, "afterwards") as bar:
        bar.advance()
    assert "afterwards" in terminal.getvalue()


def test_exception_ends_the_bar_and_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach(monkeypatch)
    with pytest.raises(KeyError), progress(1, "breaks"):
        raise KeyError
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


def test_quiet_wins_over_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = attach(monkeypatch)
    with progress(1, "x", quiet=True) as bar:
        bar.advance()
    monkeypatch.setenv("TEOLA_QUIET", "1")
    with progress(1, "x") as other:
        other.describe("y")
    assert bar.silent and other.silent and bar.completed == 1 and terminal.getvalue() == ""


def test_rich_is_not_imported_without_a_terminal() -> None:
    code = (
        "import sys\nfrom teola_plugin.observe import progress\n"
        "with progress(1, 'x') as bar: bar.advance()\nassert bar.silent and 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.PIPE)
