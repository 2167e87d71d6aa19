"""Lists of CPU cores as users write them."""

from __future__ import annotations

from collections.abc import Iterable


def parse_cores(cores: str | Iterable[int] | None) -> tuple[int, ...]:
    """Core numbers from `"0-2,5"` or from numbers; empty for None. Raises `ValueError`."""
    if cores is None:
        return ()
    if not isinstance(cores, str):
        return tuple(sorted({int(core) for core in cores}))
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in cores.split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))
