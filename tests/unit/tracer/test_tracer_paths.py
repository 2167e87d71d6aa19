"""Tests of watched paths against real runs: every opaque node's value is where the template says."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.runnables.base import RunnableLike, coerce_to_runnable
from langchain_core.tools import tool
from support.own_code import with_side_effect

from teola_plugin.adapters.langchain.started_calls import PathTracker
from teola_plugin.graph import Role
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.langchain.trace import RunPath, trace


class Recorder(BaseCallbackHandler):
    """Records values by node path, as the accelerator's handler does."""

    run_inline = True

    def __init__(self) -> None:
        self.tracker = PathTracker()
        self.values: dict[RunPath, list[Any]] = {}

    def _start(
        self,
        serialized: Any,
        started_with: Any,
        *,
        run_id: Any,
        parent_run_id: Any = None,
        tags: Any = None,
        **kwargs: Any,
    ) -> None:
        self.tracker.add_run(run_id, parent_run_id, tags)

    def _end(self, output: Any, *, run_id: Any, **kwargs: Any) -> None:
        path = self.tracker.path(run_id)
        if path is not None:
            self.values.setdefault(path, []).append(output)

    def on_llm_end(self, response: Any, *, run_id: Any, **kwargs: Any) -> None:
        generation = response.generations[0][0]
        self._end(getattr(generation, "message", None) or generation.text, run_id=run_id)

    on_chain_start = on_chat_model_start = on_llm_start = on_retriever_start = on_tool_start = _start  # type: ignore[assignment]
    on_chain_end = on_retriever_end = on_tool_end = _end  # type: ignore[assignment]


class Retriever(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(f"about {query}")]


class Words(BaseOutputParser[list[str]]):
    def parse(self, text: str) -> list[str]:
        return text.split()


class Silent(Runnable[Any, Any]):
    """A Runnable without a run of its own: its inner run must not be taken for its value."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return RunnableLambda(lambda text: text.upper()).invoke(input, config) + "!"


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


def note(value: Any) -> None:
    RunnableLambda(len).invoke("a nested run")


@with_side_effect
def count(values: dict[str, Any]) -> int:
    return len(values)


MODEL = FakeListChatModel(responses=["one two"])
CHAINS: dict[str, tuple[RunnableLike[Any, Any], Any, dict[str, Any]]] = {
    "root": (RunnableLambda(count), {"q": 1}, {"count": 1}),
    "sequence": (
        RunnableLambda(with_side_effect(lambda x: x + 1)) | with_side_effect(lambda x: x * 2),
        1,
        {"lambda": 2, "lambda2": 4},
    ),
    "assign": (
        RunnablePassthrough.assign(a=itemgetter("q") | RunnableLambda(str.upper), n=count) | itemgetter("a"),
        {"q": "hi"},
        {"a": "HI", "n": 1},
    ),
    "nested keys": (
        RunnableParallel(x={"y": RunnableLambda(count), "z": itemgetter("q")}) | RunnableParallel(t=count),
        {"q": "hi"},
        {"x.y": 1, "t": 1},
    ),
    "bindings": (
        RunnableLambda(with_side_effect(lambda x: x + 1)).with_config(tags=["mine"], run_name="plus")
        | (RunnableLambda(with_side_effect(lambda x: x * 2)) | with_side_effect(lambda x: x - 1)).with_config(
            tags=["inner"]
        )
        | RunnableLambda(str).with_listeners(on_end=lambda run: None),
        3,
        {"lambda": 4, "lambda2": 8, "lambda3": 7, "str": "7"},
    ),
    "returned runnable": (
        RunnableLambda(lambda x: RunnableLambda(lambda y: y + 1) | (lambda y: y * 3))
        | {"n": with_side_effect(lambda x: x + 1)},
        1,
        {"lambda": 6, "n": 7},
    ),
    "foreign leaves": (
        {"docs": Retriever(), "text": MODEL | Words(), "plain": FakeListLLM(responses=["p"])},
        "hi",
        {"docs": [Document("about hi")], "text.parse": ["one", "two"], "plain": "p"},
    ),
    "model": (ChatPromptTemplate.from_template("{q}") | MODEL | StrOutputParser(), "hi", {"model": "one two"}),
    "choices": (
        {
            "b": RunnableBranch(
                (with_side_effect(lambda q: q == "hi"), with_side_effect(lambda q: "yes")),
                with_side_effect(lambda q: "no"),
            ),
            "f": RunnableLambda(with_side_effect(lambda q: q + 1)).with_fallbacks([RunnableLambda(len)]),
            "r": RunnableLambda(len).with_retry(),
            "t": shout,
            "m": RunnableLambda(list) | RunnableLambda(str.upper).map(),
        },
        "hi",
        {"b": "yes", "f": 2, "r": 2, "t": "HI", "m.list": ["h", "i"], "m.each": ["H", "I"]},
    ),
    "side effect": (RunnablePassthrough() | RunnablePassthrough(count) | count, {"q": 1}, {"passthrough": {"q": 1}}),
}


def invoke(chain: Runnable[Any, Any], value: Any, config: RunnableConfig) -> None:
    chain.invoke(value, config)


def stream(chain: Runnable[Any, Any], value: Any, config: RunnableConfig) -> None:
    list(chain.stream(value, config))


async def ainvoke(chain: Runnable[Any, Any], value: Any, config: RunnableConfig) -> None:
    await chain.ainvoke(value, config)


async def astream(chain: Runnable[Any, Any], value: Any, config: RunnableConfig) -> None:
    _ = [chunk async for chunk in chain.astream(value, config)]


async def observed(how: Callable[..., Any], chain: Runnable[Any, Any], value: Any) -> Recorder:
    recorder = Recorder()
    done = how(chain, value, {"callbacks": [recorder], "tags": ["app"]})
    if isinstance(done, Awaitable):
        await done
        await asyncio.sleep(0)
    return recorder


def opaque_names(traced: TraceResult) -> set[str]:
    return {c.name for c in traced.template.components if c.role is Role.OPAQUE}


def plain(value: Any) -> Any:
    return value.content if hasattr(value, "content") else value


@pytest.mark.parametrize("how", [invoke, stream, ainvoke, astream])
@pytest.mark.parametrize("name", list(CHAINS))
async def test_every_opaque_value_is_at_its_watched_path(name: str, how: Callable[..., Any]) -> None:
    chain, value, expected = CHAINS[name]
    chain = coerce_to_runnable(chain)
    traced = trace(chain)
    assert set(traced.watched.values()) == opaque_names(traced)
    recorder = await observed(how, chain, value)
    found = {component: recorder.values[path] for path, component in traced.watched.items()}
    # a fallback's own runnable reports to the same place, with the same value
    assert all(len(values) == 1 or (name == "f" and values[0] == values[1]) for name, values in found.items())
    assert {component: plain(found[component][0]) for component in expected} == expected


@pytest.mark.parametrize("how", [invoke, ainvoke])
async def test_paths_do_not_depend_on_what_surrounds_the_chain(how: Callable[..., Any]) -> None:
    chain = RunnablePassthrough.assign(n=count)
    recorder = Recorder()

    def inside(value: Any, config: RunnableConfig) -> Any:
        return chain.invoke(value, {"callbacks": [recorder]})

    async def ainside(value: Any, config: RunnableConfig) -> Any:
        return await chain.ainvoke(value, {"callbacks": [recorder]})

    outer = RunnablePassthrough() | RunnableLambda(inside, ainside)
    done = how(outer, {"q": 1}, {})
    if isinstance(done, Awaitable):
        await done
    assert recorder.values[("mapper", "map:key:n")] == [1]
    assert recorder.values[()] == [{"q": 1, "n": 1}]


def test_a_node_without_a_run_of_its_own_is_not_watched() -> None:
    traced = trace(Silent() | RunnableLambda(len))
    assert dict(traced.watched) == {("seq:step:2",): "len"}
    router = RouterRunnable({"a": RunnableLambda(len)})
    assert not trace(router).watched


def test_nothing_inside_a_map_is_watched() -> None:
    traced = trace(RunnableLambda(list) | RunnableLambda(len).map() | RunnableLambda(sum))
    assert sorted(traced.watched.values()) == ["each", "list", "sum"]


def test_runs_of_other_chains_have_no_path() -> None:
    tracker = PathTracker()
    root, child, stranger = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    assert tracker.add_run(root, uuid.uuid4(), ["seq:step:4"]) == ()
    assert tracker.add_run(child, root, ["app", "seq:step:1"]) == ("seq:step:1",)
    assert tracker.add_run(stranger, None, ["seq:step:1"]) is None
    assert tracker.add_run(uuid.uuid4(), stranger, ["seq:step:1"]) is None
    assert tracker.path(child) == ("seq:step:1",) and tracker.path("never seen") is None
