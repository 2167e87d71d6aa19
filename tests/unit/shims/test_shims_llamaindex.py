"""Tests of the records of `shims.llamaindex` on the installed version.

With a name missing, the original runs and a reason is given.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform
from llama_index.core.query_engine import (
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryQueryEngine,
)
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.response_synthesizers import (
    Refine,
)
from llama_index.core.retrievers import TransformRetriever
from llama_index.core.schema import TextNode
from support.llamaindex_engines import ENGINES, Library, response_parts
from support.llamaindex_records import OBJECTS, Kind, summary_index
from support.private_names import touches

import teola_plugin.adapters.llamaindex
import teola_plugin.shims.llamaindex
from teola_plugin.adapters import accelerate
from teola_plugin.adapters.llamaindex.copies import nonblocking
from teola_plugin.adapters.llamaindex.ingestion import TeolaVectorStoreIndex, accelerated_index
from teola_plugin.adapters.llamaindex.workflows.agent_runs import ToolAccelerator
from teola_plugin.shims.llamaindex import EXTENSION_POINTS, engines, models, queries, retrieval, workflows
from teola_plugin.shims.llamaindex import synthesizers as writers
from teola_plugin.shims.llamaindex.records import Attribute, Parts, Unreadable
from teola_plugin.tracer.llamaindex.trace import trace

ASKED = "what is there"


# ------------------------------------------------------------ nowhere else


def test_only_shims_touch_private_names() -> None:
    places = ("adapters/llamaindex", "tracer/llamaindex", "teola_plugin/llamaindex.py")
    assert touches(places, allowed={"": EXTENSION_POINTS}) == []


def test_subclasses_override_only_extension_points() -> None:
    overridden = {
        name
        for cls in _own_classes(teola_plugin.adapters.llamaindex)
        for name, value in vars(cls).items()
        if name.startswith("_") and not name.startswith("__") and callable(value) and _of_llamaindex(cls, name)
    }
    assert overridden == EXTENSION_POINTS.keys()


def _own_classes(package: ModuleType) -> Iterator[type]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        yield from (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == found.name)


def _of_llamaindex(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__[1:] if base.__module__.startswith("llama_index"))


# ------------------------------------------------------------ as the installed version makes it

ELSEWHERE = {
    models.OpenAIParts,
    models.OpenAIEmbeddingParts,
    models.HuggingFaceEmbeddingParts,
    models.SentenceTransformerRerankParts,
    models.CohereRerankParts,
}
"""Of packages beside LlamaIndex's own: see `test_shims_llamaindex_models.py`."""
BASES = {engines.RetrievalParts, retrieval.RetrieverParts}
"""What records of several classes have in common."""
kinds = pytest.mark.parametrize("kind", list(OBJECTS), ids=lambda kind: kind.__name__)


def test_every_record_class_is_tested() -> None:
    found = {
        one
        for module in pkgutil.walk_packages(
            teola_plugin.shims.llamaindex.__path__, f"{teola_plugin.shims.llamaindex.__name__}."
        )
        for one in vars(importlib.import_module(module.name)).values()
        if inspect.isclass(one) and issubclass(one, Parts)
    }
    assert found - {Parts} == OBJECTS.keys() | ELSEWHERE | BASES


@kinds
def test_record_holds_the_constructor_values_of_its_object(stock: Library, kind: Kind) -> None:
    made, given = OBJECTS[kind](stock)
    assert not kind.OF or isinstance(made, kind.OF)
    found = kind.of(made)
    assert {one.name for one in fields(found)} == given.keys()
    for name, value in given.items():
        assert getattr(found, name) is value or getattr(found, name) == value, name


# ------------------------------------------------------------ another version


class Nothing:
    """A type that no attribute has."""


def sources(kind: Kind) -> dict[str, Any]:
    return {one.name: one.metadata["source"] for one in fields(kind)}


def reads(patch: pytest.MonkeyPatch, kind: Kind, field: str, source: Any) -> None:
    """Read the field from another attribute, as if LlamaIndex had renamed or retyped it."""
    [found] = [one for one in fields(kind) if one.name == field]
    patch.setattr(found, "metadata", MappingProxyType({"source": source}))


@kinds
def test_missing_attribute_or_method_raises_unreadable(
    stock: Library, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = OBJECTS[kind](stock)
    for field, source in sources(kind).items():
        if not isinstance(source, Attribute):
            continue
        with monkeypatch.context() as patch:
            reads(patch, kind, field, replace(source, kinds=(Nothing,)))
            with pytest.raises(Unreadable, match=rf"its '{source.name}' is a \w+, in LlamaIndex 0.14 a Nothing"):
                kind.of(made)
        with monkeypatch.context() as patch:
            reads(patch, kind, field, replace(source, name="renamed"))
            if isinstance(source.default, type(None) | bool):
                assert getattr(kind.of(made), field) is source.default
            else:
                with pytest.raises(Unreadable, match="it has no 'renamed', which LlamaIndex"):
                    kind.of(made)
    for method in kind.METHODS:
        assert callable(getattr(type(made), method)), method
    monkeypatch.setattr(kind, "METHODS", (*kind.METHODS, "renamed"))
    with pytest.raises(Unreadable, match="no method 'renamed'"):
        kind.of(made)


def test_missing_attribute_of_a_derived_field_raises_unreadable(stock: Library) -> None:
    refine = Refine(stock.llm)
    del refine._program_factory
    with pytest.raises(Unreadable, match="'_program_factory'"):
        writers.RefineParts.of(refine)
    own = Refine(stock.llm, structured_answer_filtering=True, program_factory=lambda prompt: None)  # type: ignore[arg-type,return-value]
    assert not writers.RefineParts.of(own).default_program
    steps = MultiStepQueryEngine(stock.rag(), HyDEQueryTransform(stock.llm))
    del steps._response_synthesizer
    with pytest.raises(Unreadable, match="'_response_synthesizer'"):
        engines.MultiStepQueryEngineParts.of(steps)


# ------------------------------------------------------------ what becomes of it


def retried(x: Library) -> Any:
    return RetrySourceQueryEngine(x.rag(), RelevancyEvaluator(x.llm), llm=x.llm, max_retries=1)


USED: dict[Kind, Callable[[Library], Any]] = {
    engines.RetrieverQueryEngineParts: ENGINES["reranked"],
    engines.CitationQueryEngineParts: ENGINES["cited"],
    engines.TransformQueryEngineParts: ENGINES["hyde"],
    engines.RetrySourceQueryEngineParts: retried,
    engines.RouterQueryEngineParts: ENGINES["router"],
    engines.SubQuestionQueryEngineParts: ENGINES["sub-questions"],
    retrieval.VectorIndexRetrieverParts: ENGINES["tree"],
    retrieval.SummaryIndexRetrieverParts: lambda x: summary_index(x).as_query_engine(llm=x.llm),
    retrieval.QueryFusionRetrieverParts: ENGINES["reranked"],
    retrieval.TransformRetrieverParts: lambda x: RetrieverQueryEngine.from_args(
        TransformRetriever(x.index.as_retriever(), HyDEQueryTransform(x.llm)), llm=x.llm
    ),
    writers.SynthesizerParts: lambda x: x.fused("context_only"),
    writers.RefineParts: ENGINES["fusion, refine"],
    writers.CompactAndRefineParts: ENGINES["fusion, compact"],
    writers.AccumulateParts: ENGINES["accumulated"],
    writers.TreeSummarizeParts: ENGINES["tree"],
    writers.SimpleSummarizeParts: ENGINES["fusion, simple_summarize"],
    writers.GenerationParts: ENGINES["fusion, generation"],
    retrieval.RouterRetrieverParts: lambda x: RetrieverQueryEngine.from_args(x.searching_router(), llm=x.llm),
    queries.HyDEQueryTransformParts: ENGINES["hyde"],
    queries.DecomposeQueryTransformParts: ENGINES["decomposed"],
    queries.LLMSelectorParts: ENGINES["router"],
    queries.PydanticSelectorParts: Library.router_by_call,
    queries.FunctionCallingProgramParts: Library.router_by_call,
    queries.LLMQuestionGeneratorParts: ENGINES["sub-questions"],
    retrieval.PostprocessorParts: ENGINES["chosen by the model"],
    retrieval.LLMRerankParts: ENGINES["chosen by the model"],
    engines.RelevancyEvaluatorParts: retried,
    engines.SettingsParts: retried,
}
NOT_PLANNED = {
    engines.QueryEngineParts,
    engines.MultiStepQueryEngineParts,
    engines.AnsweringParts,
    engines.VectorStoreIndexParts,
    engines.QueriedIndexParts,
    workflows.QueryEngineToolParts,
    workflows.RetrieverToolParts,
}
"""Read for other ends than a plan: the tests below."""


def test_every_record_class_is_used_in_plans() -> None:
    assert USED.keys() | NOT_PLANNED == OBJECTS.keys()


@pytest.mark.parametrize("kind", list(USED), ids=lambda kind: kind.__name__)
def test_object_that_is_not_understood_answers_unchanged(
    stock: Library, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = USED[kind]
    plain = response_parts(make(stock).query(ASKED))
    ways: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch, field=field, source=source: reads(patch, kind, field, replace(source, name="renamed"))  # type: ignore[misc]
        for field, source in sources(kind).items()
        if isinstance(source, Attribute) and source.default not in (None, False)
    ]
    ways.append(lambda patch: patch.setattr(kind, "METHODS", (*kind.METHODS, "renamed")))
    for way in ways:
        with monkeypatch.context() as patch:
            way(patch)
            fast = accelerate(make(stock), pool=stock.llm.pool)
            assert any("'renamed'" in row.reason for row in fast.report().parts if row.level != "lowered"), str(
                fast.report().parts
            )
            assert response_parts(fast.query(ASKED)) == plain


def test_engine_without_a_known_synthesizer_is_reported(stock: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources(engines.AnsweringParts)["response_synthesizer"]
    reads(monkeypatch, engines.AnsweringParts, "response_synthesizer", replace(source, name="renamed"))
    [row] = [row for row in trace(stock.rag(), "synthesize").traced.report if row.path == "engine"]
    assert row.reason.startswith("RetrieverQueryEngine has no synthesizer of its own")


@pytest.mark.parametrize("kind", [engines.QueryEngineParts, engines.MultiStepQueryEngineParts])
def test_unknown_async_method_is_not_replaced(stock: Library, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is engines.QueryEngineParts:
        engine: Any = RetryQueryEngine(stock.rag(), RelevancyEvaluator(stock.llm))
    else:
        engine = MultiStepQueryEngine(stock.rag(), HyDEQueryTransform(stock.llm))
    assert nonblocking(engine) is not engine
    monkeypatch.setattr(kind, "METHODS", (*kind.METHODS, "renamed"))
    assert nonblocking(engine) is engine


def test_unknown_index_inserts_nodes_by_its_own_code(stock: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = engines.VectorStoreIndexParts
    reads(monkeypatch, kind, "embed_model", replace(sources(kind)["embed_model"], name="renamed"))
    fast = accelerated_index(stock.index)
    assert isinstance(fast, engines.IndexHooks) and not isinstance(fast, TeolaVectorStoreIndex)
    before = stock.index.vector_store.count()  # type: ignore[attr-defined]
    fast.insert_nodes([TextNode(id_="late", text="late")])
    assert stock.index.vector_store.count() == before + 1  # type: ignore[attr-defined]
    stock.index.vector_store.delete_nodes(["late"])


@pytest.mark.parametrize("kind", [workflows.QueryEngineToolParts, workflows.RetrieverToolParts])
def test_unknown_tool_is_left_unchanged(stock: Library, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, _ = OBJECTS[kind](stock)
    [fast] = ToolAccelerator(accelerate)([tool])
    assert type(fast) is type(tool) and fast is not tool and fast.metadata is tool.metadata
    reads(monkeypatch, kind, "part", replace(sources(kind)["part"], name="renamed"))
    assert ToolAccelerator(accelerate)([tool]) == [tool]
