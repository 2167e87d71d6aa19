"""Tests of a prefilling with several decodings: their outcomes are read from the pieces of one stream."""

from __future__ import annotations

import pytest

from teola_plugin.graph import Attributes, Primitive, PrimitiveKind
from teola_plugin.runtime.driver.generation_group import (
    DecodingBegan,
    DecodingEnded,
    GenerationGroup,
    ItemNotNeeded,
    ListGrew,
    PrefillingEnded,
)

K = PrimitiveKind
LEAD = Primitive("lead", K.PREFILLING, "llm")
WHOLE = Primitive("text", K.DECODING, "llm", attributes=Attributes(items="lines"))
GROWS = Primitive("text", K.DECODING, "llm", attributes=Attributes(items="lines", stream_items=("each",)))
PARTS = [
    Primitive(f"text#{i}", K.PARTIAL_DECODING, "llm", item=i, attributes=Attributes(items="lines")) for i in range(2)
]


def read_pieces(group: GenerationGroup, *pieces: str) -> list[list[object]]:
    return [list(group.read_piece(piece)) for piece in pieces]


def test_prefilling_alone_ends_with_the_first_piece() -> None:
    group = GenerationGroup(LEAD, ())
    assert read_pieces(group, "a", "b") == [[PrefillingEnded("lead", False)], []]
    assert list(group.finish("ab")) == [] and not group.reads_items


def test_finish_without_pieces_emits_all_events() -> None:
    group = GenerationGroup(LEAD, [WHOLE])
    assert list(group.finish("ab")) == [
        DecodingBegan(WHOLE),
        PrefillingEnded("lead", True),
        DecodingEnded("text", "ab", is_whole_text=True),
    ]


def test_closed_item_is_the_value_of_its_partial_decoding() -> None:
    group = GenerationGroup(LEAD, [*PARTS, WHOLE])
    assert read_pieces(group, "one", "\ntwo\nth") == [
        [DecodingBegan(PARTS[0]), PrefillingEnded("lead", True)],
        [DecodingBegan(PARTS[1]), DecodingEnded("text#0", "one"), DecodingBegan(WHOLE), DecodingEnded("text#1", "two")],
    ]
    assert list(group.finish("one\ntwo\nth")) == [DecodingEnded("text", "one\ntwo\nth", is_whole_text=True)]
    assert group.reads_items


def test_missing_planned_items_are_marked_not_needed() -> None:
    group = GenerationGroup(LEAD, [*PARTS, WHOLE])
    read_pieces(group, "one")
    assert list(group.finish("one")) == [
        DecodingBegan(PARTS[1]),
        DecodingEnded("text#0", "one"),
        ItemNotNeeded("text#1"),
        DecodingEnded("text", "one", is_whole_text=True),
    ]


@pytest.mark.parametrize("cut", range(1, 8))
def test_list_without_planned_items_grows_for_any_chunking(cut: int) -> None:
    text, group = "one\ntwo\n", GenerationGroup(LEAD, [GROWS])
    news = [one for piece in (text[:cut], text[cut:]) for one in group.read_piece(piece)] + list(group.finish(text))
    assert [one for one in news if isinstance(one, ListGrew)] == [
        ListGrew("text", 0, "text#0", "one"),
        ListGrew("text", 1, "text#1", "two"),
    ]
    assert news[-1] == DecodingEnded("text", text, is_whole_text=True)
