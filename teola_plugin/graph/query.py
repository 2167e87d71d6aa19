"""One call of an accelerated object, as the runtime sees it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.errors import RegistrationError
from teola_plugin.graph.graph import Graph

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Terms:
    """On whose behalf work is done, and how urgent it is. Never part of what is asked for.

    They travel with every call into the pool, beside plans: also with calls that no plan knows of.
    """

    tenant: str = ""
    """Cache salt: prefixes are shared within one tenant only."""
    app: str = "default"
    deadline: float | None = None
    """On the runtime's clock; None for none."""
    goal: float | None = None
    """Seconds that the whole query should take; None for as soon as possible."""
    weight: float = 1.0
    """Share among the queries of a pool; 1.0 is ordinary."""
    depth: int = 0
    """Longest way to the output of its query."""
    session: str = ""
    """Work that should meet on one instance, e.g. the prefillings of one prompt."""
    gang: str = ""
    """Work that is done when its last member is."""


@dataclass(frozen=True, slots=True)
class Query:
    """Inputs and the terms under which they are worked on."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Values of the graph's external producers, by name without the `$` (usually just `input`)."""
    id: str = field(default_factory=lambda: f"q{next(_numbers)}")
    app: str = "default"
    tenant: str = ""
    """Cache salt: prefixes are shared within one tenant only."""
    deadline: float | None = None
    """On the runtime's clock; None for none."""
    weight: float = 1.0

    _terms: Terms = field(init=False, repr=False, compare=False, default=Terms())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_terms", Terms(self.tenant, self.app, self.deadline, weight=self.weight))

    @property
    def terms(self) -> Terms:
        """Asked for with every request, made once."""
        return self._terms

    def check(self, graph: Graph) -> None:
        """Proves that every external value of `graph` is bound by this very query. Raises `RegistrationError`."""
        missing = sorted(name for name in graph.external_inputs if name.removeprefix("$") not in self.inputs)
        if missing:
            raise RegistrationError(
                f"query {self.id} does not bind {', '.join(missing)} of its graph; it has {sorted(self.inputs)}.",
                hint="pass a value for each input that the template declares",
            )
