"""Tests of parts that a branch, a router, a fallback or a function chooses: each is planned when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.runnables.base import RunnableEach

from benchmarks.rag import apps
from teola_plugin import accelerate
from teola_plugin.adapters.langchain.accelerate import with_parts
from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.engines import profiles

Chain = Runnable[Any, Any]
GIVEN = {"question": apps.QUESTION, "document": apps.document()[:12_000], "key": "rag", "input": None}


@pytest.fixture(scope="module")
def bench() -> Iterator[apps.Bench]:
    made = apps.fake_pool(profiles.scaled(profiles.rtx3090(), 0.02))
    with made.pool:
        yield made


def chosen(x: dict[str, Any]) -> bool:
    CHOICES.append(x["key"])
    return bool(x["key"] == "rag")


CHOICES: list[str] = []


def choosing(rag: Chain, other: Chain) -> dict[str, Callable[[], Chain]]:
    """Return every way to choose between two chains at run time."""

    def route(x: dict[str, Any]) -> Chain:
        return rag if chosen(x) else other

    async def aroute(x: dict[str, Any]) -> Chain:
        return route(x)

    def failing(x: dict[str, Any]) -> Any:
        raise ValueError("as always")

    alternatives = rag.configurable_alternatives(ConfigurableField(id="which"), default_key="rag", other=other)  # type: ignore[attr-defined]
    return {
        "branch": lambda: RunnableBranch((chosen, rag), other),
        "default arm": lambda: RunnableBranch((lambda x: not chosen(x), other), rag),
        "function": lambda: RunnableLambda(route),
        "both kinds of function": lambda: RunnableLambda(route, afunc=aroute),
        "fallbacks": lambda: RunnableLambda(failing).with_fallbacks([rag]),
        "first of the fallbacks": lambda: rag.with_fallbacks([other]),
        "retry": lambda: rag.with_retry(),
        "router": lambda: (
            RunnableParallel(key=lambda x: x["key"], input=RunnablePassthrough())
            | RouterRunnable({"rag": rag, "no": other})
        ),
        "alternatives": lambda: alternatives,
        "inside a sequence": lambda: (
            RunnablePassthrough.assign(seen=lambda x: len(x)) | RunnableBranch((chosen, rag), other)
        ),
        "inside each other": lambda: RunnableBranch((chosen, RunnableLambda(route).with_retry()), other),
    }


NAMES = list(choosing(RunnablePassthrough(), RunnablePassthrough()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "batch"])
def test_subplan_of_the_chosen_chain_is_optimized(bench: apps.Bench, name: str, way: str) -> None:
    other = ChatPromptTemplate.from_template("{question}") | bench.model(10) | StrOutputParser()
    chain = choosing(apps.advanced_rag(bench, 10), other)[name]()
    fast = accelerate(chain, pool=bench.pool)
    if way == "invoke":
        plain, made = chain.invoke(GIVEN), fast.invoke(GIVEN)
    elif way == "ainvoke":
        plain, made = asyncio.run(chain.ainvoke(GIVEN)), asyncio.run(fast.ainvoke(GIVEN))
    elif way == "stream":
        plain, made = list(chain.stream(GIVEN)), list(fast.stream(GIVEN))
        plain, made = "".join(plain), "".join(made)
    else:
        plain, made = chain.batch([GIVEN, {**GIVEN, "key": "no"}]), fast.batch([GIVEN, {**GIVEN, "key": "no"}])
    assert made == plain
    traces = bench.pool.runtime.traces[-3:] if way == "batch" else [fast.last_trace()]
    names = {span.primitive for trace in traces if trace is not None for span in trace.spans}
    assert any(n.startswith("part1/") and "partial#" in n for n in names), names


def test_errors_inside_a_subplan_are_those_of_the_original(bench: apps.Bench) -> None:
    def broken(x: Any) -> Any:
        raise KeyError("mine")

    chain = RunnableBranch((chosen, RunnablePassthrough.assign(x=broken) | apps.advanced_rag(bench, 10)), broken)
    for given in (GIVEN, {**GIVEN, "key": "no"}):
        with pytest.raises(KeyError, match="mine"):
            accelerate(chain, pool=bench.pool).invoke(given)


@dataclass(frozen=True)
class Parts:
    """Applies `make` to the parts of a composite."""

    make: Callable[[Chain], Chain]

    def __call__(self, node: Chain, /) -> Chain:
        return self.make(node)

    def graph(self, node: Chain, /) -> Chain:
        return node

    def maps(self, node: RunnableEach[Any, Any], /) -> bool:
        return True


def test_composite_without_gain_is_returned_unchanged(bench: apps.Bench) -> None:
    def accelerated(node: Chain) -> Chain:
        raise AssertionError("not asked for")

    plain = ChatPromptTemplate.from_template("{question}") | bench.model(10)
    assert with_parts(plain, Parts(accelerated)) is plain
    mapped = plain.map()
    assert with_parts(mapped, Parts(accelerated)) is mapped
    same = RunnableBranch((chosen, plain), plain)
    assert with_parts(same, Parts(lambda node: node)) is same


def test_user_subclass_of_a_branch_is_returned_unchanged() -> None:
    class Mine(RunnableBranch[Any, Any]):
        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
            return "mine"

    chain = Mine((chosen, RunnablePassthrough()), RunnablePassthrough())
    assert with_parts(chain, Parts(lambda node: AcceleratedRunnable(bound=node))) is chain


def test_chain_returned_repeatedly_by_a_function_is_traced_once(bench: apps.Bench) -> None:
    rag = apps.advanced_rag(bench, 10)
    seen: list[Chain] = []

    def accelerated(node: Chain) -> Chain:
        seen.append(node)
        return node

    made = with_parts(RunnableLambda(lambda x: rag if chosen(x) else "text"), Parts(accelerated))
    assert isinstance(made, RunnableLambda)
    assert made.func(GIVEN) is rag and made.func(GIVEN) is rag and made.func({"key": "no"}) == "text"
    assert seen == [rag]
