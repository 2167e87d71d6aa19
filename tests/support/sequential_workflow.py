"""A reference implementation of workflows: components one after the other, with single calls of engines.

It uses no templates, graphs or passes. Tests compare its results with those of the real implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests import payloads
from teola_plugin.requests.items import ItemStream
from teola_plugin.requests.payloads import Chunk, EmbedText, Generate, Hit, IngestRow, Sampling, ScorePair, SearchVector
from teola_plugin.workflow import (
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
    Loop,
    Map,
    Prompt,
    QueryExpansion,
    Reranking,
    Searching,
    Synthesis,
    Tool,
)
from teola_plugin.workflow.indexing import WordWindows

K = PrimitiveKind


class Sequential:
    """One run of a workflow. All components use the same `collection`, whatever collection they name."""

    def __init__(self, pool: EnginePool, collection: str) -> None:
        self.pool, self.collection = pool, collection

    def run(self, flow: Flow, names: Any) -> dict[str, Any]:
        """Return the values of all components, in the order of the flow."""
        values, results = dict(names), {}
        for component in flow:
            values[component.name] = results[component.name] = self.value(component, values)
        return results

    def value(self, component: Component, values: dict[str, Any]) -> Any:
        evaluators: dict[type, Any] = {
            Chunking: lambda: self.chunks(component, values[component.documents]),
            Embedding: lambda: self.embed(values[component.texts]),
            Ingestion: lambda: self.ingest(values[component.chunks], values[component.vectors]),
            Indexing: lambda: self.index(component, values[component.documents]),
            QueryExpansion: lambda: self.listed(
                component,
                component.prompt.with_(n=component.n),
                {"question": values[component.question]},
                "lines",
                component.n,
            ),
            Searching: lambda: self.search(component, values[component.query]),
            Reranking: lambda: self.rerank(component, values[component.query], values[component.passages]),
            Generation: lambda: self.generated(component, values),
            Synthesis: lambda: self.synthesis(component, values[component.question], values[component.context]),
            Condition: lambda: self.holds(component, values[component.value]),
            Function: lambda: component.function(**{key: values[name] for key, name in component.sources().items()}),
            Tool: lambda: component.function(**{key: values[name] for key, name in component.sources().items()}),
            Branch: lambda: self.branch(component, values),
            Map: lambda: [
                self.last(component.flow, {**values, component.each: item}) for item in values[component.over]
            ],
            Loop: lambda: self.loop(component, values),
        }
        return evaluators[type(component)]()

    # ------------------------------------------------------------ engines

    def ask(self, kind: PrimitiveKind, engine: str, *requests: Any) -> list[Any]:
        return [self.pool.call(kind, engine, [request]).result(20)[0] for request in requests]

    def write(self, component: Any, prompt: Prompt, **values: Any) -> str:
        sampling = Sampling(component.max_tokens, component.temperature, component.top_p, stop=component.stop)
        texts = {name: text(value) for name, value in values.items()}
        texts_by_role = [("system", prompt.system), ("user", prompt.text)]
        messages = tuple(
            payloads.Message(role, template.format(**texts)) for role, template in texts_by_role if template
        )
        [generation] = self.ask(K.PREFILLING, component.engine, Generate(payloads.Prompt(messages), sampling))
        return str(generation.text)

    def embed(self, texts: Any) -> Any:
        if isinstance(texts, str):
            return self.ask(K.EMBEDDING, "embedder", EmbedText(texts))[0]
        requests = [EmbedText(c.text, "document") if isinstance(c, Chunk) else EmbedText(c) for c in texts]
        return self.ask(K.EMBEDDING, "embedder", *requests)

    # ------------------------------------------------------------ components

    def chunks(self, component: Any, documents: Any) -> tuple[Chunk, ...]:
        from teola_plugin.workflow.indexing import chunker

        return chunker(WordWindows, component.chunk_size, component.chunk_overlap)[0](documents)

    def ingest(self, chunks: Sequence[Chunk], vectors: Sequence[Any]) -> list[str]:
        rows = [IngestRow(self.collection, c, v) for c, v in zip(chunks, vectors, strict=True)]
        return self.ask(K.INGESTION, "store", *rows)

    def index(self, component: Any, documents: Any) -> list[str]:
        chunks = self.chunks(component, documents)
        return self.ingest(chunks, self.embed(chunks))

    def search(self, component: Any, query: Any) -> tuple[Hit, ...]:
        several = isinstance(query, list)
        vectors = [self.embed(q) if isinstance(q, str) else q for q in (query if several else [query])]
        results = self.ask(
            K.SEARCHING, "store", *(SearchVector(self.collection, v, component.k, component.filter) for v in vectors)
        )
        if not several:
            return results[0]
        ids = {hit.id: hit for hits in reversed(results) for hit in reversed(hits)}
        points = {i: sum(1 / (61 + rank) for hits in results for rank, h in enumerate(hits) if h.id == i) for i in ids}
        first = {hit.id: at for at, hit in reversed(list(enumerate(h for hits in results for h in hits)))}
        return tuple(sorted(ids.values(), key=lambda hit: (-round(points[hit.id], 12), first[hit.id])))

    def rerank(self, component: Any, query: str, passages: Sequence[Hit]) -> tuple[Hit, ...]:
        scores = self.ask(K.RERANKING, "reranker", *(ScorePair(query, hit.text) for hit in passages))
        ranked = sorted(zip(passages, scores, strict=True), key=lambda pair: -pair[1])
        return tuple(replace(hit, score=score) for hit, score in ranked[: component.k])

    def listed(self, component: Any, prompt: Prompt, values: Any, spelling: str, max_items: int | None) -> list[str]:
        stream = ItemStream(spelling)
        return [*stream.feed(self.write(component, prompt, **values)), *stream.finish()][:max_items]

    def generated(self, component: Any, values: dict[str, Any]) -> Any:
        variables = {variable: values[name] for variable, name in component.sources().items()}
        if component.items:
            return self.listed(component, component.prompt, variables, component.items, component.expected)
        return self.write(component, component.prompt, **variables)

    def synthesis(self, component: Any, question: str, context: Any) -> str:
        texts = [text(passage) for passage in context] if isinstance(context, (list, tuple)) else [text(context)]
        texts = texts or [""]
        if component.mode == "tree":
            answers = [self.write(component, component.prompt, question=question, context=t) for t in texts]
            while True:
                groups = [answers[at : at + component.fanout] for at in range(0, len(answers), component.fanout)]
                answers = [
                    self.write(component, component.combine_prompt, question=question, answers=group)
                    for group in groups
                ]
                if len(answers) == 1:
                    return answers[0]
        if component.mode == "compact":
            packed = [texts[0]]
            for more in texts[1:]:
                both = f"{packed[-1]}\n\n{more}"
                packed = [*packed[:-1], both] if len(both) <= 4 * component.context_tokens else [*packed, more]
            texts = packed
        answer = self.write(component, component.prompt, question=question, context=texts[0])
        for more in texts[1:]:
            answer = self.write(component, component.refine_prompt, question=question, answer=answer, context=more)
        return answer

    # ------------------------------------------------------------ control

    def holds(self, component: Any, value: Any) -> bool:
        if component.test is not None:
            return bool(component.test(value))
        return value.lower().startswith(component.yes) if isinstance(value, str) else bool(value)

    def last(self, flow: Any, values: dict[str, Any]) -> Any:
        return list(self.run(flow, values).values())[-1]

    def branch(self, component: Any, values: dict[str, Any]) -> Any:
        if values[component.condition]:
            return self.last(component.then, values)
        if isinstance(component.otherwise, Flow):
            return self.last(component.otherwise, values)
        return values[component.otherwise] if component.otherwise else None

    def loop(self, component: Any, values: dict[str, Any]) -> Any:
        draft = values[component.init]
        for _ in range(component.max_rounds):
            results = self.run(component.flow, {**values, component.carry: draft})
            draft = results[component.result or [name for name in results if name != component.until][-1]]
            if component.until and results[component.until] is True:
                break
        return draft


def text(value: Any) -> str:
    """Return a value as prompts contain it."""
    if isinstance(value, (list, tuple)):
        return "\n\n".join(map(text, value))
    return value if isinstance(value, str) else getattr(value, "text", None) or str(value)
