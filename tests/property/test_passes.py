"""Tests that any graph has the same output before and after every pass, in any order that its edges allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_interpreter import RESOURCES, Interpreter, K, realised

from teola_plugin.graph import (
    UNKNOWN_EFFECT,
    Curve,
    Effect,
    EngineProfile,
    Fragment,
    Graph,
    Primitive,
    PromptPart,
    Ref,
    named,
)
from teola_plugin.passes import DEFAULT_PASSES, Pass, PassContext, default_pipeline
from teola_plugin.passes.prune_dependencies import conflict, is_impure

ENGINES = ("llm", "embedder", "reranker", "store")
INPUT = Ref("$input")


class Maker:
    """Draws one graph: steps in the order that a developer might have written them."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.steps: list[list[Primitive]] = []
        self.texts: list[Ref] = [INPUT]
        self.lists: list[list[Ref]] = []
        """Refs of lists; those in one group have the same length."""

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def size(self) -> int | None:
        return self.draw(st.none() | st.integers(1, 9))

    def effect(self, *, writes: bool = False) -> tuple[Effect, ...]:
        return (Effect(self.pick(*RESOURCES), writes=writes, validated=not writes and self.draw(st.booleans())),)

    def add(self, *made: Primitive) -> Ref:
        self.steps.append(list(made))
        return Ref(made[-1].id)

    @property
    def name(self) -> str:
        return f"s{len(self.steps)}"

    def group(self) -> list[Ref]:
        if not self.lists:
            self.chunking()
        return self.pick(*self.lists)

    def chunking(self) -> None:
        options = (("length", self.draw(st.integers(0, 9))),)
        self.lists.append(
            [self.add(Primitive(self.name, K.CHUNKING, inputs=named(x=self.pick(*self.texts)), options=options))]
        )

    def embedding(self) -> None:
        group = self.group()
        inputs = named(texts=self.pick(*group))
        group.append(self.add(Primitive(self.name, K.EMBEDDING, "embedder", inputs, batchable=True, size=self.size())))

    def single(self) -> None:
        inputs = named(texts=self.pick(*self.texts))
        self.texts.append(self.add(Primitive(self.name, K.EMBEDDING, "embedder", inputs, size=1)))

    def ingestion(self) -> None:
        group = self.group()
        inputs = named(chunks=self.pick(*group), vectors=self.pick(*group))
        p = Primitive(
            self.name, K.INGESTION, "store", inputs, batchable=True, size=self.size(), effects=self.effect(writes=True)
        )
        group.append(self.add(p))

    def searching(self) -> None:
        group = self.group()
        inputs = named(vectors=self.pick(*group))
        group.append(
            self.add(
                Primitive(
                    self.name, K.SEARCHING, "store", inputs, batchable=True, size=self.size(), effects=self.effect()
                )
            )
        )

    def reranking(self) -> None:
        group = self.group()
        inputs = named(query=self.pick(*self.texts), documents=self.pick(*group))
        group.append(self.add(Primitive(self.name, K.RERANKING, "reranker", inputs, batchable=True, size=self.size())))

    def reranked(self) -> None:
        """Add a prompt on documents that are reranked first."""
        self.reranking()
        group = next(group for group in self.lists if Ref(self.steps[-1][-1].id) in group)
        inputs = named(documents=group[0], scores=group[-1])
        context = self.add(Primitive(self.name, K.CALL, inputs=inputs, call="join"))
        self.decode([PromptPart.literal("literal text " * 9), PromptPart.var("c", 30)], [(context, "c")])

    def retrieval(self) -> None:
        embed = Primitive(f"{self.name}.vector", K.EMBEDDING, "embedder", named(texts=self.pick(*self.texts)), size=1)
        inputs = named(vectors=Ref(embed.id))
        search = Primitive(self.name, K.SEARCHING, "store", inputs, size=1, effects=self.effect())
        self.texts.append(self.add(embed, search))

    def answering(self) -> None:
        """Add a prompt whose first part is ready before the rest."""
        self.retrieval()
        parts = [(self.pick(*self.texts), "q"), (self.texts[-1], "c")]
        self.decode([PromptPart.literal("literal text " * 9), *(PromptPart.var(name, 30) for _, name in parts)], parts)

    def generation(self) -> None:
        parts: list[tuple[Ref, str]] = []
        prompt: list[PromptPart] = []
        for i in range(self.draw(st.integers(1, 4))):
            if self.draw(st.booleans()):
                prompt.append(PromptPart.literal("literal text " * self.pick(1, 9)))
            else:
                parts.append((self.pick(*self.texts), f"v{i}"))
                prompt.append(PromptPart.var(f"v{i}", self.pick(0, 30)))
        self.decode(prompt, parts)

    def decode(self, prompt: list[PromptPart], parts: list[tuple[Ref, str]], *, splittable: bool = False) -> Ref:
        name, options = self.name, (("yields", self.draw(st.integers(1, 4))),)
        inputs = tuple((key, ref) for ref, key in parts)
        lead = Primitive(f"{name}.lead", K.PREFILLING, "llm", inputs, prompt=tuple(prompt), options=options)
        size = self.draw(st.none() | st.integers(1, 4)) if splittable else None
        made = Primitive(name, K.DECODING, "llm", named(lead=Ref(lead.id)), size=size, options=options)
        self.texts.append(self.add(lead, made.with_(splittable=splittable)))
        return self.texts[-1]

    def expansion(self) -> None:
        """Add a generated list, and a step for each item."""
        text = self.decode([PromptPart.var("q", 9)], [(self.pick(*self.texts), "q")], splittable=True)
        self.list_maker(text, "split")
        self.over(self.lists[-1][0])

    def document(self) -> None:
        """Add an upload, and a search in it for each generated item."""
        self.chunking()
        self.ingestion()
        self.expansion()

    def list_maker(self, ref: Ref, call: str) -> None:
        kind = self.pick(K.CALL, K.CALL, K.OPAQUE)
        effects = (UNKNOWN_EFFECT,) if kind is K.OPAQUE else ()
        self.lists.append([self.add(Primitive(self.name, kind, inputs=named(x=ref), call=call, effects=effects))])

    def over(self, items: Ref) -> None:
        """Add what follows a list of generated items."""
        what = self.pick("map", "map", "reverse", "embed")
        if what == "map":
            self.mapping(items)
        elif what == "reverse":
            self.list_maker(items, "reverse")
            self.mapping(self.lists[-1][0])
        else:
            inputs = named(texts=items)
            ref = self.add(Primitive(self.name, K.EMBEDDING, "embedder", inputs, batchable=True))
            self.lists[-1].append(ref)

    def mapping(self, items: Ref | None = None) -> None:
        group = next((g for g in self.lists if items in g), None) or self.group()
        body = self.body()
        effects = tuple(dict.fromkeys(e for p in body.graph for e in p.effects))
        inputs = named(items=items or self.pick(*group), shared=self.pick(*self.texts))
        group.append(self.add(Primitive(self.name, K.MAP, inputs=inputs, effects=effects, fragment=body)))

    def body(self) -> Fragment:
        made = [Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$item")), size=1)]
        then = self.pick("nothing", "search", "search", "rank", "tool")
        if then == "search":
            made.append(Primitive("s", K.SEARCHING, "store", named(vectors=Ref("e")), size=1, effects=self.effect()))
        elif then == "rank":
            inputs = named(query=Ref("$shared"), documents=Ref("e"))
            made.append(Primitive("r", K.RERANKING, "reranker", inputs, size=1))
        elif then == "tool":
            made.append(Primitive("t", K.TOOL, inputs=named(x=Ref("e")), call="tool", effects=(UNKNOWN_EFFECT,)))
        return Fragment(Graph(made, Ref(made[-1].id)), Ref(made[-1].id))

    def user_code(self) -> None:
        kind = self.pick(K.OPAQUE, K.TOOL)
        inputs = named(x=self.pick(*self.texts), y=self.pick(*self.texts, *(r for g in self.lists for r in g)))
        self.texts.append(self.add(Primitive(self.name, kind, inputs=inputs, call="user", effects=(UNKNOWN_EFFECT,))))

    def joining(self) -> None:
        inputs = named(x=self.pick(*self.texts), y=self.pick(*self.texts, *(r for g in self.lists for r in g)))
        self.texts.append(self.add(Primitive(self.name, K.CALL, inputs=inputs, call="join")))

    def graph(self) -> Graph:
        kinds = (
            self.chunking, self.embedding, self.embedding, self.single, self.ingestion, self.searching,
            self.reranking, self.reranked, self.generation, self.answering, self.expansion, self.document,
            self.mapping, self.user_code, self.joining,
        )  # fmt: skip
        for _ in range(self.draw(st.integers(1, 8))):
            self.pick(*kinds)()
        known = [*self.texts, *(ref for group in self.lists for ref in group)]
        read = self.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
        output = self.add(
            Primitive("output", K.CALL, inputs=tuple((f"v{i}", ref) for i, ref in enumerate(read)), call="join")
        )
        return Graph(self.chained() if self.draw(st.booleans()) else self.loose(), output)

    def chained(self) -> list[Primitive]:
        """Return the steps with each after the one before it, as in a template."""
        made = list(self.steps[0])
        for last, step in zip(self.steps, self.steps[1:], strict=False):
            made += [step[0].with_(after=(last[-1].id,)), *step[1:]]
        return made

    def loose(self) -> list[Primitive]:
        """Return the steps with order edges between conflicting ones, and a few others."""
        made: list[Primitive] = []
        for step in self.steps:
            needed = [p.id for p in made if any(is_impure(q) or conflict(p.effects, q.effects) for q in step)]
            more = self.draw(st.lists(st.sampled_from(made), max_size=2)) if made else []
            after = tuple(dict.fromkeys([*needed, *(p.id for p in more)]))
            made += [step[0].with_(after=after), *step[1:]]
        return made


@st.composite
def graphs(draw: Any) -> Graph:
    return Maker(draw).graph()


@st.composite
def contexts(draw: Any) -> PassContext:
    def profile() -> EngineProfile:
        curve = Curve.linear(draw(st.sampled_from((0.001, 0.1))), 0.01)
        return EngineProfile(
            curves={kind: curve for kind in K} if draw(st.booleans()) else {},
            max_efficient_batch=draw(st.integers(1, 4)),
            device=draw(st.sampled_from(("", "", "x", "y"))),
            prefix_caching=draw(st.sampled_from((True, True, False))),
            min_split_tokens=draw(st.sampled_from((0, 3, 20))),
        )

    known = [name for name in ENGINES if draw(st.integers(0, 19))]
    return PassContext({name: profile() for name in known}, draw(st.sampled_from(("auto", "auto", "all", "off"))))


def check(before: Graph, after: Graph, seeds: range) -> None:
    assert all(after.depths[p.id] > after.depths[child] for p in after for child in after.children(p.id))
    expected = Interpreter(before, 0).run()
    assert Interpreter(before, 1).run() == expected, "the drawn graph leaves an order open"
    for seed in seeds:
        assert Interpreter(after, seed).run() == expected, f"differs in order {seed}:\n{before}\n\n{after}"
    check_order(before, after)


def check_order(before: Graph, after: Graph) -> None:
    """Check that conflicting effects keep their order, and that user code waits for everything it did before."""
    for q in before:
        above = [before[name] for name in before.ancestors[q.id]]
        for p in above:
            if is_impure(q) or conflict(p.effects, q.effects):
                for late in realised(q.id, after):
                    missing = set(realised(p.id, after)) - after.ancestors[late]
                    assert not missing, f"{late} overtakes {missing}:\n{before}\n\n{after}"
            for early in after:
                mine = early.speculative and early.id.startswith(f"{q.id}[")
                if mine and conflict(p.effects, early.effects):
                    missing = set(realised(p.id, after)) - after.ancestors[early.id]
                    assert not missing, f"{early.id} overtakes {missing}:\n{before}\n\n{after}"


relaxed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("one", DEFAULT_PASSES, ids=lambda one: one.name)
@relaxed
@given(graph=graphs(), context=contexts())
def test_each_pass_preserves_the_output_of_any_graph(one: Pass, graph: Graph, context: PassContext) -> None:
    after = one.run(graph, context)
    if after is not graph:
        assert after != graph, "the same object where nothing matched"
        check(graph, after, range(3))


@relaxed
@given(graph=graphs(), context=contexts())
def test_default_pipeline_preserves_the_output_of_any_graph(graph: Graph, context: PassContext) -> None:
    after = default_pipeline().run(graph, context).graph
    check(graph, after, range(4))
    assert default_pipeline().run(after, context).graph is after, "a fixed point"
