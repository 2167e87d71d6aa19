"""The table of graphs: a builder, and what its graph is called with, call by call on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from support.graphs.kit import Kit

Builder = Callable[[Kit], Any]
Only = Literal["", "sync", "async"]


@dataclass(frozen=True)
class Turn:
    """One call. `given` may be a function of the graph and its config: what is answered may have an id of its own."""

    given: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the call: `context`, `interrupt_before`, `durability`, ..."""


@dataclass(frozen=True)
class Case:
    build: Builder
    turns: tuple[Turn, ...]
    races: bool = False
    """Whether nodes run side by side, so that what they do comes in another order every time."""
    fails: bool = False
    """Whether siblings run when a node fails: how far they got is a race."""
    only: Only = ""
    is_graph: bool = True
    """False for a chain with graphs in it."""
    not_by: str = ""
    """Ways with this in their name are left out: what the plain graph gives there is a matter of chance."""


GRAPHS: dict[str, Case] = {}


def case(*turns: Any, **about: Any) -> Any:
    """Puts the builder into the table by its name. A turn: a `Turn`, or just its input; `about`: as `Case` has it."""
    script = tuple(turn if isinstance(turn, Turn) else Turn(turn) for turn in turns)

    def listed(build: Builder) -> Builder:
        GRAPHS[build.__name__] = Case(build, script, **about)
        return build

    return listed
