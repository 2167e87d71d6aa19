"""Engines and retrievers of the user's own classes: which calls in the methods that answer a query are certain.

A method is read as a step of a workflow is, by the same rules. The query takes the place of the step's event.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.query_engine import CustomQueryEngine

from teola_plugin.graph import UnfitValue, on_loop
from teola_plugin.runtime.query_run import during
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions import Fields, FunctionInterpreter, Instance, Symbol, materialize, summarize_function
from teola_plugin.tracer.functions.lookup import DataGuards
from teola_plugin.tracer.functions.symbols import producers
from teola_plugin.tracer.functions.trace import first_parameter
from teola_plugin.tracer.leaf import is_user_code
from teola_plugin.tracer.llamaindex.classes import is_framework_class, written_method
from teola_plugin.tracer.llamaindex.lowering import CodeGuard, Lowering, SymbolicAnswer, SymbolicQuery, Value
from teola_plugin.tracer.llamaindex.model_calls import require_one_model
from teola_plugin.tracer.symbols import NotUnderstood

_PLAIN_TYPES = (str, int, float, bool, bytes, type(None), list, tuple, dict, set)
_functions_in_progress: ContextVar[tuple[Any, ...]] = ContextVar("teola_functions_in_progress", default=())
"""The methods that are being read here, each inside the one before it."""


@dataclass(slots=True)
class QueryBundles:
    """The query bundles that the read code has, and what has been asked with each."""

    _queries: dict[int, tuple[Fields, SymbolicQuery, list[Any]]] = field(default_factory=dict)
    """By the ids of the bundles' symbols: the query, and the engines and retrievers that got it."""

    def add(self, query: SymbolicQuery) -> Fields:
        """Return a symbol for the bundle of a query. Code may read its text and pass it on."""
        bundle = Fields({"query_str": query.text}, attributes=True, fields_only=True)
        self._queries[id(bundle)] = bundle, query, []
        return bundle

    def resolve(self, interpreter: FunctionInterpreter, lowering: Lowering, part: Any, symbol: Symbol) -> SymbolicQuery:
        """Return the query that `part` is asked: a bundle or a text. Raise `NotUnderstood` if it is not known."""
        if id(symbol) not in self._queries:
            text = interpreter.to_call_input(symbol)
            return SymbolicQuery(text, (text,))
        _, query, parts = self._queries[id(symbol)]
        if not is_framework_class(type(part)) and written_method(part, is_async=lowering.runs_in_loop) is None:
            interpreter.mutations.add(symbol)  # nobody knows what it does to the bundle
        require_one_model(lowering, [*parts, part])  # the first of them writes its vector into the bundle
        parts.append(part)
        return query


def lower_own_engine(
    lowering: Lowering, engine: BaseQueryEngine, method: MethodType, query: SymbolicQuery, path: str
) -> SymbolicAnswer:
    """Lower the query of an engine of the user's own class, which `method` answers."""
    answer = SymbolicAnswer()
    with lowering.reporting(path, engine):
        value, name = _read_method(lowering, method, query, path)
        if isinstance(value, Instance):
            text = _to_ref(lowering, value.fields.get("response"), name)
            answer = SymbolicAnswer(text, _to_ref(lowering, value.fields.get("source_nodes"), name))
        elif isinstance(engine, CustomQueryEngine) and (text := _to_ref(lowering, value, name)) is not None:
            answer = SymbolicAnswer(lowering.add_call(f"{name}.text", on_loop(_require_text), value=text))
    return answer


def lower_own_retriever(
    lowering: Lowering, retriever: BaseRetriever, method: MethodType, query: SymbolicQuery, path: str
) -> Value:
    """Lower the query of a retriever of the user's own class. Return the ref of the nodes that `method` returns."""
    nodes: Value = None
    with lowering.reporting(path, retriever):
        value, name = _read_method(lowering, method, query, path)
        nodes = _to_ref(lowering, value, name)
    return nodes


def _read_method(lowering: Lowering, method: MethodType, query: SymbolicQuery, path: str) -> tuple[Symbol, str]:
    """Add the certain calls of a method. Return what it returns, and the beginning of the components' names.

    Raise `NotUnderstood` if there are none.
    """
    node, function, draft = method.__self__, method.__func__, lowering.draft
    in_progress = _functions_in_progress.get()
    if method in in_progress:
        raise NotUnderstood(f"{type(node).__name__} calls itself")
    assert lowering.own_models is not None and lowering.make_reader is not None
    reader, data = lowering.make_reader(lowering.own_models), DataGuards()
    name, earlier = f"{path}.{function.__name__}", set(draft.components)
    argument = query.text if isinstance(node, CustomQueryEngine) else reader.bundles.add(query)
    with data.recording(), during(_functions_in_progress, (*in_progress, method)):
        summary = summarize_function(
            method, {first_parameter(method): argument}, draft, name, find_method=reader.find_method
        )
    drop_behind_code(draft, earlier)
    is_async, attributes = lowering.runs_in_loop, _objects_of(node)
    lowering.guards += reader.models.guards
    lowering.guards.append(
        CodeGuard(
            lambda: getattr(written_method(node, is_async=is_async), "__func__", None),
            function,
            attributes,
            lambda: _objects_of(node),
            data.are_unchanged,
        )
    )
    if draft.components.keys() <= earlier:
        raise NotUnderstood(f"no call in the code of {type(node).__name__} is certain")
    lowering.lowered.add(id(node))
    lowering.own_code.add(f"{name}.")
    return summary.value, name


def _objects_of(node: Any) -> Mapping[str, Any]:
    """Return the attributes of an object that are no plain data."""
    return {key: value for key, value in vars(node).items() if not isinstance(value, _PLAIN_TYPES)}


def _to_ref(lowering: Lowering, symbol: Symbol | None, name: str) -> Value:
    """Return a value that the code returns as a ref; None if it is not known."""
    draft = lowering.draft
    if symbol is None or any(one not in draft.components and one[:1] != "$" for one in producers(symbol)):
        return None
    return materialize(draft, symbol, name)


def _require_text(value: Any) -> str:
    if type(value) is not str:
        raise UnfitValue("an answer that is no text")
    return value


def drop_behind_code(draft: Draft, earlier_names: Container[str] = ()) -> None:
    """Drop the components that come after code which is not known: it may do anything, such as wait for a person.

    `earlier_names`: those of components that were there before the code was read.
    """
    dropped = set[str]()
    for name, component in draft.components.items():
        if name in earlier_names:
            continue
        earlier = {ref.producer for _, ref in component.inputs} | {
            before for before, after in draft.order if after == name
        }
        if is_user_code(component) or not dropped.isdisjoint(earlier):
            dropped.add(name)
    draft.components = {name: component for name, component in draft.components.items() if name not in dropped}
    draft.order = [pair for pair in draft.order if dropped.isdisjoint(pair)]
