"""What `explain()` says of composites: those that begin their calls together, and those that could."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from teola_plugin.adapters.early_words import listed
from teola_plugin.adapters.langchain.own_models.composites import parts
from teola_plugin.adapters.langchain.side_by_side import classes
from teola_plugin.adapters.langchain.side_by_side.composites import PARTS
from teola_plugin.adapters.langchain.side_by_side.threads import Threads


def told(chain: Any) -> tuple[str, ...]:
    """A phrase for each kind of composite in a chain, as `side_by_side` has made it."""
    names = dict.fromkeys(type(one).__name__ for one in _composites(chain))
    return tuple(f"the calls that {name} makes one after the other, side by side" for name in names)


def advice(chain: Any, threads: Threads) -> tuple[str, ...]:
    """What to name in `concurrent=`, so that sync calls of composites need not wait for each other."""
    found: dict[str, dict[str, None]] = {}
    for node in _all_composites(chain):
        names = [type(one).__name__ for part in classes.calls_of(node) for one in threads.unnamed(part)]
        if names:
            found.setdefault(listed(list(dict.fromkeys(names))), {})[type(node).__name__] = None
    return tuple(_NAME_THEM.format(names=names, classes=listed(list(found[names]))) for names in found)


_NAME_THEM = (
    "if several threads may call {names} at once, say so: accelerate(..., concurrent=[{names}]); "
    "then the sync calls of {classes} run side by side"
)


def _all_composites(node: Any) -> Iterator[Any]:
    if classes.name_of(node):
        yield node
    below = classes.parts_of(node) if classes.name_of(node) else [part for _, part in parts(node)]
    for part in below:
        yield from _all_composites(part)


def _composites(node: Any) -> Iterator[Any]:
    if any(getattr(node, "__dict__", {}).get(PARTS, ())):
        yield node
    below = classes.parts_of(node) if classes.name_of(node) else [part for _, part in parts(node)]
    for part in below:
        yield from _composites(part)
