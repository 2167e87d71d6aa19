"""Tests of `with_request_context` in all ways to reach the pool: streamed, nested, and after failed planning."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from support.llamaindex_engines import Library, library, reply, settings
from support.recording import Arrival, arrivals

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.engines.fake.base import Faults
from teola_plugin.errors import QueryTimeout, RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate

pytestmark = pytest.mark.usefixtures("loop_of_the_thread")
ASKED = "what is there"
NODES = [NodeWithScore(node=TextNode(text=f"node {i}"), score=0.5) for i in range(3)]
Seen = list[Arrival]


@pytest.fixture(scope="module")
def own() -> Iterator[EnginePool]:
    model = FakeLLM(answer=lambda prompt, _: reply(Generate(prompt)))
    with EnginePool.local([model, FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        yield pool


@pytest.fixture(scope="module")
def stock(own: EnginePool) -> Iterator[Library]:
    made = library(own, "terms everywhere")
    with settings(made.llm):
        yield made


@pytest.fixture(scope="module")
def all_seen(own: EnginePool, stock: Library) -> Seen:
    return arrivals(own)


@pytest.fixture
def seen(all_seen: Seen) -> Seen:
    all_seen.clear()
    return all_seen


async def _aread(fast: Any) -> str:
    made = await fast.aquery(ASKED)
    return "".join([piece async for piece in made.response_gen])


async def _atalked(fast: Any) -> str:
    made = await fast.astream_chat(ASKED)
    return "".join([piece async for piece in made.async_response_gen()])


def _talk(x: Library) -> Any:
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    return CondenseQuestionChatEngine.from_defaults(x.fused("tree_summarize"), llm=x.llm, memory=memory)


def _synthesizer(x: Library) -> Any:
    return get_response_synthesizer(llm=x.llm, response_mode="refine")  # type: ignore[arg-type]


Ask = Callable[[Any], Any]
ENTRIES: dict[str, tuple[Callable[[Library], Any], Ask]] = {
    "query": (lambda x: x.fused(), lambda fast: fast.query(ASKED)),
    "aquery": (lambda x: x.fused(), lambda fast: asyncio.run(fast.aquery(ASKED))),
    "reranked": (lambda x: x.rag(node_postprocessors=[x.reranker]), lambda fast: fast.query(ASKED)),
    "engine.retrieve": (lambda x: x.fused(), lambda fast: fast.retrieve(_bundle())),
    "engine.synthesize": (lambda x: x.fused(), lambda fast: fast.synthesize(_bundle(), NODES)),
    "retrieve": (lambda x: x.fusion(), lambda fast: fast.retrieve(ASKED)),
    "aretrieve": (lambda x: x.fusion(), lambda fast: asyncio.run(fast.aretrieve(ASKED))),
    "synthesize": (_synthesizer, lambda fast: fast.synthesize(ASKED, NODES)),
    "asynthesize": (_synthesizer, lambda fast: asyncio.run(fast.asynthesize(ASKED, NODES))),
    "get_response": (_synthesizer, lambda fast: fast.get_response(ASKED, ["a", "b"])),
    "streamed": (
        lambda x: x.fused("refine", streaming=True),
        lambda fast: "".join(fast.query(ASKED).response_gen),
    ),
    "streamed, async": (lambda x: x.fused("refine", streaming=True), lambda fast: asyncio.run(_aread(fast))),
    "chat": (_talk, lambda fast: fast.chat(ASKED)),
    "stream_chat": (_talk, lambda fast: "".join(fast.stream_chat(ASKED).response_gen)),
    "astream_chat": (_talk, lambda fast: asyncio.run(_atalked(fast))),
    "achat": (_talk, lambda fast: asyncio.run(fast.achat(ASKED))),
}


def _bundle() -> Any:
    from llama_index.core.schema import QueryBundle

    return QueryBundle(ASKED)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("name", ENTRIES)
def test_request_context_reaches_every_engine(
    name: str, planned: bool, own: EnginePool, stock: Library, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, ask = ENTRIES[name]
    fast = accelerate(make(stock)).with_request_context(tenant="acme", app="library", weight=2.0)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no plan today")

    if not planned:
        monkeypatch.setattr(own, "plan", refuse)
        monkeypatch.setattr(own.runtime, "watch", refuse)
    ask(fast)
    assert seen and {(one.tenant, one.app, one.weight) for one in seen} == {("acme", "library", 2.0)}


@pytest.mark.parametrize("planned", [True, False])
def test_nested_engine_with_a_tenant_uses_that_tenant(
    planned: bool, own: EnginePool, stock: Library, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, same = accelerate(stock.rag()).with_request_context(tenant="beta"), accelerate(stock.rag(), app="inner")

    class Nesting(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            marks.append(len(seen))
            other.query(query_str)
            marks.append(len(seen))
            return str(same.query(query_str))

    marks: list[int] = []
    fast = accelerate(Nesting(), pool=own).with_request_context(tenant="acme", weight=3.0)
    if not planned:

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("no plan today")

        monkeypatch.setattr(own.runtime, "watch", refuse)
        monkeypatch.setattr(own, "plan", refuse)
    fast.query(ASKED)
    assert {(one.tenant, one.weight) for one in seen[marks[0] : marks[1]]} == {("beta", 3.0)}
    assert {(one.tenant, one.weight) for one in seen[marks[1] :]} == {("acme", 3.0)}


@pytest.mark.parametrize("given", [{"deadline_s": "soon"}, {"weight": "heavy"}, {"weight": -1}])
def test_invalid_request_context_raises_and_names_the_key(given: dict[str, Any], stock: Library) -> None:
    with pytest.raises(RegistrationError, match=next(iter(given))):
        accelerate(stock.rag()).with_request_context(**given)


class Slow(CustomQueryEngine):
    """A query engine of the user's own code only."""

    def custom_query(self, query_str: str) -> str:
        time.sleep(0.15)
        return "late"

    async def acustom_query(self, query_str: str) -> str:
        await asyncio.sleep(30)
        return "late"


def test_answer_after_the_deadline_raises_query_timeout(own: EnginePool) -> None:
    for fast in (accelerate(Slow(), pool=own), accelerate(Slow())):
        late = fast.with_request_context(deadline_s=0.1)
        with pytest.raises(QueryTimeout, match="deadline"):
            late.query(ASKED)
        with pytest.raises(QueryTimeout, match="deadline"):
            asyncio.run(asyncio.wait_for(late.aquery(ASKED), 10))


def test_deadline_applies_if_planning_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(request: Any) -> bool:
        return isinstance(request.payload, Generate)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no plan today")

    model = FakeLLM(faults=Faults(hang_on=hangs))
    with EnginePool.local([model, FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        stock = library(pool, "late everywhere")
        fast = accelerate(stock.rag()).with_request_context(deadline_s=0.2)
        monkeypatch.setattr(pool, "plan", refuse)
        with settings(stock.llm), pytest.raises(QueryTimeout, match="deadline"):
            fast.query(ASKED)
