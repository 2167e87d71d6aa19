"""What the rules for expressions and statements need of the walk that they belong to."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import CodeType
from typing import Any, Protocol

from langchain_core.runnables import Runnable

from teola_plugin.graph import Ref
from teola_plugin.tracer.draft import Draft, Span
from teola_plugin.tracer.functions.in_place import InPlace
from teola_plugin.tracer.functions.reading import Surroundings
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE, Computed, Symbol
from teola_plugin.tracer.leaf import EmbeddingLeaf


class Flow(Enum):
    """How a block of statements ends."""

    NEXT = auto()
    ENDED = auto()
    """It returned, or raised."""
    STOPPED = auto()
    """What comes then is not known."""


class Stopped(Exception):
    """The walk has been long enough."""


@dataclass(slots=True)
class Frame:
    """One function that is being walked, or the body of a loop in one."""

    around: Surroundings
    local: frozenset[str] = frozenset()
    """Names that are the function's own."""
    names: dict[str, Symbol] = field(default_factory=dict)
    returned: Symbol = UNKNOWN_VALUE
    outer: Callable[[str], Symbol] | None = None
    """Of a body, and of a function inside a function: reads the names around it."""
    code: CodeType | None = None
    elsewhere: set[str] = field(default_factory=set)
    """Names that functions inside of it assign to."""

    def read(self, name: str) -> Symbol:
        if name in self.elsewhere:
            return UNKNOWN_VALUE
        if name in self.names:
            return self.names[name]
        if self.outer is not None and name not in self.local:
            return self.outer(name)
        return UNKNOWN_VALUE if name in self.local else self.around.read(name)


class Walker(Protocol):
    """Walks through one function, and through what it calls, with symbols in place of values."""

    draft: Draft
    frame: Frame
    name: str
    """Of the function: leads the names of its components."""
    depth: int
    """Functions that are walked inside each other."""
    line: int
    span: Span
    """Of all components so far."""
    changed: dict[tuple[int, str], Symbol]
    """What attributes were set to, by the object's id."""
    in_place: InPlace
    """What was changed in place: no expression gives it as it was."""
    left_out: bool
    """Whether something was not looked into."""
    runs_user_code: bool
    is_body: bool
    """Whether it runs for each item, or for one answer of a condition."""

    def evaluate(self, node: ast.expr) -> Symbol:
        """What the expression gives. What it asks engines for becomes components."""

    def truth(self, test: Symbol) -> bool | None:
        """Whether a condition holds; None where that is not known yet."""

    def block(self, statements: Sequence[ast.stmt]) -> Flow:
        """Walks through the statements."""

    def name_for(self, value: Ref | object, *, is_ref: bool) -> str:
        """A free name for a value, or an object at hand, in an expression."""

    def ref(self, symbol: Symbol) -> Ref:
        """The value as a ref: computed, formatted or built by CALLs. Raises `NotUnderstood`."""

    def code(self, symbol: Symbol) -> Computed | None:
        """The value as an expression; None for what is not known."""

    def run(
        self, node: Runnable[Any, Any], given: Symbol, kwargs: Mapping[str, Any], *, streamed: bool = False
    ) -> Symbol:
        """Return what the Runnable returns. `streamed`: the call may make its models stream."""

    def embed(self, leaf: EmbeddingLeaf, given: Symbol, *, several: bool) -> Symbol:
        """The vector of a text, or the vectors of several."""

    def emitted(self, span: Span) -> None:
        """Components come after all that was there before."""

    def may_try(self) -> bool:
        """Whether the ways of a condition are to be walked."""

    def trial(self, taken: set[str]) -> Walker:
        """The same walk from here on, on a draft of its own: nothing of it counts before it is taken over.

        `taken` are names of components, to which its own are added.
        """

    def finished(self, output: Ref | None) -> tuple[Ref, bool] | None:
        """Of a body: what it gives, and whether that is `output`; None for one that asks engines for nothing."""

    def user_code(self) -> None:
        """Code runs here that may do anything."""

    def body(self, outer: Callable[[str], Symbol]) -> Walker:
        """A walk of what is done with each item, into a draft of its own."""

    def call_function(self, func: Any, given: Sequence[Symbol], named: Mapping[str, Symbol]) -> Symbol | None:
        """What a function of the user's returns, walked here; None where it is not understood."""
