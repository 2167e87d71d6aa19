"""Tests of templates of LlamaIndex objects: what is understood, and why the rest is not. No engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.llms import MockLLM
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import CompactAndRefine, Refine, get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import IndexNode, NodeWithScore, TextNode
from pydantic import BaseModel
from support.llamaindex_engines import ENGINES, Library, library, own_loop, settings

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.graph import Role, build_pgraph
from teola_plugin.graph.graph import format_graph
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import UNKNOWN, Generation
from teola_plugin.shims.llamaindex.copies import copy_template
from teola_plugin.tracer.llamaindex.classes import find_override, report_level
from teola_plugin.tracer.llamaindex.model_calls import capture_payload, prompt_parts, replay_generations
from teola_plugin.tracer.llamaindex.retrieval import unique_nodes
from teola_plugin.tracer.llamaindex.trace import trace
from teola_plugin.tracer.symbols import NotUnderstood

GOLDEN = Path(__file__).parents[2] / "golden" / "tracer" / "llamaindex"


@pytest.fixture(scope="module")
def stock() -> Iterator[Library]:
    with (
        own_loop(),
        EnginePool.local([FakeLLM(), FakeEmbedder(), FakeReranker(), FakeStore()]) as pool,
    ):
        made = library(pool, "traced")
        with settings(made.llm):
            yield made


def reason(node: Any, entry: str = "query") -> str:
    """Return the reason why something in the object is not lowered."""
    return "; ".join(row.reason for row in trace(node, entry).traced.report if row.level != "lowered")


@pytest.mark.parametrize("name", list(ENGINES))
def test_every_part_is_lowered_into_a_valid_graph(stock: Library, name: str) -> None:
    found = trace(ENGINES[name](stock))
    assert {row.level for row in found.traced.report} == {"lowered"}
    build_pgraph(found.traced.template)
    assert found.holds
    named = {component for row in found.traced.report for component in row.components}
    assert named and all(name in set(found.traced.calls) | _names(found.traced.template) for name in named)


GOLDENS = {
    "fused and refined": lambda x: x.fused("refine", node_postprocessors=[x.reranker]),
    "hyde": ENGINES["hyde"],
    "tree": ENGINES["tree"],
    "sub-questions": ENGINES["sub-questions"],
    "router": ENGINES["router"],
    "router, several": ENGINES["router, several"],
    "chosen by the model": ENGINES["chosen by the model"],
}


@pytest.mark.parametrize("name", list(GOLDENS))
def test_template_and_report_match_golden_file(stock: Library, name: str, request: pytest.FixtureRequest) -> None:
    found = trace(GOLDENS[name](stock)).traced
    text = f"{format_graph(build_pgraph(found.template), depths=False)}\n\n{found.report}\n"
    path = GOLDEN / f"{name.replace(', ', '_').replace(' ', '_')}.txt"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def _names(template: Any) -> set[str]:
    own = {c.name for c in template.components}
    return own.union(*(_names(c.body) for c in template.components if c.body is not None))


# ------------------------------------------------------------ why not


class Own(BaseRetriever):
    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return []


class Told(CompactAndRefine):
    def get_response(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_response(*args, **kwargs)


class Named(CompactAndRefine):
    """Only says who it is."""

    @classmethod
    def class_name(cls) -> str:
        return "Named"


class Answer(BaseModel):
    text: str


def synthesizer(stock: Library, **more: Any) -> Any:
    return get_response_synthesizer(llm=stock.llm, **more)


def test_user_code_is_not_lowered_and_reports_why(stock: Library) -> None:
    assert reason(Own(), "retrieve") == "Own is not known"
    assert reason(Told(llm=stock.llm), "synthesize") == "Told changes what CompactAndRefine does"
    assert reason(Named(llm=stock.llm), "synthesize") == ""
    patched = stock.rag()
    patched._response_synthesizer.get_response = lambda *_: "mine"  # type: ignore[method-assign]
    assert "get_response changes what" in reason(patched)
    after = RetrieverQueryEngine(Own(), synthesizer(stock), [SimilarityPostprocessor()])
    assert reason(after).count("its input is known only at run time") == 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda x: synthesizer(x, output_cls=Answer), "has a schema"),
        (lambda x: synthesizer(x, structured_answer_filtering=True), "a program decides"),
        (lambda x: get_response_synthesizer(llm=MockLLM()), "is not on the pool"),
        (lambda x: synthesizer(x, response_mode="accumulate", streaming=True), "cannot stream"),
        (
            lambda x: synthesizer(
                x, text_qa_template=PromptTemplate("{context_str}{query_str}", function_mappings={"a": lambda **_: "b"})
            ),
            "computed by a function",
        ),
        (
            lambda x: get_response_synthesizer(
                llm=x.llm.model_copy(update={"output_parser": PydanticOutputParser(Answer)})
            ),
            "parses what it writes",
        ),
    ],
)
def test_synthesizer_that_is_not_lowered_reports_why(stock: Library, make: Any, why: str) -> None:
    assert why in reason(make(stock), "synthesize")


def test_retrievers_with_filters_or_modes_are_lowered(stock: Library) -> None:
    from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters

    several = MetadataFilters(filters=[MetadataFilter(key="a", value=1, operator=FilterOperator.GT)])
    equal = MetadataFilters(filters=[MetadataFilter(key="file", value="f1")])
    for filters in (several, equal):  # where the store has to search by itself, the embedding is ahead of it
        assert reason(stock.index.as_retriever(filters=filters), "retrieve") == ""
    assert (
        reason(stock.index.as_retriever(vector_store_query_mode="hybrid"), "retrieve") == ""
    )  # its embedding is ahead


def test_node_that_references_an_object_is_not_understood(stock: Library) -> None:
    retriever = stock.index.as_retriever()
    twice = [NodeWithScore(node=TextNode(id_="a", text=text), score=1.0) for text in ("one", "one")]
    assert [n.node.get_content() for n in unique_nodes(retriever, "q", twice)] == ["one"]
    with pytest.raises(NotUnderstood, match="stands for an object"):
        unique_nodes(retriever, "q", [NodeWithScore(node=IndexNode(text="x", index_id="i", obj=retriever), score=1.0)])


def test_report_level_tells_joined_from_original_objects(stock: Library) -> None:
    assert report_level(Own()) == "original"
    assert report_level(stock.rag()) == "joined"
    assert find_override(stock.rag(), RetrieverQueryEngine) == ""


# ------------------------------------------------------------ guards


def test_trace_is_invalid_after_its_object_changes(stock: Library) -> None:
    engine = stock.fused("refine")
    found = trace(engine)
    assert found.holds
    changes = [
        lambda: setattr(engine.retriever, "num_queries", 4),
        lambda: engine._node_postprocessors.append(SimilarityPostprocessor()),
        lambda: setattr(engine._response_synthesizer, "_refine_template", PromptTemplate("{existing_answer}")),
        lambda: setattr(engine.retriever._retrievers[0], "similarity_top_k", 9),
        lambda: setattr(engine, "_response_synthesizer", synthesizer(stock)),
    ]
    for change in changes:
        found = trace(engine)
        change()
        assert not found.holds


# ------------------------------------------------------------ dry runs


def test_prompts_and_answers_pass_through_framework_code(stock: Library) -> None:
    template = PromptTemplate("about {topic}: {text}")

    def run(llm: Any, given: Any) -> str:
        return str(llm.predict(template, **given)).upper()

    made = capture_payload(stock.llm, run, {"topic": "ships", "text": "they sail"}, {}, ("topic", "text"))
    assert made == stock.llm.payload_of_template(template, topic="ships", text="they sail")
    half = capture_payload(stock.llm, run, {"topic": "ships"}, {}, ("topic", "text"))
    assert half.prompt.messages[0].content == f"about ships: {UNKNOWN}"
    assert replay_generations(stock.llm, run, {"topic": "a", "text": "b"}, [Generation("so it is")]) == "SO IT IS"
    with pytest.raises(NotUnderstood, match="not asked"):
        capture_payload(stock.llm, lambda llm, given: "", {}, {}, ())
    with pytest.raises(NotUnderstood, match="once more"):
        replay_generations(
            stock.llm,
            lambda llm, given: run(llm, given) + run(llm, given),
            {"topic": "a", "text": "b"},
            [Generation("")],
        )
    with pytest.raises(NotUnderstood, match="another way"):
        capture_payload(stock.llm, lambda llm, given: llm.stream(template), {}, {}, ())


def test_prompt_parts_follow_the_order_of_the_text(stock: Library) -> None:
    chat = ChatPromptTemplate.from_messages([("system", "Rules. {b}"), ("user", "{a} or {b}?")])

    def run(llm: Any, given: Any) -> str:
        return str(llm.predict(chat, **given))

    found = prompt_parts(stock.llm, run, ("a", "b"), {})
    assert [part.variable or "-" for part in found] == ["-", "b", "-", "a", "-", "b", "-"]
    assert prompt_parts(stock.llm, lambda llm, given: run(llm, {"a": "x", "b": given["b"]}), ("a", "b"), {}) == ()
    assert prompt_parts(stock.llm, lambda llm, given: 1 / 0, ("a",), {}) == ()


def test_copied_template_formats_like_its_original() -> None:
    original = PromptTemplate("{a}", output_parser=PydanticOutputParser(Answer))
    copied = copy_template(original)
    copied.partial_format(a="x")
    assert copied is not original and copied.format(a="x") == original.format(a="x")
    assert original.output_parser is not copied.output_parser


def test_a_refined_answer_is_a_fold_whose_prompts_have_parts(stock: Library) -> None:
    template = trace(stock.rag("refine")).traced.template
    fold = next(c for c in template.components if c.role is Role.FOLD)
    assert fold.body is not None
    [generation] = [c for c in fold.body.components if c.role is Role.GENERATION]
    assert {part.variable for part in generation.prompt} >= {"query", "answer", "chunk"}
    assert isinstance(stock.rag("refine")._response_synthesizer, Refine)
