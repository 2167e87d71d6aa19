"""What every component of a workflow is: a name, what it reads, its settings, and how it decomposes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import GraphError, unknown_name
from teola_plugin.graph import PrimitiveKind
from teola_plugin.workflow.flow import Flow, Joins
from teola_plugin.workflow.settings import Setting, check_settings, engines_of, ports_of, settings_of
from teola_plugin.workflow.values import Kind

if TYPE_CHECKING:
    from teola_plugin.workflow.decomposition import Decomposition
    from teola_plugin.workflow.values import Value

RESERVED = frozenset({"items", "init", "condition", "outputs"})
"""Names that a graph has a meaning of its own for."""


@dataclass(frozen=True)
class Component(Joins):
    """A unit of a workflow: frozen, compared by its fields.

    A component of your own is a frozen dataclass derived from this one: its fields are made by `reads`, `on_engine` and
    `setting`, and its `decompose` says its primitives. Raises `RegistrationError` for a setting that cannot be,
    `GraphError` for a name that cannot be.
    """

    name: str

    def __post_init__(self) -> None:
        check_name(self.name, "component")
        check_settings(self)

    def decompose(self, decomposition: Decomposition) -> Value:
        """Adds its parts, and returns the value that it gives. No query's value is at hand here."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it decomposes")

    # ------------------------------------------------------------ what others ask of it

    def sources(self) -> dict[str, str]:
        """Return the name of the value that it reads at each port."""
        return {port: getattr(self, port) for port in ports_of(self) if getattr(self, port)}

    def kinds(self, port: str) -> tuple[Kind, ...]:
        """Return the kinds of values that may be read at a port."""
        return ports_of(self).get(port, (Kind.ANY,))

    def needs(self) -> tuple[str, ...]:
        """Names of all values that it reads, its bodies' too."""
        return tuple(dict.fromkeys(self.sources().values()))

    def bodies(self) -> tuple[Flow, ...]:
        """Flows that it holds."""
        return ()

    def collections(self) -> tuple[tuple[str, str], ...]:
        """Stores and their collections that it reads or writes."""
        return ()

    def engines(self) -> dict[str, tuple[PrimitiveKind, ...]]:
        """Names of the engines that it asks, and what each has to do."""
        kinds_by_engine: dict[str, tuple[PrimitiveKind, ...]] = {}
        for field, kinds in engines_of(self).items():
            name = getattr(self, field)
            kinds_by_engine[name] = kinds_by_engine.get(name, ()) + kinds
        return kinds_by_engine

    def settings(self) -> dict[str, Setting]:
        """Return the settings that a query may change."""
        return settings_of(self)

    def configured(self, values: Mapping[str, Mapping[str, Any]]) -> Component:
        """Return a copy with the settings in `values[its name]`. Raise RegistrationError for an unknown setting."""
        changes = values.get(self.name)
        if not changes:
            return self
        for key in changes:
            if key not in self.settings():
                raise unknown_name("setting", f"{self.name}.{key}", [f"{self.name}.{one}" for one in self.settings()])
        return dataclasses.replace(self, **changes)


def check_name(name: Any, role: str) -> None:
    """Raises `GraphError` for a name that values of a workflow cannot have."""
    if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
        problem = "is taken by the graph" if name in RESERVED else "is no plain name"
        raise GraphError(
            f"the {role} name {name!r:.80} {problem}.", hint="use letters, digits and _, e.g. found_passages"
        )
