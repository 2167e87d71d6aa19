"""Server-sent events (WHATWG HTML, section 9.2): one parser for every reader here, and one writer.

Lines end with CR, LF or CRLF. `str.splitlines`, and with it the `iter_lines` of httpx, also cuts at U+2028, U+2029,
U+0085 and other characters that JSON may hold unescaped, so event streams are read from bytes.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from dataclasses import dataclass

DONE = "[DONE]"
"""The data of the event that ends a stream of OpenAI's protocol."""
_LINE_END = re.compile(rb"\r\n|\r|\n")
_LINE_END_OF_TEXT = re.compile(r"\r\n|\r|\n")
_MAX_DIGITS = 18  # of a reconnection time; longer ones are skipped, since int() refuses thousands of digits
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream, complete with its blank line."""

    data: str
    """Its `data` lines, joined with LF."""
    type: str = "message"
    last_event_id: str = ""
    """The id of this event or, if it has none, of the latest event before it that had one."""


class EventStreamParser:
    """An incremental parser of one event stream.

    Bytes may be cut anywhere, also within a character or between CR and LF. An event that the stream does not complete
    with a blank line is dropped.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the start of a line whose end has not arrived
        self._is_first_line = True
        self._skips_line_feed = False  # True after a CR that ended a chunk
        self._data: list[str] = []
        self._type = ""
        self._last_event_id = ""
        self.retry_ms: int | None = None
        """The latest reconnection time that the stream has set."""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that `chunk` completes, in order."""
        if self._skips_line_feed and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skips_line_feed = False
        if not chunk:
            return []
        self._skips_line_feed = chunk.endswith(b"\r")
        *complete, rest = _LINE_END.split(chunk)
        events = []
        for part in complete:
            self._line += part
            line, self._line = bytes(self._line), bytearray()
            event = self._parse_line(line)
            if event is not None:
                events.append(event)
        self._line += rest
        return events

    def _parse_line(self, line: bytes) -> ServerSentEvent | None:
        """Read one line of the stream. Return the event that it completes: only a blank line completes one."""
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return self._complete_event()
        field, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        match field:
            case "data":
                self._data.append(value)
            case "event":
                self._type = value
            case "id" if "\0" not in value:
                self._last_event_id = value
            case "retry" if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
                self.retry_ms = int(value)
        return None  # comments have an empty name; unknown fields are skipped

    def _complete_event(self) -> ServerSentEvent | None:
        """Return the event whose lines have been read; None if it has no data, as the rules for event streams say.

        The lines are forgotten; the last event id stays, and counts for later events without an id.
        """
        data, self._data = self._data, []
        type, self._type = self._type, ""
        return ServerSentEvent("\n".join(data), type or "message", self._last_event_id) if data else None


def read_events(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Yield the events of a stream that arrives in `chunks`, each as soon as it is complete."""
    parser = EventStreamParser()
    for chunk in chunks:
        yield from parser.feed(chunk)


async def aread_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[ServerSentEvent, None]:
    """Yield the events as `read_events` does, from chunks that arrive on an event loop."""
    parser = EventStreamParser()
    async for chunk in chunks:
        for event in parser.feed(chunk):
            yield event


def write_event(data: str, type: str = "", id: str = "") -> str:
    """Return the text of one event. Raise ValueError for a type or an id that does not fit into one line."""
    fields = [(name, value) for name, value in (("event", type), ("id", id)) if value]
    for name, value in fields:
        if _LINE_END_OF_TEXT.search(value) or (name == "id" and "\0" in value):
            raise ValueError(f"the {name} of a server-sent event has a line end or a null character: {value!r:.100}")
    lines = [f"{name}: {value}\n" for name, value in fields]
    lines += [f"data: {line}\n" for line in _LINE_END_OF_TEXT.split(data)]
    return "".join(lines) + "\n"
