"""The table of graphs: a builder for each, and the calls that tests make on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from support.graphs.kit import Kit

Builder = Callable[[Kit], Any]
Only = Literal["", "sync", "async"]


@dataclass(frozen=True)
class Turn:
    """One call of a graph. `given` is the input, or a function of the graph and its config that returns the input."""

    given: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the call: `context`, `interrupt_before`, `durability`, ..."""


@dataclass(frozen=True)
class Case:
    """A graph and its calls."""

    build: Builder
    turns: tuple[Turn, ...]
    races: bool = False
    """True if nodes run in parallel, so that their effects come in another order every time."""
    fails: bool = False
    """True if other nodes run in parallel when a node fails. How far they get depends on timing."""
    only: Only = ""
    is_graph: bool = True
    """False for a chain with graphs in it."""
    not_by: str = ""
    """Ways to call with this in their name are left out, because the original's result depends on chance there."""


GRAPHS: dict[str, Case] = {}


def case(*turns: Any, **about: Any) -> Any:
    """Put the builder into the table under its name.

    Args:
        turns: the calls, each as a `Turn` or as its input.
        about: further fields of `Case`.
    """
    script = tuple(turn if isinstance(turn, Turn) else Turn(turn) for turn in turns)

    def listed(build: Builder) -> Builder:
        GRAPHS[build.__name__] = Case(build, script, **about)
        return build

    return listed
