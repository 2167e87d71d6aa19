"""Tests of the parser of event streams against a simple parser of the whole text, and of its writer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.event_streams import EventStreamParser, ServerSentEvent, aread_events, read_events, write_event

NO_LINE_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
TEXTS = st.text(st.sampled_from("ab: \0é😀\ufeff1" + NO_LINE_ENDS), max_size=6)
FIELDS = st.sampled_from(["data", "event", "id", "retry", "", "DATA", "other"])
LINES = st.one_of(
    st.builds(lambda field, space, text: f"{field}:{space}{text}", FIELDS, st.sampled_from(["", " ", "  "]), TEXTS),
    FIELDS,
    TEXTS,
    st.just(""),
)
LINE_ENDS = st.sampled_from(["\n", "\r", "\r\n"])
BYTE_ORDER_MARKS = st.sampled_from(["", "\ufeff", "\ufeff\ufeff"])
INVALID_BYTES = st.sampled_from([b"", b"\xff", b"\xc3", b"\xe2\x80", b"\xed\xa0\x80"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Draw lines of all fields with mixed ends, byte order marks, bytes that are no UTF-8, whole or cut off."""
    written = draw(BYTE_ORDER_MARKS).encode()
    for line, end in draw(st.lists(st.tuples(LINES, LINE_ENDS), max_size=12)):
        written += line.encode() + draw(INVALID_BYTES) + end.encode()
    return written[: draw(st.integers(0, len(written)))] if draw(st.booleans()) else written


@st.composite
def chunkings(draw: st.DrawFn, stream: bytes) -> list[bytes]:
    """Draw a division of the stream into chunks, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def reference(stream: bytes) -> list[ServerSentEvent]:
    """Read the whole text at once, as the standard describes it."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    *lines, _cut_off = re.split(r"\r\n|\r|\n", text)
    events, fields, last_event_id = [], [], ""
    for line in lines:
        if line:
            name, colon, value = line.partition(":")
            fields.append((name, value[1:] if colon and value.startswith(" ") else value))
            if name == "id" and "\0" not in fields[-1][1]:
                last_event_id = fields[-1][1]
            continue
        data = [value for name, value in fields if name == "data"]
        types = [value for name, value in fields if name == "event"]
        if data:
            events.append(ServerSentEvent("\n".join(data), (types or [""])[-1] or "message", last_event_id))
        fields = []
    return events


@given(st.data())
def test_any_chunking_gives_the_events_of_the_whole_stream(data: st.DataObject) -> None:
    stream = data.draw(streams())
    chunks = data.draw(chunkings(stream))

    events = list(read_events(chunks))

    assert events == reference(stream)


@given(st.data())
async def test_async_chunks_give_the_events_of_the_whole_stream(data: st.DataObject) -> None:
    stream = data.draw(streams())
    chunks = data.draw(chunkings(stream))

    async def arriving():
        for chunk in chunks:
            yield chunk

    events = [event async for event in aread_events(arriving())]

    assert events == reference(stream)


@given(st.text(), st.text(), st.text())
def test_written_events_are_read_back(data: str, type: str, id: str) -> None:
    data, type, id = (re.sub("[\ud800-\udfff]", "", text) for text in (data, type, id))
    type, id = (re.sub("[\r\n\0]", "", text) for text in (type, id))

    [event] = read_events([write_event(data, type, id).encode()])

    assert event == ServerSentEvent(re.sub(r"\r\n|\r", "\n", data), type or "message", id)


@pytest.mark.parametrize("mark", NO_LINE_ENDS, ids=ascii)
def test_separators_that_end_no_line_stay_in_the_data(mark: str) -> None:
    [event] = read_events([f"data: a{mark}b\n\n".encode()])

    assert event.data == f"a{mark}b"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"], ids=ascii)
def test_bytes_one_by_one_give_the_same_event(end: str) -> None:
    stream = f"data: größe 😀{end}data:b{end}{end}".encode()

    [event] = read_events([bytes([byte]) for byte in stream])

    assert event.data == "größe 😀\nb"


def test_an_event_that_ends_with_a_carriage_return_does_not_wait_for_more() -> None:
    parser = EventStreamParser()

    first = parser.feed(b"data: a\r\r")
    second = parser.feed(b"\ndata: b\n\n")

    assert [event.data for event in first] == ["a"]
    assert [event.data for event in second] == ["b"]


def test_an_event_without_its_blank_line_is_dropped() -> None:
    events = list(read_events([b"data: a\n\ndata: b\n"]))

    assert [event.data for event in events] == ["a"]


def test_comments_unknown_fields_and_events_without_data_are_skipped() -> None:
    events = list(read_events([b": ping\n\nfoo: x\n\nevent: y\n\ndata: a\n\n"]))

    assert events == [ServerSentEvent("a")]


def test_event_id_persists_for_later_events_but_type_does_not() -> None:
    events = list(read_events([b"id: 7\nevent: delta\ndata: a\n\ndata: b\n\n"]))

    assert events == [ServerSentEvent("a", "delta", "7"), ServerSentEvent("b", "message", "7")]


@pytest.mark.parametrize(("value", "milliseconds"), [("1500", 1500), ("x", None), ("٣", None), ("9" * 5000, None)])
def test_only_digits_set_the_reconnection_time(value: str, milliseconds: int | None) -> None:
    parser = EventStreamParser()

    parser.feed(f"retry: {value}\n".encode())

    assert parser.retry_ms == milliseconds


@pytest.mark.parametrize(("type", "id"), [("a\nb", ""), ("a\rb", ""), ("", "1\n2"), ("", "\0")])
def test_multiline_event_type_or_id_raises_value_error(type: str, id: str) -> None:
    with pytest.raises(ValueError, match="server-sent event"):
        write_event("x", type, id)
