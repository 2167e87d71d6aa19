"""A pool of small engines for the pool-backed LlamaIndex objects, and a record of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from support.llamaindex_engines import Library, library, own_loop, reply, settings
from support.scripted_llm import ScriptedLLM

from teola_plugin.engines.fake import FakeEmbedder, FakeReranker, FakeStore
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.driver.client_code import ClientCode

_names = (f"collection{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def shared_llm() -> ScriptedLLM:
    return ScriptedLLM()


@pytest.fixture(scope="module")
def pool(shared_llm: ScriptedLLM) -> Iterator[EnginePool]:
    engines = {"embedder": FakeEmbedder(), "reranker": FakeReranker(), "store": FakeStore()}
    with EnginePool.local({"llm": shared_llm, **engines}) as made:
        yield made


@pytest.fixture
def llm(shared_llm: ScriptedLLM) -> ScriptedLLM:
    """The engine behind `TeolaLLM`, fresh for the test."""
    shared_llm.__init__()  # type: ignore[misc]
    return shared_llm


@pytest.fixture
def collection() -> str:
    return next(_names)


@pytest.fixture
def payloads(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The payloads of all calls of the pool, in order."""
    found: list[Any] = []
    call = pool.runtime.call

    def noted(kind: Any, engine: str, payloads: Any, **kwargs: Any) -> Any:
        found.extend(payloads)
        return call(kind, engine, payloads, **kwargs)

    monkeypatch.setattr(pool.runtime, "call", noted)
    return found


# ------------------------------------------------------------ engines over an index


@pytest.fixture(scope="module")
def stock(pool: EnginePool, request: pytest.FixtureRequest) -> Iterator[Library]:
    """An index, and what engines are made of."""
    made = library(pool, request.module.__name__)
    with settings(made.llm):
        yield made


@pytest.fixture
def loop_of_the_thread() -> Iterator[None]:
    """LlamaIndex's sync code takes the thread's loop, or makes one that it never closes."""
    with own_loop():
        yield


@pytest.fixture
def scripted(llm: ScriptedLLM) -> None:
    """The engine says what `reply` says."""
    llm.answer = reply


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the client runs as soon as its inputs are there. On threads, with engines that take no time, the plain
    object may be the first to ask, and then nothing can be said of what the graph asks for."""
    run = ClientCode.run

    def short(self: ClientCode, query: str, function: Any, then: Any, **_: bool) -> None:
        run(self, query, function, then, is_short=True)

    monkeypatch.setattr(ClientCode, "run", short)
