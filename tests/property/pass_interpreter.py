"""A reference interpreter of primitive graphs: deterministic values, in any order that the edges allow."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Ref, read_path

K = PrimitiveKind
RESOURCES = ("a", "b")
State = dict[str, frozenset[str]]


def digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


class Interpreter:
    """Runs a graph on one input. Scalars are strings, lists are lists of strings; a store is a set of rows."""

    def __init__(self, graph: Graph, seed: int) -> None:
        self.graph = graph
        self.rng = random.Random(seed)
        self.values: dict[str, Any] = {"$input": "question"}
        self.state: State = {name: frozenset() for name in RESOURCES}
        self.seen: dict[str, State] = {}
        """What each speculative primitive saw of the stores."""
        # A validated read may run ahead of user code because it is done again where the code did write. Here no code
        # ever writes what is read in this way.
        checked = {e.resource for p in everything(graph) for e in p.effects if e.validated}
        self.written = [name for name in RESOURCES if name not in checked]

    def run(self) -> tuple[Any, State]:
        """Return the output, and the contents of the stores in the end."""
        waiting = {p.id: set(self.graph.parents(p.id)) for p in self.graph}
        while waiting:
            ready = sorted(name for name, parents in waiting.items() if not parents)
            name = self.rng.choice(ready)
            self.values[name] = self.one(self.graph[name], self.values)
            del waiting[name]
            for parents in waiting.values():
                parents.discard(name)
        return self.read(self.graph.output, self.values), self.state

    @staticmethod
    def read(ref: Ref, values: Mapping[str, Any]) -> Any:
        return read_path(values[ref.producer], ref.path)

    def one(self, p: Primitive, values: dict[str, Any]) -> Any:
        args = {key: self.read(ref, values) for key, ref in p.inputs}
        if p.speculative:
            self.seen[p.id] = dict(self.state)
        if p.kind in (K.EMBEDDING, K.SEARCHING, K.RERANKING):
            return self.batch(p, args)
        return getattr(self, p.kind.name.lower())(p, args, values)

    def batch(self, p: Primitive, args: dict[str, Any]) -> Any:
        shared = args.pop("query", None)
        (items,) = args.values()
        rows = [sorted(self.state[e.resource]) for e in p.effects]
        made = [digest(p.kind.name, p.engine, shared, item, rows) for item in (items if p.batchable else [items])]
        return made if p.batchable else made[0]

    def ingestion(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> list[str]:
        pairs = list(zip(args["chunks"], args["vectors"], strict=True))
        for effect in p.effects:
            self.state[effect.resource] |= {digest(*pair) for pair in pairs}
        return [digest("row", *pair) for pair in pairs]

    def chunking(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> list[str]:
        return [digest("chunk", args, i) for i in range(p.option("length"))]

    def prefilling(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> str:
        return digest(*(args[part.variable] if part.variable else part.text for part in p.prompt))

    full_prefilling = prefilling
    partial_prefilling = prefilling

    def items_of(self, p: Primitive, values: dict[str, Any]) -> list[str]:
        """Return what the request of `p` decodes, item by item."""
        while not p.prefills:
            p, length = self.graph[p.inputs[0][1].producer], p.option("yields")
        return [digest("item", values[p.id], i) for i in range(length)]

    def decoding(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> str:
        return "|".join(self.items_of(p, values))

    def partial_decoding(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> str | None:
        items = self.items_of(p, values)
        assert p.item is not None
        return items[p.item] if p.item < len(items) else None

    def call(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> Any:
        if p.call == "split":
            return args["x"].split("|")
        if p.call == "reverse":
            return args["x"][::-1]
        return digest("call", *args.values())

    def opaque(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> Any:
        result = self.call(p, args, values)
        row = digest(p.kind.name, args, [sorted(self.state[name]) for name in RESOURCES])
        for name in self.written:
            self.state[name] |= {row}
        return result if p.call in ("split", "reverse") else row

    tool = opaque

    def aggregate(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> list[str]:
        assert p.call == "concat"
        return [item for part in args.values() for item in part]

    def verify(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> Any:
        return args["actual"]

    def map(self, p: Primitive, args: dict[str, Any], values: dict[str, Any]) -> list[Any]:
        captured = {f"${key}": value for key, value in args.items() if key != "items"}
        return [self.instance(p, i, item, captured, values) for i, item in enumerate(args["items"])]

    def instance(self, p: Primitive, i: int, item: Any, captured: dict[str, Any], values: dict[str, Any]) -> Any:
        if i < len(p.speculative_refs) and self.confirmed(p, i, item, values):
            return self.read(p.speculative_refs[i], values)
        assert p.fragment is not None
        inner = {**values, **captured, "$item": item}
        for q in p.fragment.graph:
            inner[q.id] = self.one(q, inner)
        return self.read(p.fragment.output, inner)

    def confirmed(self, p: Primitive, i: int, item: Any, values: dict[str, Any]) -> bool:
        """Return True if the prediction was right, and what was read under `validated` is unchanged."""
        verify = self.graph[p.inputs[0][1].producer]
        predicted = verify.input(f"predicted{i}")
        assert predicted is not None
        made = [q for q in self.graph if q.id.startswith(f"{p.id}[{i}]/")]
        checked = ((q, e) for q in made for e in q.effects if e.validated)
        current = all(self.seen[q.id][e.resource] == self.state[e.resource] for q, e in checked)
        return bool(self.read(predicted, values) == item and current)


def everything(graph: Graph) -> Iterable[Primitive]:
    """Return all primitives, those of fragments included."""
    for p in graph:
        yield p
        if p.fragment is not None:
            yield from everything(p.fragment.graph)


def realised(name: str, graph: Graph) -> Iterable[str]:
    """Return the ids that do in `graph` what `name` did in the p-graph. The end of stages only collects values."""
    same = (p for p in graph if p.id == name or p.id.startswith(f"{name}#"))
    return [p.id for p in same if p.kind is not K.AGGREGATE]
