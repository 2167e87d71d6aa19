"""Accelerated LangChain objects: instances of a subclass of the original's class that share the original's state.

The subclass replaces the entry points (`invoke`, `astream`, `batch`, ...). Everything else is inherited: methods,
properties and fields are the original's own, and setting a field sets it on the original as well.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableConfig, RunnableSequence

from teola_plugin.adapters.calls import context_of
from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.adapters.langchain.started_calls import StartedCall
from teola_plugin.adapters.method_adapter import forwarded_slots, subclass_of
from teola_plugin.adapters.planned_queries import joinable, log_fallback
from teola_plugin.errors import TeolaError
from teola_plugin.shims.langchain import yields
from teola_plugin.shims.pydantic import sharing
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.langchain.classes import is_pool_backed, leaf_of
from teola_plugin.tracer.leaf import Leaf

ENTRY_POINTS = (
    *("invoke", "ainvoke", "stream", "astream", "transform", "atransform", "astream_events"),
    *("batch", "abatch", "batch_as_completed", "abatch_as_completed"),
)
"""Methods that begin a query. All other methods are the original's own."""
_CALLS = "_teola_calls"
_PUBLIC = frozenset(
    {"original", "chain", "report", "plan", "gains", "explain", "last_trace", "serving", "shadow"}
    | {"__teola_of__", "__teola_report__"}
    | AcceleratedRunnable.__private_attributes__.keys()
)
"""Attributes of an `AcceleratedRunnable` that an accelerated object has where its own class has none of that name."""


class ModelCalls(AcceleratedRunnable):
    """The entry points of an accelerated model. Nothing of a single call can begin before it: the query is traced."""

    def _started(self, input: Any, config: Any, call_options: Any, *more: Any) -> StartedCall | None:
        """Start no query inside a live one: whoever planned that query knows of the call."""
        pool = self._pool
        if pool is not None and joinable(context_of(call_options.requested, call_options.runs, pool).run) is not None:
            return None
        return super()._started(input, config, call_options, *more)


class GeneratorCalls(AcceleratedRunnable):
    """The entry points of an accelerated `RunnableGenerator`: one that its function lacks fails when it is called."""

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        if not yields(self.bound, on_loop=False):
            return self.bound.stream(input, config, **kwargs)
        return super().stream(input, config, **kwargs)

    def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        if not yields(self.bound, on_loop=True):
            return self.bound.astream(input, config, **kwargs)
        return super().astream(input, config, **kwargs)


class AcceleratedObject:
    """A mixin that stands before the original's class in the method resolution order."""

    __teola_accelerated__: ClassVar[bool] = True
    __teola_accelerated_runnable__: ClassVar[bool] = True
    if TYPE_CHECKING:
        _teola_calls: AcceleratedRunnable

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that the original lacks: one of `_PUBLIC`, or what the class itself makes up."""
        calls = _calls_of(self) if name in _PUBLIC else None
        if calls is not None:
            return calls.bound if name == "original" else getattr(calls, name)
        if inherited := getattr(super(), "__getattr__", None):
            return inherited(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> Any:
        """Return an accelerated copy of the original, with the same options."""
        calls = _calls_of(self)
        if calls is None:
            return super().__copy__()  # type: ignore[misc]
        assert calls._accelerate_copy is not None
        copied, options = copy.copy(calls.bound), calls._accelerate_copy.keywords["options"]
        bind = tuple((copied if obj is calls.bound else obj, engine) for obj, engine in options.bind)
        return calls._accelerate_copy(copied, options=replace(options, bind=bind))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        """Return an accelerated deep copy of the original, with the same options; pools are shared."""
        calls = _calls_of(self)
        return super().__deepcopy__(memo) if calls is None else copy.deepcopy(calls, memo)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Pickle the original and the options. Raises `RegistrationError` if a pool is among them: it stays here."""
        calls = _calls_of(self)
        return super().__reduce__() if calls is None else calls.__reduce__()


class AcceleratedPoolObject(AcceleratedObject):
    """An accelerated pool-backed object: in a chain it is the leaf that the original is."""

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        calls = _calls_of(self)
        leaf = super().__teola_leaf__(kwargs) if calls is None else leaf_of(calls.chain, kwargs)  # type: ignore[misc]
        return None if isinstance(leaf, str) else leaf


class AcceleratedSequence(AcceleratedObject):
    """An accelerated `RunnableSequence`, which a longer sequence takes apart: so the longer one is accelerated."""

    def __or__(self, other: Any) -> Any:
        return self._longer(super().__or__(other))  # type: ignore[misc]

    def __ror__(self, other: Any) -> Any:
        return self._longer(super().__ror__(other))  # type: ignore[misc]

    def pipe(self, *others: Any, name: str | None = None) -> Any:
        return self._longer(super().pipe(*others, name=name))  # type: ignore[misc]

    def _longer(self, sequence: Any) -> Any:
        """Accelerate a sequence that this one is a part of, with the same options."""
        calls = _calls_of(self)
        if calls is None or calls._accelerate_copy is None:
            return sequence
        try:
            return calls._accelerate_copy(sequence)
        except TeolaError as error:  # e.g. the other part has a pool of its own
            log_fallback(error, sequence)
            return sequence


def accelerated_object(calls: AcceleratedRunnable) -> Any:
    """Create an instance of a subclass of the original's class whose entry points are those of `calls`.

    It shares the state of the original.
    """
    state: Any = calls.chain if isinstance(calls.bound, BaseLanguageModel) else calls.bound
    cls = _subclass(type(state), _mixin(state))
    instance = sharing(cls, state)
    object.__setattr__(instance, _CALLS, calls)
    return instance


def calls_of(obj: Any) -> AcceleratedRunnable | None:
    """Return what makes the calls of an accelerated object; None for any other object."""
    return _calls_of(obj) if isinstance(obj, AcceleratedObject) else None


def _mixin(state: Any) -> type[AcceleratedObject]:
    if is_pool_backed(state):
        return AcceleratedPoolObject
    return AcceleratedSequence if isinstance(state, RunnableSequence) else AcceleratedObject


def _subclass(original_class: type, mixin: type[AcceleratedObject]) -> Any:
    """Create the subclass of one class, with entry points that have the signatures of that class."""

    def members() -> dict[str, Any]:
        return {
            **{name: _entry_point(name, getattr(original_class, name)) for name in ENTRY_POINTS},
            **forwarded_slots(original_class, _slot_holder),
        }

    return subclass_of(original_class, mixin, slots=(_CALLS,), members=members)


def _entry_point(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Create a method that calls `AcceleratedRunnable.<name>`.

    An instance that its class has made, as `configurable_fields` does, has nothing to call: it runs the original's. So
    does one on which the method was replaced (`mock.patch.object`): what replaces it stands in the original's, too.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = None if name in getattr(self, "__dict__", ()) else _calls_of(self)
        return original(self, *args, **kwargs) if calls is None else getattr(calls, name)(*args, **kwargs)

    async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await method(self, *args, **kwargs)

    return functools.wraps(original)(coroutine if inspect.iscoroutinefunction(original) else method)


def _slot_holder(instance: Any) -> Any:
    """Return the original of an instance; itself if its class has made it."""
    calls = _slot(instance)
    return instance if calls is None else calls.bound


def _slot(instance: Any) -> Any:
    """Return what makes the calls of an instance, without looking whether it is up to date."""
    try:
        return object.__getattribute__(instance, _CALLS)
    except AttributeError:
        return None


def _calls_of(instance: Any) -> AcceleratedRunnable | None:
    """Return what makes the calls of an instance, planned anew if fields of the original were set since."""
    calls: AcceleratedRunnable | None = _slot(instance)
    if calls is None or calls.is_current():
        return calls
    renewed = calls.renewed()
    object.__setattr__(instance, _CALLS, renewed)
    return renewed


hide_from_stack_levels(globals())
