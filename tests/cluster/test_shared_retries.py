"""Tests of a client whose host was lost and came back: a repeated piece must be equal to the first.

They need no Ray.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.ports import PortReports, entry, event

from teola_plugin.cluster.client.shared_engine import SharedEngine
from teola_plugin.cluster.client.shared_port import SharedPort
from teola_plugin.cluster.wire import Cancel, EngineFacts, Hello, RequestEnded, RequestPiece
from teola_plugin.errors import EngineError
from teola_plugin.graph import LLM_KINDS, EngineProfile
from teola_plugin.requests.payloads import Generation, Piece
from teola_plugin.runtime.loop_thread import PieceLog

FACTS = EngineFacts("llm", LLM_KINDS, EngineProfile(), {}, ("0",))


class Line:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def send(self, order: Any) -> None:
        self.orders.append(order)


async def lost_and_found(listener: PortReports, *, read: bool) -> tuple[SharedPort, Line]:
    """Send a request whose host is lost after the pieces `one two`, and which is then sent again."""
    one = SharedPort("pool", SharedEngine(FACTS), Hello("me", 1, (3, 11), "1"), listener.listener())
    line = one._link = Line()  # type: ignore[assignment]
    made = entry("a", stream=read)
    if read:
        made.read_into(PieceLog())
    one.enqueue([made], event("a"))
    one._receive_all([RequestPiece("a", Piece("a", "one")), RequestPiece("a", Piece("a", " two"))])
    one._host_found(FACTS)
    assert len(line.orders) == 2
    return one, line


@pytest.mark.parametrize("read", [True, False])
async def test_repeated_pieces_after_a_retry_are_delivered_once(read: bool) -> None:
    listener = PortReports()
    one, _ = await lost_and_found(listener, read=read)
    one._receive_all([RequestPiece("a", Piece("a", "one two")), RequestPiece("a", Piece("a", " three"))])
    one._receive_all([RequestEnded("a", Generation("one two three"))])
    assert listener.text("a") == listener.pieces["a"] == "one two three"


@pytest.mark.parametrize("ends", [True, False])
async def test_different_retry_fails_if_text_was_delivered(ends: bool) -> None:
    listener = PortReports()
    one, line = await lost_and_found(listener, read=True)
    one._receive_all([RequestEnded("a", Generation("other")) if ends else RequestPiece("a", Piece("a", "other"))])
    assert isinstance(listener.error("a"), EngineError) and "another" in str(listener.error("a"))
    assert ends or line.orders[-1] == Cancel(("a",))


async def test_different_retry_is_used_if_no_text_was_delivered() -> None:
    listener = PortReports()
    one, _ = await lost_and_found(listener, read=False)
    one._receive_all([RequestPiece("a", Piece("a", "other")), RequestEnded("a", Generation("other text"))])
    assert listener.text("a") == "other text"
