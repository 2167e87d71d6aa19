"""Methods of other packages' classes that are replaced by wrappers, and put back exactly as they were."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import CellType
from typing import Any, Protocol

Wrap = Callable[[Any], Any]
"""Return the wrapper of a function. It keeps the function as `__wrapped__` (`functools.wraps`)."""

STREAM_OPENED: Any = object()
"""The first item of the stream of a method that returns its chunks: the method has returned, and may not raise now."""


class CallObserver(Protocol):
    """Hears of every call of a model that its class makes, prefetched ones included, on whichever thread or loop."""

    def call_began(self, target: Any, options: Mapping[str, Any], /) -> Any:
        """Note that a call of a model begins. Return what `result_came` gets with each of its results.

        `options`: the keyword arguments of the provider method.
        """
        ...

    def result_came(self, call: Any, value: Any, /) -> None:
        """Note the result of a call, or one chunk of it."""
        ...


observers: list[CallObserver] = []
"""The observer of models in this process, if there is one."""
_observers_here: ContextVar[tuple[CallObserver, ...]] = ContextVar("teola_observers_here", default=())
"""The observers of the calls that run here: methods of one model call each other, and each observer hears of one."""


def observed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that does the work of a provider method, with the observer told of it, if there is one."""
    return observed_by(observers[0], call) if observers else call


def observed_by(observer: CallObserver, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that does the work of a provider method, with this observer told of it.

    That is the function itself inside another call of which the observer has heard.
    """
    if any(one is observer for one in _observers_here.get()):
        return call

    def observing(*args: Any, **kwargs: Any) -> Any:
        """Make the call, with the observer told of its beginning and of each result."""
        noted = observer.call_began(args[0] if args else None, kwargs)
        with _observing(observer):
            value = call(*args, **kwargs)
        return _observe(value, observer, noted)

    return observing


@contextlib.contextmanager
def _observing(observer: CallObserver) -> Iterator[None]:
    """Mark the context as inside an observed call, so that methods that it calls on the model are not observed."""
    token = _observers_here.set((*_observers_here.get(), observer))
    try:
        yield
    finally:
        _observers_here.reset(token)


def _observe(value: Any, observer: CallObserver, noted: Any) -> Any:
    """Return a value of the same kind, of which the observer hears: at once, when it is awaited, or chunk by chunk."""
    if inspect.isawaitable(value):
        return _observe_awaitable(value, observer, noted)
    if isinstance(value, Generator):
        return _observe_chunks(value, observer, noted)
    if isinstance(value, AsyncGenerator):
        return _aobserve_chunks(value, observer, noted)
    observer.result_came(noted, value)
    return value


async def _observe_awaitable(value: Awaitable[Any], observer: CallObserver, noted: Any) -> Any:
    """Await the value of an observed call, and report its result to the observer.

    Calls that the model makes of itself meanwhile are not observed again.
    """
    with _observing(observer):
        result = await value
    return _observe(result, observer, noted)


def _observe_chunks(
    chunks: Generator[Any, None, None], observer: CallObserver, noted: Any
) -> Generator[Any, None, None]:
    """Yield the chunks of a stream unchanged, and tell the observer of each."""
    with contextlib.closing(chunks):
        while True:
            with _observing(observer):
                chunk = next(chunks, STREAM_OPENED)
            if chunk is STREAM_OPENED:
                return
            observer.result_came(noted, chunk)
            yield chunk


async def _aobserve_chunks(
    chunks: AsyncGenerator[Any, None], observer: CallObserver, noted: Any
) -> AsyncGenerator[Any, None]:
    """Yield the chunks of an async stream unchanged, and tell the observer of each."""
    async with contextlib.aclosing(chunks):
        while True:
            with _observing(observer):
                chunk = await anext(chunks, STREAM_OPENED)
            if chunk is STREAM_OPENED:
                return
            observer.result_came(noted, chunk)
            yield chunk


class FunctionSlot(Protocol):
    """A place that holds the function of a method, where it can be replaced."""

    def get(self) -> Any: ...

    def set(self, function: Any) -> None: ...


class ClassAttribute:
    """The attribute of the class that defines a method."""

    def __init__(self, cls: type, name: str) -> None:
        self._cls, self._name = cls, name

    def get(self) -> Any:
        return vars(self._cls).get(self._name)

    def set(self, function: Any) -> None:
        setattr(self._cls, self._name, function)


class AddedAttribute(ClassAttribute):
    """The attribute of a class that inherits a method: it is deleted again."""

    def set(self, function: Any) -> None:
        """Set the wrapper as the class's own attribute; delete the attribute again if given the inherited function."""
        if function is self._inherited:
            delattr(self._cls, self._name)
        else:
            super().set(function)

    def __init__(self, cls: type, name: str) -> None:
        super().__init__(cls, name)

        @functools.wraps(getattr(cls, name))
        def inherited(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(super(cls, instance), name)(*args, **kwargs)

        self._inherited = inherited

    @property
    def inherited(self) -> Callable[..., Any]:
        """A function that calls the inherited method."""
        return self._inherited


class ClosureCell:
    """The variable of a decorator's closure that holds the function below it."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def get(self) -> Any:
        return self._cell.cell_contents

    def set(self, function: Any) -> None:
        self._cell.cell_contents = function


class WrappedFunction:
    """The `__wrapped__` of a decorator that calls what stands there, such as those of the package `wrapt`."""

    def __init__(self, decorator: Any) -> None:
        self._decorator = decorator

    def get(self) -> Any:
        return self._decorator.__wrapped__

    def set(self, function: Any) -> None:
        self._decorator.__wrapped__ = function


def looks_like(original: Any) -> Callable[[Any], Any]:
    """Return a decorator that gives a wrapper the name, the documentation and the signature of the original.

    The framework reads the signature at each call, which takes longer if it has to unwrap the method first.
    """

    def decorate(wrapper: Any) -> Any:
        wrapper = functools.wraps(original)(wrapper)
        with contextlib.suppress(TypeError, ValueError):  # a callable without a signature
            wrapper.__signature__ = inspect.signature(original)
        return wrapper

    return decorate


splitters: list[Callable[[Any, Any], Callable[..., Any]]] = []
"""At most one function that returns how an object makes a call that consists of several requests to its provider."""


def splitting(wrap: Wrap) -> Wrap:
    """Return a wrap that lets the splitter, if there is one, make calls of the original in another way."""

    def wrap_split(original: Any) -> Any:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            function = splitters[0](self, original) if splitters else original
            return function(self, *args, **kwargs)

        return wrap(call)

    return wrap_split


class MethodInterceptors:
    """The wrapped methods of a process.

    A method is wrapped in the class whose `__dict__` defines it; `add` also wraps inherited ones. `uninstall` puts the
    original function back where our wrapper is still in its place; a wrapper that somebody else has wrapped stays, and
    has to pass calls on while `is_installed` is False.
    """

    def __init__(self, slot_of: Callable[[type, str], FunctionSlot] = ClassAttribute) -> None:
        """`slot_of`: returns the place that holds the function of a method which a class defines."""
        self.is_installed = False
        self._slot_of = slot_of
        self._originals: dict[tuple[type, str], tuple[FunctionSlot, Any, Any]] = {}
        """By class and method: where the function stands, the original one, and the wrapper that stands for it."""
        self._renew_lock()
        if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def install(self, classes: Iterable[type], methods: Mapping[str, Wrap]) -> None:
        """Wrap those of the methods that the classes define themselves. Idempotent."""
        with self._lock:
            self.is_installed = True
            for cls in classes:
                for name in methods.keys() & vars(cls).keys():
                    self._wrap(cls, name, methods[name])

    def _wrap(self, cls: type, name: str, wrap: Wrap) -> None:
        """Replace the function of a method by its wrapper, unless our wrapper is in place already. Callers hold the
        lock."""
        slot = self._slot_of(cls, name)
        current = slot.get()
        if not callable(current) or isinstance(current, type):
            return
        original = self._originals.get((cls, name))
        if original is not None and _is_below(original[2], current):
            return
        wrapper = wrap(current)
        slot.set(wrapper)
        self._originals[cls, name] = (slot, current, wrapper)

    def add(self, cls: type, methods: Mapping[str, Wrap]) -> None:
        """Wrap inherited methods in the given class alone, not in the class that defines them. Idempotent.

        The class gets attributes of its own, which `uninstall` deletes. Used for LangChain classes whose objects are
        routed to an engine: the methods that they inherit from the framework would run on a thread.
        """
        with self._lock:
            self.is_installed = True
            for name in [name for name in methods if name not in vars(cls) and hasattr(cls, name)]:
                slot = AddedAttribute(cls, name)
                wrapper = methods[name](slot.inherited)
                slot.set(wrapper)
                self._originals[cls, name] = (slot, slot.inherited, wrapper)

    def original_of(self, cls: type, name: str) -> Any:
        """Return the function that calls of a method reach below our wrapper; None if they do not come to a wrapper."""
        definer = next((base for base in cls.__mro__ if name in vars(base)), cls)
        entry = self._originals.get((definer, name))
        if entry is None or not self.is_installed:
            return None
        slot, original, wrapper = entry
        return original if _is_below(wrapper, slot.get()) else None

    def uninstall(self) -> None:
        """Put every original function back."""
        with self._lock:
            self.is_installed = False
            for (cls, name), (slot, original, wrapper) in list(self._originals.items()):
                current = slot.get()
                if current is wrapper:
                    slot.set(original)
                if current is wrapper or not _is_below(wrapper, current):
                    del self._originals[cls, name]


def _is_below(wrapper: object, function: object) -> bool:
    """Return True if a function is the wrapper, or wraps it."""
    seen = 0
    while function is not None and seen < 100:
        if function is wrapper:
            return True
        function, seen = getattr(function, "__wrapped__", None), seen + 1
    return False
