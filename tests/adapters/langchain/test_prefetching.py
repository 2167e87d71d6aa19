"""Tests of prefetched calls of the user's own models: in the form that the original uses, and claimed once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from support.provider_models import Model, Server

from teola_plugin import accelerate, uninstall
from teola_plugin.adapters.langchain.prefetch_plan import unread_sites
from teola_plugin.graph import Attributes, Graph, Primitive, PrimitiveKind, Ref, named
from teola_plugin.observe.steps import PROVIDER
from teola_plugin.shims.langchain_interceptors import live_scopes

INPUT = {"q": "why"}


def three_questions(server: Server, model: Callable[..., Any] = Model) -> Any:
    """Return a chain of two independent calls and one that needs both."""
    ask = ChatPromptTemplate.from_template
    one, two, three = (model(server=server, label=label) for label in ("one", "two", "three"))
    return (
        RunnablePassthrough.assign(a=ask("first {q}") | one | StrOutputParser())
        | RunnablePassthrough.assign(b=ask("second {q}") | two | StrOutputParser())
        | ask("{a} {b}")
        | three
        | StrOutputParser()
    )


class Streamed(BaseCallbackHandler, _StreamingCallbackHandler[Any]):
    """A handler that models stream to."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.tokens.append(str(token))

    def tap_output_iter(self, run_id: Any, output: Any) -> Any:
        return output

    def tap_output_aiter(self, run_id: Any, output: Any) -> Any:
        return output


async def _all(items: Any) -> list[Any]:
    return [item async for item in items]


async def _events(chain: Any) -> list[Any]:
    left_out = ("run_id", "parent_ids")
    events = await _all(chain.astream_events(INPUT, version="v2"))
    return [
        (event["event"], event["name"], event["tags"], str(event["data"].get("chunk"))[:20])
        for event in events
        if not any(key in event["data"] for key in left_out)
    ]


def _with_events(call: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def run(chain: Any) -> Any:
        handler = Streamed()
        return call(chain, {"callbacks": [handler]}), handler.tokens

    return run


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda chain: chain.invoke(INPUT),
    "ainvoke": lambda chain: asyncio.run(chain.ainvoke(INPUT)),
    "stream": lambda chain: list(chain.stream(INPUT)),
    "astream": lambda chain: asyncio.run(_all(chain.astream(INPUT))),
    "astream_events": lambda chain: asyncio.run(_events(chain)),
    "batch": lambda chain: chain.batch([INPUT, {"q": "when"}]),
    "abatch": lambda chain: asyncio.run(chain.abatch([INPUT, {"q": "when"}])),
    "invoke, heard as it streams": _with_events(lambda chain, config: chain.invoke(INPUT, config)),
    "ainvoke, heard as it streams": _with_events(lambda chain, config: asyncio.run(chain.ainvoke(INPUT, config))),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_prefetched_provider_calls_equal_the_originals_and_overlap(entry: str) -> None:
    plain, fast = Server(), Server()

    expected = ENTRIES[entry](three_questions(plain))
    result = ENTRIES[entry](accelerate(three_questions(fast)))

    assert result == expected
    assert fast.calls == plain.calls
    assert fast.most_at_once >= 2


def test_first_chunk_reaches_the_caller_before_the_model_ends() -> None:
    ended: list[float] = []

    class Slow(Model):
        def _stream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            yield from super()._stream(messages, *args, **kwargs)
            time.sleep(1.0)
            ended.append(time.monotonic())

    ask = ChatPromptTemplate.from_template
    chain = RunnablePassthrough.assign(a=ask("first {q}") | Model() | StrOutputParser()) | RunnablePassthrough.assign(
        b=ask("second {q}") | Slow() | StrOutputParser()
    )
    for _ in accelerate(chain).stream(INPUT):
        if ended:
            break
        first = time.monotonic()
    assert first < ended[0] - 0.5


def test_model_with_overridden_invoke_is_not_prefetched() -> None:
    entered: list[str] = []

    class Own(Model):
        def invoke(self, *args: Any, **kwargs: Any) -> Any:
            entered.append(self.label)
            return super().invoke(*args, **kwargs)

    plain, fast = Server(), Server()
    expected = three_questions(plain, Own).invoke(INPUT)
    entered.clear()

    assert accelerate(three_questions(fast, Own)).invoke(INPUT) == expected
    assert entered == ["one", "two", "three"]
    assert fast.calls == plain.calls


def test_rate_limiter_is_acquired_once_per_call() -> None:
    class Counting(InMemoryRateLimiter):
        calls = 0

        def acquire(self, *, blocking: bool = True) -> bool:
            Counting.calls += 1
            return True

    server = Server()
    accelerate(three_questions(server, lambda **fields: Model(rate_limiter=Counting(), **fields))).invoke(INPUT)
    assert Counting.calls == 3


def test_call_site_with_wasted_prefetch_is_no_longer_prefetched() -> None:
    def chain(server: Server) -> Any:
        ask = ChatPromptTemplate.from_template

        class Changes(BaseCallbackHandler):
            """Changes what the second model is asked, above the seam."""

            def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
                for message in messages[0]:
                    if message.content.startswith("second"):
                        message.content = "changed"

        chain = RunnablePassthrough.assign(a=ask("first {q}") | Model(server=server)) | RunnablePassthrough.assign(
            b=ask("second {q}") | Model(server=server)
        )
        return accelerate(chain), {"callbacks": [Changes()]}

    server = Server()
    fast, config = chain(server)
    for _ in range(4):
        fast.invoke(INPUT, config)
    assert server.calls["_generate", "changed"] == 4
    assert server.calls["_generate", "second why"] <= 1
    assert "no longer prefetched" in fast.explain(details=True)


def test_uninstall_stops_prefetching_until_the_next_accelerate() -> None:
    server = Server()
    chain = three_questions(server)
    fast = accelerate(chain)
    uninstall()
    assert fast.invoke(INPUT) == chain.invoke(INPUT)
    assert server.most_at_once == 1
    accelerate(chain)
    fast.invoke(INPUT)
    assert server.most_at_once == 2


async def test_ended_and_cancelled_queries_leave_no_live_scope() -> None:
    fast = accelerate(three_questions(Server()))
    await fast.ainvoke(INPUT)
    task = asyncio.create_task(fast.ainvoke(INPUT))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while live_scopes:
            await asyncio.sleep(0.01)


class Started(BaseCallbackHandler):
    """Notes the questions that models are started with."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
        self.questions.append(messages[0][-1].content)


class Asking(Model):
    """A model that asks another one, and hands on no callbacks: the framework's ambient config says who listens."""

    other: BaseChatModel

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        self.other.invoke(f"again {messages[-1].content}")
        return super()._generate(messages, *args, **kwargs)

    async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        await self.other.ainvoke(f"again {messages[-1].content}")
        return await super()._agenerate(messages, *args, **kwargs)


@pytest.mark.parametrize("on_loop", [False, True])
def test_handlers_get_calls_nested_in_a_prefetched_call(on_loop: bool) -> None:
    def questions(accelerated: bool) -> list[str]:
        other = Model()
        chain = three_questions(Server(), lambda **fields: Asking(other=other, **fields))
        app, handler = accelerate(chain) if accelerated else chain, Started()
        if on_loop:
            asyncio.run(app.ainvoke(INPUT, {"callbacks": [handler]}))
        else:
            app.invoke(INPUT, {"callbacks": [handler]})
        return handler.questions

    assert questions(accelerated=True) == questions(accelerated=False)


def test_prefetched_call_has_tags_and_metadata_of_model_and_caller() -> None:
    reached: list[tuple[set[str], dict[str, Any]]] = []

    class Noting(Model):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
            own = {key: run_manager.metadata.get(key) for key in ("of_model", "of_caller", "ls_model_type")}
            reached.append((set(run_manager.tags) & {"model", "caller"}, own))
            return super()._generate(messages, stop, run_manager, **kwargs)

    chain = three_questions(Server(), lambda **fields: Noting(tags=["model"], metadata={"of_model": 1}, **fields))
    accelerate(chain).invoke(INPUT, {"tags": ["caller"], "metadata": {"of_caller": 2}})

    expected = {"model", "caller"}, {"of_model": 1, "of_caller": 2, "ls_model_type": "chat"}
    assert reached == [expected] * 3


def test_call_site_with_several_calls_is_read_if_any_is() -> None:
    def call(name: str, **inputs: Ref) -> Primitive:
        attributes = Attributes(wrapped="ask")
        return Primitive(name, PrimitiveKind.PREFILLING, PROVIDER, inputs=named(**inputs), attributes=attributes)

    two_calls = Graph([call("first", value=Ref("$input")), call("second", value=Ref("first"))], Ref("second"))
    one_call = Graph([call("first", value=Ref("$input"))], Ref("first"))
    traced: Any = SimpleNamespace(report=())

    assert unread_sites(two_calls, traced) == frozenset()
    assert unread_sites(one_call, traced) == {"ask"}
