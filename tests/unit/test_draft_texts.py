"""Tests of the texts that an answer may repeat, as its request names them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.graph import GAP
from teola_plugin.requests.draft_texts import (
    MAX_TEXTS,
    calls_in,
    forms_of_labels,
    forms_of_list,
    forms_of_tools,
    texts_of,
)
from teola_plugin.requests.json_forms import MAX_FORMS, forms, forms_of_schema
from teola_plugin.requests.payloads import UNKNOWN, Generate, Message, Prompt, Sampling, SearchVector

TEXT = {"type": "string"}


def fits(form: str, text: str) -> bool:
    """Return True if the text is the form with its gaps filled."""
    at = 0
    first, *others = form.split(GAP)
    if not text.startswith(first):
        return False
    at = len(first)
    for part in others:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"a": TEXT, "n": {"type": "integer"}}}, {"a": "x", "n": 1}),
        ({"enum": ["yes", "no"]}, "no"),
        ({"const": 3}, 3),
        ({"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}, ["a", "b"]),
        ({"type": "object", "properties": {"to": {"enum": ["db", "web"]}, "why": TEXT}}, {"to": "web", "why": "so"}),
        ({"type": "object", "properties": {"of": {"$ref": "#/$defs/B"}}, "$defs": {"B": {"const": "b"}}}, {"of": "b"}),
        ({"anyOf": [TEXT, {"type": "null"}]}, None),
    ],
)
def test_some_form_of_a_schema_fits_a_valid_value(schema: Any, value: Any) -> None:
    found = forms_of_schema(json.dumps(schema))
    assert found and any(fits(form, json.dumps(value)) for form in found)
    assert any(fits(form, json.dumps(value, separators=(",", ":"))) for form in found)
    assert all(GAP in form for form in found)


@pytest.mark.parametrize("schema", ["", "{", "3", '{"type": "object"}', '{"$ref": "#/$defs/n"}', '{"type": "string"}'])
def test_a_schema_that_fixes_nothing_has_no_form(schema: str) -> None:
    assert forms_of_schema(schema) == ()


def test_recursive_schema_has_a_finite_form() -> None:
    tree = {"type": "object", "properties": {"name": TEXT, "next": {"$ref": "#/$defs/T"}}}
    [form] = forms({"$ref": "#/$defs/T", "$defs": {"T": tree}})
    assert form.startswith('{"name": "' + GAP)


WORDS = st.sampled_from(["type", "properties", "items", "anyOf", "enum", "$ref", "$defs", "minItems", "maxItems"])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["object", "array", "string", "#/$defs/items"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_any_schema_yields_a_bounded_number_of_forms(schema: Any) -> None:
    found = forms_of_schema(json.dumps(schema))
    assert len(found) <= 2 * MAX_FORMS and all(GAP in form for form in found)
    assert len(forms_of_tools(json.dumps(schema))) <= MAX_TEXTS


def test_each_tool_yields_forms_of_known_call_formats() -> None:
    tools = [{"function": {"name": name, "parameters": {"properties": {"city": TEXT}}}} for name in ("a", "b")]
    tools[0]["function"]["parameters"]["type"] = "object"
    found = forms_of_tools(json.dumps(tools))
    assert any(fits(form, '{"name": "a", "arguments": {"city": "Rome"}}') for form in found)
    assert any(fits(form, '{"name": "b", "parameters": {"city": "x"}}') for form in found)
    assert any(
        fits(form, 'Well.\n<tool_call>\n{"name": "b", "arguments": {"city": "x"}}\n</tool_call>') for form in found
    )
    assert len(found) == 8


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=ascii)
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"], ids=ascii)
def test_earlier_call_with_any_separator_but_line_ends_is_found(mark: str, end: str) -> None:
    call = json.dumps({"name": "a", "arguments": {"text": f"oats{mark}hay"}}, ensure_ascii=False)

    found = calls_in([Message("assistant", f"So.{end}{call}{end}")])

    assert found == (call,)


def test_earlier_calls_come_before_tool_forms_newest_first() -> None:
    calls = [json.dumps({"name": "a", "arguments": {"n": n}}) for n in range(6)]
    messages = [Message("assistant", f"So.\n{call}") for call in calls] + [Message("user", calls[0])]
    assert calls_in(messages) == tuple(reversed(calls))[:4]
    tools = json.dumps([{"function": {"name": "a"}}])
    request = Generate(Prompt(tuple(messages), tools=tools))
    assert texts_of(request) == (*calls_in(messages), *forms_of_tools(tools))


def test_only_greedy_generations_get_draft_texts() -> None:
    prompt = Prompt(text="x")
    assert texts_of(Generate(prompt, Sampling(json_schema='{"enum": ["a"]}'))) == ('"a"' + GAP,)
    assert texts_of(Generate(prompt, Sampling(temperature=0.1, json_schema='{"enum": ["a"]}'))) == ()
    assert texts_of(Generate(prompt)) == texts_of(SearchVector("c", (0.0,))) == ()


def test_labels_and_lists_have_draft_forms() -> None:
    assert forms_of_labels(["YES", "NO", "YES", ""]) == ("YES" + GAP, "NO" + GAP)
    assert fits(forms_of_list("numbered")[0][:12], "1. one\n2. two\n3. three")
    assert forms_of_list("comma") == forms_of_list("") == ()
    assert GAP == UNKNOWN, "what stands for unknown text in a prompt does so in a draft"
