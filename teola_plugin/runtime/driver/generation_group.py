"""A prefilling and its decodings are one request: what its stream says of each of them. Pure: pieces in, news out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import InstancePath, Primitive, PrimitiveKind
from teola_plugin.requests.items import ItemStream
from teola_plugin.requests.payloads import Generation

_K = PrimitiveKind


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The first piece is there: the prompt is computed."""

    primitive: str
    goes_on: bool
    """Whether decodings follow."""


@dataclass(frozen=True, slots=True)
class Began:
    """A decoding begins where the one before it has ended."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoding has its value: an item, or the whole."""

    primitive: str
    value: Any
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Grown:
    """A list that is being decoded has one item more; `name` is where its value lies."""

    primitive: str
    index: int
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """A planned item that the list does not have."""

    primitive: str


News = Prefilled | Began | Decoded | Grown | NotNeeded


class GenerationGroup:
    """The decodings `members` that the request of the prefilling `leader` serves, in order."""

    def __init__(self, leader: Primitive, members: Sequence[Primitive]) -> None:
        self._leader, self.members = leader, tuple(members)
        self._grows = [m for m in self.members if m.attributes.stream_items]
        listed = next((m for m in self.members if m.kind is _K.PARTIAL_DECODING or m.attributes.stream_items), None)
        self._items = None if listed is None else ItemStream(listed.attributes.items or "json")
        self._closed = self._heard = 0
        self.prefilled = False

    @property
    def lists(self) -> bool:
        """Whether items are read from the stream."""
        return self._items is not None

    def piece(self, text: str) -> Iterator[News]:
        """A piece of the stream, in order."""
        yield from self._prefilled()
        yield from self._listed(text)

    def ended(self, value: Any) -> Iterator[News]:
        """The request has ended well, with this value. Once."""
        yield from self._prefilled()
        if self._items is not None:
            rest = value.text[self._heard :] if isinstance(value, Generation) else ""
            yield from self._listed(rest)  # who came late may not have heard all of it
            for item in self._items.finish():
                yield from self._item(item)
        for member in self.members:
            if member.item is not None and member.item >= self._closed:
                yield NotNeeded(member.id)
        for member in self.members:
            if member.kind is _K.DECODING:
                yield Decoded(member.id, value, whole=True)

    def _listed(self, text: str) -> Iterator[News]:
        self._heard += len(text)
        for item in self._items.feed(text) if self._items is not None else ():
            yield from self._item(item)

    def _prefilled(self) -> Iterator[News]:
        if not self.prefilled:
            self.prefilled = True
            if self.members:
                yield Began(self.members[0])
            yield Prefilled(self._leader.id, bool(self.members))

    def _item(self, item: Any) -> Iterator[News]:
        index, self._closed = self._closed, self._closed + 1
        place = next((i for i, m in enumerate(self.members) if m.item == index), None)
        if place is None:
            for member in self._grows:
                yield Grown(member.id, index, InstancePath(member.id).stage(index), item)
            return
        if place + 1 < len(self.members):
            yield Began(self.members[place + 1])
        yield Decoded(self.members[place].id, item)
