"""What the stream of one request says of a prefilling and its decodings: pieces in, news out."""

from __future__ import annotations

import pytest

from teola_plugin.graph import Attributes, Primitive, PrimitiveKind
from teola_plugin.runtime.driver.generation_group import Began, Decoded, GenerationGroup, Grown, NotNeeded, Prefilled

K = PrimitiveKind
LEAD = Primitive("lead", K.PREFILLING, "llm")
WHOLE = Primitive("text", K.DECODING, "llm", attributes=Attributes(items="lines"))
GROWS = Primitive("text", K.DECODING, "llm", attributes=Attributes(items="lines", stream_items=("each",)))
PARTS = [
    Primitive(f"text#{i}", K.PARTIAL_DECODING, "llm", item=i, attributes=Attributes(items="lines")) for i in range(2)
]


def told(group: GenerationGroup, *pieces: str) -> list[list[object]]:
    return [list(group.piece(piece)) for piece in pieces]


def test_a_prefilling_alone_ends_with_the_first_piece() -> None:
    group = GenerationGroup(LEAD, ())
    assert told(group, "a", "b") == [[Prefilled("lead", False)], []]
    assert list(group.ended("ab")) == [] and not group.lists


def test_without_pieces_the_end_tells_everything() -> None:
    group = GenerationGroup(LEAD, [WHOLE])
    assert list(group.ended("ab")) == [Began(WHOLE), Prefilled("lead", True), Decoded("text", "ab", whole=True)]


def test_each_item_that_closes_is_the_value_of_its_partial_decoding() -> None:
    group = GenerationGroup(LEAD, [*PARTS, WHOLE])
    assert told(group, "one", "\ntwo\nth") == [
        [Began(PARTS[0]), Prefilled("lead", True)],
        [Began(PARTS[1]), Decoded("text#0", "one"), Began(WHOLE), Decoded("text#1", "two")],
    ]
    assert list(group.ended("one\ntwo\nth")) == [Decoded("text", "one\ntwo\nth", whole=True)]
    assert group.lists


def test_planned_items_that_do_not_come_are_not_needed() -> None:
    group = GenerationGroup(LEAD, [*PARTS, WHOLE])
    told(group, "one")
    assert list(group.ended("one")) == [
        Began(PARTS[1]),
        Decoded("text#0", "one"),
        NotNeeded("text#1"),
        Decoded("text", "one", whole=True),
    ]


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_list_without_planned_items_grows_however_it_is_cut(cut: int) -> None:
    text, group = "one\ntwo\n", GenerationGroup(LEAD, [GROWS])
    news = [one for piece in (text[:cut], text[cut:]) for one in group.piece(piece)] + list(group.ended(text))
    assert [one for one in news if isinstance(one, Grown)] == [
        Grown("text", 0, "text#0", "one"),
        Grown("text", 1, "text#1", "two"),
    ]
    assert news[-1] == Decoded("text", text, whole=True)
