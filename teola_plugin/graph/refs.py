"""References of primitives: to values (`Ref`), to resources (`Effect`), to pieces of a prompt (`PromptPart`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Slice(NamedTuple):
    """Items `start` to `stop` of a list; None as `stop` takes the rest (the last stage of Pass 2)."""

    start: int
    stop: int | None

    def __str__(self) -> str:
        return f"{self.start}:{'' if self.stop is None else self.stop}"


Path = tuple[str | int | Slice, ...]

INPUT = "$input"
"""Producer name of the query's own input."""
ITEM, CARRY = "$item", "$carry"
"""Producer names inside a fragment: the item (MAP, FOLD) and the carried value (FOLD, LOOP)."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value of `producer`, or to the value under `path` (keys and indices) inside it."""

    producer: str
    path: Path = ()

    def at(self, *path: str | int | Slice) -> Ref:
        return Ref(self.producer, self.path + path)

    @property
    def external(self) -> bool:
        """True for values from outside the graph (`$input`, `$item`, captures)."""
        return self.producer.startswith("$")

    def __str__(self) -> str:
        return self.producer + "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in self.path)


Inputs = tuple[tuple[str, Ref], ...]
"""Named inputs, in order."""


def named(**refs: Ref) -> Inputs:
    return tuple(refs.items())


@dataclass(frozen=True, slots=True)
class Effect:
    """A resource that a primitive reads or writes, e.g. `collection:docs`; `*` stands for any resource.

    `validated` marks a read whose result is checked against the resource's version before use, so that it may run
    ahead of user code that might write.
    """

    resource: str
    writes: bool = False
    validated: bool = False

    def conflicts(self, other: Effect) -> bool:
        """Return True if the order of the two effects matters."""
        if not (self.writes or other.writes):
            return False
        if "*" in (self.resource, other.resource):
            return not (self.validated or other.validated)
        return self.resource == other.resource

    def __str__(self) -> str:
        return ("writes " if self.writes else "reads ") + self.resource


UNKNOWN_EFFECT = Effect("*", writes=True)
"""The effect of user code, which might write anything."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a prompt: literal text, or a variable (text or messages) named as in the primitive's inputs.

    `tokens` is the expected length; 0 if unknown.
    """

    text: str = ""
    variable: str = ""
    tokens: int = 0

    @staticmethod
    def literal(text: str) -> PromptPart:
        return PromptPart(text=text, tokens=max(1, len(text) // 4))

    @staticmethod
    def var(name: str, tokens: int = 0) -> PromptPart:
        return PromptPart(variable=name, tokens=tokens)

    def __str__(self) -> str:
        return "{" + self.variable + "}" if self.variable else f"<{self.tokens} tokens>"


def conflict(first: tuple[Effect, ...], second: tuple[Effect, ...]) -> bool:
    """Return True if an effect of `first` must keep its order with one of `second`."""
    return any(a.conflicts(b) for a in first for b in second)
