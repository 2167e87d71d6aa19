"""Programs as trees of text: created from a seed, printed for a test, and shrunk when they show a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Node:
    """An expression: `form` with a `%s` for each part; without a form, the parts one after the other."""

    sort: str
    """What it takes and gives, e.g. `D>T`: a node may stand for any other of its sort."""
    form: str = ""
    parts: tuple[Node, ...] = ()

    def __str__(self) -> str:
        if self.form:
            return self.form % tuple(map(str, self.parts))
        return "\n    | ".join(map(str, self.parts))

    @property
    def size(self) -> int:
        return 1 + sum(part.size for part in self.parts)


def sequence(sort: str, parts: list[Node]) -> Node:
    return Node(sort, "", tuple(parts))


def smaller(node: Node) -> Iterator[Node]:
    """Yield copies of this tree with something left out, the smallest first."""
    found = sorted(_smaller(node), key=lambda each: each.size)
    yield from dict.fromkeys(found)


def _smaller(node: Node) -> Iterator[Node]:
    for below in _below(node):
        if below.sort == node.sort:
            yield below
    if not node.form:
        for i, part in enumerate(node.parts):
            if len(node.parts) > 1 and part.sort[0] == part.sort[-1]:  # what follows takes what it gave
                yield replace(node, parts=node.parts[:i] + node.parts[i + 1 :])
    for i, part in enumerate(node.parts):
        for less in _smaller(part):
            yield replace(node, parts=(*node.parts[:i], less, *node.parts[i + 1 :]))


def _below(node: Node) -> Iterator[Node]:
    for part in node.parts:
        yield part
        yield from _below(part)


def shrunk(node: Node, shows: Callable[[Node], bool], trials: int = 80) -> Node:
    """Return a smaller tree for which `shows` is still true, found with a limited number of trials."""
    while trials > 0:
        for less in smaller(node):
            trials -= 1
            if shows(less):
                node = less
                break
            if trials <= 0:
                return node
        else:
            return node
    return node
