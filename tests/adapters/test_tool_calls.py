"""Tests of tool calls parsed from a model's text, from the whole text and while it is being written."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teola_plugin.adapters.tool_calls import Call, CallReader, read

NAMES = ("add", "find")


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(edges)]


def calls_from(pieces: list[str]) -> list[Call]:
    reader = CallReader(NAMES)
    return [call for piece in pieces for call in reader.feed(piece)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(['"', "{[", "\\", "é\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
ARGS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
CALLS = st.builds(
    lambda name, key, args, indent: (Call(name, args), json.dumps({"name": name, key: args}, indent=indent)),
    st.sampled_from(NAMES),
    st.sampled_from(["arguments", "parameters"]),
    ARGS,
    st.sampled_from([None, 2]),
)
PROSE = st.text('ab {}[]"<>,\n', max_size=8).filter(lambda text: not text.strip().startswith(("{", "[")))
SPACE = st.text(" \n", max_size=2)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Call], str]:
    """Draw tool calls, and a text that spells them in one of the formats of models."""
    made = draw(st.lists(CALLS, min_size=1, max_size=4))
    around = draw(SPACE)
    way = draw(st.sampled_from(["one", "list", "tags", "tagged list", "open"]))
    if way == "one":
        made = made[:1]
        return [made[0][0]], around + made[0][1] + around
    items = "[" + f",{around}".join(["1", '"see {"', *(raw for _, raw in made), '{"name": "other"}']) + "]"
    if way == "list":
        return [call for call, _ in made], around + items
    if way == "tagged list":
        return [call for call, _ in made], f"{draw(PROSE)}<tool_call>{around}{items}</tool_call>{around}"
    text = draw(PROSE) + "".join(f"<tool_call>{around}{raw}{around}</tool_call>{draw(PROSE)}" for _, raw in made)
    if way == "open":
        text = draw(PROSE) + "".join(f"<tool_call>{raw}</tool_call>" for _, raw in made[:-1])
        text += f"<tool_call>{made[-1][1]}{around}"
    return [call for call, _ in made], text


@settings(deadline=None)
@given(answer=answers(), places=st.lists(st.integers(0, 400), max_size=8))
def test_calls_read_from_pieces_equal_those_of_the_whole_answer(
    answer: tuple[list[Call], str], places: list[int]
) -> None:
    calls, text = answer
    assert read(text, NAMES)[1] == calls == calls_from(cut(text, places))


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "_call>", "{", "}", "[", "]", ",", '"', "\\", " ", "\n", "words"),
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "find", "parameters": {}}',
        '{"name": "add", "arguments": {"t": "<tool_call>{}</tool_call>"}}',
        '{"name": "other", "arguments": {}}',
        '{"name": ["add"], "arguments": {}}',
    ]
)


@settings(deadline=None, max_examples=300)
@given(text=st.lists(FRAGMENTS, max_size=8).map("".join), places=st.lists(st.integers(0, 400), max_size=8))
def test_calls_read_from_a_text_do_not_depend_on_pieces(text: str, places: list[int]) -> None:
    found = calls_from([text])
    assert calls_from(cut(text, places)) == found
    for call in read(text, NAMES)[1]:
        found.remove(call)


@pytest.mark.parametrize(
    ("pieces", "closed"),
    [
        (['{"name": "add", "argu', 'ments": {"a": 1}', "}"], [0, 0, 1]),
        (["<tool", '_call>{"name": "add", "arguments": {}}', "</tool_call>"], [0, 1, 0]),
        (['[{"name": "add", "arguments": {}}', ', {"name": "find", "arguments": {}}', "]"], [1, 1, 0]),
        (["I say }", '{"name": "add", "arguments": {}}'], [0, 0]),
        (['{"name": "add"}', '{"name": "add", "arguments": {}}'], [0, 0]),
    ],
)
def test_call_reader_returns_a_call_when_its_json_closes(pieces: list[str], closed: list[int]) -> None:
    reader = CallReader(NAMES)
    assert [len(reader.feed(piece)) for piece in pieces] == closed


@pytest.mark.parametrize("text", ["[" * 5000, '{"a":' * 5000, "<tool_call>" + "[" * 5000, "<tool_call>" + " " * 50_000])
def test_too_deep_or_unfinished_json_is_no_call(text: str) -> None:
    """And takes no time: the pattern that was read with before looked at white space again and again."""
    assert read(text, NAMES) == (text, []) and calls_from([text]) == []


def test_call_arguments_may_contain_tags() -> None:
    written: dict[str, Any] = {"name": "add", "arguments": {"t": "a <tool_call> b"}}
    assert read(json.dumps(written), NAMES) == ("", [Call("add", {"t": "a <tool_call> b"})])
