"""Tests of routers that choose by a function call, and of routers of retrievers: the choice starts with its number."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.base_selector import MultiSelection, SingleSelection
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMMultiSelector, PydanticMultiSelector, PydanticSingleSelector
from llama_index.core.selectors.prompts import DEFAULT_SINGLE_PYD_SELECT_PROMPT_TMPL
from support.llamaindex_engines import Library, chat_mock, library, response_parts, settings
from support.reasoning_llm import ObservedStore, ReasoningLLM, calls_of_the_original, spans

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeReranker
from teola_plugin.pool import EnginePool
from teola_plugin.requests.items import ItemStream

pytestmark = pytest.mark.usefixtures("loop_of_the_thread", "immediate_client_code")
ASKED = "what is there"


def one(index: Any = 2) -> str:
    return f'{{"name": "SingleSelection", "arguments": {{"index": {index}, "reason": "ships are what it is about"}}}}'


def several(*indices: int) -> str:
    chosen = ", ".join(f'{{"index": {index}, "reason": "so"}}' for index in indices)
    return f'{{"name": "MultiSelection", "arguments": {{"selections": [{chosen}]}}}}'


@pytest.fixture(scope="module")
def shared_llm() -> ReasoningLLM:
    return ReasoningLLM(one(), '"reason')


@pytest.fixture(scope="module")
def pool(shared_llm: ReasoningLLM) -> Iterator[EnginePool]:
    engines = {"embedder": FakeEmbedder(), "reranker": FakeReranker(), "store": ObservedStore(shared_llm)}
    with EnginePool.local({"llm": shared_llm, **engines}) as made:
        yield made


@pytest.fixture(scope="module")
def stock(pool: EnginePool) -> Iterator[Library]:
    made = library(pool, "by call")
    with settings(made.llm):
        yield made


@pytest.fixture
def llm(shared_llm: ReasoningLLM) -> ReasoningLLM:
    shared_llm.__init__(one(), '"reason')  # type: ignore[misc]
    return shared_llm


def result_and_prompts(router: Any, llm: ReasoningLLM, way: str) -> tuple[Any, Counter[str]]:
    """Return the answer, the nodes or the error, and the prompts."""
    llm.requests.clear()
    name = ("a" if way == "async" else "") + ("retrieve" if isinstance(router, BaseRetriever) else "query")
    try:
        made = getattr(router, name)(ASKED)
        made = asyncio.run(made) if way == "async" else made
        made = [(n.score, n.node.get_content()) for n in made] if isinstance(made, list) else response_parts(made)
    except Exception as error:
        made = type(error), str(error)
    return made, Counter(request.prompt.flat() for request in llm.requests)


def chooses(prompts: Counter[str]) -> Counter[str]:
    """Return the prompts for the choice. They may contain wasted requests of an earlier query."""
    return Counter({text: n for text, n in prompts.items() if "Using only the choices above" in text})


ways = pytest.mark.parametrize("way", ["sync", "async"])


@ways
@pytest.mark.parametrize("chosen", [one(), several(2, 1), several(1)])
def test_engine_chosen_by_call_searches_before_the_reason_is_generated(
    stock: Library, llm: ReasoningLLM, chosen: str, way: str
) -> None:
    llm.choice, many = chosen, "Multi" in chosen
    plain, fast = (
        result_and_prompts(stock.router_by_call(several=many), llm, way),
        accelerate(stock.router_by_call(several=many)),
    )
    llm.waits_for_search = True
    assert result_and_prompts(fast, llm, way) == plain
    assert llm.in_time == [True] * chosen.count('"reason')
    assert calls_of_the_original(fast) == [] and spans(fast, outcome="wasted") == []


@ways
@pytest.mark.parametrize("many", [False, True])
def test_chosen_retriever_searches_before_the_reason_is_generated(
    stock: Library, llm: ReasoningLLM, many: bool, way: str
) -> None:
    llm.choice = '[{"choice": 2, "reason": "a"}' + ', {"choice": 1, "reason": "b"}' * many + "]"
    selector = LLMMultiSelector.from_defaults(stock.llm) if many else None
    plain, fast = (
        result_and_prompts(stock.searching_router(selector), llm, way),
        accelerate(stock.searching_router(selector)),
    )
    llm.waits_for_search = True
    assert result_and_prompts(fast, llm, way) == plain
    assert llm.in_time == [True] * (2 if many else 1)
    assert calls_of_the_original(fast) == [] and spans(fast, outcome="wasted") == []


@ways
def test_retrievers_chosen_by_call_search_before_reasons_are_generated(
    stock: Library, llm: ReasoningLLM, way: str
) -> None:
    """A router of retrievers whose model calls a function, below an engine."""
    llm.choice = several(2, 1)
    kind = PydanticMultiSelector.from_defaults(llm=stock.calling)  # type: ignore[arg-type]
    plain, fast = result_and_prompts(stock.searching_router(kind), llm, way), accelerate(stock.searching_router(kind))
    llm.waits_for_search = True
    assert (
        result_and_prompts(fast, llm, way) == plain
        and llm.in_time == [True, True]
        and calls_of_the_original(fast) == []
    )


WRITTEN = [
    one('"2"'),
    one("2.0"),
    one(0),
    one(7),
    one(-2),
    one('"two"'),
    "neither",
    "",
    '{"name": "Another", "arguments": {"index": 2, "reason": "a"}}',
    '{"name": "SingleSelection", "arguments": {"index": 2}}',
    '{"name": "SingleSelection", "arguments": {"index": 2, "reason": "cut',
    f"[{one(1)}, {one(2)}]",
    f"<tool_call>{one(2)}</tool_call>",
    '{"name": "SingleSelection", "arguments": {"reason": "index: 1", "index": 2}}',
    '{"name": "SingleSelection", "arguments": {"index": 1, "reason": "JSON takes the last one", "index": 2}}',
]


@ways
@pytest.mark.parametrize("chosen", WRITTEN)
def test_every_spelling_of_a_choice_by_call_is_parsed(
    stock: Library, llm: ReasoningLLM, chosen: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The plain answer, or the plain error; and no word of what was begun in vain."""
    llm.choice = chosen
    plain, prompts = result_and_prompts(stock.router_by_call(), llm, way)
    made, more = result_and_prompts(accelerate(stock.router_by_call()), llm, way)
    assert made == plain and chooses(prompts) == chooses(more)
    assert not [r for r in caplog.records if r.name == "teola_plugin" and r.levelno >= logging.WARNING]


@ways
@pytest.mark.parametrize(
    "chosen", ["[]", "neither", '[{"choice": 7, "reason": "a"}]', '[{"choice": 0, "reason": "a"}]']
)
def test_invalid_retriever_choice_gives_the_originals_result(
    stock: Library, llm: ReasoningLLM, chosen: str, way: str
) -> None:
    llm.choice = chosen
    plain, _ = result_and_prompts(stock.searching_router(), llm, way)
    assert result_and_prompts(accelerate(stock.searching_router()), llm, way)[0] == plain


class OwnRetriever(BaseRetriever):
    """A retriever that cannot be planned."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=query_bundle.query_str), score=1.0)]


@ways
@pytest.mark.parametrize("chosen", [1, 2])
def test_router_prefetches_only_retrievers_that_are_lowered(
    stock: Library, llm: ReasoningLLM, chosen: int, way: str
) -> None:
    llm.choice = f'[{{"choice": {chosen}, "reason": "a"}}]'

    def make() -> Any:
        return stock.searching_router(None, stock.index.as_retriever, OwnRetriever)

    plain, fast = result_and_prompts(make(), llm, way), accelerate(make())
    llm.waits_for_search = chosen == 1
    assert result_and_prompts(fast, llm, way) == plain and llm.in_time == [True] * llm.waits_for_search
    assert spans(fast, outcome="wasted") == []


class OwnSelection(SingleSelection):
    """A selection in a class of the user's own."""


def program(stock: Library, **more: Any) -> Any:
    given = {"output_cls": SingleSelection, "prompt_template_str": DEFAULT_SINGLE_PYD_SELECT_PROMPT_TMPL}
    return FunctionCallingProgram.from_defaults(**{**given, "llm": stock.calling, **more})


class OwnProgram(FunctionCallingProgram[Any]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return SingleSelection(index=1, reason="always")


UNKNOWN = {
    "class of its own": lambda x: program(x, output_cls=OwnSelection),
    "several": lambda x: program(x, output_cls=MultiSelection, allow_parallel_tool_calls=True),
    "program of its own": lambda x: OwnProgram(SingleSelection, x.calling, program(x).prompt),
    "system prompt": lambda x: program(x, llm=x.calling.model_copy(update={"system_prompt": "Be brief."})),
}


@ways
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_program_chooses_before_any_search(stock: Library, llm: ReasoningLLM, name: str, way: str) -> None:
    def make() -> RouterQueryEngine:
        return RouterQueryEngine(PydanticSingleSelector(UNKNOWN[name](stock)), stock.tools(), llm=stock.llm)

    plain, fast = result_and_prompts(make(), llm, way), accelerate(make())
    assert result_and_prompts(fast, llm, way) == plain
    assert not any(name.startswith("answers") for name in spans(fast)) and spans(fast, outcome="wasted") == []


def test_bound_llm_of_a_selector_runs_on_the_engine(stock: Library, llm: ReasoningLLM) -> None:
    own = chat_mock(max_tokens=3)
    selector = PydanticSingleSelector.from_defaults(llm=own)  # type: ignore[arg-type]
    router = RouterQueryEngine(selector, stock.tools(), llm=stock.llm)
    llm.waits_for_search = True
    fast = accelerate(router, pool=stock.llm.pool, bind=[(own, "llm")])
    assert fast.query(ASKED).metadata["selector_result"].ind == 1
    assert llm.in_time == [True] and calls_of_the_original(fast) == []
    assert router._selector is selector and selector._selector_program._llm is own  # type: ignore[attr-defined]


def test_speculate_off_searches_after_the_choice_by_call(stock: Library, llm: ReasoningLLM) -> None:
    plain, fast = (
        result_and_prompts(stock.router_by_call(), llm, "sync"),
        accelerate(stock.router_by_call(), speculate="off"),
    )
    assert result_and_prompts(fast, llm, "sync") == plain
    trace = {span.primitive: span for span in fast.last_trace().spans}
    searches = [span for span in trace.values() if span.kind == "SEARCHING"]
    assert searches and all(one.queued >= trace["select.parsed"].queued for one in searches)


def test_speculative_calls_of_a_router_send_no_spans(stock: Library, llm: ReasoningLLM) -> None:
    """Spans and events of LlamaIndex's instrumentation are the plain ones, each once."""
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler

    def names(router: Any) -> Counter[str]:
        handler = SimpleSpanHandler()
        root = get_dispatcher()
        root.add_span_handler(handler)
        try:
            router.query(ASKED)
        finally:
            root.span_handlers.remove(handler)
        return Counter(one.id_.split("-")[0] for one in handler.completed_spans)

    plain = names(stock.router_by_call())
    assert plain and names(accelerate(stock.router_by_call())) == plain


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (one(2), [2]),
        (several(3, 1), [3, 1]),
        (one('"2"'), [2]),
        (one("2.5"), []),
        ('index: 4, {"choice": 1}', []),
        ('{"index": 12', []),
    ],
)
def test_item_stream_returns_numbers_as_they_close(text: str, items: list[int]) -> None:
    for size in (1, 3, len(text)):
        stream = ItemStream("indices")
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert [item for piece in pieces for item in stream.feed(piece)] + stream.finish() == items
