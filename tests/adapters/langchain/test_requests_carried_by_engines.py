"""Tests of `ChatOpenAI` requests that an engine sends: headers, credentials, errors and limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel
from langchain_openai import ChatOpenAI
from support.deadlines import HOURS, expire_deadlines_when
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.recording import arrivals

from teola_plugin import accelerate
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.errors import (
    EngineOverloaded,
    EngineUnavailable,
    QueryCancelled,
    QueryTimeout,
    RegistrationError,
    TeolaError,
)
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.loop_thread import CallHandle

Chain = Runnable[Any, Any]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
QUESTION = {"question": "what is a primitive?"}


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIStub]:
    with openai_stub() as stub:
        yield stub


@pytest.fixture
def stub(server: OpenAIStub) -> OpenAIStub:
    server.requests.clear()
    server.headers.clear()
    server.go.clear()
    return server


@pytest.fixture(scope="module")
def pool(server: OpenAIStub) -> Iterator[EnginePool]:
    engine = OpenAIServer(base_url=server.base_url, api_key="the-engines", prefix_caching=True, calibrate=False)
    with EnginePool.local(llm=engine) as made:
        yield made


def model(stub: OpenAIStub, key: str = "mine", **options: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"temperature": 0.0, "max_retries": 2, **options}
    return ChatOpenAI(base_url=stub.base_url, api_key=key, model=MODEL, **given)  # type: ignore[arg-type]


def asking(text: str, one: Any) -> Chain:
    return ChatPromptTemplate.from_template(text + " {question}") | one


async def _listed(chain: Chain, config: Any) -> list[Any]:
    return [chunk async for chunk in chain.astream(QUESTION, config)]


WAYS: dict[str, Callable[[Chain, Any], Any]] = {
    "invoke": lambda chain, config=None: chain.invoke(QUESTION, config),
    "ainvoke": lambda chain, config=None: asyncio.run(chain.ainvoke(QUESTION, config)),
    "stream": lambda chain, config=None: list(chain.stream(QUESTION, config)),
    "astream": lambda chain, config=None: asyncio.run(_listed(chain, config)),
}


# ------------------------------------------------------------ what goes with a request


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
def test_bound_openai_model_sends_images_as_the_original(way: str, pool: EnginePool, stub: OpenAIStub) -> None:
    """`ChatTeola` refuses them; a bound `ChatOpenAI` writes the request itself."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    parts = [{"type": "text", "text": "See: {question}"}, picture]
    one = model(stub)
    chain: Chain = ChatPromptTemplate.from_messages([("human", parts)]) | one
    WAYS[way](chain, None)
    fast = accelerate(chain, pool=pool, bind=[(one, "llm")])
    WAYS[way](fast, None)
    plain, carried = ([m["content"] for m in body["messages"]] for _, body in stub.requests)
    assert carried == plain and carried[0][1]["image_url"]["url"] == picture["image_url"]["url"]


def _sent_requests(stub: OpenAIStub) -> set[tuple[str, str | None, str | None]]:
    """Return path, key and team of each request."""
    paths = [path for path, _ in stub.requests]
    return {(p, h.get("authorization"), h.get("x-team")) for p, h in zip(paths, stub.headers, strict=True)}


@pytest.mark.parametrize("way", WAYS)
def test_bound_models_of_one_engine_keep_own_keys_and_headers(way: str, pool: EnginePool, stub: OpenAIStub) -> None:
    """Two objects ask one engine the same: neither is answered with what was asked for the other."""
    one = model(stub, "first", default_headers={"X-Team": "a"})
    two = model(stub, "second", default_query={"region": "north"})
    chain = RunnableParallel(one=asking("hi", one), two=asking("hi", two))
    plain = WAYS[way](chain, None)
    expected = _sent_requests(stub)
    assert expected == {
        ("/v1/chat/completions", "Bearer first", "a"),
        ("/v1/chat/completions?region=north", "Bearer second", None),
    }
    stub.requests.clear()
    stub.headers.clear()
    seen = arrivals(pool)
    fast = accelerate(chain, pool=pool, bind=[(one, "llm"), (two, "llm")])
    made = WAYS[way](fast, None)
    assert _sent_requests(stub) == expected and len(stub.requests) == 2 and len(seen) >= 2
    if way in ("invoke", "ainvoke"):
        assert [made[key].content for key in made] == [plain[key].content for key in plain]


def test_request_to_another_address_skips_the_engine(pool: EnginePool, stub: OpenAIStub) -> None:
    own = model(stub)
    fast = accelerate(asking("hi", own), pool=pool, bind=[(own, "llm")])
    served = fast.chain.steps[-1]  # type: ignore[attr-defined]
    served.root_client.base_url = stub.base_url.replace("/v1", "/other/v1")
    seen = arrivals(pool)
    served.invoke("hello")
    assert [path for path, _ in stub.requests] == ["/other/v1/chat/completions"] and seen == []


def test_headers_of_a_custom_http_client_are_sent(pool: EnginePool, stub: OpenAIStub) -> None:
    import httpx

    own = model(stub, http_client=httpx.Client(headers={"X-Team": "b"}))
    fast = accelerate(asking("hi", own), pool=pool, bind=[(own, "llm")])
    fast.invoke(QUESTION)
    assert {header.get("x-team") for header in stub.headers} == {"b"}


@pytest.mark.parametrize("way", ["ainvoke", "stream"])
def test_api_keys_appear_in_no_error_trace_or_log(
    way: str, pool: EnginePool, stub: OpenAIStub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "teola_plugin")
    with EnginePool.local(
        llm=OpenAIServer(base_url=stub.base_url, prefix_caching=True, calibrate=False), details=True
    ) as own_pool:
        own = model(stub, "sesame", default_headers={"X-Key": "sesame"}, max_retries=0)
        for text in ("hi", "refuse"):
            fast = accelerate(asking(text, own), pool=own_pool, bind=[(own, "llm")])
            try:
                WAYS[way](fast, None)
            except Exception as error:
                assert "sesame" not in f"{error!r} {error} {error.__cause__!r}"
            trace = fast.last_trace()
            assert trace is not None and "sesame" not in repr(trace)
            assert "sesame" not in fast.explain(QUESTION, details=True)
    assert "sesame" not in caplog.text


def test_url_credentials_appear_in_no_error_trace_or_log(stub: OpenAIStub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "teola_plugin")
    secret = stub.base_url.replace("http://", "http://ann:sesame@")
    engine = OpenAIServer(base_url=secret, calibrate=False)
    own = ChatOpenAI(base_url=secret, api_key="mine", model=MODEL)  # type: ignore[arg-type]
    chain = asking("hi", own)
    with EnginePool.local(llm=engine) as pool:
        fast = accelerate(chain, pool=pool, bind=[(own, "llm")])
        fast.invoke(QUESTION)
        chain.invoke(QUESTION)
        theirs, plain = (header.get("authorization") for header in stub.headers)
        assert theirs == plain and str(theirs).startswith("Basic ")
        explanation = fast.explain(details=True)
        shown = f"{engine!r} {vars(pool)} {pool.versions()} {pool.profiles} {explanation} {fast.last_trace()!r}"
        other = ChatOpenAI(base_url=secret + "/x", api_key="mine", model=MODEL)  # type: ignore[arg-type]
        with pytest.raises(RegistrationError, match="talks to") as refused:
            accelerate(asking("hi", other), pool=pool, bind=[(other, "llm")])
    gone = OpenAIServer(base_url="http://ann:sesame@127.0.0.1:9/v1")
    with pytest.raises(EngineUnavailable) as down:
        EnginePool.local(llm=gone).start()
    assert "sesame" not in f"{shown} {refused.value} {down.value} {down.value.__cause__!r} {caplog.text}"


# ------------------------------------------------------------ what becomes of it


@pytest.mark.parametrize("way", WAYS)
def test_request_past_its_deadline_is_not_retried(way: str, pool: EnginePool, stub: OpenAIStub) -> None:
    own = model(stub)
    fast = accelerate(asking("slowly", own), pool=pool, bind=[(own, "llm")])
    with expire_deadlines_when(pool, lambda: stub.requests), pytest.raises(QueryTimeout, match="deadline"):
        WAYS[way](fast, {"configurable": {"teola_deadline_s": HOURS}})
    assert len(stub.requests) == 1


OURS: dict[str, TeolaError] = {
    "timeout": QueryTimeout("query q did not end before its deadline."),
    "cancelled": QueryCancelled("query q was cancelled."),
    "overloaded": EngineOverloaded("the queue is full."),
    "unavailable": EngineUnavailable("the engine died."),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("way", ["invoke", "astream"])
def test_error_of_the_pool_reaches_the_caller_without_retry(
    way: str, name: str, pool: EnginePool, stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, as it is, and nothing is sent past the engine."""
    own, calls = model(stub), 0
    fast = accelerate(asking("hi", own), pool=pool, bind=[(own, "llm")], passes=())

    def failing(*_: Any, **__: Any) -> CallHandle:
        nonlocal calls
        from concurrent.futures import Future

        calls += 1
        failed: Future[list[Any]] = Future()
        failed.set_exception(OURS[name])
        handle = CallHandle(failed)
        handle.pieces.close()
        return handle

    monkeypatch.setattr(pool, "call", failing)
    with pytest.raises(type(OURS[name])) as raised:
        WAYS[way](fast, None)
    assert raised.value is OURS[name] and calls == 1 and stub.requests == []


@pytest.mark.parametrize("way", ["ainvoke", "stream"])
def test_client_sends_request_if_engine_stopped_or_pool_closed(way: str, stub: OpenAIStub) -> None:
    own = model(stub)
    chain = asking("hi", own)
    with EnginePool.local(llm=OpenAIServer(base_url=stub.base_url, calibrate=False)) as pool:
        fast = accelerate(chain, pool=pool, bind=[(own, "llm")])
        pool.admin("llm", "stop").result(30)
        stopped = WAYS[way](fast, None)
    closed = WAYS[way](fast, None)
    assert len(stub.requests) == 2 and _content(stopped) == _content(closed) == _content(WAYS[way](chain, None))


def _content(value: Any) -> str:
    return "".join(one.content for one in value) if isinstance(value, list) else str(value.content)


@pytest.mark.parametrize("way", ["invoke", "astream"])
def test_unreachable_server_raises_the_error_of_the_client(way: str) -> None:
    with openai_stub() as there:
        own = model(there, max_retries=0)
        chain = asking("hi", own)
        pool = EnginePool.local(llm=OpenAIServer(base_url=there.base_url, calibrate=False)).start()
    with pool:
        fast = accelerate(chain, pool=pool, bind=[(own, "llm")])
        errors = []
        for one in (chain, fast):
            with pytest.raises(Exception, match="Connection error") as raised:
                WAYS[way](one, None)
            errors.append(type(raised.value).__name__)
    assert errors[0] == errors[1]
