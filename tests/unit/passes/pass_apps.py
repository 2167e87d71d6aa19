"""Graphs and engines that several tests of the passes use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from teola_plugin.graph import (
    Attributes,
    Batching,
    Component,
    Curve,
    Effect,
    EngineProfile,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Ref,
    Role,
    WorkflowTemplate,
    named,
)
from teola_plugin.passes import PassContext

K = PrimitiveKind
Golden = Callable[[str, Graph, Graph], None]
"""The `golden` fixture."""
LITERAL = PromptPart.literal("Answer the question below from the context given, briefly and in one sentence. " * 4)
READS, WRITES = Effect("collection:docs"), Effect("collection:docs", writes=True)

LLM = EngineProfile(
    curves={K.PREFILLING: Curve.linear(0.01, 0.001), K.DECODING: Curve.linear(0.0, 0.02)},
    batching=Batching.CONTINUOUS,
    max_efficient_batch=1024,
    device="gpu:0",
    prefix_caching=True,
)
EMBEDDER = EngineProfile(curves={K.EMBEDDING: Curve.linear(0.005, 0.001)}, device="gpu:1")
RERANKER = EngineProfile(curves={K.RERANKING: Curve.linear(0.005, 0.002)}, max_efficient_batch=32, device="gpu:2")
STORE = EngineProfile(
    curves={K.INGESTION: Curve.linear(0.002, 0.0005), K.SEARCHING: Curve.linear(0.004, 0.001)},
    batching=Batching.CONTINUOUS,
    device="cpu",
)
PROFILES = {"llm": LLM, "embedder": EMBEDDER, "reranker": RERANKER, "store": STORE}
CONTEXT = PassContext(PROFILES)
UNMEASURED = PassContext({name: replace(profile, curves={}) for name, profile in PROFILES.items()})
ONE_DEVICE = PassContext({name: replace(profile, device="cpu") for name, profile in PROFILES.items()})

QUESTION = Ref("$input", ("question",))


def retrieval_body(effect: Effect = READS) -> WorkflowTemplate:
    one = Component(
        "hits",
        Role.RETRIEVAL,
        named(query=Ref("$item")),
        "store",
        "embedder",
        effects=(effect,),
        attributes=Attributes(k=16),
    )
    return WorkflowTemplate((one,), Ref("hits"), name="retrieve one")


def generation(name: str, context: Ref, previous: str = "") -> Component:
    prompt = (LITERAL, PromptPart.var("question"), PromptPart.var("context", tokens=200))
    inputs = named(question=QUESTION, context=context)
    if previous:
        prompt += (PromptPart.var("existing_answer"),)
        inputs += named(existing_answer=Ref(previous))
    return Component(name, Role.GENERATION, inputs, "llm", prompt=prompt)


def advanced_rag(*, splittable: bool = True, expected: int | None = 3) -> WorkflowTemplate:
    """Return the app of the paper's Figures 2d and 6: an upload, query expansion, a reranker, three refine calls."""
    components = [
        Component("index", Role.INDEXING, named(document=Ref("$input", ("document",))), "store", "embedder",
                  effects=(WRITES,), expected=666),
        Component("expand", Role.GENERATION, named(question=QUESTION), "llm", splittable=splittable, expected=expected,
                  prompt=(LITERAL, PromptPart.var("question"))),
        Component("queries", Role.CALL, named(text=Ref("expand"))),
        Component("retrieve", Role.MAP, named(items=Ref("queries")), body=retrieval_body()),
        Component("union", Role.OPAQUE, named(hits=Ref("retrieve"))),
        Component("rerank", Role.RERANKING, named(query=QUESTION, documents=Ref("union")), "reranker", batchable=True,
                  expected=24),
        Component("top", Role.CALL, named(scores=Ref("rerank"), documents=Ref("union"))),
        generation("answer", Ref("top", (0,))),
        generation("refine1", Ref("top", (1,)), "answer"),
        generation("refine2", Ref("top", (2,)), "refine1"),
    ]  # fmt: skip
    names = [c.name for c in components]
    return WorkflowTemplate(tuple(components), Ref("refine2"), tuple(pairwise(names)), "advanced rag")


def call(
    name: str, *reads: str, after: tuple[str, ...] = (), kind: PrimitiveKind = K.CALL, **more: object
) -> Primitive:
    """Return a primitive that reads whole values."""
    inputs = tuple((f"in{i}", Ref(read)) for i, read in enumerate(reads))
    return Primitive(name, kind, inputs=inputs, after=after, call=name, **more)  # type: ignore[arg-type]
