"""Tests that any workflow gives the same result with all passes, without any, and run step by step."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sample_workflows import engines
from support.sequential_workflow import Sequential

from teola_plugin.engines.profiles import rtx3090
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.workflow import (
    PER_QUERY,
    Branch,
    Chunking,
    Component,
    Condition,
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
    Workflow,
)

TEXT, TEXTS, PASSAGES, VECTOR = "text", "texts", "passages", "vector"
INPUTS = [Input("question"), Input("other"), Input("words", Kind.TEXTS), Input("documents", Kind.DOCUMENTS)]
NUMBERS = itertools.count()


def joined(**given: Any) -> str:
    """Return a short text of all arguments, as functions of drawn workflows do."""
    return f"{'+'.join(sorted(given))} {hash(str(given)) % 997}"


class Maker:
    """Draws one workflow: components in an order, each reading values that are there by then."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.made: list[Component] = []
        self.known: dict[str, list[str]] = {TEXT: ["question", "other"], TEXTS: ["words"], PASSAGES: [], VECTOR: []}
        self.count = 0

    def pick(self, kind: str) -> str:
        return self.draw(st.sampled_from(self.known[kind]))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def name(self) -> str:
        self.count += 1
        return f"c{self.count}"

    def add(self, one: Component, kind: str) -> None:
        self.made.append(one)
        self.known[kind].append(one.name)

    # ------------------------------------------------------------ one component each

    def index(self) -> None:
        self.made.append(Indexing(self.name(), chunk_size=self.number(4, 9), chunk_overlap=2, collection=PER_QUERY))

    def index_step_by_step(self) -> None:
        chunks, vectors, rows = self.name(), self.name(), self.name()
        self.made += [
            Chunking(chunks, chunk_size=self.number(4, 9), chunk_overlap=1),
            Embedding(vectors, texts=chunks),
            Ingestion(rows, chunks=chunks, vectors=vectors, collection=PER_QUERY),
        ]

    def expand(self) -> None:
        self.add(QueryExpansion(self.name(), question=self.pick(TEXT), n=self.number(1, 4)), TEXTS)

    def listed(self) -> None:
        prompt, expected = "Write 3 search queries about {a}.", self.draw(st.none() | st.integers(1, 5))
        one = Generation(self.name(), prompt, reads={"a": self.pick(TEXT)}, items="lines", expected=expected)
        self.add(one, TEXTS)

    def embed(self) -> None:
        self.add(Embedding(self.name(), texts=self.pick(TEXT)), VECTOR)

    def search(self) -> None:
        kinds = [kind for kind in (TEXT, TEXTS, TEXTS, VECTOR) if self.known[kind]]
        query = self.pick(self.draw(st.sampled_from(kinds)))
        self.add(Searching(self.name(), query=query, k=self.number(1, 4), collection=PER_QUERY), PASSAGES)

    def rerank(self) -> None:
        if self.known[PASSAGES]:
            found = self.pick(PASSAGES)
            self.add(Reranking(self.name(), query=self.pick(TEXT), passages=found, k=self.number(1, 3)), PASSAGES)

    def synthesis(self) -> None:
        if self.known[PASSAGES]:
            one = Synthesis(
                self.name(),
                question=self.pick(TEXT),
                context=self.pick(PASSAGES),
                mode=self.draw(st.sampled_from(("refine", "compact", "tree"))),
                max_tokens=self.number(1, 8),
                context_tokens=self.number(4, 40),
                fanout=self.number(2, 3),
            )
            self.add(one, TEXT)

    def generation(self) -> None:
        kind = self.draw(st.sampled_from([kind for kind in (TEXT, TEXTS, PASSAGES) if self.known[kind]]))
        reads = {"a": self.pick(TEXT), "b": self.pick(kind)}
        prompt = self.draw(st.sampled_from(("{a}", "Say {a}, then {b}.", "A long lead. " * 30 + "{a}: {b}")))
        reads = {key: name for key, name in reads.items() if f"{{{key}}}" in prompt}
        self.add(Generation(self.name(), prompt, reads=reads, max_tokens=self.number(1, 8)), TEXT)

    def function(self) -> None:
        reads = {key: self.pick(TEXT) for key in ("a", "b")}
        how = self.draw(st.sampled_from(("pure", "not", "tool", "read only")))
        function = lambda a, b: joined(a=a, b=b)  # noqa: E731
        if how in ("pure", "not"):
            self.add(Function(self.name(), function, reads=reads, pure=how == "pure"), TEXT)
        else:
            self.add(Tool(self.name(), function, reads=reads, read_only=how == "read only"), TEXT)

    def branch(self) -> None:
        condition, then = self.name(), self.inner()
        test = self.draw(st.sampled_from((lambda value: True, lambda value: len(str(value)) % 2)))
        self.made.append(Condition(condition, value=self.pick(TEXT), test=test))
        otherwise: Any = self.inner() if self.draw(st.booleans()) else self.pick(TEXT)
        self.add(Branch(self.name(), condition=condition, then=then, otherwise=otherwise), TEXT)

    def mapping(self) -> None:
        body = self.inner("item")
        self.add(Map(self.name(), over=self.pick(TEXTS), flow=body), TEXTS)

    def loop(self) -> None:
        body, until = self.inner("draft"), ""
        if self.draw(st.booleans()):
            until = self.name()
            last = body.tails[0]
            body = body >> Condition(until, value=last, test=lambda value: len(str(value)) % 2)
        rounds = self.number(1, 3)
        self.add(Loop(self.name(), init=self.pick(TEXT), flow=body, until=until, max_rounds=rounds), TEXT)

    def inner(self, own: str = "") -> Flow:
        """Draw a flow of one or two components, which may read all earlier values."""
        known, made = {kind: list(names) for kind, names in self.known.items()}, self.made
        self.known, self.made = {**known, TEXT: [*known[TEXT], *([own] if own else [])], PASSAGES: []}, []
        self.draw(st.sampled_from((self.generation, self.function)))()
        if self.draw(st.booleans()):
            first = self.made[-1].name
            self.made.append(Generation(self.name(), "{x} again", reads={"x": first}, max_tokens=4))
        elif own and self.made[-1].sources() and own not in self.made[-1].sources().values():
            first = self.made[-1].name
            self.made.append(
                Function(self.name(), lambda x, y: joined(x=x, y=y), reads={"x": first, "y": own}, pure=True)
            )
        flow = Flow.of(self.made[0])
        for one in self.made[1:]:
            flow = flow >> one
        self.known, self.made = known, made
        return flow

    def workflow(self) -> Workflow:
        steps = (
            self.index, self.index_step_by_step, self.expand, self.listed, self.embed, self.search, self.search,
            self.rerank, self.synthesis, self.synthesis, self.generation, self.function, self.branch, self.mapping,
            self.loop,
        )  # fmt: skip
        for _ in range(self.number(1, 7)):
            self.draw(st.sampled_from(steps))()
        if not self.made:
            self.generation()
        flow = Flow.of(self.made[0])
        for one in self.made[1:]:
            flow = flow >> one
        return Workflow(f"drawn{next(NUMBERS)}", flow, output=self.made[-1].name, inputs=INPUTS)


@st.composite
def workflows(draw: Any) -> Workflow:
    return Maker(draw).workflow()


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    """Create a pool for the sequential reference. It takes no time and gives the answers of the others."""
    with EnginePool.local(engines()) as made:
        yield made


GIVEN = {
    "question": "What do lambs eat in winter?",
    "other": "Who sells hay?",
    "words": ["oats", "hay and straw", "ivy"],
    "documents": "Lambs eat oats and mares eat oats. Goats eat ivy. Hay is sold at the market in winter by the farm.",
}


OTHER = {
    **GIVEN,
    "question": "Where is ivy eaten?",
    "words": ["ivy"],
    "documents": "Ivy grows on the wall of the farm.",
}


async def answered(workflow: Workflow, passes: Any) -> list[dict[str, Any]]:
    """Return the values of two parallel queries in virtual time, on engines with latencies."""
    async with EnginePool.on_this_loop(engines(rtx3090())) as pool:
        app = workflow.deploy(pool, passes=passes)
        made = await asyncio.gather(*(app.arun(inputs, deadline_s=10_000) for inputs in (GIVEN, OTHER)))
        assert await asyncio.wrap_future(pool.admin("store", "collections")) == []
        return [dict(one.outputs) for one in made]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(workflow=workflows())
def test_any_workflow_gives_equal_values_with_or_without_passes(pool: EnginePool, workflow: Workflow) -> None:
    expected = []
    for number, inputs in enumerate((GIVEN, OTHER)):
        collection = f"{workflow.name}_{number}"
        expected.append(Sequential(pool, collection).run(workflow.flow, inputs))
        pool.admin("store", "delete_collection", collection).result(5)
    for passes in ((), None):
        for made, wanted in zip(run_virtual(answered(workflow, passes)), expected, strict=True):
            for name, value in made.items():
                assert value == wanted[name], f"{name}, passes={passes}\n{workflow}"
