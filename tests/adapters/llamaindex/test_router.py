"""Tests of routers: the chosen engine starts once its number is written, before the reason for it is."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.output_parsers.base import StructuredOutput
from llama_index.core.output_parsers.selection import SelectionOutputParser
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from support.llamaindex_engines import Library, library, response_parts, settings
from support.reasoning_llm import ObservedStore, ReasoningLLM, calls_of_the_original, spans

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeReranker
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.usefixtures("loop_of_the_thread", "immediate_client_code")
ASKED = "what is there"
ONE = '[{"choice": 2, "reason": "ships are what it is about"}]'
TWO = '[{"choice": 2, "reason": "ships"}, {"choice": 1, "reason": "fields"}]'


@pytest.fixture(scope="module")
def shared_llm() -> ReasoningLLM:
    return ReasoningLLM(ONE, "reason")


@pytest.fixture(scope="module")
def pool(shared_llm: ReasoningLLM) -> Iterator[EnginePool]:
    engines = {"embedder": FakeEmbedder(), "reranker": FakeReranker(), "store": ObservedStore(shared_llm)}
    with EnginePool.local({"llm": shared_llm, **engines}) as made:
        yield made


@pytest.fixture(scope="module")
def stock(pool: EnginePool) -> Iterator[Library]:
    made = library(pool, "routed")
    with settings(made.llm):
        yield made


@pytest.fixture
def llm(shared_llm: ReasoningLLM) -> ReasoningLLM:
    shared_llm.__init__(ONE, "reason")  # type: ignore[misc]
    return shared_llm


def router(stock: Library, selector: BaseSelector) -> RouterQueryEngine:
    return RouterQueryEngine(selector, stock.tools(), llm=stock.llm)


def single(stock: Library) -> RouterQueryEngine:
    return router(stock, LLMSingleSelector.from_defaults(stock.llm))


def several(stock: Library) -> RouterQueryEngine:
    return router(stock, LLMMultiSelector.from_defaults(stock.llm))


def outcome(engine: Any, llm: ReasoningLLM, way: str = "query") -> tuple[Any, Counter[str]]:
    """Return the answer or the error, and the prompts."""
    llm.requests.clear()
    try:
        found = response_parts(engine.query(ASKED) if way == "query" else asyncio.run(engine.aquery(ASKED)))
    except Exception as error:
        found = type(error), str(error)
    return found, Counter(request.prompt.flat() for request in llm.requests)


@pytest.mark.parametrize("way", ["query", "aquery"])
@pytest.mark.parametrize(("make", "chosen"), [(single, ONE), (several, TWO), (several, ONE), (single, TWO)])
def test_chosen_engine_searches_before_the_reason_is_generated(
    stock: Library, llm: ReasoningLLM, make: Any, chosen: str, way: str
) -> None:
    llm.choice = chosen
    plain, fast = outcome(make(stock), llm, way), accelerate(make(stock))
    llm.waits_for_search = not (
        make is single and chosen is TWO
    )  # who is to choose one is not expected to choose another
    assert outcome(fast, llm, way) == plain
    assert llm.in_time == [True] * chosen.count("reason") * llm.waits_for_search
    assert calls_of_the_original(fast) == [] and spans(fast, outcome="wasted") == []


def test_answer_is_requested_before_the_reason_is_generated(stock: Library, llm: ReasoningLLM) -> None:
    fast = accelerate(single(stock))
    llm.waits_for_search = True
    fast.query(ASKED)
    trace = {span.primitive: span for span in fast.last_trace().spans}
    answers = [span for span in trace.values() if span.primitive.startswith("answers[0]/") and span.engine == "llm"]
    assert answers and all(one.queued < trace["select.parsed"].queued for one in answers)


@pytest.mark.parametrize("make", [single, several])
def test_explain_names_speculative_calls_of_a_router(stock: Library, make: Any) -> None:
    explanation = str(accelerate(make(stock)).explain())
    assert "each model call of answers as soon as its item is written" in explanation and "no gain" not in explanation


def test_speculate_off_searches_after_the_choice(stock: Library, llm: ReasoningLLM) -> None:
    plain, fast = outcome(single(stock), llm), accelerate(single(stock), speculate="off")
    assert outcome(fast, llm) == plain
    trace = {span.primitive: span for span in fast.last_trace().spans}
    searches = [span for span in trace.values() if span.kind == "SEARCHING"]
    assert searches and all(one.queued >= trace["select.parsed"].queued for one in searches)


@pytest.mark.parametrize(
    "chosen",
    [
        '```json\n[\n  {\n    "choice": 2,\n    "reason": "a"\n  }\n]\n```',
        "[{choice: 2, reason: ships}]",
        '{"choice": 2, "reason": "alone"}',
        '[{"reason": "choice: 1 says nothing", "choice": 2}]',
        '[{"choice": 0, "reason": "none of them, which is the last one"}]',
        '[{"thoughts": {"choice": 2, "reason": "deep down"}}]',
        '[{"choice": "2", "reason": "in quotes"}]',
        '[{"choice": 2.5, "reason": "no whole number, which is cut"}]',
        'I take choice: 1, or so. {"choice": 2, "reason": "a"}',
        '[{"choice": 2, "reason": "a"}, {"choice": 2, "reason": "once more"}]',
    ],
)
@pytest.mark.parametrize("make", [single, several])
def test_every_spelling_of_a_choice_is_parsed(stock: Library, llm: ReasoningLLM, make: Any, chosen: str) -> None:
    llm.choice = chosen
    fast = accelerate(make(stock))
    plain = outcome(make(stock), llm)
    assert outcome(fast, llm) == plain
    assert spans(fast, outcome="wasted") == []
    assert calls_of_the_original(fast) == [] and any("/engine1" in name for name in spans(fast))


@pytest.mark.parametrize("make", [single, several])
def test_revised_choice_wastes_only_the_work_of_the_first(stock: Library, llm: ReasoningLLM, make: Any) -> None:
    """Work that started for the first choice is wasted and stays invisible."""
    llm.choice = '[{"choice": 1, "choice": 2, "reason": "JSON takes the last one"}]'
    plain, prompts = outcome(make(stock), llm)
    llm.waits_for_search = True
    fast = accelerate(make(stock))
    found, more = outcome(fast, llm)
    assert found == plain and llm.in_time == [True]
    assert not prompts - more and set(spans(fast, outcome="wasted")) & set(spans(fast))
    assert all(name.startswith("answers[0]/") for name in spans(fast, outcome="wasted"))


@pytest.mark.parametrize(
    "chosen",
    [
        '[{"choice": 7, "reason": "out of range"}]',
        '[{"choice": -2, "reason": "out of range"}]',
        '[{"choice": 1, "reason": "a"}, {"choice": 9, "reason": "b"}]',
        '[{"choice": 2}]',
        '[{"choice": 2, "reason": "cut off',
        "[]",
        "neither",
        "",
    ],
)
@pytest.mark.parametrize("make", [single, several])
def test_invalid_choice_raises_the_originals_error_without_warning(
    stock: Library, llm: ReasoningLLM, make: Any, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The plain error, and no word of what was begun in vain."""
    llm.choice = chosen
    plain, _ = outcome(make(stock), llm)
    assert outcome(accelerate(make(stock)), llm)[0] == plain and isinstance(plain[0], type)
    assert not [r for r in caplog.records if r.name == "teola_plugin" and r.levelno >= logging.WARNING]


# ------------------------------------------------------------ of the user's own


class OwnRetriever(BaseRetriever):
    """A retriever that cannot be planned."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=query_bundle.query_str), score=1.0)]


@pytest.mark.parametrize(("known", "chosen", "early"), [(1, 1, True), (1, 2, False), (0, 1, False)])
def test_router_prefetches_only_engines_that_are_lowered(
    stock: Library, llm: ReasoningLLM, known: int, chosen: int, early: bool
) -> None:
    """Lowered engines start early as always. The sources of the answer are not known then."""
    own = RetrieverQueryEngine.from_args(OwnRetriever(), llm=stock.llm)
    engines = [*[stock.rag(), stock.rag(k=2)][:known], *[own] * (2 - known)]
    tools = [QueryEngineTool.from_defaults(one, name=name) for name, one in zip("ab", engines, strict=True)]
    llm.choice = f'[{{"choice": {chosen}, "reason": "a"}}]'

    def make() -> RouterQueryEngine:
        return RouterQueryEngine(LLMSingleSelector.from_defaults(stock.llm), tools, llm=stock.llm)

    plain, fast = outcome(make(), llm), accelerate(make())
    llm.waits_for_search = early
    assert outcome(fast, llm) == plain and llm.in_time == [True] * early
    assert spans(fast, outcome="wasted") == []


class Swapped(SelectionOutputParser):
    """Takes the other one."""

    def parse(self, output: str) -> Any:
        parsed = super().parse(output)
        for one in parsed.parsed_output:
            one.choice = 3 - one.choice
        return StructuredOutput(raw_output=output, parsed_output=parsed.parsed_output)


class Contrary(LLMSingleSelector):
    def _select(self, *args: Any) -> SelectorResult:
        found = super()._select(*args)
        return SelectorResult(selections=[SingleSelection(index=1 - found.ind, reason=found.reason)])


class Fixed(BaseSelector):
    """Asks nobody."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...

    def _select(self, choices: Any, query: Any) -> SelectorResult:
        return SelectorResult(selections=[SingleSelection(index=0, reason="always")])

    async def _aselect(self, choices: Any, query: Any) -> SelectorResult:
        return self._select(choices, query)


def custom(stock: Library, kind: str) -> BaseSelector:
    if kind == "fixed":
        return Fixed()
    if kind == "contrary":
        made = LLMSingleSelector.from_defaults(stock.llm)
        return Contrary(made._llm, made._prompt)  # type: ignore[arg-type]
    return LLMMultiSelector.from_defaults(stock.llm, output_parser=Swapped())


@pytest.mark.parametrize("kind", ["parser", "contrary", "fixed"])
def test_user_selectors_get_no_speculative_calls(stock: Library, llm: ReasoningLLM, kind: str) -> None:
    """Choices of selectors that the user wrote are not predicted."""
    plain, fast = outcome(router(stock, custom(stock, kind)), llm), accelerate(router(stock, custom(stock, kind)))
    assert outcome(fast, llm) == plain
    assert spans(fast, outcome="wasted") == [] and not any(name.startswith("answers") for name in spans(fast))
