"""Large values that stay at the instance that made them, in a shared pool: what stands for them elsewhere."""

from __future__ import annotations


class RemoteValue:
    """Stands for a value that only engines read. It is looked up before anybody else may see it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<remote value>"
