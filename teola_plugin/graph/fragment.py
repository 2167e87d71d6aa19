"""A frozen sub-graph that is instantiated at run time, once per item, round or branch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from teola_plugin.graph.graph import Graph
from teola_plugin.graph.instance_path import InstancePath
from teola_plugin.graph.primitive import Primitive
from teola_plugin.graph.refs import Ref


@dataclass(frozen=True, slots=True)
class Fragment:
    """`graph` with named inputs: external refs (`$item`, `$carry`, `$name` for a capture) are bound per instance."""

    graph: Graph
    output: Ref

    def instantiate(
        self, name: str, bind: dict[str, Ref], *, tentative: bool = False, without: Collection[str] = ()
    ) -> tuple[list[Primitive], Ref]:
        """Primitives of one instance, but for those `without` which it does, ids prefixed `name/`, and the ref of its
        output.

        `bind` gives the ref for every external producer the fragment reads.
        """
        child = InstancePath(name).child
        names = {primitive.id: child(primitive.id) for primitive in self.graph}
        changes = {"tentative": True} if tentative else {}
        made = [p.rename(names, bind, **changes) for p in self.graph if p.id not in without]
        if self.output.producer in bind:
            base = bind[self.output.producer]
            return made, Ref(base.producer, base.path + self.output.path)
        return made, Ref(names.get(self.output.producer, self.output.producer), self.output.path)

    @property
    def externals(self) -> frozenset[str]:
        """External producers that an instance must bind."""
        refs = self.graph.external_reads
        return refs | {self.output.producer} if self.output.external else refs
