"""The primitive graph (immutable, validated on construction, in topological order), its builder and its text form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from teola_plugin.errors import GraphError
from teola_plugin.graph.instance_path import InstancePath
from teola_plugin.graph.primitive import ATTRIBUTES, FRAGMENT_KINDS, IMPURE_KINDS, LLM_DECODES, Primitive, PrimitiveKind
from teola_plugin.graph.refs import Ref

_CHECKED_KINDS = FRAGMENT_KINDS | LLM_DECODES
"""Kinds of primitives that require a fragment, or a prefilling before them."""


class Graph:
    """A validated acyclic set of primitives.

    Construction checks that ids are unique; every reference and order edge names a primitive of the graph (or an
    external value); there is no cycle; decodings follow a prefilling; kinds that need a fragment have one; no option
    has the name of an attribute. Iteration is in a stable topological order, so equal graphs print equally.

    Args:
        primitives: The primitives, in any order.
        output: The value that the graph computes.
        base: The graph that this one was edited from. Edges of primitives that both share are not computed again.

    Raises:
        GraphError: A check failed.
    """

    def __init__(self, primitives: Iterable[Primitive], output: Ref, *, base: Graph | None = None) -> None:
        self.output = output
        unsorted = list(primitives)
        self._by_id = {p.id: p for p in unsorted}
        if len(self._by_id) != len(unsorted):
            counts = Counter(p.id for p in unsorted)
            first = min(name for name, count in counts.items() if count > 1)
            raise GraphError(f"two primitives share the id {first!r}.", hint="give each primitive its own id")
        if base is None:
            self._parents = {p.id: self.edges_into(p) for p in unsorted}
        else:
            old, old_parents = base._by_id.get, base._parents
            self._parents = {p.id: old_parents[p.id] if old(p.id) is p else self.edges_into(p) for p in unsorted}
        self._children: dict[str, list[str]] = {name: [] for name in self._by_id}
        self._link_children()
        self._check(unsorted)
        self._order = self._sorted()

    def _link_children(self) -> None:
        """Fill the table of children from the table of parents. Raise GraphError for an edge from nowhere."""
        children = self._children
        for name, parents in self._parents.items():
            try:
                for parent in parents:
                    children[parent].append(name)
            except KeyError:
                raise self._error(self._by_id[name], self._unknown_edge(self._by_id[name])) from None

    def _check(self, primitives: list[Primitive]) -> None:
        """Raise GraphError for a missing fragment, prefilling or output, and for options named like attributes."""
        for p in [p for p in primitives if p.kind in _CHECKED_KINDS]:
            if p.kind in FRAGMENT_KINDS and p.fragment is None:
                raise self._error(p, f"is a {p.kind.name} without a fragment")
            producers = [self._by_id.get(name) for name in p.producers] if p.kind in LLM_DECODES else []
            if p.kind in LLM_DECODES and not any(q is not None and (q.prefills or q.decodes) for q in producers):
                raise self._error(p, "decodes without reading a prefilling or an earlier decoding")
        for p in [p for p in primitives if p.options]:
            if reserved := [key for key, _ in p.options if key in ATTRIBUTES]:
                remedy = f"use attributes=Attributes({reserved[0]}=...)"
                raise self._error(p, f"says {reserved[0]!r} as an option", remedy)
        if not self.output.external and self.output.producer not in self._by_id:
            raise GraphError(f"the output {self.output} is produced by nothing.", hint="set output to a primitive's id")

    def _unknown_edge(self, p: Primitive) -> str:
        """Describe the first edge into `p` that comes from a primitive which is not in the graph."""
        for ref in p.refs:
            if not ref.external and ref.producer not in self._by_id:
                return f"reads {ref}, which nothing produces"
        name = next(name for name in p.after if name not in self._by_id)
        return f"comes after {name!r}, which is not in the graph"

    def _error(self, p: Primitive, problem: str, hint: str = "check the edit that made it") -> GraphError:
        return GraphError(f"primitive {p.id!r} {problem}.\n  {format_primitive(p)}\n", hint=hint)

    def _sorted(self) -> tuple[Primitive, ...]:
        """Return the primitives in a topological order that equal graphs share. Raise GraphError for a cycle."""
        waiting = {name: len(parents) for name, parents in self._parents.items() if parents}
        ready = [name for name in self._parents if name not in waiting]
        children = self._children
        for name in ready:  # the list grows during the loop
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
        """Return the ids of the primitives that must end before `p` starts: data edges, then order edges, each once."""
        parents = [ref.producer for _, ref in p.inputs if ref.producer[:1] != "$"]
        if p.speculative_refs:
            parents += [ref.producer for ref in p.speculative_refs if ref.producer[:1] != "$"]
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
        """The producers that each primitive reads, by id; external ones included, each once."""
        return {p.id: p.producers for p in self._order}

    @cached_property
    def read_by(self) -> Mapping[str, tuple[str, ...]]:
        """The ids of the readers of each value that is read, by producer; external ones included."""
        readers: dict[str, list[str]] = {}
        for name, producers in self.reads.items():
            for producer in producers:
                readers.setdefault(producer, []).append(name)
        return {producer: tuple(names) for producer, names in readers.items()}

    @cached_property
    def successors(self) -> Mapping[str, tuple[str, ...]]:
        """The children of each primitive that has any, by id."""
        return {name: tuple(names) for name, names in self._children.items() if names}

    def readers(self, name: str) -> tuple[Primitive, ...]:
        """Return the primitives that read a value of `name`."""
        children = [self._by_id[child] for child in self._children[name]]
        # Without order edges, a child can only be a reader.
        return tuple([p for p in children if not p.after or any(ref.producer == name for ref in p.refs)])

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """The longest distance of each primitive to a sink; the output has depth 0 (paper, Algorithm 2, event 1)."""
        depth: dict[str, int] = {}
        for p in reversed(self._order):
            depth[p.id] = 1 + max((depth[c] for c in self._children[p.id]), default=-1)
        return MappingProxyType(depth)

    @cached_property
    def ancestors(self) -> Mapping[str, frozenset[str]]:
        """The ids of all ancestors of each primitive: all that must end before it starts.

        Each set is built from its mask on first use. Passes and the adapters' plans for prefetching read it to see
        whether one primitive waits for another.
        """
        return _AncestorSets(self.bits, self.ancestor_masks)

    @cached_property
    def bits(self) -> Mapping[str, int]:
        """The bit of each primitive in masks, which are integers that stand for sets of primitives."""
        return {p.id: 1 << position for position, p in enumerate(self._order)}

    @cached_property
    def ancestor_masks(self) -> Mapping[str, int]:
        """The ancestors of each primitive as a mask, which is quicker to compute and to compare than a set."""
        return self.collect_ancestor_masks(self.bits)

    def collect_ancestor_masks(self, bits: Mapping[str, int]) -> dict[str, int]:
        """Return, for each primitive, the mask of its ancestors that have a bit in `bits`."""
        masks: dict[str, int] = {}
        parents, bit = self._parents, bits.get
        for p in self._order:
            mask = 0
            for parent in parents[p.id]:
                mask |= masks[parent] | bit(parent, 0)
            masks[p.id] = mask
        return masks

    def forget_ancestors(self) -> None:
        """Drop the cached masks, which grow with the square of the graph. They are computed again when needed."""
        for name in ("ancestor_masks", "ancestors", "bits"):
            self.__dict__.pop(name, None)

    @cached_property
    def behind_code(self) -> frozenset[str]:
        """The ids of user code and of primitives that cannot start before it has ended.

        The graph without these is closed: no other primitive has a parent among them. A FOLD whose first value waits
        for user code may be expanded before that code ran, so the FOLD and its ancestors are not included. Nor is code
        of which a call shows that it has ended (`observed_to_end`).
        """
        blocked: set[str] = set()
        for p in self._order:
            if (p.kind in IMPURE_KINDS and p.id not in self.observed_to_end) or not blocked.isdisjoint(
                self._parents[p.id]
            ):
                blocked.add(p.id)
        folds = [name for name in blocked if self._by_id[name].kind is PrimitiveKind.FOLD]
        return frozenset(blocked.difference(folds, *[self.ancestors[name] for name in folds]))

    @cached_property
    def observed_to_end(self) -> frozenset[str]:
        """The ids of the user code of which a later call shows that it has ended (`Attributes.ends`)."""
        return frozenset([name for p in self for name in p.attributes.ends])

    @cached_property
    def external_reads(self) -> frozenset[str]:
        """The external producers that primitives of the graph read, those inside fragments not counted."""
        return frozenset([ref.producer for p in self for ref in p.refs if ref.external])

    @cached_property
    def external_inputs(self) -> frozenset[str]:
        """The external producers that a query (or an instance) must bind."""
        names = set(self.external_reads)
        for p in self:
            for fragment in (p.fragment, p.otherwise):
                if fragment is not None:
                    bound = {"$item", "$carry", *(f"${key}" for key, _ in p.inputs)}
                    names |= fragment.externals - bound
        return frozenset(names | ({self.output.producer} if self.output.external else set()))

    def __eq__(self, other: object) -> bool:
        """Compare output and primitives; their order and how the graph was made do not count."""
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
        return format_graph(self)

    def __repr__(self) -> str:
        return f"<Graph of {len(self._by_id)} primitives, output {self.output}>"

    def mermaid(self) -> str:
        return format_mermaid(self)


class _AncestorSets(Mapping[str, frozenset[str]]):
    """A mapping from ids to sets of ids, each built from its mask on first use."""

    def __init__(self, bits: Mapping[str, int], masks: Mapping[str, int]) -> None:
        self._bits = bits
        self._masks = masks
        self._sets: dict[str, frozenset[str]] = {}

    def __getitem__(self, name: str) -> frozenset[str]:
        """Return the set of a primitive's ancestors, built from its mask on first use. Raise KeyError for an unknown
        id."""
        ids = self._sets.get(name)
        if ids is None:
            mask = self._masks[name]
            ids = self._sets[name] = frozenset([other for other, bit in self._bits.items() if mask & bit])
        return ids

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)


# ------------------------------------------------------------ the builder


class GraphEdit:
    """A set of changes to a graph, to be frozen into a new graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._before: dict[str, Primitive] = {p.id: p for p in graph}
        self._by_id = dict(self._before)
        self._output = graph.output

    def __getitem__(self, name: str) -> Primitive:
        return self._by_id[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_id

    def add(self, *primitives: Primitive) -> None:
        """Add primitives. Raise GraphError if the graph has one of their ids already.

        They may read primitives that are added later: references are checked when the edit is frozen.
        """
        for p in primitives:
            if p.id in self._by_id:
                raise GraphError(f"primitive {p.id!r} is in the graph already.", hint="choose another id")
            self._by_id[p.id] = p

    def replace(self, primitive: Primitive) -> None:
        """Replace the primitive that has the same id. Raise KeyError if there is none."""
        if primitive.id not in self._by_id:
            raise KeyError(primitive.id)
        self._by_id[primitive.id] = primitive

    def remove(self, name: str) -> None:
        del self._by_id[name]

    def reread(self, old: Ref, new: Ref, only: Iterable[str] | None = None) -> None:
        """Redirect readers of `old`, or of a value inside it, to `new`: all of them, or those in `only`."""

        def redirected(ref: Ref) -> Ref:
            is_inside = ref.producer == old.producer and ref.path[: len(old.path)] == old.path
            return Ref(new.producer, new.path + ref.path[len(old.path) :]) if is_inside else ref

        for name in list(self._by_id) if only is None else list(only):
            p = self._by_id[name]
            inputs = tuple((key, redirected(ref)) for key, ref in p.inputs)
            self.replace(p.with_(inputs=inputs, speculative_refs=tuple(redirected(ref) for ref in p.speculative_refs)))
        if only is None:
            self._output = redirected(self._output)

    def freeze(self) -> Graph:
        """Return the new graph: the original object if nothing was changed.

        Raise GraphError if a primitive of the new graph reads one that is not there.
        """
        if self._output == self._graph.output and self._by_id == self._before:
            return self._graph
        return Graph(self._by_id.values(), self._output, base=self._graph)


# ------------------------------------------------------------ fragments


@dataclass(frozen=True, slots=True)
class Fragment:
    """A graph whose external references (`$item`, `$carry`, `$name` for a capture) are bound per instance."""

    graph: Graph
    output: Ref

    def instantiate(
        self, name: str, bind: dict[str, Ref], *, speculative: bool = False, without: Collection[str] = ()
    ) -> tuple[list[Primitive], Ref]:
        """Create the primitives of one instance.

        Args:
            name: Name of the instance; ids of its primitives are prefixed with `name/`.
            bind: The reference for every external producer that the fragment reads.
            speculative: Mark the primitives as working on a predicted value.
            without: Ids of primitives to leave out.

        Returns:
            The primitives, and the reference of the instance's output.
        """
        child = InstancePath(name).child
        names = {primitive.id: child(primitive.id) for primitive in self.graph}
        changes = {"speculative": True} if speculative else {}
        primitives = [p.rename(names, bind, **changes) for p in self.graph if p.id not in without]
        if self.output.producer in bind:
            base = bind[self.output.producer]
            return primitives, Ref(base.producer, base.path + self.output.path)
        return primitives, Ref(names.get(self.output.producer, self.output.producer), self.output.path)

    @property
    def externals(self) -> frozenset[str]:
        """The external producers that an instance must bind."""
        refs = self.graph.external_reads
        return refs | {self.output.producer} if self.output.external else refs


# ------------------------------------------------------------ the text form


def format_primitive(p: Primitive, depth: int | None = None) -> str:
    """Return one line, e.g. `%search = SEARCHING@store(vector=%embed) after(%ingest) {k=16} reads collection:docs`."""
    args = ", ".join(f"{key}=%{ref}" for key, ref in p.inputs)
    text = f"%{p.id} = {p.kind.name}" + (f"@{p.engine}" if p.engine else "") + f"({args})"
    if p.after:
        text += f" after({', '.join('%' + a for a in p.after)})"
    if p.speculative_refs:
        text += f" early({', '.join('%' + str(r) for r in p.speculative_refs)})"
    notes = [f"{key}={value}" for key, value in (*p.attributes.non_default_items(), *p.options)]
    if p.item is not None:
        notes.append(f"item={p.item}")
    if p.size is not None:
        notes.append(f"size={p.size}")
    if p.prompt:
        notes.append("prompt=" + "".join(map(str, p.prompt)))
    notes += [name for name in ("batchable", "splittable", "speculative") if getattr(p, name)]
    if notes:
        text += " {" + ", ".join(notes) + "}"
    text += "".join(f" {effect}" for effect in p.effects)
    return text if depth is None else f"{text}  # depth {depth}"


def format_graph(graph: Graph, *, depths: bool = True) -> str:
    """Return one line per primitive, in order, with fragments indented below their primitive."""
    lines: list[str] = []
    for p in graph:
        lines.append(format_primitive(p, graph.depths[p.id] if depths else None))
        for label, fragment in (("each", p.fragment), ("else", p.otherwise)):
            if fragment is not None:
                inner = format_graph(fragment.graph, depths=False)
                lines += [f"    {label} | {line}" for line in inner.split("\n")]
    lines.append(f"return %{graph.output}")
    return "\n".join(lines)


def format_mermaid(graph: Graph) -> str:
    """Return a Mermaid flow chart: data edges are solid, order edges dotted."""
    names = {p.id: f"n{i}" for i, p in enumerate(graph)}
    lines = ["flowchart TD"]
    for p in graph:
        engine = f"<br/>{p.engine}" if p.engine else ""
        lines.append(f'  {names[p.id]}["{p.kind.name}<br/>{p.id}{engine}"]')
    for p in graph:
        for producer in dict.fromkeys(r.producer for r in p.refs if not r.external):
            lines.append(f"  {names[producer]} --> {names[p.id]}")
        lines += [f"  {names[a]} -.-> {names[p.id]}" for a in p.after]
    return "\n".join(lines)
