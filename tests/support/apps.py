"""Advanced RAG as a workflow template with client callables: index, expand, search, union, rerank, refine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from teola_plugin.graph import Attributes, Component, Effect, PromptPart, Ref, Role, WorkflowTemplate, named
from teola_plugin.requests.payloads import UNKNOWN, Chunk, Generate, Message, Prompt, Sampling

QUESTION = Ref("$input", ("question",))
LIST = '{"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}'


def advanced_rag() -> tuple[WorkflowTemplate, dict[str, Callable[..., Any]], dict[str, Any]]:
    """Return the template, its client callables by component, and the inputs of a query."""
    search = WorkflowTemplate(
        (
            Component(
                "search",
                Role.RETRIEVAL,
                named(query=Ref("$item")),
                "store",
                "embedder",
                effects=(Effect("collection:docs"),),
                attributes=Attributes(collection="docs", k=4),
            ),
        ),
        Ref("search"),
    )
    lit = PromptPart.literal("Answer with care and with the context only. " * 8)
    answer = (lit, PromptPart.var("question"), PromptPart.var("context"))
    refine = (*answer, PromptPart.var("previous"))
    chain: list[Component] = [
        Component(
            "index",
            Role.INDEXING,
            named(documents=Ref("$input", ("documents",))),
            "store",
            "embedder",
            effects=(Effect("collection:docs", writes=True),),
            attributes=Attributes(collection="docs"),
        ),
        Component(
            "expand",
            Role.GENERATION,
            named(question=QUESTION),
            "llm",
            splittable=True,
            expected=3,
            prompt=(lit, PromptPart.var("question")),
            attributes=Attributes(items="json"),
        ),
        Component("queries", Role.CALL, named(text=Ref("expand"))),
        Component("found", Role.MAP, named(items=Ref("queries")), body=search),
        Component("union", Role.OPAQUE, named(found=Ref("found"))),
        Component("rerank", Role.RERANKING, named(query=QUESTION, texts=Ref("union")), "reranker", batchable=True),
        Component("top", Role.CALL, named(documents=Ref("union"), scores=Ref("rerank"))),
    ]
    for i in range(3):
        inputs = {"question": QUESTION, "context": Ref("top", (i,))}
        if i:
            inputs["previous"] = Ref(f"answer{i - 1}", ())
        chain.append(
            Component(f"answer{i}", Role.GENERATION, tuple(inputs.items()), "llm", prompt=refine if i else answer)
        )
    chain.append(Component("text", Role.CALL, named(generation=Ref("answer2"))))
    order = tuple((a.name, b.name) for a, b in itertools.pairwise(chain))
    template = WorkflowTemplate(tuple(chain), Ref("text"), order)
    return template, _calls(), {"question": "what is a lambda expression", "documents": _document()}


def _calls() -> dict[str, Callable[..., Any]]:
    return {
        "index": lambda documents: tuple(Chunk(f"c{i}", text) for i, text in enumerate(documents)),
        "expand": lambda given: _ask(given, ("question",), LIST),
        "queries": lambda text: json.loads(text.text),
        "union": lambda found: list(dict.fromkeys(hit.text for hits in found for hit in hits)),
        "top": lambda documents, scores: [
            d for _, d in sorted(zip(scores, documents, strict=True), key=lambda x: (-x[0], x[1]))
        ],
        "answer0": lambda given: _ask(given, ("question", "context")),
        "answer1": lambda given: _ask(given, ("question", "context", "previous")),
        "answer2": lambda given: _ask(given, ("question", "context", "previous")),
        "text": lambda generation: generation.text,
    }


def _ask(given: Mapping[str, Any], names: tuple[str, ...], schema: str = "") -> Generate:
    parts = [str(getattr(value := given.get(name, UNKNOWN), "text", value)) for name in names]
    prompt = Prompt((Message("user", "Answer with care. " * 20 + "\n".join(parts)),))
    return Generate(prompt, Sampling(max_tokens=60 if schema else 12, json_schema=schema))


WORDS = "lambda expression function argument default module import class object iterator generator"


def _document() -> list[str]:
    words = WORDS.split()
    return [" ".join(words[(i * j) % len(words)] for j in range(1, 9)) + f" part {i}" for i in range(12)]
