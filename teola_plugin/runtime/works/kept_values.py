"""Large values that stay where they were made, at a shared pool: what stands for them in between."""

from __future__ import annotations


class KeptValue:
    """Stands for a value that only engines read. It is looked up before anybody else may see it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<kept value>"
