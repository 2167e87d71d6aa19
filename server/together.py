"""Between the socket and uvicorn: what is written within one turn of the loop is sent in one piece, an answer's head
with its body; and of each request it is known when it began to come.

uvicorn writes head and body one after the other, each a call of the system and something for the client to wake up for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_HEAD = b"HTTP/"
"""How the head of an answer begins; no piece of a chunked body does."""


class Together(asyncio.Transport):
    """A transport that keeps what is written until the loop's next turn; an answer's head until its body comes."""

    def __init__(self, real: asyncio.Transport) -> None:
        super().__init__()
        self._real = real
        self._loop = asyncio.get_running_loop()
        self._kept: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._kept.append(bytes(data))
        if len(self._kept) == 1:
            self._loop.call_soon(self._send)
        elif len(self._kept) == 2 and self._kept[0].startswith(_HEAD):
            self._send()  # now: before what the server does when an answer is written

    def _send(self) -> None:
        kept, self._kept = self._kept, []
        if kept and not self._real.is_closing():
            self._real.write(b"".join(kept))

    def close(self) -> None:
        """What is kept is sent before."""
        self._send()
        self._real.close()

    def abort(self) -> None:
        self._kept.clear()
        self._real.abort()

    def is_closing(self) -> bool:
        return self._real.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._real.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._real.pause_reading()

    def resume_reading(self) -> None:
        self._real.resume_reading()

    def is_reading(self) -> bool:
        return self._real.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._real.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._real.get_protocol()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._kept)) + self._real.get_write_buffer_size()


def together(protocol: type[Any], clock: Callable[[], float]) -> type[Any]:
    """uvicorn's protocol, on such a transport. Requests tell under `teola.began` when their first byte came."""

    class Sending(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(Together(transport))

        def data_received(self, data: bytes) -> None:
            now, before = clock(), self.scope
            super().data_received(data)
            if self.scope is not before:  # a request has begun in it; it is not answered before the loop's next turn
                self.scope["teola.began"] = now

    return Sending
