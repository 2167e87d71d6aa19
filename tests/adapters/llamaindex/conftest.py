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
    """Return the engine behind `TeolaLLM`, reset for the test."""
    shared_llm.__init__()  # type: ignore[misc]
    return shared_llm


@pytest.fixture
def collection() -> str:
    return next(_names)


@pytest.fixture
def payloads(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the payloads of all calls of the pool, in order."""
    recorded: list[Any] = []
    call = pool.runtime.call

    def record(kind: Any, engine: str, payloads: Any, **kwargs: Any) -> Any:
        recorded.extend(payloads)
        return call(kind, engine, payloads, **kwargs)

    monkeypatch.setattr(pool.runtime, "call", record)
    return recorded


# ------------------------------------------------------------ engines over an index


@pytest.fixture(scope="module")
def stock(pool: EnginePool, request: pytest.FixtureRequest) -> Iterator[Library]:
    """Create an index and the models from which engines are made."""
    stocked_library = library(pool, request.module.__name__)
    with settings(stocked_library.llm):
        yield stocked_library


@pytest.fixture
def loop_of_the_thread() -> Iterator[None]:
    """Close the event loop that LlamaIndex's sync code creates for the thread and leaves open."""
    with own_loop():
        yield


@pytest.fixture
def scripted(llm: ScriptedLLM) -> None:
    """Make the engine answer as `reply` does."""
    llm.answer = reply


@pytest.fixture
def immediate_client_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run code of the client as soon as its inputs are there, instead of on threads.

    With engines that take no time, the original could otherwise be faster than its plan, and a test could not tell what
    the plan requests.
    """
    run = ClientCode.run

    def short(self: ClientCode, query: str, function: Any, then: Any, **_: bool) -> None:
        run(self, query, function, then, is_short=True)

    monkeypatch.setattr(ClientCode, "run", short)
