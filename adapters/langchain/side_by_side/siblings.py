"""Calls that a composite is about to make one after the other: they begin together, and each is taken in its place.

They are the same methods of the same objects, on threads, heard by nobody until the plain code comes to them: then
their events are told and their outcomes taken. The plain code makes the first call itself, and each that no thread has
begun by then. So on success there are as many calls as ever; where one fails, those under way were made for nothing.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.vectorstores import VectorStoreRetriever

from teola_plugin.adapters.langchain.current_query import active_run
from teola_plugin.adapters.langchain.own_models import replay
from teola_plugin.adapters.langchain.own_models.leaf_calls import CallSite, LeafCall
from teola_plugin.adapters.langchain.side_by_side.workers import workers
from teola_plugin.adapters.own_calls import Outcome, State, outcome_of
from teola_plugin.adapters.snapshots import NotCopied, exactly, snapshot

MOST = min(32, (os.cpu_count() or 1) + 4)
"""Calls at once, of one composite: as many as `batch` makes where nothing else is said."""

bounded: ContextVar[bool] = ContextVar("teola_bounded", default=False)
"""Set where a caller said `max_concurrency`, which composites do not hand on to what they call."""

Wanted = tuple[Any, Any]
"""A part, and what it is to be called with."""
Make = Callable[[Any, RunnableConfig | None], Any]
Ask = Callable[[LeafCall, RunnableConfig], Outcome]
"""Makes a call, with a config of which only the call's log hears."""


def begin(wanted: Sequence[Wanted], config: RunnableConfig) -> Siblings | None:
    """`invoke` of the parts: the calls after the first begin now.

    `config`: as the plain code hands it to each of them. None where no other call would begin by it.
    """
    models = not all(type(part) is VectorStoreRetriever for part, _ in wanted)
    return begin_by(_invoked, wanted, config, models=models)


def begin_by(ask: Ask, wanted: Sequence[Wanted], config: RunnableConfig, *, models: bool) -> Siblings | None:
    """`begin`, by another method of theirs. `models`: whether a model may be asked, which may have a cache."""
    told = ensure_config(config)
    if not may_begin(told, models=models):
        return None
    calls = list(_distinct(wanted))
    return Siblings(ask, calls, told) if len(calls) > 1 else None


def may_begin(told: RunnableConfig, *, models: bool) -> bool:
    """Whether calls with this config may begin before their place: nobody bounds them, or hears them as they run."""
    if bounded.get() or told.get("max_concurrency") is not None:
        return False
    return replay.may_be_kept_back(told, models=models)


def _distinct(wanted: Iterable[Wanted]) -> Iterator[LeafCall]:
    """Of equal calls the first: the plain code makes the others in their place, when a cache may know their result."""
    known: list[LeafCall] = []
    for part, input in wanted:
        try:
            asked = snapshot(input)
        except NotCopied:
            continue
        if not any(one.site.leaf is part and exactly(one.asked, asked) for one in known):
            known.append(LeafCall(CallSite("", part, {}, {}, None), asked, State.WAITING))
    return iter(known)


class Siblings:
    """Calls under way. Used by the plain code, on the thread that made it, and by its own threads."""

    def __init__(self, ask: Ask, calls: Sequence[LeafCall], config: RunnableConfig) -> None:
        self._ask, self._calls, self._config = ask, calls, config
        self._waiting = deque(calls[1:])
        self._context, self._run = copy_context(), active_run(config.get("callbacks"))
        self._lock = threading.Lock()
        workers().run(self._work, min(len(self._waiting), MOST - 1))

    def close(self) -> None:
        """The plain code is done: what has not begun is dropped, what is under way ends unheard."""
        with self._lock:
            self._waiting.clear()

    # ------------------------------------------------------------ the threads' side

    def _work(self) -> None:
        while (call := self._next()) is not None:
            self._make(call)

    def _next(self) -> LeafCall | None:
        with self._lock:
            while self._waiting:
                call = self._waiting.popleft()
                if call.state is State.WAITING:
                    call.state = State.EARLY
                    return call
        return None

    def _make(self, call: LeafCall) -> None:
        outcome = None
        try:
            context = self._context.copy()
            config = replay.early_config(self._config, {}, call.log, sync=True)
            _inherit(config["callbacks"], self._config["callbacks"])
            replay.prepare(context, config, self._run)
            outcome = context.run(self._ask, call, config)
        finally:  # whoever waits for it must not wait for ever
            call.outcome.set_result(outcome or Outcome(error=RuntimeError("the call could not be made ahead")))

    # ------------------------------------------------------------ the plain code's side

    def take(self, part: Any, input: Any, config: RunnableConfig | None, make: Make) -> Any:
        """What the part gives for the input: by the call that has begun, or by `make`, in its place."""
        call = self.claimed(part, input)
        if call is None:
            return make(input, config)
        told = ensure_config(config)
        replay.deliver(call.log, told, call.site.tags)
        with replay.breaking_off(call.log, told, call.site.tags):
            outcome = call.outcome.result()
        replay.deliver(call.log, told, call.site.tags)
        return outcome.get()

    def claimed(self, part: Any, input: Any) -> LeafCall | None:
        """The call that has begun; None where the plain code makes it itself."""
        with self._lock:
            free = (one for one in self._calls if not one.for_plain and one.site.leaf is part)
            call = next((one for one in free if exactly(one.asked, input)), None)
            if call is None:
                return None
            call.for_plain = True
            if call.state is State.EARLY:
                return call
            call.state = State.PLAIN
            return None


def _inherit(manager: Any, plain: object) -> None:
    """Tags and metadata that calls inside of a call inherit of the callbacks of the plain one."""
    if isinstance(plain, BaseCallbackManager):
        manager.add_tags(plain.inheritable_tags)
        manager.add_metadata(plain.inheritable_metadata)


def _invoked(call: LeafCall, config: RunnableConfig) -> Outcome:
    given = call.fresh_input()
    with replay.untraced():
        return outcome_of(lambda: call.site.leaf.invoke(given, config))


class Taken(Runnable[Any, Any]):
    """Stands for a part while its composite calls it. No run of its own: events are the part's alone."""

    def __init__(self, part: Any, siblings: Siblings) -> None:
        self._part, self._siblings = part, siblings

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self._siblings.take(self._part, input, config, self._part.invoke)
