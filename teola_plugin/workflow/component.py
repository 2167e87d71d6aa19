"""The components of a workflow, joined by `>>`.

A component has a name, inputs, settings, and a decomposition into primitives. Joined components follow one another or
run side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from teola_plugin.errors import GraphError, unknown_name
from teola_plugin.graph import PrimitiveKind
from teola_plugin.workflow.settings import Setting, check_settings, engines_of, ports_of, settings_of
from teola_plugin.workflow.values import Kind

if TYPE_CHECKING:
    from teola_plugin.workflow.decomposition import Decomposition
    from teola_plugin.workflow.values import Value


Joinable = Union["Joins", Sequence["Joins"]]
"""What can be joined: a component, a flow, or a list of those, which stand side by side."""


class Joins:
    """`a >> b`: all of `a` before all of `b`; `a >> [b, c] >> d`: `b` and `c` side by side between the two."""

    def __rshift__(self, other: Joinable) -> Flow:
        return Flow.of(self).followed_by(Flow.of(other))

    def __rrshift__(self, other: Joinable) -> Flow:
        return Flow.of(other).followed_by(Flow.of(self))


@dataclass(frozen=True)
class Flow(Joins):
    """Components, and pairs of their names: the first of a pair comes before the second.

    One component may stand in several flows that are joined: it is one component still. Raises `GraphError` for two
    different components of one name.
    """

    components: tuple[Component, ...]
    order: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Keep each component and each pair of the order once. Raise GraphError if two components share a name."""
        by_name: dict[str, Component] = {}
        for one in self.components:
            if by_name.setdefault(one.name, one) != one:
                raise GraphError(f"two components share the name {one.name!r}.", hint="rename one of them")
        object.__setattr__(self, "components", tuple(by_name.values()))
        object.__setattr__(self, "order", tuple(dict.fromkeys(self.order)))

    @staticmethod
    def of(joinable: Any) -> Flow:
        """Convert a component, a flow or a list of them to a flow. Raise GraphError for any other object."""
        from teola_plugin.workflow.component import Component

        if isinstance(joinable, Flow):
            return joinable
        if isinstance(joinable, Component):
            return Flow((joinable,))
        if isinstance(joinable, Sequence) and not isinstance(joinable, str):
            return Flow.combine([Flow.of(one) for one in joinable])
        raise GraphError(
            f"{joinable!r:.80} cannot be joined by >>: it is a {type(joinable).__name__}.",
            hint="join components, flows, and lists of them; wrap a function of yours: Function('name', function)",
        )

    @staticmethod
    def combine(flows: Sequence[Flow]) -> Flow:
        """Return a flow with all of the flows, without an order between them."""
        components = tuple(one for flow in flows for one in flow.components)
        return Flow(components, tuple(pair for flow in flows for pair in flow.order))

    def followed_by(self, other: Flow) -> Flow:
        """Return a flow with all of this before all of `other`.

        Each component of `other` that nothing in it comes before waits for each one of this that nothing here comes
        after.
        """
        between = tuple((tail, head) for tail in self.tails for head in other.heads)
        return Flow(self.components + other.components, self.order + other.order + between)

    @property
    def tails(self) -> tuple[str, ...]:
        """Names of the components that nothing comes after."""
        earlier = {first for first, _ in self.order}
        return tuple(one.name for one in self.components if one.name not in earlier)

    @property
    def heads(self) -> tuple[str, ...]:
        later = {second for _, second in self.order}
        return tuple(one.name for one in self.components if one.name not in later)

    def __iter__(self) -> Iterator[Component]:
        return iter(self.components)

    def everything(self) -> Iterator[Component]:
        """Yield all components, those inside bodies included."""
        for one in self.components:
            yield one
            for body in one.bodies():
                yield from body.everything()

    def __getitem__(self, name: str) -> Component:
        return next(one for one in self.components if one.name == name)


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
