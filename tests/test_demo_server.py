"""The demo's server: its port."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from teola_plugin.cli.demo import stock


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(stock, "_PORT", free.getsockname()[1])


def test_two_that_start_together_take_different_ports() -> None:
    with stock.reserved_port() as one:
        with stock.reserved_port() as other:
            assert one == stock._PORT != other
        with stock.reserved_port() as again:
            assert again != one
    with stock.reserved_port() as later:
        assert later == one


def test_a_port_that_somebody_listens_on_is_left_to_them() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", stock._PORT))
        busy.listen()
        with stock.reserved_port() as port:
            assert port != stock._PORT


def test_a_cache_that_cannot_be_written_costs_the_usual_port_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with stock.reserved_port() as port:
        assert port not in (0, stock._PORT)
