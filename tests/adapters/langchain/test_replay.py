"""Tests of the events of a prefetched call: the same as without a prefetch, or none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import (
    AsyncCallbackHandler,
    BaseCallbackHandler,
    CallbackManager,
    adispatch_custom_event,
    dispatch_custom_event,
    get_usage_metadata_callback,
)
from langchain_core.globals import set_debug, set_llm_cache
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.context import collect_runs
from support.own_leaves import Chat, Ledger, Notes

from teola_plugin import accelerate

Chain = Runnable[Any, Any]
QUESTION = {"question": "why"}
BASES = (BaseCallbackHandler, AsyncCallbackHandler)


class Tree(BaseTracer):
    """A tracer that keeps whole run trees with metadata, as LangSmith gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[Any] = []

    def _persist_run(self, run: Any) -> None:
        self.roots.append(shape(run))


def shape(run: Any) -> Any:
    metadata = {k: v for k, v in (run.extra or {}).get("metadata", {}).items() if k != "revision_id"}
    children = sorted((shape(child) for child in run.child_runs), key=str)
    events = [e["name"] for e in run.events]
    return run.name, run.run_type, run.tags, metadata, str(run.error or "")[:40], events, children


class Streaming(Chat):
    """Streams inside whenever it is called, token by token."""

    streaming: bool = True

    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Iterator[Any]:
        self.ledger.work(f"{self.says}: {messages[-1].content}")
        for word in ("so ", "it ", "is"):
            chunk = ChatGenerationChunk(message=AIMessageChunk(word))
            if run_manager:
                run_manager.on_llm_new_token(word, chunk=chunk)
            yield chunk


class Rewriting(BaseRetriever):
    """A retriever that calls a model below itself, one in its own name and one of the ambient config, and speaks."""

    ledger: Any
    model: Any

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
        self.model.invoke(f"as a child: {query}", {"callbacks": run_manager.get_child("inner")})
        self.model.invoke(f"on its own: {query}")
        dispatch_custom_event("said", {"what": query})
        return Notes(ledger=self.ledger).invoke(query, {"callbacks": run_manager.get_child()})

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
        await self.model.ainvoke(f"as a child: {query}", {"callbacks": run_manager.get_child("inner")})
        await self.model.ainvoke(f"on its own: {query}")
        await adispatch_custom_event("said", {"what": query})
        return await Notes(ledger=self.ledger).ainvoke(query, {"callbacks": run_manager.get_child()})


def ask(text: str, model: Chain) -> Chain:
    return ChatPromptTemplate.from_template(text) | model


def chain_of(ledger: Ledger, second: Chain) -> Chain:
    """Return a chain whose second part is prefetched, because it depends on nothing.

    The first part waits until it runs.
    """
    first = ask("{question}", Chat(ledger=ledger, says="first"))
    return RunnablePassthrough.assign(a=first).assign(b=second) | RunnableLambda(lambda x: x["b"])


SECONDS = {
    "tags": lambda ledger: ask("b {question}", Chat(ledger=ledger, tags=["z", "a"], metadata={"k": 1}, name="B")),
    "bound": lambda ledger: ask(
        "b {question}", Chat(ledger=ledger).bind(stop=["x"]).with_config(tags=["t"], metadata={"m": 2}, run_name="R")
    ),
    "streaming": lambda ledger: ask("b {question}", Streaming(ledger=ledger, streaming=True)),
    "failing": lambda ledger: ask("b {question}", Chat(ledger=ledger, error="down")),
    "retriever": lambda ledger: (
        ask("{question}", Chat(ledger=ledger)) | StrOutputParser() | Notes(ledger=ledger, tags=["r"])
    ),
}


def call(chain: Chain, way: str, config: dict[str, Any]) -> Any:
    try:
        return chain.invoke(QUESTION, config) if way == "invoke" else asyncio.run(chain.ainvoke(QUESTION, config))
    except ValueError as error:
        return str(error)


def tree_of(chain: Chain, way: str) -> Any:
    tracer = Tree()
    call(chain, way, {"callbacks": [tracer], "tags": ["mine", "a"], "metadata": {"user": 7}, "run_name": "Root"})
    return tracer.roots


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("name", SECONDS)
def test_run_trees_with_a_claimed_call_equal_the_originals(name: str, way: str) -> None:
    alone, ledger = Ledger(), Ledger(meet=2)
    plain = tree_of(chain_of(alone, SECONDS[name](alone)), way)
    fast = accelerate(chain_of(ledger, SECONDS[name](ledger)))
    assert fast._prefetch_plan is not None
    assert tree_of(fast, way) == plain
    assert ledger.calls == alone.calls
    assert alone.most_at_once == 1 and ledger.most_at_once == 2


class Everything(BaseCallbackHandler):
    """Records every event of models, retrievers and users, with its parent's name, tags and metadata."""

    run_inline = True

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.seen: list[str] = []
        self.threads: set[int] = set()

    def _note(self, event: str, kwargs: dict[str, Any], what: Any = "") -> None:
        self.threads.add(threading.get_ident())
        run, parent = kwargs.get("run_id"), kwargs.get("parent_run_id")
        if "name" in kwargs:
            self.names[run] = kwargs["name"]
        meta = sorted(k for k in kwargs.get("metadata") or {})
        self.seen.append(
            f"{event} {self.names.get(run)} in {self.names.get(parent)} {kwargs.get('tags')} {meta} {what}"
        )

    def on_chain_start(self, *args: Any, **kwargs: Any) -> None:
        self.names[kwargs["run_id"]] = kwargs["name"]

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self._note("model", kwargs, messages[0][-1].content)

    def on_retriever_start(self, *args: Any, **kwargs: Any) -> None:
        self._note("retriever", kwargs)

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self._note("model end", kwargs)

    def on_retriever_end(self, *args: Any, **kwargs: Any) -> None:
        self._note("retriever end", kwargs)

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self._note(f"custom {name}", kwargs)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_events_below_a_claimed_call_equal_the_originals(way: str) -> None:
    """Children of the leaf's run, and runs and events of the ambient config, whose parent is the plain sequence's."""

    def seen(make: Any) -> list[str]:
        handler = Everything()
        call(make, way, {"callbacks": [handler], "tags": ["mine"], "metadata": {"user": 7}})
        return handler.seen

    alone, ledger = Ledger(), Ledger(meet=2)

    def rewriting(own: Ledger) -> Chain:
        return itemgetter("question") | Rewriting(ledger=own, model=Chat(ledger=own, name="M"))

    plain = seen(chain_of(alone, rewriting(alone)))
    assert seen(accelerate(chain_of(ledger, rewriting(ledger)))) == plain
    assert ledger.most_at_once == 2 and any("custom said" in one for one in plain)


@pytest.mark.parametrize("base", BASES)
async def test_handlers_get_the_events_of_a_claimed_call_in_order(base: type[Any]) -> None:
    events: list[str] = []

    class Handler(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            for event, text in (("on_chat_model_start", "start"), ("on_llm_end", "end")):
                setattr(self, event, self._hears(lambda *_, text=text: text))
            self.on_llm_new_token = self._hears(lambda token: token)

        def _hears(self, text: Any) -> Any:
            def hear(*args: Any, **_: Any) -> None:
                events.append(text(*args))

            async def ahear(*args: Any, **_: Any) -> None:
                events.append(text(*args))

            return ahear if base is AsyncCallbackHandler else hear

    ledger = Ledger(meet=2)
    await accelerate(chain_of(ledger, SECONDS["streaming"](ledger))).ainvoke(QUESTION, {"callbacks": [Handler()]})
    assert ledger.most_at_once == 2
    assert [one for one in events if one] == ["start", "end", "start", "so ", "it ", "is", "end"]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_unclaimed_call_sends_no_events(way: str) -> None:
    ledger = Ledger(meet=2)
    failing = ask("{question}", Chat(ledger=ledger, says="first", error="down"))
    chain = RunnablePassthrough.assign(a=failing).assign(b=ask("b {question}", Chat(ledger=ledger)))
    handler = Everything()
    assert call(accelerate(chain), way, {"callbacks": [handler]}) == "down"
    assert ledger.most_at_once == 2
    assert [one.split()[0] for one in handler.seen] == ["model"]


def test_message_of_a_claimed_call_has_its_run_id() -> None:
    ids: dict[str, Any] = {}

    class Handler(BaseCallbackHandler):
        def on_llm_end(self, response: Any, *, run_id: Any, **kwargs: Any) -> None:
            ids[response.generations[0][0].message.id] = run_id

    ledger = Ledger(meet=2)
    message = accelerate(chain_of(ledger, SECONDS["tags"](ledger))).invoke(QUESTION, {"callbacks": [Handler()]})
    assert message.id == f"lc_run--{ids[message.id]}-0"


def test_usage_of_a_claimed_call_is_counted_once() -> None:
    class Counting(Chat):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
            self.ledger.work(f"{self.says}: {messages[-1].content}")
            usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
            message = AIMessage("x", usage_metadata=usage, response_metadata={"model_name": "own"})  # type: ignore[arg-type]
            return ChatResult(generations=[ChatGeneration(message=message)])

    ledger = Ledger(meet=2)
    chain = RunnablePassthrough.assign(a=ask("a {question}", Counting(ledger=ledger)))
    fast = accelerate(chain.assign(b=ask("b {question}", Counting(ledger=ledger))))
    with get_usage_metadata_callback() as usage:
        fast.invoke(QUESTION)
    assert ledger.most_at_once == 2
    assert usage.usage_metadata["own"]["total_tokens"] == 10


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_claimed_call_has_tags_of_a_custom_callback_manager(way: str) -> None:
    """The manager brings tags and metadata that no config contains."""

    def seen(make: Any) -> list[str]:
        handler = Everything()
        own = {"inheritable_tags": ["boss"], "inheritable_metadata": {"boss": 1}}
        manager = CallbackManager([handler], [handler], tags=["boss"], metadata={"boss": 1}, **own)
        call(make, way, {"callbacks": manager, "metadata": {"user": 7}})
        return handler.seen

    alone, ledger = Ledger(), Ledger(meet=2)
    assert seen(accelerate(chain_of(ledger, SECONDS["tags"](ledger)))) == seen(chain_of(alone, SECONDS["tags"](alone)))
    assert ledger.most_at_once == 2


def test_collect_runs_gets_runs_below_a_claimed_call() -> None:
    """`collect_runs` is not inherited: every run of the context finds it by itself."""

    def collected(chain: Chain) -> list[str]:
        with collect_runs() as runs:
            chain.invoke(QUESTION)
        return sorted(run.name for run in runs.traced_runs)

    alone, ledger = Ledger(), Ledger(meet=2)
    make = [itemgetter("question") | Rewriting(ledger=one, model=Chat(ledger=one, name="M")) for one in (alone, ledger)]
    assert collected(accelerate(chain_of(ledger, make[1]))) == collected(chain_of(alone, make[0]))


def test_response_cache_turns_off_prefetching() -> None:
    """The second of two equal calls comes from the cache. Started together, they would be two requests."""
    ledger = Ledger(jitter=0.004)
    same = Chat(ledger=ledger)
    fast = accelerate(RunnablePassthrough.assign(a=ask("{question}", same)).assign(b=ask("{question}", same)))
    set_llm_cache(InMemoryCache())
    try:
        fast.invoke(QUESTION)
    finally:
        set_llm_cache(None)
    assert ledger.calls == {"model: why": 1}


def test_debug_output_turns_off_prefetching(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(jitter=0.002)
    fast = accelerate(chain_of(ledger, SECONDS["tags"](ledger)))
    set_debug(True)
    try:
        fast.invoke(QUESTION)
    finally:
        set_debug(False)
    assert capsys.readouterr().out.count("Entering LLM run") == 2
    assert ledger.most_at_once == 1
