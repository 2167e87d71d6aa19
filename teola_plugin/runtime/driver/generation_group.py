"""A prefilling and its decodings share one request: its stream tells when each of them begins and ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import InstancePath, Primitive, PrimitiveKind
from teola_plugin.requests.items import ItemStream
from teola_plugin.requests.payloads import Generation

_K = PrimitiveKind


@dataclass(frozen=True, slots=True)
class PrefillingEnded:
    """The first piece has come, so the prompt is computed."""

    primitive: str
    has_decodings: bool


@dataclass(frozen=True, slots=True)
class DecodingBegan:
    """A decoding begins, because the one before it has ended."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class DecodingEnded:
    """A decoding has its value: an item, or the whole text."""

    primitive: str
    value: Any
    is_whole_text: bool = False


@dataclass(frozen=True, slots=True)
class ListGrew:
    """A list that is being decoded has one more item. Its value is stored under `name`."""

    primitive: str
    index: int
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class ItemNotNeeded:
    """A planned item that the list does not have."""

    primitive: str


GroupEvent = PrefillingEnded | DecodingBegan | DecodingEnded | ListGrew | ItemNotNeeded


class GenerationGroup:
    """The prefilling `leader` and the decodings `members`, in order, that its request serves. Pieces in, events out."""

    def __init__(self, leader: Primitive, members: Sequence[Primitive]) -> None:
        self._leader, self.members = leader, tuple(members)
        self._growing = [m for m in self.members if m.attributes.stream_items]
        listing = next((m for m in self.members if m.kind is _K.PARTIAL_DECODING or m.attributes.stream_items), None)
        self._items = None if listing is None else ItemStream(listing.attributes.items or "json")
        self._item_count = self._characters_read = 0
        self.is_prefilled = False

    @property
    def reads_items(self) -> bool:
        """True if items are read from the stream."""
        return self._items is not None

    def read_piece(self, text: str) -> Iterator[GroupEvent]:
        """Yield the events of the next piece of the stream."""
        yield from self._end_prefilling()
        yield from self._read_items(text)

    def finish(self, value: Any) -> Iterator[GroupEvent]:
        """Yield the last events: the request has ended well, with this value. Call it once."""
        yield from self._end_prefilling()
        if self._items is not None:
            unread = value.text[self._characters_read :] if isinstance(value, Generation) else ""
            yield from self._read_items(unread)  # a late reader may have missed pieces
            for item in self._items.finish():
                yield from self._take_item(item)
        for member in self.members:
            if member.item is not None and member.item >= self._item_count:
                yield ItemNotNeeded(member.id)
        for member in self.members:
            if member.kind is _K.DECODING:
                yield DecodingEnded(member.id, value, is_whole_text=True)

    def _read_items(self, text: str) -> Iterator[GroupEvent]:
        self._characters_read += len(text)
        for item in self._items.feed(text) if self._items is not None else ():
            yield from self._take_item(item)

    def _end_prefilling(self) -> Iterator[GroupEvent]:
        """Yield, once, the events for the first sign of an answer: the prompt is computed, a decoding begins."""
        if not self.is_prefilled:
            self.is_prefilled = True
            if self.members:
                yield DecodingBegan(self.members[0])
            yield PrefillingEnded(self._leader.id, bool(self.members))

    def _take_item(self, item: Any) -> Iterator[GroupEvent]:
        """Yield the events for the next list item: the end of the decoding that is planned for it, or a longer list."""
        index, self._item_count = self._item_count, self._item_count + 1
        position = next((i for i, m in enumerate(self.members) if m.item == index), None)
        if position is None:
            for member in self._growing:
                yield ListGrew(member.id, index, InstancePath(member.id).stage(index), item)
            return
        if position + 1 < len(self.members):
            yield DecodingBegan(self.members[position + 1])
        yield DecodingEnded(self.members[position].id, item)
