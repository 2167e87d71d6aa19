"""How primitives are named that passes and schedulers make of others: written here, and read here alone.

    found[2]/found.retrieve.embedding     in the instance of `found` for item 2
    part1/answer.prefilling               in a part of the query that began later
    route.then/answer.decoding            in the arm that was taken
    rows#1                                stage 1 of `rows`, or item 1 of the decoding `rows`
    answer.prefilling.partial#0           the first partial prefilling of a prompt
    answer.prefilling.grown#0             a prefix of it that is not in the graph, prefilled as it grew
    found.verify                          compares what `found` was predicted to read

Names of components have no `/`, `#` and `[` in them. Ids stay plain strings, which are quick as keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_GROWN = ".grown#"
_ITEM = re.compile(r"\[\d+'?\]")


@dataclass(frozen=True, slots=True)
class InstancePath:
    """The id of a primitive, an instance or a part. What makes others of it gives their ids as texts."""

    text: str

    # ------------------------------------------------------------ names of others

    def child(self, name: str) -> str:
        """What is called `name` inside of this instance or part."""
        return f"{self.text}/{name}"

    def instance(self, index: int, *, again: bool = False) -> str:
        """The holder's instance for an item or a round; `again` where one was made early for another value."""
        return f"{self.text}[{index}']" if again else f"{self.text}[{index}]"

    def arm(self, taken: bool, *, again: bool = False) -> str:
        """A branch's only instance; `again` where one was made early, and came to nothing."""
        return f"{self.text}.{'then' if taken else 'else'}" + ("'" if again else "")

    def stage(self, index: int) -> str:
        """A slice of a batchable primitive, or an item of a decoding."""
        return f"{self.text}#{index}"

    def partial(self, index: int) -> str:
        """A partial prefilling of a prefilling."""
        return f"{self.text}.partial#{index}"

    def grown(self, index: int) -> str:
        """A prefix of a prefilling's prompt, as far as it had grown."""
        return f"{self.text}{_GROWN}{index}"

    def verify(self) -> str:
        """What compares its predicted items with the real ones."""
        return f"{self.text}.verify"

    # ------------------------------------------------------------ what it says

    @property
    def outermost(self) -> str:
        """The first instance or part on the way; itself if it is in none."""
        return self.text.partition("/")[0]

    @property
    def items(self) -> str:
        """Of which items and rounds it is an instance, outermost first: `[2]`; empty for none."""
        return "".join(_ITEM.findall(self.text)) if "[" in self.text else ""

    def around(self) -> Iterator[str]:
        """The instances and parts that it is in, outermost first."""
        text = self.text
        place = text.find("/")
        while place >= 0:
            yield text[:place]
            place = text.find("/", place + 1)

    def inside(self, outer: str) -> str | None:
        """Its name inside of that instance or part; None where it is not in there."""
        return self.text[len(outer) + 1 :] if self.text.startswith(f"{outer}/") else None

    def in_instance_of(self, holder: str) -> bool:
        """Whether it is an instance of that holder, or in one."""
        return self.text.startswith(f"{holder}[")

    @property
    def ungrown(self) -> str:
        """Of a grown prefix, the prefilling that it is a prefix of; itself otherwise."""
        return self.text.partition(_GROWN)[0]
