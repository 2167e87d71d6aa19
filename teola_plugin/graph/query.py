"""A query: one call of an accelerated object, as the runtime sees it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.errors import RegistrationError
from teola_plugin.graph.graph import Graph

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context of a request: for which tenant and app it is made, and how urgent it is. It never affects the result.

    It travels with every call into the pool, also with calls that belong to no plan.
    """

    tenant: str = ""
    """Tenant. It salts caches: prefixes are shared within one tenant only."""
    app: str = "default"
    deadline: float | None = None
    """Time on the runtime's clock; None for no deadline."""
    goal: float | None = None
    """Target duration of the whole query, in seconds; None for as soon as possible."""
    weight: float = 1.0
    """Share among the queries of a pool; 1.0 is the default share."""
    depth: int = 0
    """Longest distance to the output of its query."""
    session: str = ""
    """Requests of one session should run on one replica, e.g. the prefillings of one prompt."""
    gang: str = ""
    """Requests of one gang are useful only when the last of them has ended."""


@dataclass(frozen=True, slots=True)
class Query:
    """The inputs of a query, and the context of its requests."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Values of the graph's external producers, by name without the `$` (usually just `input`)."""
    id: str = field(default_factory=lambda: f"q{next(_numbers)}")
    app: str = "default"
    tenant: str = ""
    """Tenant. It salts caches: prefixes are shared within one tenant only."""
    deadline: float | None = None
    """Time on the runtime's clock; None for no deadline."""
    weight: float = 1.0

    _terms: RequestContext = field(init=False, repr=False, compare=False, default=RequestContext())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_terms", RequestContext(self.tenant, self.app, self.deadline, weight=self.weight))

    @property
    def terms(self) -> RequestContext:
        """The context of its requests, created once."""
        return self._terms

    def check(self, graph: Graph) -> None:
        """Raise RegistrationError unless the query binds every external value of `graph`."""
        missing = sorted(name for name in graph.external_inputs if name.removeprefix("$") not in self.inputs)
        if missing:
            raise RegistrationError(
                f"query {self.id} does not bind {', '.join(missing)} of its graph; it has {sorted(self.inputs)}.",
                hint="pass a value for each input that the template declares",
            )
