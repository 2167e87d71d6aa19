"""Lists of CPU cores as users write them."""

from __future__ import annotations

from collections.abc import Iterable


def parse_cores(cores: str | Iterable[int] | None) -> tuple[int, ...]:
    """Return core numbers from `"0-2,5"` or from numbers; () for None. Raise ValueError for an invalid text."""
    if cores is None:
        return ()
    if not isinstance(cores, str):
        return tuple(sorted({int(core) for core in cores}))
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in cores.split(","))):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))
