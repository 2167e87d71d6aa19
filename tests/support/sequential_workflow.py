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
        known, own = dict(names), {}
        for one in flow:
            known[one.name] = own[one.name] = self.value(one, known)
        return own

    def value(self, one: Component, known: dict[str, Any]) -> Any:
        ways: dict[type, Any] = {
            Chunking: lambda: self.chunks(one, known[one.documents]),
            Embedding: lambda: self.embed(known[one.texts]),
            Ingestion: lambda: self.ingest(known[one.chunks], known[one.vectors]),
            Indexing: lambda: self.index(one, known[one.documents]),
            QueryExpansion: lambda: self.listed(
                one, one.prompt.with_(n=one.n), {"question": known[one.question]}, "lines", one.n
            ),
            Searching: lambda: self.search(one, known[one.query]),
            Reranking: lambda: self.rerank(one, known[one.query], known[one.passages]),
            Generation: lambda: self.generated(one, known),
            Synthesis: lambda: self.synthesis(one, known[one.question], known[one.context]),
            Condition: lambda: self.holds(one, known[one.value]),
            Function: lambda: one.function(**{key: known[name] for key, name in one.sources().items()}),
            Tool: lambda: one.function(**{key: known[name] for key, name in one.sources().items()}),
            Branch: lambda: self.branch(one, known),
            Map: lambda: [self.last(one.flow, {**known, one.each: item}) for item in known[one.over]],
            Loop: lambda: self.loop(one, known),
        }
        return ways[type(one)]()

    # ------------------------------------------------------------ engines

    def ask(self, kind: PrimitiveKind, engine: str, *given: Any) -> list[Any]:
        return [self.pool.call(kind, engine, [one]).result(20)[0] for one in given]

    def write(self, one: Any, prompt: Prompt, **values: Any) -> str:
        how = Sampling(one.max_tokens, one.temperature, one.top_p, stop=one.stop)
        texts = {name: text(value) for name, value in values.items()}
        given = [("system", prompt.system), ("user", prompt.text)]
        messages = tuple(payloads.Message(role, said.format(**texts)) for role, said in given if said)
        [made] = self.ask(K.PREFILLING, one.engine, Generate(payloads.Prompt(messages), how))
        return str(made.text)

    def embed(self, given: Any) -> Any:
        if isinstance(given, str):
            return self.ask(K.EMBEDDING, "embedder", EmbedText(given))[0]
        one = [EmbedText(c.text, "document") if isinstance(c, Chunk) else EmbedText(c) for c in given]
        return self.ask(K.EMBEDDING, "embedder", *one)

    # ------------------------------------------------------------ components

    def chunks(self, one: Any, documents: Any) -> tuple[Chunk, ...]:
        from teola_plugin.workflow.indexing import chunker

        return chunker(WordWindows, one.chunk_size, one.chunk_overlap)[0](documents)

    def ingest(self, chunks: Sequence[Chunk], vectors: Sequence[Any]) -> list[str]:
        rows = [IngestRow(self.collection, c, v) for c, v in zip(chunks, vectors, strict=True)]
        return self.ask(K.INGESTION, "store", *rows)

    def index(self, one: Any, documents: Any) -> list[str]:
        chunks = self.chunks(one, documents)
        return self.ingest(chunks, self.embed(chunks))

    def search(self, one: Any, query: Any) -> tuple[Hit, ...]:
        several = isinstance(query, list)
        vectors = [self.embed(q) if isinstance(q, str) else q for q in (query if several else [query])]
        found = self.ask(K.SEARCHING, "store", *(SearchVector(self.collection, v, one.k, one.filter) for v in vectors))
        if not several:
            return found[0]
        ids = {hit.id: hit for hits in reversed(found) for hit in reversed(hits)}
        points = {i: sum(1 / (61 + place) for hits in found for place, h in enumerate(hits) if h.id == i) for i in ids}
        first = {hit.id: at for at, hit in reversed(list(enumerate(h for hits in found for h in hits)))}
        return tuple(sorted(ids.values(), key=lambda hit: (-round(points[hit.id], 12), first[hit.id])))

    def rerank(self, one: Any, query: str, passages: Sequence[Hit]) -> tuple[Hit, ...]:
        scores = self.ask(K.RERANKING, "reranker", *(ScorePair(query, hit.text) for hit in passages))
        ranked = sorted(zip(passages, scores, strict=True), key=lambda pair: -pair[1])
        return tuple(replace(hit, score=score) for hit, score in ranked[: one.k])

    def listed(self, one: Any, prompt: Prompt, values: Any, spelling: str, most: int | None) -> list[str]:
        stream = ItemStream(spelling)
        return [*stream.feed(self.write(one, prompt, **values)), *stream.finish()][:most]

    def generated(self, one: Any, known: dict[str, Any]) -> Any:
        values = {variable: known[name] for variable, name in one.sources().items()}
        if one.items:
            return self.listed(one, one.prompt, values, one.items, one.expected)
        return self.write(one, one.prompt, **values)

    def synthesis(self, one: Any, question: str, context: Any) -> str:
        texts = [text(passage) for passage in context] if isinstance(context, (list, tuple)) else [text(context)]
        texts = texts or [""]
        if one.mode == "tree":
            answers = [self.write(one, one.prompt, question=question, context=t) for t in texts]
            while True:
                groups = [answers[at : at + one.fanout] for at in range(0, len(answers), one.fanout)]
                answers = [self.write(one, one.combine_prompt, question=question, answers=group) for group in groups]
                if len(answers) == 1:
                    return answers[0]
        if one.mode == "compact":
            packed = [texts[0]]
            for more in texts[1:]:
                both = f"{packed[-1]}\n\n{more}"
                packed = [*packed[:-1], both] if len(both) <= 4 * one.context_tokens else [*packed, more]
            texts = packed
        answer = self.write(one, one.prompt, question=question, context=texts[0])
        for more in texts[1:]:
            answer = self.write(one, one.refine_prompt, question=question, answer=answer, context=more)
        return answer

    # ------------------------------------------------------------ control

    def holds(self, one: Any, value: Any) -> bool:
        if one.test is not None:
            return bool(one.test(value))
        return value.lower().startswith(one.yes) if isinstance(value, str) else bool(value)

    def last(self, flow: Any, known: dict[str, Any]) -> Any:
        return list(self.run(flow, known).values())[-1]

    def branch(self, one: Any, known: dict[str, Any]) -> Any:
        if known[one.condition]:
            return self.last(one.then, known)
        if isinstance(one.otherwise, Flow):
            return self.last(one.otherwise, known)
        return known[one.otherwise] if one.otherwise else None

    def loop(self, one: Any, known: dict[str, Any]) -> Any:
        draft = known[one.init]
        for _ in range(one.max_rounds):
            made = self.run(one.flow, {**known, one.carry: draft})
            draft = made[one.result or [name for name in made if name != one.until][-1]]
            if one.until and made[one.until] is True:
                break
        return draft


def text(value: Any) -> str:
    """Return a value as prompts contain it."""
    if isinstance(value, (list, tuple)):
        return "\n\n".join(map(text, value))
    return value if isinstance(value, str) else getattr(value, "text", None) or str(value)
