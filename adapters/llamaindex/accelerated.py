"""What users hold: the very object, with other public methods.

An accelerated object has the original's class, and its attributes are the original's own: reading and writing them,
`update_prompts`, `callback_manager` and the like are as they always were. Only the entries differ: they call the
original's beside a live query.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.workflow import Workflow
from pydantic import BaseModel

from teola_plugin.adapters.checking.shadow import ShadowReport
from teola_plugin.adapters.llamaindex.checking import shadowed
from teola_plugin.adapters.llamaindex.session import Session, chunks_input, nodes_input, query_input
from teola_plugin.adapters.serving.serving import served_section
from teola_plugin.adapters.terms import Asked
from teola_plugin.errors import TraceError
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.passes import Optimised
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.copies import sharing
from teola_plugin.shims.llamaindex.hooks import QueryHooks
from teola_plugin.shims.llamaindex.workflows import with_steps_of
from teola_plugin.tracer.report import TraceReport

if TYPE_CHECKING:
    from teola_plugin.adapters.explain import Explanation


class Accelerated:
    """What all of them have in common."""

    __teola_accelerated__: ClassVar[bool] = True
    __teola_session__: ClassVar[Session]
    """Of the one object that the class is made for, see `accelerated`."""
    __teola_entry__: ClassVar[str] = "query"
    """What is shown of it."""

    def __copy__(self) -> Any:
        return accelerated(self.__teola_session__.of(copy.copy(self.__teola_session__.served)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return accelerated(self.__teola_session__.of(copy.deepcopy(self.__teola_session__.served, memo)))

    @property
    def original(self) -> Any:
        """The object that was accelerated."""
        return self.__teola_session__.original

    def with_terms(
        self,
        *,
        app: str | None = None,
        tenant: str | None = None,
        deadline_s: float | None = None,
        weight: float | None = None,
    ) -> Any:
        """The same object, with other terms for its queries; what is not given stays as it is.

        `app`: the name under which they are scheduled and traced. `tenant`: whose prefixes they may share (a cache
        salt). `deadline_s`: seconds after which a query fails with `QueryTimeout`. `weight`: their share among the
        queries of the pool, 1.0 is ordinary. Plans are shared, so that there may be one for every call.
        Raises `RegistrationError` for what is no number.
        """
        Asked.of({"deadline_s": deadline_s, "weight": weight}, tenant="", deadline_s="deadline_s", weight="weight")
        given = {"app": app, "tenant": tenant, "deadline_s": deadline_s, "weight": weight}
        session = self.__teola_session__
        terms = replace(session.terms, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        return accelerated(session.under(terms))

    @property
    def report(self) -> TraceReport:
        """What is lowered, joined or called as it always was, and why."""
        return self.__teola_session__.entry(self.__teola_entry__).traced.report

    def plan(self, input: Any = None) -> Optimised | None:
        """The e-graph of a query, and the passes that made it; None where the original just runs."""
        return self.__teola_session__.plan(self.__teola_entry__, None if input is None else query_input(input))

    def explain(self, input: Any = None, *, details: bool = False) -> str:
        """What was understood, what begins before its place, what to expect: three lines. Nothing runs.

        `details`: also each part, the p-graph, the e-graph, the passes that fired and advice, in sections.
        """
        return self.__teola_explained__(input).text(details=details)

    def __teola_of__(self) -> tuple[Any, EnginePool | None]:
        """The original, and the pool that plans it."""
        return self.__teola_session__.original, self.__teola_session__.pool

    def __teola_explained__(self, input: Any = None) -> Explanation:
        given = None if input is None else query_input(input)
        told = self.__teola_session__.explained(self.__teola_entry__, given)
        return replace(told, served=served_section(self.__teola_session__.serving))

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """The trace of the last call that was started on this object; None before the first one.

        Without a pool also None where nothing of that call began ahead.
        """
        session = self.__teola_session__
        last = session.last
        trace: QueryTrace | None = None if last is None else last.trace.result(timeout)
        return trace if trace is None or session.pool is not None or trace.spans else None

    @property
    def shadow(self) -> ShadowReport:
        """How the calls that were made once more by the original compared; see `accelerate(..., shadow=)`."""
        shadow = self.__teola_session__.shadow
        return ShadowReport() if shadow is None else shadow.report


class AcceleratedQueryEngine(QueryHooks, Accelerated):
    """A `BaseQueryEngine`."""

    def query(self, str_or_query_bundle: Any) -> Any:
        given = query_input(str_or_query_bundle)
        return self.__teola_session__.call("query", given, lambda node: node.query(str_or_query_bundle))

    async def aquery(self, str_or_query_bundle: Any) -> Any:
        given = query_input(str_or_query_bundle)
        return await self.__teola_session__.acall("query", given, lambda node: node.aquery(str_or_query_bundle))

    def __teola_query__(self, query: Any, plain: Callable[[Any], Any]) -> Any:
        """Below the entries, by engines that retry; the entries above call the original's."""
        return self.__teola_session__.call("query", query_input(query), plain)

    async def __teola_aquery__(self, query: Any, plain: Callable[[Any], Awaitable[Any]]) -> Any:
        """`__teola_query__` in a loop."""
        return await self.__teola_session__.acall("query", query_input(query), plain)

    def retrieve(self, query_bundle: Any) -> Any:
        return self.__teola_session__.call(
            "retrieve", query_input(query_bundle), lambda node: node.retrieve(query_bundle)
        )

    async def aretrieve(self, query_bundle: Any) -> Any:
        given = query_input(query_bundle)
        return await self.__teola_session__.acall("retrieve", given, lambda node: node.aretrieve(query_bundle))

    def synthesize(self, query_bundle: Any, nodes: Any, additional_source_nodes: Any = None) -> Any:
        given = nodes_input(query_bundle, nodes)
        return self.__teola_session__.call(
            "synthesize", given, lambda node: node.synthesize(query_bundle, nodes, additional_source_nodes)
        )

    async def asynthesize(self, query_bundle: Any, nodes: Any, additional_source_nodes: Any = None) -> Any:
        given = nodes_input(query_bundle, nodes)
        return await self.__teola_session__.acall(
            "synthesize", given, lambda node: node.asynthesize(query_bundle, nodes, additional_source_nodes)
        )


class AcceleratedRetriever(Accelerated):
    """A `BaseRetriever`."""

    __teola_entry__ = "retrieve"

    def retrieve(self, str_or_query_bundle: Any) -> Any:
        given = query_input(str_or_query_bundle)
        return self.__teola_session__.call("retrieve", given, lambda node: node.retrieve(str_or_query_bundle))

    async def aretrieve(self, str_or_query_bundle: Any) -> Any:
        given = query_input(str_or_query_bundle)
        return await self.__teola_session__.acall("retrieve", given, lambda node: node.aretrieve(str_or_query_bundle))


class AcceleratedSynthesizer(Accelerated):
    """A `BaseSynthesizer`."""

    __teola_entry__ = "synthesize"

    def synthesize(self, query: Any, nodes: Any, additional_source_nodes: Any = None, **response_kwargs: Any) -> Any:
        given = None if response_kwargs else nodes_input(query, nodes)
        return self.__teola_session__.call(
            "synthesize", given, lambda node: node.synthesize(query, nodes, additional_source_nodes, **response_kwargs)
        )

    async def asynthesize(
        self, query: Any, nodes: Any, additional_source_nodes: Any = None, **response_kwargs: Any
    ) -> Any:
        given = None if response_kwargs else nodes_input(query, nodes)
        return await self.__teola_session__.acall(
            "synthesize", given, lambda node: node.asynthesize(query, nodes, additional_source_nodes, **response_kwargs)
        )

    def get_response(self, query_str: str, text_chunks: Any, **response_kwargs: Any) -> Any:
        given = chunks_input(query_str, text_chunks, response_kwargs)
        return self.__teola_session__.call(
            "respond", given, lambda node: node.get_response(query_str, text_chunks, **response_kwargs)
        )

    async def aget_response(self, query_str: str, text_chunks: Any, **response_kwargs: Any) -> Any:
        given = chunks_input(query_str, text_chunks, response_kwargs)
        return await self.__teola_session__.acall(
            "respond", given, lambda node: node.aget_response(query_str, text_chunks, **response_kwargs)
        )


class AcceleratedChatEngine(Accelerated):
    """A `BaseChatEngine`. Its engine or retriever runs ahead; the conversation is its own."""

    def chat(self, *args: Any, **kwargs: Any) -> Any:
        return self.__teola_session__.call("chat", None, lambda node: node.chat(*args, **kwargs))

    async def achat(self, *args: Any, **kwargs: Any) -> Any:
        return await self.__teola_session__.acall("chat", None, lambda node: node.achat(*args, **kwargs))

    def stream_chat(self, *args: Any, **kwargs: Any) -> Any:
        return self.__teola_session__.call("chat", None, lambda node: node.stream_chat(*args, **kwargs))

    async def astream_chat(self, *args: Any, **kwargs: Any) -> Any:
        return await self.__teola_session__.acall("chat", None, lambda node: node.astream_chat(*args, **kwargs))


class AcceleratedWorkflow(Accelerated):
    """A `Workflow`, or an agent. Its steps, handlers and contexts are its own."""

    __teola_entry__ = "run"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        session: Any = self.__teola_session__
        return session.run(args, kwargs)


KINDS: tuple[tuple[type, type[Accelerated]], ...] = (
    (BaseQueryEngine, AcceleratedQueryEngine),
    (BaseRetriever, AcceleratedRetriever),
    (BaseSynthesizer, AcceleratedSynthesizer),
    (BaseChatEngine, AcceleratedChatEngine),
    (Workflow, AcceleratedWorkflow),
)


def accelerated(session: Session) -> Any:
    """An object of the served object's class, with its attributes, whose entries begin live queries."""
    served = session.served
    kind = next((mine for theirs, mine in KINDS if isinstance(served, theirs)), None)
    if kind is None:
        raise _refusal(served)
    if session.shadow is not None:
        kind = shadowed(kind)
    if kind is not AcceleratedWorkflow:
        return sharing(_class(kind, type(served), session), served)
    if session.shown is None:
        session.shown = with_steps_of(_class(kind, type(served), session), type(served))
    made = sharing(session.shown, served)
    object.__setattr__(made, _OWN, session)
    return made


def _refusal(obj: Any) -> TraceError:
    what = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if type(obj).__name__ == "QueryPipeline":
        return TraceError(
            f"cannot accelerate a {what}: LlamaIndex has removed query pipelines in 0.13.",
            hint="write it as a query engine (RetrieverQueryEngine, TransformQueryEngine, ...), and accelerate that",
        )
    return TraceError(
        f"cannot accelerate a {what}.",
        hint="accelerate query engines, retrievers, synthesizers, chat engines, workflows or agents",
    )


def _class(kind: type[Accelerated], theirs: type, session: Session) -> type:
    """One class per object: its session is the class's, since the attributes are all the original's.

    It has the original's name, by which LlamaIndex calls the spans of methods that are not entries.
    """
    values = {
        "__teola_session__": session,
        "__module__": theirs.__module__,
        "__qualname__": f"Accelerated{theirs.__qualname__}",
        "__doc__": kind.__doc__,
    }
    if kind is AcceleratedWorkflow:
        values |= _of_workflow(theirs, session.served)
    return type(theirs)(theirs.__name__, (kind, theirs), values)


_OWN = "__teola_own__"
_SHOWN = ("original", "with_terms", "report", "plan", "explain", "last_trace", "shadow")


def _of_workflow(theirs: Any, served: Any) -> dict[str, Any]:
    """What a workflow defines, or holds, is its own, also under a name of ours: it may have a step named `plan`."""

    @functools.wraps(theirs.run)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return AcceleratedWorkflow.run(self, *args, **kwargs)

    def add_step(cls: Any, func: Any) -> None:
        theirs.add_step(func)

    names: dict[str, Any] = {"run": run, "add_step": classmethod(add_step), "__qualname__": theirs.__qualname__}
    names |= {"__slots__": (_OWN,), "__teola_session__": property(attrgetter(_OWN))}  # one class for all terms
    names |= {name: inspect.getattr_static(theirs, name) for name in _SHOWN if hasattr(theirs, name)}
    if issubclass(theirs, BaseModel):
        return {**names, "model_config": {"defer_build": True}}
    return {**names, **{name: None for name in _SHOWN if name in vars(served)}}
