"""Accelerated LlamaIndex objects: instances of a subclass of the original's class that share the original's state.

The subclass replaces the entry points (`query`, `aretrieve`, `chat`, ...), which call the original's while a live query
runs. Everything else is inherited: methods, properties and fields are the original's own, and setting a field sets it
on the original as well.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABCMeta
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.workflow import Workflow
from pydantic import BaseModel

from teola_plugin.adapters.automatic_engines import report_with_rules
from teola_plugin.adapters.calls import RequestedContext
from teola_plugin.adapters.llamaindex.session import query_input
from teola_plugin.adapters.method_adapter import forwarded_slots, subclass_of
from teola_plugin.adapters.shadow import ShadowReport
from teola_plugin.errors import TraceError
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.passes import Optimised
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.copies import sharing, with_slots_of, with_steps_of
from teola_plugin.shims.llamaindex.engines import QueryHooks, without_span
from teola_plugin.shims.llamaindex.workflows import RuntimeHooks
from teola_plugin.shims.stack_levels import hide_from_stack_levels

if TYPE_CHECKING:
    from teola_plugin.adapters.plan_report import PlanReport

_SLOT = "__teola_slot__"


class ShadowableProperty:
    """A property that gives way to an attribute of that name in the object's `__dict__`."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read, self.__doc__ = read, read.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._read(instance)


class OriginalAttribute:
    """The attribute `original` of an accelerated object, unless the object or its class has one of that name."""

    @ShadowableProperty
    def original(self) -> Any:
        """The object that was accelerated."""
        return session_of(self).original


class PlannedAttributes(OriginalAttribute):
    """Attributes of accelerated objects that are planned, unless the object or its class has one of that name."""

    if TYPE_CHECKING:
        __teola_entry__: ClassVar[str]

        def __teola_report__(self, input: Any = None) -> PlanReport: ...

    def with_request_context(
        self,
        *,
        app: str | None = None,
        tenant: str | None = None,
        deadline_s: float | None = None,
        weight: float | None = None,
    ) -> Any:
        """Return the same object with another request context for its queries; a value that is None stays as it is.

        `app`: the name under which the queries are scheduled and traced. `tenant`: whose cached prefixes they
        may share (a cache salt). `deadline_s`: seconds after which a query fails with `QueryTimeout`. `weight`: their
        share among the queries of the pool, 1.0 is ordinary. Plans are shared, so you may make such an object for
        every call. Raises `RegistrationError` for a `deadline_s` or `weight` that is not a number.
        """
        RequestedContext.of(
            {"deadline_s": deadline_s, "weight": weight}, tenant="", deadline_s="deadline_s", weight="weight"
        )
        changes = {"app": app, "tenant": tenant, "deadline_s": deadline_s, "weight": weight}
        session = session_of(self)
        settings = replace(session.settings, **{name: value for name, value in changes.items() if value is not None})
        return accelerated(session.with_request_context(settings))

    def report(self, input: Any = None) -> PlanReport:
        """Return what `explain()` prints, as data: a row for each place that makes calls, and for each part."""
        return self.__teola_report__(input)

    def plan(self, input: Any = None) -> Optimised | None:
        """Return the e-graph of a query and the passes that made it; None where the original just runs."""
        query = None if input is None else query_input(input)
        optimised: Optimised | None = session_of(self).plan(self.__teola_entry__, query)
        return optimised

    def explain(self, input: Any = None, *, details: bool = False) -> str:
        """Return three lines: what was understood, which calls start sooner, what gain to expect. Nothing runs.

        `details`: add sections on each part, the p-graph, the e-graph, the passes that fired and advice.
        """
        return self.__teola_report__(input).text(details=details)

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """Return the trace of the last call that was started on this object; None before the first one.

        Without a pool, return None too if that call prefetched nothing.
        """
        session = session_of(self)
        last = session.last
        trace: QueryTrace | None = None if last is None else last.trace.result(timeout)
        return trace if trace is None or session.tracing_pool is not None or trace.spans else None

    @ShadowableProperty
    def shadow(self) -> ShadowReport:
        """The comparison with calls that the original made once more; see `accelerate(..., shadow=)`."""
        shadow = session_of(self).shadow
        return ShadowReport() if shadow is None else shadow.report


class Accelerated:
    """A mixin that stands before the original's class in the method resolution order."""

    __teola_accelerated__: ClassVar[bool] = True
    __teola_entry__: ClassVar[str] = "query"
    """The entry that `report`, `plan` and `explain` are about."""
    __teola_entries__: ClassVar[tuple[str, ...]] = ()
    """The entry points: methods that start a query; events and spans come from the original's own method alone."""
    __teola_attributes__: ClassVar[type] = PlannedAttributes
    __teola_kind__: ClassVar[type]
    """The original's class."""

    @property
    def __teola_session__(self) -> Any:
        """The session; None for an instance that the class's constructor made: it runs as the original's class does."""
        return _slot(self)

    def __copy__(self) -> Any:
        """Return an accelerated copy of the original, with the same options."""
        session = _slot(self)
        return copy.copy(_plain(self)) if session is None else session.accelerate_copy(copy.copy(session.original))

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        """Return an accelerated deep copy of the original, with the same options; pools are shared."""
        session = _slot(self)
        if session is None:
            return copy.deepcopy(_plain(self), memo)
        original, accelerate_copy = copy.deepcopy((session.original, session.accelerate_copy), memo)
        return accelerate_copy(original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the original and the options. Raises `RegistrationError` if there is a pool, which stays here."""
        session = _slot(self)
        return (_itself, (_plain(self),)) if session is None else (session.accelerate_copy, (session.original,))

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __teola_of__(self) -> tuple[Any, EnginePool | None]:
        """Return the original and the pool that plans it."""
        session = session_of(self)
        return session.original, session.tracing_pool

    def __teola_report__(self, input: Any = None) -> PlanReport:
        session = session_of(self)
        report: PlanReport = session.report(self.__teola_entry__, None if input is None else query_input(input))
        return report_with_rules(report, session.serving, session.rules, session.gate)


class AcceleratedQueryEngine(QueryHooks, Accelerated):
    """A `BaseQueryEngine`."""

    __teola_entries__ = ("query", "aquery", "retrieve", "aretrieve", "synthesize", "asynthesize")

    def __teola_query__(self, query: Any, invoke: Callable[[Any], Any]) -> Any:
        """Start a query below the entries, for engines that retry; the entries above call the original's methods."""
        session = self.__teola_session__
        return invoke(self) if session is None else session.call("query", query_input(query), invoke)

    async def __teola_aquery__(self, query: Any, invoke: Callable[[Any], Awaitable[Any]]) -> Any:
        """`__teola_query__` in a loop."""
        session = self.__teola_session__
        return await (invoke(self) if session is None else session.acall("query", query_input(query), invoke))


class AcceleratedRetriever(Accelerated):
    """A `BaseRetriever`."""

    __teola_entry__ = "retrieve"
    __teola_entries__ = ("retrieve", "aretrieve")


class AcceleratedSynthesizer(Accelerated):
    """A `BaseSynthesizer`."""

    __teola_entry__ = "synthesize"
    __teola_entries__ = ("synthesize", "asynthesize", "get_response", "aget_response")


class AcceleratedChatEngine(Accelerated):
    """A `BaseChatEngine`. Its engine or retriever is accelerated; the conversation is the original's."""

    __teola_entries__ = ("chat", "achat", "stream_chat", "astream_chat")


class AcceleratedWorkflow(RuntimeHooks, Accelerated):
    """A `Workflow` or an agent. Its steps, handlers and contexts are the original's."""

    __teola_entry__ = "run"
    __teola_entries__ = ("run",)

    def __teola_original__(self) -> Any:
        return original_of(self)

    @classmethod
    def add_step(cls, func: Any) -> None:
        """Add the step to the original's class, so that both have it."""
        cls.__teola_kind__.add_step(func)  # type: ignore[attr-defined]


KINDS: tuple[tuple[type, type[Accelerated]], ...] = (
    (BaseQueryEngine, AcceleratedQueryEngine),
    (BaseRetriever, AcceleratedRetriever),
    (BaseSynthesizer, AcceleratedSynthesizer),
    (BaseChatEngine, AcceleratedChatEngine),
    (Workflow, AcceleratedWorkflow),
)


def accelerated(session: Any, mixin: type[Accelerated] | None = None) -> Any:
    """Create an instance of a subclass of the original's class whose entry points are those of `session`.

    Raise `TraceError` for an object of an unknown class.
    """
    original = session.original
    mixin = mixin or next((mixin for base, mixin in KINDS if isinstance(original, base)), None)
    if mixin is None:
        raise _refusal(original)
    instance = sharing(_subclass(type(original), mixin), original)
    object.__setattr__(instance, _SLOT, session)
    return instance


def original_of(obj: Any) -> Any:
    """Return the object that was accelerated; an object that is not accelerated itself."""
    session = _slot(obj) if isinstance(obj, Accelerated) else None
    return obj if session is None else session.original


class EqualsOriginal(ABCMeta):
    """A metaclass whose classes equal the original's class, so that dictionaries with that key find them."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or vars(cls).get("__teola_kind__", cls) is other

    def __hash__(cls) -> int:
        kind = vars(cls).get("__teola_kind__")
        return super().__hash__() if kind is None else hash(kind)


def session_of(obj: Any) -> Any:
    """Return the session of an accelerated object. Raise `AttributeError` for an object that its class made."""
    session = obj.__teola_session__
    if session is None:
        raise AttributeError(f"this {type(obj).__name__} was made by its class: accelerate() it for this")
    return session


def _refusal(obj: Any) -> TraceError:
    """Return the error for an object that cannot be accelerated, with a hint what can."""
    class_name = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if type(obj).__name__ == "QueryPipeline":
        return TraceError(
            f"cannot accelerate a {class_name}: LlamaIndex has removed query pipelines in 0.13.",
            hint="write it as a query engine (RetrieverQueryEngine, TransformQueryEngine, ...), and accelerate that",
        )
    return TraceError(
        f"cannot accelerate a {class_name}.",
        hint="accelerate query engines, retrievers, synthesizers, chat engines, workflows or agents",
    )


# ------------------------------------------------------------ classes


def _subclass(base: Any, mixin: type[Accelerated]) -> Any:
    """Create the subclass of one class, with entry points that have the signatures of that class."""
    if issubclass(base, mixin):  # the class of an instance that the constructor of such a class made
        return base

    def members() -> dict[str, Any]:
        entries = {
            name: entry_point(name, getattr(base, name)) for name in mixin.__teola_entries__ if hasattr(base, name)
        }
        return {**entries, **forwarded_slots(base, _slot_holder), **_attributes(base, mixin), "__teola_kind__": base}

    subclass = subclass_of(base, mixin, slots=(_SLOT,), members=members)
    return with_steps_of(subclass, base) if issubclass(base, Workflow) else subclass


def _attributes(base: Any, mixin: type[Accelerated]) -> dict[str, Any]:
    """Return the members of `__teola_attributes__` for which the class has no method, attribute or field."""
    fields = base.model_fields if issubclass(base, BaseModel) else {}
    attributes = {name: member for cls in mixin.__teola_attributes__.__mro__[:-1] for name, member in vars(cls).items()}
    members = {
        name: member
        for name, member in attributes.items()
        if not name.startswith("_") and name not in fields and not hasattr(base, name)
    }
    if issubclass(base, BaseModel):
        ignored = (*base.model_config.get("ignored_types", ()), ShadowableProperty)
        members["model_config"] = {"defer_build": True, "ignored_types": ignored}
    return members


def entry_point(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Create an entry point that calls the session's method.

    It calls the original's method for an instance that its class made, and for one on which the method was replaced
    (`mock.patch.object`): the replacement is in the original's attributes, too.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = None if name in vars(self) else self.__teola_session__
        if session is None:
            return getattr(super(Accelerated, self), name)(*args, **kwargs)
        return session.enter(name, args, kwargs)

    async def coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await method(self, *args, **kwargs)

    entry = functools.wraps(original)(coroutine if inspect.iscoroutinefunction(original) else method)
    return without_span(entry)  # type: ignore[no-any-return]


def _slot(instance: Any) -> Any:
    """Return the session of an instance; None if the class made the instance."""
    try:
        return object.__getattribute__(instance, _SLOT)
    except AttributeError:
        return None


def _slot_holder(instance: Any) -> Any:
    """Return the original of an instance; the instance itself if its class made it."""
    session = _slot(instance)
    return instance if session is None else session.original


def _plain(instance: Any) -> Any:
    """Return an instance of the original's class with the same state."""
    return with_slots_of(instance, sharing(instance.__teola_kind__, instance))


def _itself(obj: Any) -> Any:
    return obj


hide_from_stack_levels(globals())
