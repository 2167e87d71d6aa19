"""Small versions of the problems that langchain-core's own tests found (`make test-upstream`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.language_models import FakeListLLM
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableGenerator, RunnableLambda

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.accelerated import calls_of
from teola_plugin.pool import EnginePool
from teola_plugin.shims.langchain import inline_callback
from teola_plugin.tracer.langchain.classes import has_own_run


class PlainHandler(BaseCallbackHandler):
    """An ordinary handler: neither async nor inline."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.names.append("start")

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.names.append("end")


async def test_handler_gets_llm_start_and_end(pool: EnginePool) -> None:
    handler = PlainHandler()
    fast = accelerate(PromptTemplate.from_template("{x}") | FakeListLLM(responses=["a"]), pool=pool)
    assert await fast.ainvoke({"x": 1}, {"callbacks": [handler]}) == "a"
    assert handler.names == ["start", "end"]


async def test_astream_events_include_llm_start(pool: EnginePool) -> None:
    chain = PromptTemplate.from_template("{x}") | FakeListLLM(responses=["a"])

    async def names(one: Runnable[Any, Any]) -> list[str]:
        return [event["event"] async for event in one.astream_events({"x": 1}, version="v2")]

    assert "on_llm_start" in await names(chain)
    assert await names(accelerate(chain, pool=pool)) == await names(chain)


class Noted(BaseCallbackHandler):
    def __init__(self) -> None:
        self.loops: list[bool] = []

    @inline_callback
    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.loops.append(asyncio._get_running_loop() is not None)


async def test_inline_handler_method_runs_on_the_thread_of_its_event() -> None:
    noted = Noted()
    await AsyncCallbackManager.configure([noted]).on_llm_start({}, ["x"])
    CallbackManager.configure([noted]).on_llm_start({}, ["x"])  # a sync call on the loop
    await asyncio.to_thread(CallbackManager.configure([noted]).on_llm_start, {}, ["x"])
    assert noted.loops == [True, True, False]


@pytest.mark.parametrize("way", ["astream", "astream_events"])
@pytest.mark.parametrize("pooled", [True, False])
async def test_abandoned_stream_is_closed_immediately(way: str, pooled: bool, pool: EnginePool) -> None:
    closed = False

    async def count(given: AsyncIterator[Any]) -> AsyncIterator[int]:
        nonlocal closed
        try:
            for i in range(9):
                yield i
                await asyncio.sleep(0)
        finally:
            closed = True

    fast = accelerate(RunnableGenerator(count), pool=pool if pooled else None)
    version = {"version": "v2"} if way == "astream_events" else {}
    stream = getattr(fast, way)("x", **version)
    async for item in stream:
        if way == "astream" or item["event"] == "on_chain_stream":
            break
    await stream.aclose()
    assert closed


class Keeps(Runnable[Any, Any]):
    """Keeps the config of each call."""

    def __init__(self) -> None:
        self.configs: list[Any] = []

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        self.configs.append(config)
        return input


@pytest.mark.parametrize("inputs", [["a"], ["a", "b"]])
async def test_batch_as_completed_passes_the_configs_of_the_original(inputs: list[str]) -> None:
    leaf = Keeps()
    chain = leaf.with_config(tags=["t"])
    for one in (chain, accelerate(chain)):
        list(one.batch_as_completed(inputs, {"metadata": {"k": "v"}}))
        [done async for done in one.abatch_as_completed(inputs, {"metadata": {"k": "v"}})]
    half = len(leaf.configs) // 2
    assert leaf.configs[half:] == leaf.configs[:half]


def test_query_on_a_pool_adds_at_most_one_callback_handler(pool: EnginePool) -> None:
    leaf = Keeps()
    chain = leaf.with_config(tags=["t"])
    config = RunnableConfig(metadata={"k": "v"})
    for one in (chain, accelerate(chain), accelerate(chain, pool=pool)):
        one.invoke("a", config)
    list(accelerate(chain, pool=pool).stream("a", config))
    plain, without, only_traced, streamed = leaf.configs
    assert without == only_traced == plain and not plain.get("callbacks")
    added = streamed.pop("callbacks")
    assert len(added) == 1 and streamed == {key: value for key, value in plain.items() if key != "callbacks"}


def _only_sync(given: Iterator[Any]) -> Iterator[Any]:
    yield from given


async def _only_async(given: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for one in given:
        yield one


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    ("function", "missing", "there"), [(_only_sync, "astream", "stream"), (_only_async, "stream", "")]
)
def test_runnable_generator_without_sync_or_async_form_raises(
    function: Callable[..., Any], missing: str, there: str, pooled: bool, pool: EnginePool
) -> None:
    fast = accelerate(RunnableGenerator(function), pool=pool if pooled else None)
    with pytest.raises(NotImplementedError):
        getattr(fast, missing)("x")
    if there:
        assert list(getattr(fast, there)("x")) == ["x"]


async def test_transform_runs_the_bound_chain(pool: EnginePool) -> None:
    fast = accelerate(RunnableLambda(lambda x: x + 1), pool=pool)
    calls_of(fast)._chain = RunnableLambda(lambda x: x + 2)
    assert list(fast.transform(iter([1]))) == [3]

    async def given() -> AsyncIterator[int]:
        yield 1

    assert [one async for one in fast.atransform(given())] == [3]


def test_model_with_patched_method_has_no_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeListLLM(responses=["a"])
    assert has_own_run(model)

    def spy(*args: Any, **kwargs: Any) -> Any: ...

    spy.__module__ = None  # type: ignore[assignment]  # as pytest-mock's are
    monkeypatch.setattr(FakeListLLM, "invoke", spy)
    assert not has_own_run(model)
    assert accelerate(PromptTemplate.from_template("{x}") | model).report().parts
