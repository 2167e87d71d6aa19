"""Tests of the port of the demo's server."""

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


def test_concurrent_demos_take_different_ports() -> None:
    with stock.reserved_port() as one:
        with stock.reserved_port() as other:
            assert one == stock._PORT != other
        with stock.reserved_port() as again:
            assert again != one
    with stock.reserved_port() as later:
        assert later == one


def test_occupied_port_is_not_taken() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", stock._PORT))
        busy.listen()
        with stock.reserved_port() as port:
            assert port != stock._PORT


def test_unwritable_cache_selects_another_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with stock.reserved_port() as port:
        assert port not in (0, stock._PORT)
