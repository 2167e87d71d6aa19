"""Tests of own models without a pool: calls of known lists start together, and nothing else differs."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from differential.llamaindex.compare import settled
from differential.llamaindex.composed import custom, router_deep, sub_questions_sync
from differential.llamaindex.retrieval import after, fused, over
from differential.llamaindex.synthesis import packed
from llama_index.core import PromptTemplate
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import RouterRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import RetrieverTool
from llama_index.core.utilities.token_counting import TokenCounter

from benchmarks.llamaindex.engines import ASKED, accumulate, naive_rag, router_multi, shown
from benchmarks.llamaindex.kits import Kit
from teola_plugin import accelerate, uninstall
from tests.support.llamaindex_own import ChattyLLM, Diary, DiaryHandler, WatchedKit, create_watched_kit, run_with_diary

Make = Callable[[Kit], BaseQueryEngine]
OTHER = "What would have to change first, and why?"


def routed_multi(kit: Kit) -> Any:
    retrievers = [index.as_retriever(similarity_top_k=2) for index in (kit.reports, kit.notes)]
    described = zip(retrievers, ("The reports.", "The notes."), strict=True)
    tools = [RetrieverTool.from_defaults(one, description=text) for one, text in described]
    return RouterRetriever(LLMMultiSelector.from_defaults(llm=kit.llm), tools, llm=kit.llm)


LISTS: dict[str, tuple[Make, str, int]] = {
    "accumulate": (accumulate, ASKED, 4),
    "compact_accumulate": (packed(ResponseMode.COMPACT_ACCUMULATE), ASKED, 2),
    "tree": (packed(ResponseMode.TREE_SUMMARIZE), ASKED, 2),
    "naive RAG": (naive_rag, ASKED, 1),
    "sub-questions": (sub_questions_sync, ASKED, 2),
    "router": (router_multi, OTHER, 2),
    "router of engines": (router_deep, OTHER, 2),
    "fusion, accumulated": (over(fused("reciprocal_rerank", 3, use_async=False), response_mode="accumulate"), ASKED, 5),
    "fusion in a loop, accumulated": (over(fused("reciprocal_rerank", 3), response_mode="accumulate"), ASKED, 5),
    "several retrievers": (over(routed_multi, response_mode="accumulate"), OTHER, 3),
    "reranked": (after(lambda kit: LLMRerank(llm=kit.llm, choice_batch_size=2, top_n=3)), ASKED, 3),
    "parts of an engine of one's own": (custom, ASKED, 1),
}
"""What to build, what to ask, and how many calls come together at the least."""
LONE = {"sub-questions", "router", "router of engines", "several retrievers", *(n for n in LISTS if n[:6] == "fusion")}
"""Those whose list is what a first call answers."""


@pytest.fixture
def own() -> Iterator[WatchedKit]:
    made = create_watched_kit()
    with made.kit.in_force():
        yield made
    settled()


def concurrent_models(own: WatchedKit) -> tuple[Any, ...]:
    return own.kit.concurrent


@pytest.mark.parametrize("name", LISTS)
def test_calls_of_a_list_overlap_and_none_is_added(own: WatchedKit, name: str) -> None:
    make, given, together = LISTS[name]
    engine = make(own.kit)
    own.fresh()
    before = engine.query(given)
    reached, searches = own.kit.ledger.reached, own.kit.ledger.searches
    assert own.most_at_once() == 1 or name == "router of engines"
    fast = accelerate(engine, concurrent=concurrent_models(own))
    own.fresh(calls_together=together, calls_alone=int(name in LONE))
    after = fast.query(given)
    assert shown(after) == shown(before)
    assert own.kit.ledger.reached == reached and own.kit.ledger.searches == searches
    assert own.most_at_once() >= together


@pytest.mark.parametrize("name", LISTS)
def test_events_keep_the_originals_order_and_thread(name: str) -> None:
    make, given, _ = LISTS[name]
    diary = Diary()
    own = create_watched_kit(CallbackManager([DiaryHandler(diary)]))
    with own.kit.in_force():
        engine = make(own.kit)
        found = []
        for one in (engine, accelerate(engine, concurrent=concurrent_models(own))):
            diary.events.clear()
            own.fresh()
            found.append((shown(run_with_diary(diary, lambda one=one: one.query(given))), list(diary.events)))  # type: ignore[misc]
    settled()
    if "loop" not in name and name != "router of engines":  # there tasks take turns
        assert found[0] == found[1]
        assert diary.threads == {threading.current_thread().name}
    assert sorted(found[0][1]) == sorted(found[1][1])


@pytest.mark.parametrize("options", [{}, {"speculate": "off", "concurrent": None}])
def test_calls_without_concurrent_option_stay_sequential(own: WatchedKit, options: dict[str, Any]) -> None:
    engine = accumulate(own.kit)
    if "speculate" in options:
        options = {**options, "concurrent": concurrent_models(own)}
    own.fresh()
    engine.query(ASKED)
    prompts = list(own.prompts)
    own.fresh()
    accelerate(engine, **options).query(ASKED)
    assert own.prompts == prompts and own.threads == {threading.current_thread().name}


def test_calls_of_a_list_run_on_caller_or_prefetch_threads(own: WatchedKit) -> None:
    own.fresh(calls_together=4)
    accelerate(accumulate(own.kit), concurrent=concurrent_models(own)).query(ASKED)
    names = [name for _, name, _ in own.starts]
    assert names.count(threading.current_thread().name) <= 1
    assert names.count("teola-prefetch") >= 3
    assert len(names) == 4


def test_equal_calls_do_not_overlap(own: WatchedKit) -> None:
    nodes = [NodeWithScore(node=TextNode(id_=f"{i}", text="Oats are sown."), score=1.0) for i in range(3)]
    engine = accelerate(accumulate(own.kit), concurrent=concurrent_models(own))
    own.fresh()
    engine.synthesize(QueryBundle("What is sown?"), nodes)
    assert len(own.prompts) == 3 and len(set(own.prompts)) == 1 and own.most_at_once() == 1


def test_failing_call_raises_and_stops_further_calls(own: WatchedKit) -> None:
    engine = accumulate(own.kit)
    own.fresh()
    engine.query(ASKED)
    first, second = own.prompts[0], own.prompts[1]
    for broken, most in ((first, 4), (second, 4)):
        own.kit.ledger.broken_prompt = broken
        own.fresh()
        with pytest.raises(ValueError, match=f"injected: {len(broken)}"):
            accelerate(engine, concurrent=concurrent_models(own)).query(ASKED)
        settled()
        assert len(own.prompts) <= most


def test_prefetched_call_with_transient_error_is_made_again(own: WatchedKit) -> None:
    engine = accumulate(own.kit)
    own.fresh()
    before = shown(engine.query(ASKED))
    noted, failed = own.kit.ledger.asked, list[str]()

    def fail_once(prompt: str) -> None:
        noted(prompt)
        if not failed and threading.current_thread().name == "teola-prefetch":
            failed.append(prompt)
            raise ConnectionError("reset by the peer")

    own.kit.ledger.asked = fail_once  # type: ignore[method-assign]
    fast = accelerate(engine, concurrent=concurrent_models(own))
    own.fresh(calls_together=2)
    assert shown(fast.query(ASKED)) == before
    assert own.prompts.count(failed[0]) == 2
    assert len(own.prompts) == 5


def test_uninstall_stops_prefetching_until_the_next_accelerate(own: WatchedKit) -> None:
    fast = accelerate(accumulate(own.kit), concurrent=concurrent_models(own))
    uninstall()
    own.fresh()
    fast.query(ASKED)
    assert own.most_at_once() == 1
    assert own.threads == {threading.current_thread().name}
    accelerate(accumulate(own.kit), concurrent=concurrent_models(own))
    own.fresh(calls_together=4)
    fast.query(ASKED)
    assert own.most_at_once() == 4


def test_prefetched_calls_see_the_context_of_the_caller(own: WatchedKit) -> None:
    asked_by: contextvars.ContextVar[str] = contextvars.ContextVar("asked_by", default="nobody")
    seen: list[str] = []
    noted = own.kit.ledger.asked
    own.kit.ledger.asked = lambda prompt: (seen.append(asked_by.get()), noted(prompt))[1]  # type: ignore[method-assign]
    token = asked_by.set("me")
    accelerate(accumulate(own.kit), concurrent=concurrent_models(own)).query(ASKED)
    asked_by.reset(token)
    assert seen == ["me"] * 4


def test_rate_limiter_keeps_calls_on_the_callers_thread(own: WatchedKit) -> None:
    limiters = pytest.importorskip(
        "llama_index.core.rate_limiter", reason="models have rate limiters since llama-index-core 0.14.16"
    )
    own.kit.llm.rate_limiter = limiters.TokenBucketRateLimiter(requests_per_minute=6000)
    own.fresh()
    accelerate(accumulate(own.kit), concurrent=concurrent_models(own)).query(ASKED)
    assert own.most_at_once() == 1 and own.threads == {threading.current_thread().name}


def test_events_nested_in_model_calls_equal_the_originals() -> None:
    """The first early call detects such a model without a request. Later calls of it are made in their turn."""
    diary = Diary()
    own = create_watched_kit(CallbackManager([DiaryHandler(diary)]))
    llm = ChattyLLM(callback_manager=own.kit.manager)
    engine = own.kit.reports.as_query_engine(llm=llm, similarity_top_k=4, response_mode="accumulate")
    found = []
    for one in (engine, accelerate(engine, concurrent=[llm]), accelerate(engine, concurrent=[llm])):
        diary.events.clear()
        llm.chats = 0
        found.append((str(run_with_diary(diary, lambda one=one: one.query(ASKED))), list(diary.events), llm.chats))  # type: ignore[misc]
        settled()
    assert found[0] == found[1] == found[2] and found[0][2] == 4


def test_unknown_embedding_gets_one_call_at_a_time(own: WatchedKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(own.kit.embedding)
    under_way, most = [0], [0]
    embed = kind._now

    def counted(self: Any, role: str, texts: list[str]) -> Any:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        try:
            return embed(self, role, texts)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(kind, "_now", counted)
    engine = sub_questions_sync(own.kit)
    own.fresh(calls_together=2, calls_alone=1)
    accelerate(engine, concurrent=[own.kit.llm, type(own.kit.reports.vector_store)]).query(ASKED)
    assert most == [1] and own.most_at_once() >= 2


def test_prompts_updated_later_are_used_in_prefetched_calls(own: WatchedKit) -> None:
    engine = accumulate(own.kit)
    fast = accelerate(engine, concurrent=concurrent_models(own))
    fast.query(ASKED)
    words = PromptTemplate("Read {context_str} and say, as a poet would, {query_str}")
    fast.update_prompts({"response_synthesizer:text_qa_template": words})
    own.fresh(calls_together=4)
    fast.query(ASKED)
    assert own.most_at_once() == 4 and all("as a poet would" in prompt for prompt in own.prompts)


def test_concurrent_queries_claim_their_own_calls(own: WatchedKit) -> None:
    engine = accelerate(accumulate(own.kit), concurrent=concurrent_models(own))
    plain = {f"{i} {ASKED}": shown(accumulate(own.kit).query(f"{i} {ASKED}")) for i in range(4)}
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda q=question: found.update({q: shown(engine.query(q))}))  # type: ignore[misc]
        for question in plain
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == plain


def test_no_prefetch_thread_is_left_after_queries(own: WatchedKit) -> None:
    accelerate(RetrieverQueryEngine.from_args(own.kit.reports.as_retriever()), concurrent=concurrent_models(own)).query(
        ASKED
    )
    accelerate(accumulate(own.kit), concurrent=concurrent_models(own)).query(ASKED)
    settled()
    assert not [one for one in threading.enumerate() if one.name.startswith(("teola-early", "teola-ahead"))]


def _counted_by(own: WatchedKit, tokenizer: Callable[[str], Any]) -> tuple[list[str], list[str]]:
    """Return the texts that a tokenizer reads on the caller's thread, for the original and accelerated."""
    read: list[str] = []
    here = threading.current_thread()

    def noted(text: str) -> Any:
        if threading.current_thread() is here:
            read.append(text)
        return tokenizer(text)

    engine: Any = accumulate(own.kit)
    helper = engine._response_synthesizer._prompt_helper
    engine._response_synthesizer._prompt_helper = helper.model_copy()
    engine._response_synthesizer._prompt_helper._token_counter = TokenCounter(tokenizer=noted)
    found = []
    for one in (engine, accelerate(engine, concurrent=concurrent_models(own))):
        read.clear()
        own.fresh()
        one.query(ASKED)
        found.append(list(read))
    return found[0], found[1]


def test_user_tokenizer_reads_the_originals_texts(own: WatchedKit) -> None:
    plain, fast = _counted_by(own, str.split)
    assert plain and fast == plain
