"""Components joined by `>>`: which comes after which, and which stand side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from teola_plugin.errors import GraphError

if TYPE_CHECKING:
    from teola_plugin.workflow.component import Component

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
        """Return a flow with all of this before all of `other`."""
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
