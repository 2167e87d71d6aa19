"""Random queries for the runtime alone: the requests of their originals in order, and the plans that prefetch them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.fake import embed_words
from teola_plugin.graph import Attributes, Effect, Graph, Primitive, PrimitiveKind, Ref, named
from teola_plugin.requests.payloads import (
    Chunk,
    EmbedText,
    Generate,
    IngestRow,
    Message,
    Prompt,
    Sampling,
    SearchVector,
)

K = PrimitiveKind
COLLECTION = "notes"
WORDS = ("apple", "bread", "copper", "river")
IDS = ("a", "b", "c", "d")
K_ALL = len(IDS)
"""A search finds all: which of two rows that are as near is left out is not said."""


@dataclass(frozen=True, slots=True)
class Op:
    """One step of an original: `do` is embed, search, generate, put, delete, clear, think or observe."""

    do: str
    text: str = ""
    ids: tuple[str, ...] = ()
    pause: float = 0.0
    """Seconds before it."""
    stream: bool = False
    gives_up: float | None = None
    """Seconds after which the call is cancelled."""
    beside: bool = False
    """Whether the next step does not wait for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A part that runs ahead of some of the steps."""

    begins: int
    """Before which step."""
    ends: int
    """Before which step; beyond the last one, it ends with its query."""
    graph: Graph
    calls: Mapping[str, Callable[..., Any]]
    inputs: Mapping[str, Any]
    lookahead: bool
    gang: str
    depth: int

    def __str__(self) -> str:
        how = f"{'lookahead' if self.lookahead else 'a part'} {self.gang} at depth {self.depth}"
        return f"from step {self.begins} to {self.ends}: {how}\n{self.graph}"


@dataclass(frozen=True, slots=True)
class Case:
    """One query: its steps, its plan, and how it ends."""

    ops: tuple[Op, ...]
    graph: Graph
    calls: Mapping[str, Callable[..., Any]]
    inputs: Mapping[str, Any]
    begins: float
    cancelled: bool
    parts: tuple[Ahead, ...] = ()

    def __str__(self) -> str:
        steps = "\n".join(f"  {op}" for op in self.ops)
        parts = "\n".join(map(str, self.parts))
        ends = "cancelled" if self.cancelled else "closed"
        return f"begins at {self.begins:.3f}, {ends}\n{steps}\n{self.graph}\n{parts}"


def vector(text: str) -> tuple[float, ...]:
    return tuple(float(x) for x in embed_words(text, "document"))


def question(text: str) -> Generate:
    return Generate(Prompt((Message("user", text),)), Sampling(max_tokens=30))


def rows(op: Op) -> list[IngestRow]:
    return [IngestRow(COLLECTION, Chunk(id, op.text, {"of": op.text}), vector(op.text)) for id in op.ids]


def payloads(op: Op) -> tuple[PrimitiveKind, str, list[Any]]:
    """Return the payloads of a step that makes requests."""
    if op.do == "embed":
        return K.EMBEDDING, "embedder", [EmbedText(op.text)]
    if op.do == "search":
        return K.SEARCHING, "store", [SearchVector(COLLECTION, vector(op.text), K_ALL)]
    if op.do == "generate":
        return K.PREFILLING, "llm", [question(op.text)]
    return K.INGESTION, "store", rows(op)


def a_case(draw: random.Random, *, faults: bool = True, longest: float = 0.02) -> Case:
    ops = tuple(_op(draw, number, faults, longest) for number in range(draw.randrange(2, 9)))
    graph, calls, inputs = _graph(draw, ops)
    begins, cancelled = draw.random() * 2 * longest, faults and draw.random() < 0.15
    return Case(ops, graph, calls, inputs, begins, cancelled, tuple(_parts(random.Random(begins), ops)))


def _parts(draw: random.Random, ops: tuple[Op, ...]) -> Iterator[Ahead]:
    """Yield subplans as a graph's nodes begin them: each for the next steps, while earlier ones still run."""
    for begins in sorted(draw.randrange(len(ops)) for _ in range(draw.choice((0, 0, 1, 2, 4)))):
        last = min(len(ops), begins + draw.randrange(1, 5))
        graph, calls, inputs = _graph(draw, ops[begins:last])
        if draw.random() < 0.1:
            calls = dict.fromkeys(calls, _broken)
        ends = draw.randrange(begins, len(ops) + 2)
        gang = draw.choice(("", "", f"g{begins}"))
        yield Ahead(begins, ends, graph, calls, inputs, draw.random() < 0.8, gang, draw.randrange(4))


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("the client's")


def _text(draw: random.Random, faults: bool) -> str:
    word = draw.choice(WORDS) + f" {draw.randrange(3)}"
    if faults and draw.random() < 0.1:
        word += draw.choice((" flaky", " flaky", " broken"))
    return word


def _op(draw: random.Random, number: int, faults: bool, longest: float) -> Op:
    do = draw.choice(
        ("embed", "search", "search", "search", "generate", "generate", "put", "put", "put", "delete", "clear")
    )
    if draw.random() < 0.1:
        return Op("observe", f"o{number}", pause=draw.random() * longest)
    text, pause = _text(draw, faults), draw.choice((0.0, draw.random() * longest))
    ids = tuple(draw.sample(IDS, draw.choice((1, 1, 2)))) if do in ("put", "delete") else ()
    gives_up = (
        draw.random() * longest if faults and do in ("embed", "search", "generate") and draw.random() < 0.1 else None
    )
    beside = faults and draw.random() < 0.2
    return Op(do, text, ids, pause, do == "generate" and draw.random() < 0.4, gives_up, beside)


# ------------------------------------------------------------ graphs


Guesses = tuple[Graph, dict[str, Callable[..., Any]], dict[str, Any]]


def _graph(draw: random.Random, ops: tuple[Op, ...]) -> Guesses:
    """Return a graph of most requests of the steps, some of them wrong, in the order of the steps or without order."""
    guesses: list[Op | None] = []
    for number, op in enumerate(ops):
        guess = op if draw.random() < 0.85 else _op(draw, number, False, 0.0)
        wrong = guess.do not in _PRIMITIVES or (guess.do == "observe") != (op.do == "observe")
        guesses.append(None if wrong or draw.random() < 0.2 else guess)
    return graph_of(guesses, draw)


def graph_of(ops: Sequence[Op | None], draw: random.Random | None = None) -> Guesses:
    """Return the graph that prefetches the requests, its callables and its input. `draw` adds order edges."""
    made: list[Primitive] = []
    calls: dict[str, Callable[..., Any]] = {}
    inputs: dict[str, Any] = {}
    for number, op in enumerate(ops):
        if op is not None:
            after = (made[-1].id,) if made and draw is not None and draw.random() < 0.3 else ()
            inputs[f"i{number}"] = op.text
            more = _PRIMITIVES[op.do](f"p{number}", number, op, after, inputs, calls)
            made += [p for p in more if all(p.id != q.id for q in made)]  # a wrong guess may name a right one's step
    if not any(primitive.on_engine for primitive in made):
        inputs["i"] = "nothing"
        made.append(Primitive("p", K.EMBEDDING, "embedder", named(texts=Ref("$input", ("i",)))))
    return Graph(made, Ref(made[-1].id)), calls, inputs


Made = list[Primitive]
Calls = dict[str, Callable[..., Any]]
_SAID = Attributes(collection=COLLECTION, k=K_ALL)
_READS, _WRITES = (Effect(f"collection:store/{COLLECTION}"),), (Effect(f"collection:store/{COLLECTION}", writes=True),)


def _embedding(name: str, n: int, op: Op, after: tuple[str, ...], inputs: dict[str, Any], calls: Calls) -> Made:
    made = Primitive(name, K.EMBEDDING, "embedder", named(texts=Ref("$input", (f"i{n}",))), after=after)
    return [made]


def _searching(name: str, n: int, op: Op, after: tuple[str, ...], inputs: dict[str, Any], calls: Calls) -> Made:
    text = named(texts=Ref("$input", (f"i{n}",)))
    role = Attributes(role="document")
    embed = Primitive(f"{name}.e", K.EMBEDDING, "embedder", text, after=after, attributes=role)
    needle = named(vectors=Ref(embed.id))
    return [embed, Primitive(name, K.SEARCHING, "store", needle, effects=_READS, attributes=_SAID)]


def _generation(name: str, n: int, op: Op, after: tuple[str, ...], inputs: dict[str, Any], calls: Calls) -> Made:
    calls[name] = lambda given: question(given["text"])
    text = named(text=Ref("$input", (f"i{n}",)))
    lead = Primitive(f"{name}.p", K.PREFILLING, "llm", text, after=after, call=name)
    return [lead, Primitive(name, K.DECODING, "llm", named(prefilling=Ref(lead.id)))]


def _ingestion(name: str, n: int, op: Op, after: tuple[str, ...], inputs: dict[str, Any], calls: Calls) -> Made:
    inputs[f"c{n}"] = [row.chunk for row in rows(op)]
    chunks, role = Ref("$input", (f"c{n}",)), Attributes(role="document")
    embed = Primitive(
        f"{name}.v", K.EMBEDDING, "embedder", named(texts=chunks), after=after, batchable=True, attributes=role
    )
    given = named(chunks=chunks, vectors=Ref(embed.id))
    write = Primitive(name, K.INGESTION, "store", given, effects=_WRITES, batchable=True, attributes=_SAID)
    return [embed, write]


def _opaque(name: str, n: int, op: Op, after: tuple[str, ...], inputs: dict[str, Any], calls: Calls) -> Made:
    return [Primitive(op.text, K.OPAQUE, inputs=named(value=Ref("$input", (f"i{n}",))), after=after)]


_PRIMITIVES: dict[str, Callable[..., Made]] = {
    "embed": _embedding,
    "search": _searching,
    "generate": _generation,
    "put": _ingestion,
    "observe": _opaque,
}
