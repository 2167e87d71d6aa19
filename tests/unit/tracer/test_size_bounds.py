"""Tests of bounds on the work of functions: those without a bound are user code, the others keep to it."""

from __future__ import annotations

import json
import os
import re
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
    filter_messages,
    get_buffer_string,
    merge_message_runs,
    message_to_dict,
    messages_to_dict,
    trim_messages,
)
from langchain_core.messages.utils import count_tokens_approximately

from teola_plugin.tracer.purity.abstract_values import MAX_FACTOR
from teola_plugin.tracer.purity.interpreter import step_bound
from teola_plugin.tracer.purity.purity import analyze_purity, plain_size

SEPARATOR = "\n"
COUNTING_MODEL = FakeListChatModel(responses=["1"])


class OwnMessage(HumanMessage):
    """A message whose class may do anything."""


def growing(x: Any) -> Any:
    text = ""
    for one in x:
        text = text + one + text
    return text


def shrinking(x: Any) -> Any:
    while x:
        x = x[1:]
    return x


def for_ever(x: Any) -> Any:
    while True:
        if x:
            return x


def doubling(x: Any) -> Any:
    a = x + x + x + x + x + x + x + x + x + x
    b = a + a + a + a + a + a + a + a + a + a
    c = b + b + b + b + b + b + b + b + b + b
    d = c + c + c + c + c + c + c + c + c + c
    e = d + d + d + d + d + d + d + d + d + d
    return e + e + e + e + e + e + e + e + e + e


def doubled_constant(x: Any) -> Any:
    a = "-" * 1000
    b = a + a + a + a + a + a + a + a + a + a
    c = b + b + b + b + b + b + b + b + b + b
    d = c + c + c + c + c + c + c + c + c + c
    return x + d


def doubled_field(x: Any) -> Any:
    a = "----------"
    b = f"{a}{a}{a}{a}{a}{a}{a}{a}{a}{a}"
    c = f"{b}{b}{b}{b}{b}{b}{b}{b}{b}{b}"
    d = f"{c}{c}{c}{c}{c}{c}{c}{c}{c}{c}"
    e = f"{d}{d}{d}{d}{d}{d}{d}{d}{d}{d}"
    return x + e + e


def squaring(x: Any) -> Any:
    a = [c + x for c in x]
    b = [c + d for c in a for d in a]
    return [c + d for c in b for d in b]


def calling_itself(x: Any) -> Any:
    return calling_itself(x[1:]) + calling_itself(x[2:]) if x else 1


def ping(x: Any) -> Any:
    return pong(x[1:]) if x else x


def pong(x: Any) -> Any:
    return ping(x)


def guarded(x: Any) -> Any:
    try:
        return x["a"]
    except KeyError:
        return re.sub("(a+)+$", "", x)


def changing(x: Any) -> Any:
    text = x

    def doubled() -> Any:
        return text + text

    text = doubled() + text
    return doubled()


UNBOUNDED: dict[str, Callable[[Any], Any]] = {
    "while": shrinking,
    "while true": for_ever,
    "a loop that accumulates": growing,
    "recursion": calling_itself,
    "recursion of two": ping,
    "a function that is given itself": lambda x: (lambda f: f(f))(lambda f: (f(f), f(f))),  # type: ignore[misc]
    "a function that is given itself, with an end": lambda x: (lambda f: f(f, x))(
        lambda f, y: (f(f, y[1:]), f(f, y[1:])) if y else 0
    ),
    "an iterator without an end": lambda x: [y for y in iter(int, 1)],
    "re.findall": lambda x: re.findall("(a+)+$", x),
    "re.sub": lambda x: re.sub("(a+)+$", "", x),
    "re.split": lambda x: re.split("(a+)+$", x),
    "re.match": lambda x: re.match("(a+)+$", x),
    "a repetition before something": lambda x: re.search(r"a+b", x),
    "a repetition of a repetition": lambda x: re.findall(r"a++", x),
    "a lazy repetition": lambda x: re.findall(r"a+?", x),
    "a pattern with an alternative": lambda x: re.split("a|b", x),
    "a pattern with options": lambda x: re.sub("a", "b", x, flags=re.VERBOSE),
    "a pattern of the input": lambda x: re.sub(x["pattern"], "", x["text"]),
    "a pattern after a class of brackets": lambda x: re.findall(r"[]x](a+)+$", x),
    "a replacement that repeats": lambda x: re.sub("a", r"\g<0>" * 9, x),
    "a replacement of the input": lambda x: re.sub("a", x, x),
    "a replacement by a function": lambda x: re.sub("a", lambda match: "b", x),
    "a large range": lambda x: list(range(10**9)),
    "a range of the input": lambda x: [1 for _ in range(x["n"])],
    "ranges of a map": lambda x: list(map(range, x)),
    "a large product": lambda x: x * 10**9,
    "a large list": lambda x: [0] * (10**9 + x),
    "a product of two values": lambda x: x["a"] * x["b"],
    "a power": lambda x: x**x,
    "a power of two values": lambda x: x["a"] ** x["b"],
    "a shift": lambda x: 1 << x,
    "zfill": lambda x: x.zfill(10**9),
    "zfill of the input": lambda x: x["a"].zfill(x["n"]),
    "ljust": lambda x: x.ljust(10**9),
    "center": lambda x: x.center(10**9),
    "expandtabs": lambda x: x.expandtabs(10**9),
    "a wide field": lambda x: f"{x:1000000000}",
    "a precise field": lambda x: f"{x:.999999999f}",
    "a field as wide as the input says": lambda x: f"{x['a']:{x['n']}}",
    "a wide format": lambda x: "{:999999999}".format(x),  # noqa: UP032
    "a template of the input": lambda x: x["template"].format(1),
    "a format that looks into values": lambda x: "{0.__class__}".format(x),  # noqa: UP030, UP032
    "percent": lambda x: "%999999999d" % x["n"],  # noqa: UP031
    "percent of the input": lambda x: x["text"] % 3,
    "round to very many digits": lambda x: round(x, -(10**9)),
    "round as the input says": lambda x: round(x["a"], x["n"]),
    "three loops over the same": lambda x: [a for a in x for b in x for c in x],
    "a comprehension in a comprehension in a comprehension": lambda x: [[[c for c in x] for b in x] for a in x],
    "a map in a map in a map": lambda x: list(map(lambda a: list(map(lambda b: [c for c in x], x)), x)),
    "a sum of lists of squares": lambda x: sum([[a + b for b in x] for a in x], []),  # noqa: RUF017
    "replaced by the input, twice": lambda x: x.replace("a", x).replace("b", x),
    "joined by the input, twice": lambda x: x.join(x).join(x),
    "json with a wide indent": lambda x: json.dumps(x, indent=10**9),
    "json with a hook": lambda x: json.loads(x, object_hook=lambda d: d),
    "json with another encoder": lambda x: json.dumps(x, default=str),
    "messages trimmed by a model": lambda x: trim_messages(x, max_tokens=3, token_counter=COUNTING_MODEL),
    "messages trimmed by a counter without a bound": lambda x: trim_messages(x, max_tokens=3, token_counter=shrinking),
    "messages trimmed by a counter of squares": lambda x: trim_messages(
        x, max_tokens=3, token_counter=lambda messages: len([(a, b) for a in messages for b in messages])
    ),
    "messages trimmed by a splitter": lambda x: trim_messages(
        x, max_tokens=3, token_counter=len, text_splitter=shrinking
    ),
    "messages that come later": lambda x: (x, filter_messages(include_types="human")),
    "messages merged": lambda x: merge_message_runs(x),
    "a class of messages of your own": lambda x: [m for m in x if isinstance(m, OwnMessage)],
    "doubling": doubling,
    "a constant text doubled": doubled_constant,
    "a field of a constant text doubled": doubled_field,
    "a wide rule": lambda x: "-" * 10**9 + x,
    "joined by a long separator that is the input": lambda x: x.join([x.join(x)]).join(x),
    "squares of squares": squaring,
    "a handler of errors": guarded,
    "a function whose variable changes": changing,
    "a name that is set too late": lambda x: [b for a in x if b for b in a],  # noqa: F821
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_function_without_a_bound_is_user_code(name: str) -> None:
    assert analyze_purity(UNBOUNDED[name]) is None


def first_with_text(x: Any) -> Any:
    for one in x:
        if one:
            return f"{one!r:>10}"
    return None


def either(x: Any) -> Any:
    if len(x) > 2:
        chosen = x[0]
    else:
        chosen = "none"
    return f"{chosen}!"


def flattened(x: Any) -> Any:
    return [c for text in x for c in text if c != " "]


def joined_in_place(x: Any) -> Any:
    x = ", ".join(text.strip() for text in x)
    return x.split(", ")


def first_line_of_any(x: Any) -> Any:
    for text in x:
        for line in text.split("\n"):
            if line:
                return {"line": line, "all": x}
    return x


BOUNDED: dict[str, Callable[[Any], Any]] = {
    "joined": lambda x: SEPARATOR.join(x),
    "lines": lambda x: [line.strip() for text in x for line in text.split("\n") if line.strip()],
    "lines, joined, split, joined": lambda x: "; ".join([a for a in ", ".join(x).split(",") if a]),
    "numbered": lambda x: "\n".join(f"[{i}] {text}" for i, text in enumerate(x, 1)),
    "by length": lambda x: sorted(x, key=lambda text: len(text), reverse=True)[:3],
    "by key": lambda x: {text: text.upper() for text in x},
    "pairs": lambda x: [(a, b) for a in x for b in x],
    "with the whole": lambda x: [text + SEPARATOR.join(x) for text in x],
    "by index": lambda x: [x[i] for i in range(len(x))],
    "mapped": lambda x: list(map(str.strip, x)),
    "filtered": lambda x: list(filter(None, x)),
    "in json": lambda x: json.dumps(x),
    "in json, indented": lambda x: json.dumps(x, indent=2, ensure_ascii=False),
    "quoted": lambda x: f"{x}",
    "quoted twice": lambda x: repr(repr(x)),
    "formatted": lambda x: f"Q: {x} A: {x!r}",
    "escaped": lambda x: [t.replace("&", "&amp;").replace("<", "&lt;").replace("", "--") for t in x],
    "between rules": lambda x: ("\n" + "-" * 40 + "\n").join(x),
    "between rules, numbered": lambda x: f"\n{'=' * 30}\n".join([f"{i}: {t}" for i, t in enumerate(x, start=1)]),
    "joined by each": lambda x: [text.join(x) for text in x],
    "joined by the whole": lambda x: "".join(x).join(x),
    "joined characters": lambda x: ("=" * 20).join("".join(x)),
    "joined pieces": lambda x: ("=" * 20).join("".join(x).split("a")),
    "joined items of a dictionary": lambda x: ("=" * 20).join(f"{k}{v}" for k, v in {t: t for t in x}.items()),
    "joined cut list": lambda x: ("=" * 20).join(sorted(x)[:5] or ["none", "of", "them"]),
    "joined chosen items": lambda x: ("=" * 20).join(filter(None, map(str.strip, reversed(x)))),
    "joined pairs": lambda x: ("=" * 20).join(b for a in x for b in (a, "b", a)),
    "joined starred items": lambda x: ("=" * 20).join(["first", *x, *x]),
    "joined sum of lists": lambda x: ("=" * 20).join(["first"] + x + x),  # noqa: RUF005
    "joined keys": lambda x: ("=" * 20).join({t: 1 for t in x} | {"k": 1}),
    "repeated, then joined": lambda x: ("=" * 20).join(["a"] * 30 + x),
    "rounded": lambda x: [round(len(text) / 7, 3) for text in x],
    "three times": lambda x: [text * 3 for text in x] * 3,
    "as often as there are": lambda x: "-" * len(x),
    "zipped": lambda x: [a + b for a, b in zip(x, reversed(x), strict=True)],
    "added": lambda x: {"a": x, "n": len(x), "all": [*x, *x]},
    "sums of lists": lambda x: sum([[text] for text in x], []),  # noqa: RUF017
    "early return": first_with_text,
    "early return of two loops": first_line_of_any,
    "joined in place": joined_in_place,
    "filled in": lambda x: "%s of %s" % (x, len(x)),  # noqa: UP031
    "unpacked": lambda x: (*("a", "b"), *x, -1, +len(x)),
    "either": either,
    "flattened": flattened,
    "distinct": lambda x: list({t: t for t in x}.values()),
    "without space": lambda x: [re.sub(r"\s+", "--", text) for text in x],
    "between characters": lambda x: re.sub(r"\d*", "<number>", "".join(x)),
    "numbers": lambda x: [re.findall(r"\d+", text) for text in x],
    "parts": lambda x: [re.split(r"[,;\]]*", text) for text in x],
    "first number": lambda x: [match.group() for text in x if (match := re.search(r"\d+", text))],
    "dedented": lambda x: textwrap.dedent("\n".join(f"  {text}" for text in x)),
    "a number": lambda x: f"{len(x) / 3:.2f} {round(len(x) * 0.5, 1):>8}",
}


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=200 if os.environ.get("TEOLA_TEST_LONG") else 8, deadline=None)
@given(texts=st.lists(st.text(max_size=12), max_size=12))
def test_result_size_does_not_exceed_the_bound(name: str, texts: list[str]) -> None:
    most = 10**9
    found = step_bound(BOUNDED[name])  # type: ignore[arg-type]
    assert found is not None and found.degree <= 2
    assert plain_size(BOUNDED[name](texts), most) <= found.factor * plain_size(texts, most) ** found.degree


MESSAGES = st.lists(
    st.one_of(
        st.text(max_size=30).map(HumanMessage),
        st.builds(SystemMessage, st.text(max_size=12), name=st.text(max_size=5)),
        st.lists(st.text(max_size=9).map(lambda text: {"type": "text", "text": text}), max_size=3).map(HumanMessage),
        st.text(max_size=9).map(
            lambda text: AIMessage(text, tool_calls=[{"name": text, "args": {text: [text, "&<\x00"]}, "id": text}])
        ),
        st.text(max_size=9).map(lambda text: ToolMessage(text, tool_call_id="1")),
    ),
    max_size=8,
)


def first_words(messages: Any) -> int:
    return sum(len(message.content) // 4 + 1 for message in messages)


ON_MESSAGES: dict[str, Callable[[Any], Any]] = {
    "printed": lambda x: get_buffer_string(x),
    "printed with long names": lambda x: get_buffer_string(x, "Person" * 20, message_separator="-" * 50),
    "printed as XML": lambda x: get_buffer_string(x, format="xml"),
    "printed last ones": lambda x: get_buffer_string(x[-4:], human_prefix="User", ai_prefix="Assistant"),
    "printed prettily": lambda x: "\n".join(m.pretty_repr() for m in x),
    "chosen by class": lambda x: [m for m in x if isinstance(m, (HumanMessage, AIMessage))],
    "converted": lambda x: convert_to_messages(x),
    "filtered by type": lambda x: filter_messages(x, include_types=[HumanMessage, "ai"], exclude_ids=("1",)),
    "filtered by tool calls": lambda x: filter_messages(x, exclude_tool_calls=True),
    "as dictionaries": lambda x: messages_to_dict(x),
    "the first as a dictionary": lambda x: message_to_dict(x[0]) if x else None,
    "trimmed to a number": lambda x: trim_messages(x, max_tokens=3, token_counter=len, include_system=True),
    "trimmed by a name": lambda x: trim_messages(x, max_tokens=9, token_counter="approximate", start_on="human"),
    "trimmed by a counter of LangChain": lambda x: trim_messages(
        x, max_tokens=9, token_counter=count_tokens_approximately, strategy="first", end_on=HumanMessage
    ),
    "trimmed by a counter": lambda x: trim_messages(x, max_tokens=3, token_counter=first_words, allow_partial=True),
}


@pytest.mark.parametrize("name", ON_MESSAGES)
@settings(max_examples=200 if os.environ.get("TEOLA_TEST_LONG") else 8, deadline=None)
@given(messages=MESSAGES)
def test_size_of_converted_messages_does_not_exceed_the_bound(name: str, messages: list[BaseMessage]) -> None:
    most = 10**9
    bound = step_bound(ON_MESSAGES[name])  # type: ignore[arg-type]
    assert bound is not None and bound.degree <= 2
    assert plain_size(ON_MESSAGES[name](messages), most) <= bound.factor * plain_size(messages, most) ** bound.degree


def test_parts_of_trimmed_messages_are_counted_again_and_again() -> None:
    def trimmed(x: Any) -> Any:
        return trim_messages(x, max_tokens=3, token_counter="approximate", allow_partial=True)

    bound = step_bound(trimmed)  # type: ignore[arg-type]
    assert bound is not None and bound.degree == 2


def documents_between_rules(x: Any) -> Any:
    separator = "\n" + "-" * 80 + "\n"
    return separator.join(
        [
            f"[{i}] {one.get('title', 'Untitled')} - {one.get('source', 'unknown')}, page {one.get('page', '?')}, "
            f"relevance {round(one.get('score', 0.0), 3)}\n{one['content'][:500] + '...'}"
            for i, one in enumerate(x, 1)
        ]
    )


def test_bound_of_formatted_documents_is_far_below_the_limit() -> None:
    bound = step_bound(documents_between_rules)  # type: ignore[arg-type]
    assert bound is not None
    assert (bound.degree, bound.factor < MAX_FACTOR / 10) == (1, True)


def test_search_for_a_bound_takes_limited_time() -> None:
    """Functions that call functions that call functions: each is looked into, up to a limit."""
    source = ["def f0(x): return [x]"] + [f"def f{i}(x): return [f{i - 1}(x), f{i - 1}(x)]" for i in range(1, 19)]
    made: dict[str, Any] = {}
    exec("\n".join(source), made)
    begun = time.process_time()
    assert analyze_purity(made["f18"]) is None
    assert time.process_time() - begun < 10
