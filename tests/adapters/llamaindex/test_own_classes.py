"""Tests of engines and retrievers of the user's own classes: certain calls in their methods are prefetched."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from llama_index.core import MockEmbedding, PromptTemplate, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.base.response.schema import Response
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine, RouterQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import TransformRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from pydantic import PrivateAttr
from support.hosted_steps import HostedLLM

from teola_plugin import accelerate

TEXTS = ["oats grow", "barley grows", "ivy climbs", "clover spreads"]
NODES = [NodeWithScore(node=TextNode(text=text, id_=text), score=1.0) for text in TEXTS]


class CountingEmbedding(MockEmbedding):
    """An embedding model that notes its texts."""

    _texts: list[str] = PrivateAttr(default_factory=list)

    def _get_query_embedding(self, query: str) -> list[float]:
        self._texts.append(query)
        return [float(len(query)), 1.0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


@dataclass
class Outcome:
    """What a call returned or raised, and the requests that it made."""

    answer: Any
    prompts: list[str]
    embedded: list[str]
    most_at_once: int


def run(make: Callable[[HostedLLM, Any], Any], *, is_fast: bool, is_async: bool = False, fails_on: str = "") -> Outcome:
    """Call an object once, with a query or for its nodes."""
    llm, model = HostedLLM(fails_on=fails_on, latency_s=0.15), CountingEmbedding(embed_dim=2)
    obj = make(llm, VectorStoreIndex([one.node for one in NODES], embed_model=model))
    model._texts.clear()
    if is_fast:
        obj = accelerate(obj, concurrent=[llm])
    return call(obj, llm, model, is_async=is_async)


def call(obj: Any, llm: HostedLLM, model: Any = None, *, is_async: bool = False) -> Outcome:
    """Call an object, and note what it asks of the models."""
    name = "retrieve" if isinstance(obj, BaseRetriever) else "query"
    before = len(llm._prompts)
    try:
        answer = asyncio.run(getattr(obj, f"a{name}")("oats")) if is_async else getattr(obj, name)("oats")
        answer = [(one.text, one.score) for one in answer] if isinstance(answer, list) else str(answer)
    except ValueError as error:
        answer = repr(error)
    return Outcome(answer, sorted(llm._prompts[before:]), sorted(model._texts) if model else [], llm.most_at_once)


def compared(make: Callable[[HostedLLM, Any], Any], *, is_async: bool = False) -> Outcome:
    """Return the outcome of the accelerated object, which has the original's answer and requests."""
    original, fast = (run(make, is_fast=is_fast, is_async=is_async) for is_fast in (False, True))
    assert (fast.answer, fast.prompts, fast.embedded) == (original.answer, original.prompts, original.embedded)
    assert original.most_at_once == 1
    return fast


# ------------------------------------------------------------ classes as the documentation writes them


class Perspectives(CustomQueryEngine):
    """Answers from several perspectives, from the passages that it retrieves."""

    llm: Any
    retriever: Any
    roles: list[str] = ["cook", "farmer", "miller"]

    def custom_query(self, query_str: str) -> str:
        nodes = self.retriever.retrieve(query_str)
        context = "; ".join([node.node.get_content() for node in nodes])
        opinions = []
        for role in self.roles:
            opinions.append(str(self.llm.complete(f"As a {role}, from {context}: {query_str}")))
        return str(self.llm.complete("Combine: " + " | ".join(opinions)))


class AsyncPerspectives(Perspectives):
    async def acustom_query(self, query_str: str) -> str:
        nodes = await self.retriever.aretrieve(query_str)
        context = "; ".join([node.node.get_content() for node in nodes])
        opinions = []
        for role in self.roles:
            opinions.append(str(await self.llm.acomplete(f"As a {role}, from {context}: {query_str}")))
        return " | ".join(opinions)


class Responding(BaseQueryEngine):
    """An engine that does without `CustomQueryEngine`."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        super().__init__(None)

    def _get_prompt_modules(self) -> Any:
        return {}

    def _query(self, query_bundle: QueryBundle) -> Response:
        first = self.llm.complete(f"praise {query_bundle.query_str}")
        second = self.llm.complete(f"blame {query_bundle.query_str}")
        return Response(f"{first} {second}")

    async def _aquery(self, query_bundle: QueryBundle) -> Response:
        first = await self.llm.acomplete(f"praise {query_bundle.query_str}")
        second = await self.llm.acomplete(f"blame {query_bundle.query_str}")
        return Response(f"{first} {second}")


class Paired(CustomQueryEngine):
    """Asks several models, each in a role of its own."""

    llms: list[Any]
    roles: list[str] = ["cook", "farmer"]

    def custom_query(self, query_str: str) -> str:
        answers = []
        for llm, role in zip(self.llms, self.roles, strict=False):
            answers.append(str(llm.complete(f"As a {role}: {query_str}")))
        for llm, role in zip(self.llms, self.roles):  # noqa: B905
            answers.append(str(llm.complete(f"Once more, as a {role}: {query_str}")))
        return " ".join(answers)


class Rewriting(BaseRetriever):
    """Retrieves for several queries, which a model writes one after the other."""

    def __init__(self, llm: Any, retriever: Any) -> None:
        self._llm, self._retriever = llm, retriever
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        for style in ("short", "long"):
            nodes = nodes + self._retriever.retrieve(self._llm.complete(f"{style} {query_bundle.query_str}").text)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        for style in ("short", "long"):
            text = (await self._llm.acomplete(f"{style} {query_bundle.query_str}")).text
            nodes = nodes + await self._retriever.aretrieve(text)
        return nodes


def write_queries(llm: Any, query_str: str) -> list[str]:
    """Return the queries that a model writes, one on each line."""
    lines: list[str] = llm.complete(f"list queries\nfor {query_str}").text.split("\n")
    return lines


def retrieve_all(queries: list[str], retrievers: list[Any]) -> dict[Any, list[NodeWithScore]]:
    """Return the nodes of each query from each retriever."""
    results = {}
    for query in queries:
        for i, retriever in enumerate(retrievers):
            results[query, i] = retriever.retrieve(query)
    return results


class Fusing(BaseRetriever):
    """Retrieves for the query and those that a model writes, from several retrievers, which ask a model, too."""

    def __init__(self, llm: Any, retrievers: list[Any]) -> None:
        self._llm, self._retrievers = llm, retrievers
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        queries = write_queries(self._llm, query_bundle.query_str)
        results = retrieve_all([query_bundle.query_str, *queries], self._retrievers)
        return sorted({node.node_id: node for nodes in results.values() for node in nodes}.values(), key=by_text)


def by_text(node: NodeWithScore) -> str:
    return node.text


class WithSteps(Workflow):
    """A workflow with a step that calls such an engine."""

    def __init__(self, engine: Any) -> None:
        super().__init__(timeout=60)
        self.engine = engine

    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(await self.engine.aquery(ev.query)))


class Both(BaseRetriever):
    """Asks two retrievers with one bundle, which keeps the vector that the first of them makes."""

    def __init__(self, llm: Any, retrievers: list[Any]) -> None:
        self._llm, self._retrievers = llm, retrievers
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        first, second = self._retrievers
        nodes = first.retrieve(query_bundle)
        self._llm.complete(f"praise {query_bundle.query_str}")
        self._llm.complete(f"blame {query_bundle.query_str}")
        more_nodes = second.retrieve(query_bundle)
        query_bundle.query_str = "barley"
        self._llm.complete(f"praise {query_bundle.query_str}")
        return [*nodes, *more_nodes]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        first, second = self._retrievers
        nodes = await first.aretrieve(query_bundle)
        await self._llm.acomplete(f"praise {query_bundle.query_str}")
        await self._llm.acomplete(f"blame {query_bundle.query_str}")
        return [*nodes, *await second.aretrieve(query_bundle)]


def both(llm: HostedLLM, index: Any) -> Any:
    return Both(llm, [index.as_retriever(similarity_top_k=count) for count in (1, 2)])


def both_models(llm: HostedLLM, index: Any) -> Any:
    other_index = VectorStoreIndex([one.node for one in NODES[1:]], embed_model=MockEmbedding(embed_dim=2))
    return Both(llm, [index.as_retriever(similarity_top_k=1), other_index.as_retriever(similarity_top_k=1)])


def perspectives(llm: HostedLLM, index: Any) -> Any:
    return Perspectives(llm=llm, retriever=index.as_retriever())


def async_perspectives(llm: HostedLLM, index: Any) -> Any:
    return AsyncPerspectives(llm=llm, retriever=index.as_retriever())


def paired(llm: HostedLLM, index: Any) -> Any:
    return Paired(llms=[llm, llm])


def responding(llm: HostedLLM, index: Any) -> Any:
    return Responding(llm)


def rewriting(llm: HostedLLM, index: Any) -> Any:
    return Rewriting(llm, index.as_retriever())


def fusing(llm: HostedLLM, index: Any) -> Any:
    transforms = [HyDEQueryTransform(llm, PromptTemplate(prompt + " {context_str}")) for prompt in ("praise", "blame")]
    retrievers = [TransformRetriever(index.as_retriever(), transform) for transform in transforms]
    return RetrieverQueryEngine(Fusing(llm, retrievers), get_response_synthesizer(llm=llm))


def inside_engine(llm: HostedLLM, index: Any) -> Any:
    return RetrieverQueryEngine(rewriting(llm, index), get_response_synthesizer(llm=llm))


def inside_itself(llm: HostedLLM, index: Any) -> Any:
    return Perspectives(llm=llm, retriever=rewriting(llm, index))


class First(BaseSelector):
    """Chooses the first engine."""

    def _select(self, choices: Any, query: Any) -> Any:
        return SelectorResult(selections=[SingleSelection(index=0, reason="")])

    async def _aselect(self, choices: Any, query: Any) -> Any:
        return self._select(choices, query)

    def _get_prompts(self) -> Any:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...


def routed(llm: HostedLLM, index: Any) -> Any:
    tool = QueryEngineTool.from_defaults(Responding(llm), name="responding", description="responds")
    return RouterQueryEngine(First(), [tool], llm=llm, summarizer=get_response_synthesizer(llm=llm))


# ------------------------------------------------------------ calls that start early


@pytest.fixture(autouse=True, scope="module")
def running_threads() -> None:
    """Start the threads that prefetch: the first query waits for them."""
    run(responding, is_fast=True)


@pytest.mark.parametrize(
    ("make", "is_async"),
    [
        (perspectives, False),
        (perspectives, True),
        (async_perspectives, True),
        (paired, False),
        (responding, False),
        (responding, True),
        (rewriting, False),
        (rewriting, True),
        (fusing, False),
        (both, False),
        (both, True),
        (both_models, False),
        (both_models, True),
        (inside_engine, False),
        (inside_engine, True),
        (inside_itself, False),
        (routed, False),
    ],
)
def test_certain_calls_of_own_classes_are_prefetched(make: Any, is_async: bool) -> None:
    assert compared(make, is_async=is_async).most_at_once >= 2


def test_engine_of_an_own_class_in_a_step_is_read() -> None:
    def run_workflow(*, is_fast: bool) -> tuple[str, list[str], int]:
        llm = HostedLLM()
        workflow: Any = WithSteps(Responding(llm))
        workflow = accelerate(workflow) if is_fast else workflow

        async def ask() -> str:
            return str(await workflow.run(query="oats"))

        return asyncio.run(ask()), llm.prompts, llm.most_at_once

    original, fast = run_workflow(is_fast=False), run_workflow(is_fast=True)
    assert fast[:2] == original[:2]
    assert (original[2], fast[2]) == (1, 2)


def test_explain_has_a_row_for_each_call_in_own_code() -> None:
    llm = HostedLLM()
    fast = accelerate(Responding(llm), concurrent=[llm])
    rows = [(row.name, row.status.name) for row in fast.report().calls]
    assert rows == [("engine._query.complete", "IN_PLACE"), ("engine._query.complete2", "PREFETCHED")]
    assert "1 part: 1 optimized" in fast.explain()


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("make", [responding, rewriting, async_perspectives])
@pytest.mark.parametrize("fails_on", ["praise", "blame", "short", "long", "farmer"])
def test_error_of_a_call_in_own_code_is_the_originals(make: Any, is_async: bool, fails_on: str) -> None:
    original = run(make, is_fast=False, is_async=is_async, fails_on=fails_on)
    fast = run(make, is_fast=True, is_async=is_async, fails_on=fails_on)
    assert fast.answer == original.answer
    assert set(original.prompts) <= set(fast.prompts)


# ------------------------------------------------------------ what is not certain keeps its place


class Choosing(CustomQueryEngine):
    llm: Any

    def custom_query(self, query_str: str) -> str:
        if "x" in str(self.llm.complete(f"choose {query_str}")):
            return str(self.llm.complete(f"left {query_str}"))
        return str(self.llm.complete(f"right {query_str}"))


def remembering(function: Any) -> Any:
    """Return a method that remembers its answers."""
    answers: dict[str, str] = {}

    @functools.wraps(function)
    def method(self: Any, query_str: str) -> str:
        if query_str not in answers:
            answers[query_str] = function(self, query_str)
        return answers[query_str]

    return method


def cached_engine(llm: HostedLLM) -> Any:
    class Cached(CustomQueryEngine):
        llm: Any

        @remembering
        def custom_query(self, query_str: str) -> str:
            return str(self.llm.complete(f"a {query_str}")) + str(self.llm.complete(f"b {query_str}"))

    return Cached(llm=llm)


class OtherQuery(Perspectives):
    def query(self, str_or_query_bundle: Any) -> Any:
        return super().query(f"{str_or_query_bundle} today")


class AnsweringItself(CustomQueryEngine):
    llm: Any

    def custom_query(self, query_str: str) -> str:
        if len(query_str) < 6:
            return str(self.query(query_str + "!"))
        return str(self.llm.complete(query_str))


@pytest.mark.parametrize(
    "make",
    [
        lambda llm, index: Choosing(llm=llm),
        lambda llm, index: cached_engine(llm),
        lambda llm, index: OtherQuery(llm=llm, retriever=index.as_retriever()),
        lambda llm, index: AnsweringItself(llm=llm),
    ],
)
def test_code_that_is_not_certain_runs_as_it_is(make: Any) -> None:
    assert compared(make).most_at_once == 1


def test_cached_method_calls_its_models_once() -> None:
    llm = HostedLLM()
    fast = accelerate(cached_engine(llm), concurrent=[llm])
    assert [len(call(fast, llm).prompts) for _ in range(2)] == [2, 0]


def test_method_that_was_replaced_on_the_object_is_not_read() -> None:
    llm = HostedLLM()
    retriever = rewriting(llm, VectorStoreIndex([NODES[0].node], embed_model=MockEmbedding(embed_dim=2)))
    retriever._retrieve = lambda query_bundle: NODES
    fast = accelerate(retriever, concurrent=[llm])
    assert call(fast, llm).prompts == []


# ------------------------------------------------------------ objects that change


def test_plan_follows_changes_of_the_object() -> None:
    llm, other_llm = HostedLLM(), HostedLLM()
    engine = Perspectives(
        llm=llm, retriever=rewriting(llm, VectorStoreIndex([], embed_model=MockEmbedding(embed_dim=2)))
    )
    fast = accelerate(engine, concurrent=[llm, other_llm])
    call(fast, llm)
    engine.roles.append("baker")
    second = call(fast, llm)
    assert sum(prompt.startswith("As a") for prompt in second.prompts) == 4
    engine.llm = other_llm
    assert not any(prompt.startswith("As a") for prompt in call(fast, llm).prompts)
    assert sum(prompt.startswith("As a") for prompt in other_llm.prompts) == 4


def test_calls_of_a_method_that_was_patched_are_those_of_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = HostedLLM()
    fast = accelerate(Responding(llm), concurrent=[llm])
    call(fast, llm)
    monkeypatch.setattr(Responding, "_query", lambda self, query_bundle: Response(str(self.llm.complete("new"))))
    assert call(fast, llm).prompts == ["new"]
