"""Texts that a model of the user's own embeds batch after batch in sync code: the batches are asked for side by side.

All of them are known at the start, and sure. LlamaIndex's own code still goes from batch to batch, with its events and
its progress bar, and takes each one's outcome in its place. Only for models that take calls of several threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding

from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.shims.llamaindex.copies import sharing
from teola_plugin.shims.llamaindex.models import is_paced
from teola_plugin.shims.llamaindex.own_calls import EMBED_BATCH, body_of, embeds_by, with_bodies
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.tracer.llamaindex.classes import is_leaf

AT_ONCE = 8
"""Calls of one list that are under way together; fewer if the model says so by its `num_workers`."""
Key = str | tuple[str, ...]
"""What a call is made with."""


class _Calls:
    """The calls of one list: begun by threads in their order, taken in their place. Close it."""

    def __init__(self, keys: Sequence[Key], make: Callable[[Key], Any], threads: int) -> None:
        self._futures: dict[Key, Future[Any]] = {key: Future() for key in keys}  # equal ones: the first alone
        self._todo, self._make = deque(self._futures.items()), make
        for _ in range(min(threads, len(self._futures))):
            work = (self._work,)
            threading.Thread(target=copy_context().run, args=work, name="teola-early", daemon=True).start()

    def _work(self) -> None:
        while self._todo:
            try:
                key, future = self._todo.popleft()
            except IndexError:  # another thread was sooner
                return
            try:
                future.set_result(self._make(key))
            except BaseException as error:
                self.close()  # the plain object comes no further than here
                future.set_exception(error)

    def take(self, key: Key, make: Callable[[], Any]) -> Any:
        """What the call gives or raises; made here where it is none of these, or has been taken before."""
        future = self._futures.pop(key, None)
        if future is not None:
            with suppress(CancelledError):  # nobody has begun it, nor will
                return future.result()
        return make()

    def close(self) -> None:
        """What has not begun does not begin any more."""
        while self._todo:
            with suppress(IndexError):  # another thread was sooner
                self._todo.popleft()[1].cancel()


_current: ContextVar[tuple[Any, _Calls] | None] = ContextVar("teola_own_batches", default=None)
"""The object whose list is being embedded, and its calls."""


class OwnBatches:
    """Stands before the model's own class in the order of methods. No spans of its own: it is no such class."""

    __teola_own__: Any
    """The user's own object."""

    if TYPE_CHECKING:
        embed_batch_size: int
        num_workers: int | None

    def get_text_embedding_batch(self, texts: list[str], *args: Any, **kwargs: Any) -> Any:
        plain = super().get_text_embedding_batch  # type: ignore[misc]
        calls = self._begun(texts)
        if calls is None:
            return plain(texts, *args, **kwargs)
        token = _current.set((self, calls))
        try:
            return plain(texts, *args, **kwargs)
        finally:
            _current.reset(token)
            calls.close()

    def _begun(self, texts: Sequence[str]) -> _Calls | None:
        """With a cache or a rate limiter the framework decides what is asked for, and when."""
        own = self.__teola_own__
        if is_paced(self) or vars(self) is not vars(own):
            return None  # the last: a copy of it
        name = embeds_by(type(own))
        keys: list[Key] = list(texts) if name != EMBED_BATCH else _batches(texts, self.embed_batch_size)
        threads = min(AT_ONCE, self.num_workers or AT_ONCE)
        if threads < 2 or len(set(keys)) < 2 or not all(type(text) is str for text in texts):
            return None
        body = body_of(type(own), name)
        return _Calls(keys, lambda key: body(own, key if isinstance(key, str) else list(key)), threads)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the user's own object is pickled, for worker processes."""
        return _itself, (sharing(type(self.__teola_own__), self),)


def _itself(model: Any) -> Any:
    return model


def _batches(texts: Sequence[str], size: int) -> list[Key]:
    return [tuple(texts[start : start + size]) for start in range(0, len(texts), size)]


def _call(own: Any, name: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    current = _current.get()
    make = partial(body, own, *args, **kwargs)
    if current is None or current[0] is not own or kwargs or len(args) != 1:
        return make()
    asked = args[0]
    return current[1].take(asked if isinstance(asked, str) else tuple(asked), make)


def side_by_side(model: Any, threads: ThreadSafety) -> Any:
    """`model`, or an object that shares its attributes, whose lists are embedded side by side."""
    kind: Any = type(model)
    if not isinstance(model, BaseEmbedding) or is_leaf(model) or isinstance(model, OwnBatches):
        return model
    if not threads.allows(model):
        return model
    try:
        hooked: Any = with_bodies(kind, [embeds_by(kind)], _call, _call)
    except Unreadable:  # it goes its own way
        return model
    values = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__teola_own__": model}
    return sharing(type(kind)(kind.__name__, (OwnBatches, hooked), values), model)
