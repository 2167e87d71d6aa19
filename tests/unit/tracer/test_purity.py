"""Tests of which small functions count as pure. Their arguments are checked when they run."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document

from teola_plugin.tracer.purity.purity import Purity, analyze_purity, cached_purity, call_on_plain, is_plain

SEPARATOR, SHARED = "\n", [1]


def formatted(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def numbered(documents: list[Document]) -> str:
    return SEPARATOR.join([f"[{i}] {d.metadata['source']}: {d.page_content}" for i, d in enumerate(documents, 1)])


def key_reader(key: str) -> Callable[[Any], Any]:
    return lambda x: x[key].split(SEPARATOR)


def setting(x: Any) -> Any:
    x["a"] = 1
    return x


def extending(x: Any) -> Any:
    y = x["items"]
    y += [1]
    return y


def endless(x: Any) -> Any:
    return endless(x)


def generating(x: Any) -> Any:
    yield x


async def waiting(x: Any) -> Any:
    return x


class Callable_:
    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda x: x, Purity(None, ())),
        (lambda x: x["q"], Purity(("q",), ("q",))),
        (lambda x: x["a"]["b"][0], Purity(("a",), ("a", "b", 0))),
        (lambda x: x["a"] + x["b"], Purity(("a", "b"))),
        (lambda _: "constant", Purity(())),
        (lambda x: formatted(x["context"]), Purity(("context",))),
        (lambda x: {"q": x["q"], "c": formatted(x["c"])}, Purity(("q", "c"))),
        (lambda x: [q.strip() for q in x["t"].split("\n") if q.strip()], Purity(("t",))),
        (lambda x: [x["a"] for _ in range(3)], Purity(None)),
        (lambda x: sorted(x["d"], key=lambda d: d.metadata["s"], reverse=True)[:3], Purity(("d",))),
        (lambda x: json.loads(x.content)["items"], Purity(None)),
        (lambda x: not x.get("chat_history", False), Purity(None)),
        (key_reader("k"), Purity(None)),
        (formatted, Purity(None)),
        (json.loads, Purity(None)),
        (numbered, Purity(None)),
    ],
)
def test_pure_function_gets_its_purity_and_reads(function: Any, reads: Purity) -> None:
    assert analyze_purity(function) == reads


@pytest.mark.parametrize(
    "function",
    [
        setting, extending, endless, generating, waiting, Callable_(), len, str.upper,
        lambda x: os.getcwd(), lambda x: random.random(), lambda x: print(x), lambda x: x.append(1), lambda x: SHARED,
        lambda x: x.invoke("q"), lambda x: __import__(x), lambda x: x.__class__,
        lambda x, y=1: x, lambda *x: x, lambda: 1, lambda x: (yield x), lambda x: [y for y in x if y.pop()],
        lambda x: (lambda: os.remove(x))(), lambda x: eval(x), lambda x: unknown_name(x),  # noqa: F821
    ],
)  # fmt: skip
def test_possibly_impure_function_is_not_pure(function: Any) -> None:
    assert analyze_purity(function) is None


def test_is_plain_accepts_standard_values_only() -> None:
    class Own(dict[str, Any]):
        pass

    assert is_plain({"a": [1, "b", (None, 2.0)], "d": Document("x")})
    assert not is_plain({"a": [Own()]})
    assert not is_plain(object())
    assert not is_plain(Document("x", metadata={"a": Own()}))


def test_value_too_large_to_inspect_is_not_plain() -> None:
    shared: list[Any] = ["x"]
    for _ in range(60):
        shared = [shared, shared]
    endless: list[Any] = []
    endless.append(endless)
    for value in (shared, "x" * 2_000_000, 1 << 100_000):
        assert not is_plain(value)
    with pytest.raises((TypeError, RecursionError)):
        call_on_plain(len, endless)


def test_a_function_of_higher_degree_is_computed_on_small_values_only() -> None:
    def pairs(x: Any) -> Any:
        return [(a, b) for a in x for b in x]

    found = analyze_purity(pairs)
    assert found is not None and found.degree == 2
    assert call_on_plain(pairs, ["a", "b"], found.degree) == [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    with pytest.raises(TypeError, match="too large"):
        call_on_plain(pairs, ["x"] * 100_000, found.degree)


def test_purity_cache_distinguishes_closures_by_their_values() -> None:
    def reader(key: Any) -> Callable[[Any], Any]:
        return lambda x: x[key] * key

    assert cached_purity(reader(2)) == cached_purity(reader(2)) == Purity(None)  # type: ignore[arg-type]
    assert cached_purity(reader(10**9)) is None  # type: ignore[arg-type]
    assert cached_purity(reader([1])) is None  # type: ignore[arg-type]
    assert cached_purity(reader(True)) is not None  # type: ignore[arg-type]


def test_shadowed_builtin_makes_a_function_impure() -> None:
    made: dict[str, Any] = {"len": os.remove}
    exec("f = lambda x: len(x)", made)
    assert analyze_purity(made["f"]) is None
