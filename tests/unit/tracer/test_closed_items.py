"""Tests that items closed early equal those of the frameworks' parsers, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_classic.retrievers.multi_query import LineListOutputParser
from langchain_core.output_parsers import (
    BaseOutputParser,
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    MarkdownListOutputParser,
    NumberedListOutputParser,
)
from llama_index.core.output_parsers.selection import SelectionOutputParser

from teola_plugin.errors import RegistrationError
from teola_plugin.requests.items import ItemStream

PARSERS: dict[str, BaseOutputParser[Any]] = {
    "lines": LineListOutputParser(),
    "numbered": NumberedListOutputParser(),
    "markdown": MarkdownListOutputParser(),
    "comma": CommaSeparatedListOutputParser(),
    "json": JsonOutputParser(),
}
ALPHABET = {
    "lines": "ab \n\t",
    "numbered": "1.a \n",
    "markdown": "-*a \n",
    "comma": 'ab, "\n',
}


def read(kind: str, pieces: list[str]) -> list[Any]:
    stream = ItemStream(kind)
    items = [item for piece in pieces for item in stream.feed(piece)]
    return items + stream.finish()


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("kind", list(ALPHABET))
@settings(deadline=None)
@given(data=st.data())
def test_items_of_any_chunked_text_equal_the_parsers_result(kind: str, data: st.DataObject) -> None:
    text = data.draw(st.text(ALPHABET[kind], max_size=30))
    places = data.draw(st.lists(st.integers(0, 40), max_size=8))
    assert read(kind, cut(text, places)) == PARSERS[kind].parse(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    items=st.lists(VALUES, max_size=5),
    indent=st.sampled_from([None, 2]),
    shape=st.sampled_from(["{}", '{{"note": "see [1] and \\" too", "queries": {}}}', "```json\n{}\n```"]),
    places=st.lists(st.integers(0, 200), max_size=8),
)
def test_json_items_equal_the_parsed_array(items: list[Any], indent: int | None, shape: str, places: list[int]) -> None:
    text = shape.format(json.dumps(items, indent=indent))
    parsed = JsonOutputParser().parse(text)
    assert read("json", cut(text, places)) == (parsed["queries"] if isinstance(parsed, dict) else parsed)


@pytest.mark.parametrize(
    ("kind", "pieces", "closed"),
    [
        ("json", ['["q o', 'ne", "q t', 'wo"', "]"], [[], ["q one"], ["q two"], []]),
        ("json", ['[{"q": 1', "}", ", 2", "3", ", 4]"], [[], [{"q": 1}], [], [], [23, 4]]),
        ("lines", ["a", "\n", "b ", "\nc"], [[], ["a"], [], ["b "]]),
        ("numbered", ["1. a", "b\n2", ". c\n"], [[], ["ab"], ["c"]]),
        ("markdown", ["- a\n", "- b"], [["a"], []]),
        ("comma", ['x, "a', ', b", c'], [["x"], ["a, b"]]),
        (
            "choices",
            ['[{"choice": 1', ', "reason": "choice', ": 4, as", '"}, {choice: 2', "\n", "}]"],
            [[], [1], [], [], [2], []],
        ),
    ],
)
def test_item_is_emitted_only_once_it_is_closed(kind: str, pieces: list[str], closed: list[Any]) -> None:
    stream = ItemStream(kind)
    assert [stream.feed(piece) for piece in pieces] == closed


@settings(deadline=None)
@given(
    choices=st.lists(st.tuples(st.integers(0, 120), st.text('ab :,{}[]"\\choie12', max_size=12)), max_size=4),
    indent=st.sampled_from([None, 2]),
    shape=st.sampled_from(["{}", "Choice: 3 fits\n{}", "```json\n{}\n```"]),
    order=st.sampled_from([1, -1]),
    places=st.lists(st.integers(0, 200), max_size=8),
)
def test_choices_equal_those_of_the_parsed_selection(
    choices: list[tuple[int, str]], indent: int | None, shape: str, order: int, places: list[int]
) -> None:
    items = [dict([("choice", number), ("reason", reason)][::order]) for number, reason in choices]
    text = shape.format(json.dumps(items, indent=indent))
    parsed: Any = SelectionOutputParser().parse(text)
    assert read("choices", cut(text, places)) == [answer.choice for answer in parsed.parsed_output]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"choice": "2", "reason": "3"}', [2]),
        ('{"choice": "the 2nd", "reason": "a", "choice": 1 }', [1]),
        ('{"choice": 2.5, "multi_choice": 3, "choices": 4}', []),
        ('{"choice": -1, "choice" : 0}', [0]),
        ('[{"a": [{"choice":3}]}]', [3]),
        ("choice: 1", []),
        ("{choice: 1", []),
        ("[{'choice': 12, reason: x}]", []),
    ],
)
def test_only_whole_numbers_of_choices_are_read(text: str, found: list[int]) -> None:
    assert read("choices", [text]) == found


def test_json_with_raw_newlines_and_escapes_is_read() -> None:
    assert read("json", ['["a\nb", "c\\n\\u00e9\\"", "']) == ["a\nb", 'c\né"', ""]


def test_truncated_array_ends_as_the_parser_ends_it() -> None:
    assert read("json", ['{"queries": ["a", "b c']) == JsonOutputParser().parse('{"queries": ["a", "b c')["queries"]


def test_prose_without_an_array_gives_nothing() -> None:
    assert read("json", ['Sure, it\'s "fine" {x}.']) == []


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(RegistrationError, match="numbered"):
        ItemStream("numbers")
