"""What is written within one turn of the loop is sent in one piece: an answer's head with its body.

uvicorn writes them one after the other, each a call of the system and something for the client to wake up for.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Together(asyncio.Transport):
    """A transport that keeps what is written until the loop's next turn."""

    def __init__(self, real: asyncio.Transport) -> None:
        super().__init__()
        self._real = real
        self._loop = asyncio.get_running_loop()
        self._kept: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._kept:
            self._loop.call_soon(self._send)
        self._kept.append(bytes(data))

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


def together(protocol: type[Any]) -> type[Any]:
    """uvicorn's protocol, on such a transport."""

    class Sending(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(Together(transport))

    return Sending
