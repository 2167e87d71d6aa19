"""Tests of `speculate="all"`: own models and retrievers are called for items that an engine is still writing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from differential.recording import WAYS, observe
from langchain_classic.retrievers import MultiQueryRetriever
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from support.own_leaves import Chat, Ledger, Notes, SyncChat, Text
from support.writing_llm import WritingLLM, Written

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.plan_report import Status
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt

Chain = Runnable[Any, Any]
Make = Callable[[EnginePool, Ledger], Chain]
GIVEN = {"question": "why"}
WRITTEN = ["first of them", "second of them", "third of them"]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    """Create a pool with a model that writes lists, at 3 ms a token."""

    def answer(prompt: Any, sampling: Any) -> str:
        text = prompt.messages[-1].content
        if "twice" in text:
            return json.dumps([WRITTEN[0], WRITTEN[0], WRITTEN[1]])
        return json.dumps(WRITTEN) if "JSON" in text else "\n".join(WRITTEN) if "line" in text else f"said {len(text)}"

    with EnginePool.local([FakeLLM("llm", profiles.scaled(profiles.rtx3090(), 0.1)["llm"], answer)]) as made:
        yield made


def queries(pool: EnginePool, text: str = "JSON list: {question}") -> Chain:
    return ChatPromptTemplate.from_template(text) | ChatTeola(pool=pool) | JsonOutputParser()


def joined(found: list[Any]) -> str:
    return " ".join(document.page_content for documents in found for document in documents)


def searched(pool: EnginePool, ledger: Ledger) -> Chain:
    context = queries(pool) | Notes(ledger=ledger, tags=["own"]).map() | joined
    answer = ChatPromptTemplate.from_template("{context} {question}") | ChatTeola(pool=pool) | StrOutputParser()
    return RunnablePassthrough.assign(context=context) | answer


def answered(pool: EnginePool, ledger: Ledger) -> Chain:
    """Return a chain that searches with each item, and answers it by a model of the user's own."""
    one = {"context": Notes(ledger=ledger) | (lambda found: found[0].page_content), "item": RunnablePassthrough()}
    each = one | ChatPromptTemplate.from_template("{item}: {context}") | Chat(ledger=ledger).with_config(tags=["t"])
    return queries(pool) | (each | StrOutputParser()).with_config(run_name="Each").map() | "; ".join


def one_at_a_time(pool: EnginePool, ledger: Ledger) -> Chain:
    return queries(pool) | (PromptTemplate.from_template("{text}") | SyncChat(ledger=ledger)).map()


def multi_query(pool: EnginePool, ledger: Ledger) -> Chain:
    prompt = PromptTemplate.from_template("one per line: {question}")
    notes = Notes(ledger=ledger, tags=["own"])
    return MultiQueryRetriever.from_llm(notes, ChatTeola(pool=pool), prompt, include_original=True)


def twice(pool: EnginePool, ledger: Ledger) -> Chain:
    return queries(pool, "JSON, one of them twice: {question}") | Notes(ledger=ledger).map()


def raising(pool: EnginePool, ledger: Ledger) -> Chain:
    return queries(pool) | Notes(ledger=ledger, error="no notes today").map()


CHAINS: dict[str, tuple[Make, Any]] = {
    "searched": (searched, GIVEN),
    "answered": (answered, GIVEN),
    "one_at_a_time": (one_at_a_time, GIVEN),
    "multi_query": (multi_query, "why"),
    "twice": (twice, GIVEN),
    "raising": (raising, GIVEN),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_map_over_generated_list_gives_the_results_of_the_original(pool: EnginePool, name: str, way: str) -> None:
    make, given = CHAINS[name]
    alone, ledger = Ledger(), Ledger()
    plain = observe(make(pool, alone), way, given)
    fast = accelerate(make(pool, ledger), speculate="all")
    assert fast._prefetch_plan is not None
    found = observe(fast, way, given)
    assert found.result == plain.result
    if name != "raising":  # how far its siblings got is a race, in the plain object, too
        assert found.events == plain.events
        assert ledger.calls == alone.calls


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("name", ["searched", "answered", "multi_query"])
def test_list_item_is_requested_while_the_next_item_is_generated(name: str, way: str) -> None:
    """The model writes no item before the one before it has been asked for."""
    make, given = CHAINS[name]
    ledger, llm = Ledger(), WritingLLM()

    def is_requested(item: str) -> Callable[[], bool]:
        return lambda: any(item in call for call in tuple(ledger.calls))

    def writes(prompt: Prompt) -> list[Written]:
        text = prompt.flat()
        first, second, third = WRITTEN
        if "JSON" in text:
            return [f'["{first}", ', is_requested(first), f'"{second}", ', is_requested(second), f'"{third}"]']
        return (
            [f"{first}\n", is_requested(first), f"{second}\n", is_requested(second), third]
            if "line" in text
            else ["said"]
        )

    llm.writes = writes
    with EnginePool.local([llm]) as pool:
        observe(accelerate(make(pool, ledger), speculate="all"), way, given)
    assert llm.fulfilled_waits == [True, True]


@pytest.mark.parametrize("speculate", ["auto", "off"])
@pytest.mark.parametrize("name", CHAINS)
def test_user_models_get_no_speculative_calls_by_default(pool: EnginePool, name: str, speculate: str) -> None:
    make, _ = CHAINS[name]
    assert not accelerate(make(pool, Ledger()), speculate=speculate).report().with_status(Status.SPECULATIVE)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_wrongly_predicted_item_is_requested_once_when_known(pool: EnginePool, way: str) -> None:
    """A function drops the first item and changes the last: one search for nothing, none twice."""

    def chain(ledger: Ledger) -> Chain:
        changed = RunnableLambda(lambda found: [found[1], found[2].upper()])
        return queries(pool) | changed | Notes(ledger=ledger).map()

    alone, ledger = Ledger(), Ledger()
    plain = observe(chain(alone), way, GIVEN)
    fast = accelerate(chain(ledger), speculate="all")
    assert fast._prefetch_plan is not None
    assert observe(fast, way, GIVEN) == plain
    assert set(alone.calls) <= set(ledger.calls) <= {f"notes: {x}" for x in (*WRITTEN, WRITTEN[2].upper())}
    assert set(ledger.calls.values()) == {1}


def test_text_model_with_batched_prompts_is_not_prefetched(pool: EnginePool) -> None:
    """`BaseLLM.batch` makes one call of many prompts."""
    ledger = Ledger()
    chain = queries(pool) | (PromptTemplate.from_template("{text}") | Text(ledger=ledger)).map()
    assert accelerate(chain, speculate="all")._prefetch_plan is None


def test_list_generated_by_a_user_model_is_not_prefetched() -> None:
    one = ChatPromptTemplate.from_template("{question}") | Chat() | (lambda message: message.content.split())
    assert accelerate(one | Notes().map(), speculate="all")._prefetch_plan is None


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_mapped_retriever_does_not_overtake_a_possible_write(pool: EnginePool, way: str) -> None:
    order: list[str] = []

    class Late(Notes):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            order.append("search")
            return super()._get_relevant_documents(query, run_manager=run_manager)

        async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            order.append("search")
            return await super()._aget_relevant_documents(query, run_manager=run_manager)

    def write(found: Any) -> Any:
        order.append("write")
        return found

    chain = RunnablePassthrough.assign(q=queries(pool)).assign(w=RunnableLambda(write)) | (lambda x: x["q"])
    fast = accelerate(chain | Late().map(), speculate="all")
    observe(fast, way, GIVEN)
    assert order == ["write", *["search"] * 3]


def test_map_over_given_list_keeps_its_plan_with_speculate_all(pool: EnginePool) -> None:
    """The list comes with the input: the items' own plans still begin what they can."""
    each = {"context": Notes() | joined_one} | ChatPromptTemplate.from_template("long {context}") | ChatTeola(pool=pool)
    chain = RunnableLambda(lambda x: x["items"]) | each.map()
    auto, every = (accelerate(chain, speculate=mode) for mode in ("auto", "all"))
    assert every._prefetch_plan is None and type(every.chain) is type(auto.chain)
    assert every.explain({"items": ["a"]}, details=True) == auto.explain({"items": ["a"]}, details=True)


def joined_one(found: list[Any]) -> str:
    return " ".join(document.page_content for document in found)


async def test_concurrent_queries_do_not_mix_their_items(pool: EnginePool) -> None:
    import asyncio

    ledger = Ledger(jitter=0.003)
    fast = accelerate(answered(pool, ledger), speculate="all")
    expected = answered(pool, Ledger()).invoke(GIVEN)
    assert await asyncio.gather(*(fast.ainvoke(GIVEN) for _ in range(8))) == [expected] * 8
    assert Counter(ledger.calls.values()) == {8: len(ledger.calls)}
