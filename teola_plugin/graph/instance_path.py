"""Ids of the primitives that passes and schedulers derive from others. Only this module writes and parses them.

    found[2]/found.retrieve.embedding     in the instance of `found` for item 2
    part1/answer.prefilling               in a subplan of the query that began later
    route.then/answer.decoding            in the chosen arm of a branch
    rows#1                                stage 1 of `rows`, or item 1 of the decoding `rows`
    answer.prefilling.partial#0           the first partial prefilling of a prompt
    answer.prefilling.grown#0             a prefix of it that is not in the graph, prefilled as it grew
    found.verify                          compares what `found` was predicted to read

Names of components do not contain `/`, `#` or `[`. Ids stay plain strings, which are quick as keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_GROWN = ".grown#"
_ITEM = re.compile(r"\[\d+'?\]")


@dataclass(frozen=True, slots=True)
class InstancePath:
    """The id of a primitive, an instance or a subplan, with methods that return ids of others as texts."""

    text: str

    # ------------------------------------------------------------ ids of others

    def child(self, name: str) -> str:
        """Return the id of the primitive `name` inside this instance or subplan."""
        return f"{self.text}/{name}"

    def instance(self, index: int, *, is_second: bool = False) -> str:
        """Return the id of the instance for an item or a round; `is_second` if a speculative one was discarded."""
        return f"{self.text}[{index}']" if is_second else f"{self.text}[{index}]"

    def arm(self, condition: bool, *, is_second: bool = False) -> str:
        """Return the id of a branch's instance; `is_second` if one that began before the condition was discarded."""
        return f"{self.text}.{'then' if condition else 'else'}" + ("'" if is_second else "")

    def stage(self, index: int) -> str:
        """Return the id of a stage of a batchable primitive, or of an item of a decoding."""
        return f"{self.text}#{index}"

    def partial(self, index: int) -> str:
        """Return the id of a partial prefilling."""
        return f"{self.text}.partial#{index}"

    def grown(self, index: int) -> str:
        """Return the id of the prefilling of a prefix of a growing prompt."""
        return f"{self.text}{_GROWN}{index}"

    def verify(self) -> str:
        """Return the id of the VERIFY that compares predicted items with the real ones."""
        return f"{self.text}.verify"

    # ------------------------------------------------------------ parts of the id

    @property
    def outermost(self) -> str:
        """The outermost instance or subplan that it is in; itself if it is in none."""
        return self.text.partition("/")[0]

    @property
    def items(self) -> str:
        """The items and rounds that it is an instance of, outermost first, e.g. `[2]`; empty for none."""
        return "".join(_ITEM.findall(self.text)) if "[" in self.text else ""

    def enclosing(self) -> Iterator[str]:
        """Yield the ids of the instances and subplans that it is in, outermost first."""
        text = self.text
        end = text.find("/")
        while end >= 0:
            yield text[:end]
            end = text.find("/", end + 1)

    def inside(self, outer: str) -> str | None:
        """Return its name inside that instance or subplan; None if it is not inside."""
        return self.text[len(outer) + 1 :] if self.text.startswith(f"{outer}/") else None

    def in_instance_of(self, holder: str) -> bool:
        """Return True if it is an instance of that primitive, or inside one."""
        return self.text.startswith(f"{holder}[")

    @property
    def ungrown(self) -> str:
        """The prefilling that a grown prefix belongs to; itself if it is not a grown prefix."""
        return self.text.partition(_GROWN)[0]
