"""What `explain()` says of composites that begin their calls together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from teola_plugin.adapters.langchain.own_models.composites import parts
from teola_plugin.adapters.langchain.side_by_side import classes
from teola_plugin.adapters.langchain.side_by_side.composites import PARTS


def told(chain: Any) -> tuple[str, ...]:
    """A phrase for each kind of composite in a chain, as `side_by_side` has made it."""
    names = dict.fromkeys(type(one).__name__ for one in _composites(chain))
    return tuple(f"the calls that {name} makes one after the other, side by side" for name in names)


def _composites(node: Any) -> Iterator[Any]:
    if any(getattr(node, "__dict__", {}).get(PARTS, ())):
        yield node
    below = classes.parts_of(node) if classes.name_of(node) else [part for _, part in parts(node)]
    for part in below:
        yield from _composites(part)
