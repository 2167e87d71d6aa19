"""Tests of attributes of primitives: typed, stored in one place, separate from those of users' own passes."""

from __future__ import annotations

from dataclasses import fields

import pytest

from teola_plugin.errors import GraphError
from teola_plugin.graph import Attributes, Component, Graph, Primitive, PrimitiveKind, Ref, Role, build_pgraph, named
from teola_plugin.graph import WorkflowTemplate as Template
from teola_plugin.graph.graph import format_primitive
from teola_plugin.graph.primitive import ATTRIBUTES, NOTHING_SAID

K = PrimitiveKind


def test_default_attributes_have_no_non_default_items() -> None:
    assert list(NOTHING_SAID.non_default_items()) == [] and Attributes() == NOTHING_SAID
    assert {known.name for known in fields(Attributes)} == ATTRIBUTES


def test_false_and_zero_values_are_non_default_items() -> None:
    assert list(Attributes(lookahead=False, k=0).non_default_items()) == [("k", 0), ("lookahead", False)]


def test_with_returns_changed_copy_and_rejects_unknown_names() -> None:
    attributes = Attributes(k=3, items="json")
    assert attributes.with_(k=4, grow=True) == Attributes(k=4, items="json", grow=True) and attributes.k == 3
    with pytest.raises(KeyError):
        attributes.with_(unknown=1)


def test_formatted_primitive_shows_attributes_before_options() -> None:
    attributes = Attributes(stream_items=("m", "n"), collection="docs", k=3, grow=True)
    p = Primitive("p", K.SEARCHING, "store", attributes=attributes, options=(("mine", 1),))
    shown = "{collection=docs, k=3, stream_items=m, stream_items=n, grow=True, mine=1}"
    assert format_primitive(p) == f"%p = SEARCHING@store() {shown}"


def test_renamed_primitive_streams_items_to_renamed_holders() -> None:
    p = Primitive("d", K.DECODING, "llm", attributes=Attributes(items="json", stream_items=("m", "other")))
    assert p.rename({"m": "x/m"}, {}).attributes == Attributes(items="json", stream_items=("x/m", "other"))


def test_component_passes_attributes_and_options_to_primitives() -> None:
    attributes, own = Attributes(collection="docs"), (("mine", True),)
    one = Component(
        "s", Role.RETRIEVAL, named(query=Ref("$input")), "store", "embedder", attributes=attributes, options=own
    )
    searching = build_pgraph(Template((one,), Ref("s")))["s.searching"]
    assert searching.attributes == attributes and searching.option("mine") is True and searching.option("yours", 7) == 7


@pytest.mark.parametrize("key", sorted(ATTRIBUTES))
def test_option_named_like_an_attribute_raises_graph_error(key: str) -> None:
    p = Primitive("p", K.CALL, options=(("mine", 1), (key, "value")))
    with pytest.raises(GraphError, match=rf"says '{key}' as an option") as caught:
        Graph([p], Ref("p"))
    assert f"attributes=Attributes({key}=...)" in str(caught.value)
