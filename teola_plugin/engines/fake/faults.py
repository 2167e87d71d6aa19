"""Faults that a fake engine is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from teola_plugin.requests.request import Request

Predicate = Callable[[Request], bool]


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong with a fake engine, to see that an app survives it."""

    fail_on: Predicate | None = None
    """These requests fail alone, half-way."""
    raise_on: Predicate | None = None
    """`execute` raises half-way through the batch that holds one of these: all its unfinished requests fail."""
    die_after: int | None = None
    """After so many batches the engine dies, once, in the middle of the next; `restart()` revives it for good."""
    hang_on: Predicate | None = None
    """These requests never end until they are cancelled; others beside them do."""
    raises: type[BaseException] = RuntimeError
    """What `raise_on` raises; SystemExit for an engine that ends its process, as it thinks."""
    deaf: bool = False
    """Whether it ignores cancellations."""
    slow: float = 1.0
    """Everything takes so many times as long."""
    retryable: bool = True
    """What the errors of `fail_on` say of themselves."""
    no_version: bool = False
    """The store cannot tell the versions of its collections."""

    def hits(self, predicate: Predicate | None, request: Request) -> bool:
        return predicate is not None and predicate(request)


NO_FAULTS = Faults()
