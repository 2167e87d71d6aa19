"""The primitive graph: frozen, checked when made, in topological order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

from teola_plugin.errors import GraphError
from teola_plugin.graph.attributes import ATTRIBUTES
from teola_plugin.graph.kinds import FRAGMENT_KINDS, IMPURE_KINDS, LLM_DECODES, PrimitiveKind
from teola_plugin.graph.primitive import Primitive
from teola_plugin.graph.refs import Ref

_DEMANDING = FRAGMENT_KINDS | LLM_DECODES
"""Kinds that a primitive cannot have without something else."""


class Graph:
    """A validated acyclic set of primitives.

    Making one proves: ids are unique; every ref and order edge names a primitive of the graph (or an external value);
    there is no cycle; decodings follow a prefilling; fragment-holding kinds hold one; no option has the name of an
    attribute. Raises `GraphError`. Iteration is in a stable topological order, so equal graphs print equally.
    """

    def __init__(self, primitives: Iterable[Primitive], output: Ref, *, base: Graph | None = None) -> None:
        """`base`: the graph it was made from; primitives that both share need not be looked at for edges again."""
        self.output = output
        found = list(primitives)
        self._by_id = {p.id: p for p in found}
        if len(self._by_id) != len(found):
            seen: set[str] = set()
            twice = sorted({p.id for p in found if p.id in seen or seen.add(p.id)})  # type: ignore[func-returns-value]
            raise GraphError(f"two primitives share the id {twice[0]!r}.", hint="give each primitive its own id")
        if base is None:
            self._parents = {p.id: self.edges_into(p) for p in found}
        else:
            old, known = base._by_id.get, base._parents
            self._parents = {p.id: known[p.id] if old(p.id) is p else self.edges_into(p) for p in found}
        self._children: dict[str, list[str]] = {name: [] for name in self._by_id}
        self._link()
        self._check(found)
        self._order = self._sorted()

    def _link(self) -> None:
        """The edges the other way round."""
        children = self._children
        for name, parents in self._parents.items():
            try:
                for parent in parents:
                    children[parent].append(name)
            except KeyError:
                raise self._fault(self._by_id[name], self._unknown(self._by_id[name])) from None

    def _check(self, found: list[Primitive]) -> None:
        for p in [p for p in found if p.kind in _DEMANDING]:
            if p.kind in FRAGMENT_KINDS and p.fragment is None:
                raise self._fault(p, f"is a {p.kind.name} without a fragment")
            if p.kind in LLM_DECODES and not any(self._leads(ref) for ref in p.refs):
                raise self._fault(p, "decodes without reading a prefilling or an earlier decoding")
        for p in [p for p in found if p.options]:
            if taken := [key for key, _ in p.options if key in ATTRIBUTES]:
                raise self._fault(p, f"says {taken[0]!r} as an option", f"use attributes=Attributes({taken[0]}=...)")
        if not self.output.external and self.output.producer not in self._by_id:
            raise GraphError(f"the output {self.output} is produced by nothing.", hint="set output to a primitive's id")

    def _unknown(self, p: Primitive) -> str:
        for ref in p.refs:
            if not ref.external and ref.producer not in self._by_id:
                return f"reads {ref}, which nothing produces"
        name = next(name for name in p.after if name not in self._by_id)
        return f"comes after {name!r}, which is not in the graph"

    def _leads(self, ref: Ref) -> bool:
        made_by = self._by_id.get(ref.producer)
        return made_by is not None and (made_by.prefills or made_by.decodes)

    def _fault(self, p: Primitive, what: str, hint: str = "check the edit that made it") -> GraphError:
        from teola_plugin.graph.text import format_primitive

        return GraphError(f"primitive {p.id!r} {what}.\n  {format_primitive(p)}\n", hint=hint)

    def _sorted(self) -> tuple[Primitive, ...]:
        waiting = {name: len(parents) for name, parents in self._parents.items() if parents}
        ready = [name for name in self._parents if name not in waiting]
        children = self._children
        for name in ready:  # grows while it is walked
            for child in children[name]:
                count = waiting[child] = waiting[child] - 1
                if not count:
                    ready.append(child)
        if len(ready) != len(self._parents):
            stuck = sorted(name for name, count in waiting.items() if count)
            raise GraphError(f"the graph has a cycle through {', '.join(stuck)}.", hint="remove one of these edges")
        return tuple([self._by_id[name] for name in ready])

    @staticmethod
    def edges_into(p: Primitive) -> tuple[str, ...]:
        """Ids that must be finished before `p` starts: data, then order; each once."""
        parents = [ref.producer for _, ref in p.inputs if ref.producer[:1] != "$"]
        if p.early:
            parents += [ref.producer for ref in p.early if ref.producer[:1] != "$"]
        if p.after:
            parents += p.after
        return tuple(dict.fromkeys(parents)) if len(parents) > 1 else tuple(parents)

    def __iter__(self) -> Iterator[Primitive]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, name: object) -> bool:
        return name in self._by_id

    def __getitem__(self, name: str) -> Primitive:
        return self._by_id[name]

    def get(self, name: str) -> Primitive | None:
        return self._by_id.get(name)

    def parents(self, name: str) -> tuple[str, ...]:
        return self._parents[name]

    def children(self, name: str) -> tuple[str, ...]:
        return tuple(self._children[name])

    @cached_property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """For each primitive, whose values it reads, external ones too; each once."""
        return {p.id: p.producers for p in self._order}

    @cached_property
    def read_by(self) -> Mapping[str, tuple[str, ...]]:
        """For each value that is read, external ones too, who reads it."""
        found: dict[str, list[str]] = {}
        for name, producers in self.reads.items():
            for producer in producers:
                found.setdefault(producer, []).append(name)
        return {producer: tuple(names) for producer, names in found.items()}

    @cached_property
    def led_from(self) -> Mapping[str, tuple[str, ...]]:
        """For each primitive that anything waits for, what does."""
        return {name: tuple(names) for name, names in self._children.items() if names}

    def readers(self, name: str) -> tuple[Primitive, ...]:
        """Primitives that read a value of `name`."""
        children = [self._by_id[child] for child in self._children[name]]
        # Without order edges, a child can only be a reader.
        return tuple([p for p in children if not p.after or any(ref.producer == name for ref in p.refs)])

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """Longest distance to a sink; the output has depth 0 (paper, Algorithm 2, event 1)."""
        depth: dict[str, int] = {}
        for p in reversed(self._order):
            depth[p.id] = 1 + max((depth[c] for c in self._children[p.id]), default=-1)
        return MappingProxyType(depth)

    @cached_property
    def ancestors(self) -> Mapping[str, frozenset[str]]:
        """For each primitive, everything it waits for, directly or not."""
        return _AncestorSets(self.bits, self.above)

    @cached_property
    def bits(self) -> Mapping[str, int]:
        """For each primitive, the bit that stands for it where a set of primitives is an integer."""
        return {p.id: 1 << place for place, p in enumerate(self._order)}

    @cached_property
    def above(self) -> Mapping[str, int]:
        """`ancestors` as integers, which are quicker to make and to compare."""
        return self.reached(self.bits)

    def reached(self, bits: Mapping[str, int]) -> dict[str, int]:
        """For each primitive, the bits of all that it waits for, directly or not."""
        above: dict[str, int] = {}
        parents, bit = self._parents, bits.get
        for p in self._order:
            mask = 0
            for parent in parents[p.id]:
                mask |= above[parent] | bit(parent, 0)
            above[p.id] = mask
        return above

    def forget_ancestors(self) -> None:
        """Give up sets that grow with the square of the graph; they are made again when they are needed."""
        kept = self.__dict__
        if "bits" in kept:
            kept.pop("above", None)
            kept.pop("ancestors", None)
            kept.pop("bits", None)

    @cached_property
    def behind_code(self) -> frozenset[str]:
        """User code, and what cannot begin before it has ended. Without these, nothing that is left lacks a parent.

        A FOLD whose first value waits for user code may be laid out before it, so all that leads there stays.
        """
        found: set[str] = set()
        for p in self._order:
            if p.kind in IMPURE_KINDS or not found.isdisjoint(self._parents[p.id]):
                found.add(p.id)
        folds = [name for name in found if self._by_id[name].kind is PrimitiveKind.FOLD]
        return frozenset(found.difference(folds, *[self.ancestors[name] for name in folds]))

    @cached_property
    def external_reads(self) -> frozenset[str]:
        """External producers that its primitives read, those inside of fragments aside."""
        return frozenset([ref.producer for p in self for ref in p.refs if ref.external])

    @cached_property
    def external_inputs(self) -> frozenset[str]:
        """External producers that a query (or an instance) must bind."""
        names = set(self.external_reads)
        for p in self:
            for fragment in (p.fragment, p.otherwise):
                if fragment is not None:
                    bound = {"$item", "$carry", *(f"${key}" for key, _ in p.inputs)}
                    names |= fragment.externals - bound
        return frozenset(names | ({self.output.producer} if self.output.external else set()))

    def digest(self) -> str:
        """A short hash of the text form."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:12]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Graph):
            return NotImplemented
        return self.output == other.output and self._by_id == other._by_id

    @cached_property
    def _hash(self) -> int:
        return hash((self.output, frozenset(self._by_id)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Graph], tuple[tuple[Primitive, ...], Ref]]:
        return Graph, (self._order, self.output)

    def __str__(self) -> str:
        from teola_plugin.graph.text import format_graph

        return format_graph(self)

    def __repr__(self) -> str:
        return f"<Graph of {len(self._by_id)} primitives, output {self.output}>"

    def mermaid(self) -> str:
        from teola_plugin.graph.text import format_mermaid

        return format_mermaid(self)


class _AncestorSets(Mapping[str, frozenset[str]]):
    """Integers as sets of ids, made for those that are asked for."""

    def __init__(self, bits: Mapping[str, int], masks: Mapping[str, int]) -> None:
        self._bits = bits
        self._masks = masks
        self._sets: dict[str, frozenset[str]] = {}

    def __getitem__(self, name: str) -> frozenset[str]:
        found = self._sets.get(name)
        if found is None:
            mask = self._masks[name]
            found = self._sets[name] = frozenset([other for other, bit in self._bits.items() if mask & bit])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)
