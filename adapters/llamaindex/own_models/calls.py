"""Calls of the user's own models and stores: what was asked of which object, and what came of it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult

from teola_plugin.adapters.own_calls import Outcome, State
from teola_plugin.adapters.snapshots import exactly, snapshot
from teola_plugin.observe.waits import OwnCall
from teola_plugin.tracer.symbols import NotUnderstood


class Failed(Exception):
    """A call that is needed here has failed; the plain object sees the error itself, in its place."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments as they were. Nothing in them is shared with anybody."""

    args: Any
    kwargs: Any
    vector: list[float] | None = None
    """Of a search: compared by its numbers, which are many."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
        """Raises `NotCopied` for what cannot be told apart."""
        if len(args) == 1 and type(args[0]) is VectorStoreQuery:
            fields = dict(vars(args[0]))
            vector = fields.pop("query_embedding")
            if type(vector) is list:
                return cls(snapshot(fields), snapshot(kwargs), list(vector))
        return cls(snapshot(args), snapshot(kwargs))

    def equals(self, other: Asked) -> bool:
        same = self.vector == other.vector and exactly(self.args, other.args)
        return same and exactly(self.kwargs, other.kwargs)

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments once more, for a call that may change them."""
        kwargs = snapshot(self.kwargs)
        if self.vector is not None:
            return (VectorStoreQuery(query_embedding=list(self.vector), **snapshot(self.args)),), kwargs
        return snapshot(self.args), kwargs


@dataclass(slots=True, eq=False)
class Call:
    """One call, made or to be made."""

    leaf: Any
    """The user's own object."""
    name: str
    asked: Asked
    state: State
    told: OwnCall
    """What the trace says of it."""
    for_plain: bool = False
    for_ahead: bool = False
    outcome: Future[Outcome] = field(default_factory=Future)
    """For the plain object, which takes it once."""
    shown: Future[Any] = field(default_factory=Future)
    """For what runs ahead: a text, a vector, a copy of what was found."""

    def end(self, outcome: Outcome) -> None:
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            self._show(outcome)  # before the plain object has it, and may change it
        self.outcome.set_result(outcome)

    def _show(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self.shown.set_exception(Failed(repr(outcome.error)))
            return
        try:
            copied = shown(outcome.value)
        except Exception as error:  # it cannot be copied
            self.shown.set_exception(NotUnderstood(str(error)))
        else:
            self.shown.set_result(copied)


def shown(value: Any) -> Any:
    """A copy of what a call gave, as far as it is looked at ahead. Raises `NotUnderstood`."""
    if isinstance(value, ChatResponse):
        return value.message.content or ""
    if isinstance(value, CompletionResponse):
        return value.text
    if type(value) is VectorStoreQueryResult:
        nodes = None if value.nodes is None else [node.model_copy(deep=True) for node in value.nodes]
        return VectorStoreQueryResult(nodes, _list(value.similarities), _list(value.ids))
    if type(value) is list:
        return list(value)
    raise NotUnderstood(f"it gives a {type(value).__name__}")


def _list(values: Any) -> Any:
    return None if values is None else list(values)


class Turns:
    """Of an object that takes one call at a time: plain calls wait for early ones, never for each other."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._early, self._plain = 0, 0

    @contextlib.contextmanager
    def early(self) -> Any:
        with self._free:
            self._free.wait_for(lambda: not self._early and not self._plain)
            self._early += 1
        try:
            yield
        finally:
            with self._free:
                self._early -= 1
                self._free.notify_all()

    @contextlib.contextmanager
    def plain(self) -> Any:
        with self._free:
            self._free.wait_for(lambda: not self._early)
            self._plain += 1
        try:
            yield
        finally:
            with self._free:
                self._plain -= 1
                self._free.notify_all()
