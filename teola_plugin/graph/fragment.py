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
    """A graph whose external references (`$item`, `$carry`, `$name` for a capture) are bound per instance."""

    graph: Graph
    output: Ref

    def instantiate(
        self, name: str, bind: dict[str, Ref], *, tentative: bool = False, without: Collection[str] = ()
    ) -> tuple[list[Primitive], Ref]:
        """Create the primitives of one instance.

        Args:
            name: Name of the instance; ids of its primitives are prefixed with `name/`.
            bind: The reference for every external producer that the fragment reads.
            tentative: Mark the primitives as working on a predicted value.
            without: Ids of primitives to leave out.

        Returns:
            The primitives, and the reference of the instance's output.
        """
        child = InstancePath(name).child
        names = {primitive.id: child(primitive.id) for primitive in self.graph}
        changes = {"tentative": True} if tentative else {}
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
