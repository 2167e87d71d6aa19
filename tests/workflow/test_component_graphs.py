"""Tests of the p-graph of every component, and of its e-graph on the profile of RTX 3090s."""

from __future__ import annotations

from pathlib import Path

import pytest

from teola_plugin import workflow as package
from teola_plugin.engines.fake import FakeTools, FakeWebSearch
from teola_plugin.engines.fake.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090, tools, web_search
from teola_plugin.graph import Attributes, Primitive, PrimitiveKind, Ref, named
from teola_plugin.pool import EnginePool
from teola_plugin.workflow import (
    PER_QUERY,
    Branch,
    Chunking,
    Component,
    Condition,
    Decomposition,
    Embedding,
    Flow,
    Function,
    Generation,
    Indexing,
    Ingestion,
    Input,
    Kind,
    Loop,
    Map,
    QueryExpansion,
    Reranking,
    Searching,
    Synthesis,
    Tool,
    Value,
    WebSearch,
    Workflow,
    reads,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "workflow"
GIVEN = {"documents": " ".join(f"word{i}" for i in range(60_000))}


class Custom(Component):
    """Says its primitives."""

    query: str = reads("question", Kind.TEXT)

    def sources(self) -> dict[str, str]:
        return {"query": "question"}

    def decompose(self, decomposition: Decomposition) -> Value:
        hits = decomposition.primitives(
            Primitive("vector", PrimitiveKind.EMBEDDING, "embedder", named(texts=Ref("$query")), size=1),
            Primitive(
                "search",
                PrimitiveKind.SEARCHING,
                "store",
                named(vectors=Ref("vector")),
                attributes=Attributes(collection="documents", k=2),
            ),
            Primitive("count", PrimitiveKind.CALL, inputs=named(hits=Ref("search")), call="count"),
            calls={"count": len},
        )
        return Value(hits, Kind.ANY)


def function(x: str) -> str:
    return x


LEAD = "Be brief, and answer from the passages alone. " * 8
TOLD = Synthesis("told", context="web")
FOUND = Searching("passages", k=3)
FLOWS: dict[str, Flow] = {
    "chunking, embedding, ingestion": Chunking("chunks") >> Embedding("vectors", texts="chunks") >> Ingestion("rows"),
    "indexing": Flow.of(Indexing("index", collection=PER_QUERY)),
    "searching": Embedding("vector") >> Searching("found", query="vector"),
    "searching after expansion": QueryExpansion("queries") >> Searching("found", query="queries", k=16),
    "searching for many": Flow.of(Searching("found", query="several")),
    "web searching": QueryExpansion("queries", n=2) >> WebSearch("found", query="queries"),
    "reranking": FOUND >> Reranking("best"),
    "generation": FOUND >> Generation("answer", LEAD + "{question}\n{passages}"),
    "a list that is mapped over": Generation("plan", "{question}", items="json", expected=2)
    >> Map("all", over="plan", flow=Generation("one", "Do {item} for {question}")),
    "refine": FOUND >> Synthesis("answer", mode="refine"),
    "compact": FOUND >> Synthesis("answer", mode="compact"),
    "tree": FOUND >> Synthesis("answer", mode="tree"),
    "a tree of many levels": Flow.of(Synthesis("answer", context="several", mode="tree", fanout=2)),
    "condition and branch": Generation("verdict", "Is it about hay? {question}")
    >> Condition("about_hay")
    >> Branch(
        "answer",
        condition="about_hay",
        then=WebSearch("web") >> Synthesis("told", context="web"),
        otherwise="verdict",
    ),
    "loop": Generation("first", "{question}")
    >> Loop(
        "better",
        init="first",
        flow=Generation("next", "Better {draft}") >> Condition("enough", value="next"),
        until="enough",
    ),
    "functions and tools": Function("x", function, reads={"x": "question"}, pure=True)
    >> [Function("y", function), Tool("z", function, read_only=True)]
    >> Tool("sent", engine="tools", reads={"text": "y"}),
    "custom": Flow.of(Custom("custom")),
}


def test_every_shipped_component_has_a_case() -> None:
    kinds = (getattr(package, name) for name in package.__all__)
    shipped = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Component)} - {Component}
    assert {type(one) for flow in FLOWS.values() for one in flow.everything()} == shipped | {Custom}


@pytest.fixture(scope="module")
def pool() -> EnginePool:
    """Create a pool that is never started, because plans need profiles only."""
    outside = [FakeWebSearch(profile=web_search(0.3)), FakeTools(profile=tools(0.2))]
    return EnginePool.local([*fake_engines(rtx3090()), *outside])


@pytest.mark.parametrize("case", FLOWS)
def test_component_graphs_match_golden_files(case: str, pool: EnginePool, request: pytest.FixtureRequest) -> None:
    workflow = Workflow(case, FLOWS[case], inputs=_inputs(FLOWS[case]))
    app = workflow.deploy(pool, speculate="all" if "web" in case else "auto")
    given = {one.name: GIVEN.get(one.name, "x") for one in workflow.inputs}
    plan = app.plan({**given, "several": ["x", "y"]} if "several" in given else given)
    text = f"p-graph\n{plan.source}\n\ne-graph ({', '.join(plan.fired)})\n{plan.graph}\n"
    path = GOLDEN / f"{case.replace(', ', ' ').replace(' ', '_')}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, "pytest --update-golden, and review it"


def _inputs(flow: Flow) -> list[Input]:
    read = {name for one in flow for name in one.needs()}
    return [Input("several", Kind.TEXTS)] if "several" in read else []
