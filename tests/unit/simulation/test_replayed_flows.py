"""Tests of flows: recorded from an app, and replayed under load with the times of the app itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import answer_words
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.errors import TeolaError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.simulation import (
    Cluster,
    Flow,
    FlowArrival,
    FlowRequest,
    FlowWork,
    arriving,
    poisson,
    record,
    replay,
    replayed,
    simulate,
)
from teola_plugin.simulation.flows import END, FlowChange, shared_blocks

K = PrimitiveKind
CLUSTER = Cluster.of(rtx3090(), replicas={"llm": 2}, output_tokens=24)
EMBEDDING = 0.022 + 0.00115
TWO = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}


def maker(*, fast: bool) -> Any:
    """Return an app of two wordings, a search with each, an answer and a summary of it."""

    async def make(pool: EnginePool) -> Any:
        llm = ChatTeola(pool=pool, max_tokens=24)
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="notes")
        await store.aadd_texts([f"note {number} says what note {number - 1} does not" for number in range(20)])
        expand = ChatPromptTemplate.from_template("Two questions, as JSON: {question}")
        answer = ChatPromptTemplate.from_template("Be brief. " * 30 + "{question} {found}")
        chain = (
            RunnablePassthrough.assign(queries=expand | llm.bind(json_schema=TWO, max_tokens=64) | JsonOutputParser())
            | RunnablePassthrough.assign(found=RunnableLambda(lambda x: x["queries"]) | store.as_retriever().map())
            | RunnablePassthrough.assign(answer=answer | llm | StrOutputParser())
            | ChatPromptTemplate.from_template("Be brief. " * 30 + "{question} {answer}")
            | llm
        )
        return (accelerate(chain) if fast else chain).ainvoke

    return make


def questions(count: int) -> list[dict[str, str]]:
    return [{"question": f"What does note {number} say about number {number + 1}?"} for number in range(count)]


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "accelerated"])
def test_a_replay_takes_as_long_as_the_app(fast: bool) -> None:
    make, rate, queries = maker(fast=fast), 1.2, 30
    flows = [record(CLUSTER, "app", make, one) for one in questions(2)]
    times = list(itertools.islice(poisson(rate, 1), queries))
    quick = replayed(CLUSTER, {"app": flows}, [(at, "app") for at in times])
    exact = simulate(CLUSTER, {"app": make}, arriving(poisson(rate, 1), {"app": questions(queries)}, queries))
    mean, real = (sum(one.seconds for one in run.queries) / queries for run in (quick, exact))
    assert mean == pytest.approx(real, rel=0.02)
    slowest, really = (sorted(one.seconds for one in run.queries)[-2] for run in (quick, exact))
    assert slowest == pytest.approx(really, rel=0.04)


def test_recorded_flow_has_the_dependencies_of_its_requests() -> None:
    flow = record(CLUSTER, "app", maker(fast=False), questions(1)[0])
    kinds = [work.kind for work in flow.works]
    assert kinds[0] is K.PREFILLING and kinds[-2:] == [K.PREFILLING, K.PREFILLING]
    searches = [number for number, kind in enumerate(kinds) if kind is K.SEARCHING]
    assert len(searches) == 2
    answer, summary = len(kinds) - 2, len(kinds) - 1
    assert set(flow.works[answer].after) == {(number, END) for number in searches}
    assert flow.works[summary].after == ((answer, END),) and flow.end == ((summary, END),)
    assert flow.used() == frozenset(range(len(kinds)))


def test_accelerated_flow_searches_while_the_list_is_decoded() -> None:
    flow = record(CLUSTER, "app", maker(fast=True), questions(1)[0])
    embeddings = [work for work in flow.works if work.kind is K.EMBEDDING]
    tokens = [token for work in embeddings for _, token in work.after]
    assert len(embeddings) == 2 and all(token != END for token in tokens)
    assert any(work.warmup and not work.after for work in flow.works)


def _all_documents(state: dict[str, Any]) -> list[Document]:
    return [document for found in state["found"] for document in found]


async def reranking(pool: EnginePool) -> Any:
    """Return an app of two questions, the best of their passages, and an answer that starts on earlier passages."""
    llm = ChatTeola(pool=pool, max_tokens=24)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="reports")
    await store.aadd_texts([answer_words(str(number), 40) for number in range(80)])
    expand = ChatPromptTemplate.from_template("Two questions, as JSON: {question}")
    best = TeolaRerank(pool=pool, top_n=3).as_runnable()
    chain = (
        RunnablePassthrough.assign(queries=expand | llm.bind(json_schema=TWO, max_tokens=64) | JsonOutputParser())
        | RunnablePassthrough.assign(
            found=RunnableLambda(lambda x: x["queries"]) | store.as_retriever(search_kwargs={"k": 16}).map()
        )
        | RunnablePassthrough.assign(
            best={"query": itemgetter("question"), "documents": RunnableLambda(_all_documents)} | best
        )
        | ChatPromptTemplate.from_template("{question} {best}")
        | llm
    )
    return accelerate(chain).ainvoke


def test_recording_an_app_without_requests_raises() -> None:
    async def nothing(value: Any) -> None:
        pass

    with pytest.raises(TeolaError, match="asked no engine"):
        record(CLUSTER, "app", lambda pool: nothing, "x")


# ------------------------------------------------------------ replaying, by hand


def embeds(count: int = 1, after: tuple[tuple[int, int], ...] = ()) -> FlowWork:
    return FlowWork("embedder", K.EMBEDDING, (FlowRequest(),) * count, after)


def generates(prompt: int, output: int, after: tuple[tuple[int, int], ...] = (), **more: Any) -> FlowWork:
    return FlowWork("llm", more.pop("kind", K.PREFILLING), (FlowRequest(prompt, prompt, output, **more),), after)


def seconds(*works: FlowWork, end: tuple[tuple[int, int], ...]) -> float:
    return replay(CLUSTER, [FlowArrival(0.0, "app", Flow(works, end))]).queries[0].seconds


def test_flow_time_is_sum_in_sequence_and_maximum_in_parallel() -> None:
    assert seconds(embeds(), embeds(after=((0, END),)), end=((1, END),)) == pytest.approx(2 * EMBEDDING)
    both = seconds(embeds(), generates(100, 10), end=((0, END), (1, END)))
    assert both == pytest.approx(100 * 0.00035 + 10 * 0.0285)


def test_request_starts_after_the_given_token() -> None:
    found = seconds(generates(100, 10), embeds(after=((0, 4),)), end=((1, END),))
    assert found == pytest.approx(100 * 0.00035 + 4 * 0.0285 + EMBEDDING)


def test_unneeded_request_ends_with_its_query_and_is_wasted() -> None:
    flow = Flow((embeds(), generates(100, 1000)), ((0, END),))
    run = replay(CLUSTER, [FlowArrival(0.0, "app", flow)])
    (served,) = run.queries
    assert served.seconds == pytest.approx(EMBEDDING) == served.wasted == run.seconds
    assert served.wasted_tokens == 100
    assert sum(run.busy["llm"]) == pytest.approx(EMBEDDING)


def test_cancelled_request_ends_and_depth_changes_take_effect() -> None:
    guess = replace(generates(100, 1000), given_up=((0, END),))
    flow = Flow((embeds(), guess, embeds(after=((0, END),))), ((2, END),))
    run = replay(CLUSTER, [FlowArrival(0.0, "app", flow)])
    assert sum(run.busy["llm"]) == pytest.approx(EMBEDDING) == run.queries[0].wasted
    first, busy, waits = replace(embeds(), depth=20), replace(embeds(200), depth=5), embeds()
    deeper = replace(waits, changes=(FlowChange(((0, END),), 10),))
    assert seconds(first, busy, deeper, end=((2, END),)) < seconds(first, busy, waits, end=((2, END),))


def test_warm_up_used_by_a_prompt_is_not_wasted() -> None:
    warm = generates(32, 0, kind=K.PARTIAL_PREFILLING, keys=(1, 2))
    for keys, wasted in (((1, 2, 3), 0), ((4, 5, 6), 32)):
        flow = Flow((warm, embeds(), generates(48, 5, after=((1, END),), keys=keys)), ((2, END),))
        [served] = replay(Cluster.of(rtx3090()), [FlowArrival(0.0, "app", flow)]).queries
        assert served.wasted_tokens == wasted


def test_static_engine_fuses_waiting_requests() -> None:
    flow = Flow((embeds(),), ((0, END),))
    run = replay(CLUSTER, [FlowArrival(at, "app", flow) for at in (0.0, 0.001, 0.002)])
    assert [one.ended_at for one in run.queries] == pytest.approx([EMBEDDING, *[EMBEDDING + 0.022 + 2 * 0.00115] * 2])


def test_prefixes_common_to_queries_are_shared() -> None:
    def flow(name: int) -> Flow:
        keys = (*range(10), name * 100)
        return Flow((generates(176, 1, keys=keys),), ((0, END),))

    flows = [flow(1), flow(2)]
    assert shared_blocks(flows) == frozenset(range(10))
    cluster = Cluster.of(rtx3090())
    run = replayed(cluster, {"app": flows}, [(10.0 * n, "app") for n in range(4)])
    first, *others = (one.seconds for one in run.queries)
    assert first == pytest.approx(176 * 0.00035 + 0.0285)
    assert others == pytest.approx([16 * 0.00035 + 0.0285] * 3)


def test_replay_of_a_single_recorded_flow_raises() -> None:
    with pytest.raises(ValueError, match="record two inputs"):
        replayed(CLUSTER, {"app": [Flow((embeds(),), ((0, END),))]}, [(0.0, "app")])
