"""The data of a workflow's steps: events, the store of their context, and what may change while a step runs.

The rules for events and the store are those by which a step's source is read. For what may change, the source of all
steps is looked through; what it does not show is taken to change anything.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

from llama_index.core.workflow import Event, StartEvent, Workflow
from pydantic import BaseModel

from teola_plugin.graph import INPUT, Ref
from teola_plugin.shims.llamaindex.workflows import MAPPING_MODEL, WorkflowStep, is_dictionary_state
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions import UNKNOWN_VALUE, Fields, FunctionInterpreter, KnownValue, Symbol
from teola_plugin.tracer.functions.frames import OutOfFuel
from teola_plugin.tracer.functions.framework_calls import Arguments
from teola_plugin.tracer.functions.lookup import is_subclass
from teola_plugin.tracer.functions.mutations import MUTATING_METHODS, Mutations
from teola_plugin.tracer.functions.operations import read_key
from teola_plugin.tracer.functions.symbols import (
    AwaitableValue,
    Expression,
    Unknown,
    known_value,
    move_to_draft,
    producers,
)
from teola_plugin.tracer.source import source_of

EVENT, EVENT_DATA, EVENT_CLASSES = "event", "event_data", "event_classes"
"""Keys of the template's input: an event's values, those of them that are no declared fields, its classes' names."""
COLLECTED, STORE = "collected", "store"
"""Keys of the template's input: values of collected events by key, and those of the context's store."""
Rule = Callable[[FunctionInterpreter, Arguments], Symbol]


def class_names(kind: type) -> list[str]:
    """Return a name for a class and each of its base classes, which no other class has."""
    return [f"{base.__qualname__} {id(base)}" for base in kind.__mro__]


def _decide_presence(interpreter: FunctionInterpreter, values: Ref, key: str) -> bool | None:
    """Return True if the dictionary in the template's input has the key; None if that is not known yet."""
    code = ast.Compare(ast.Constant(key), [ast.In()], [ast.Name("teola_v", ast.Load())])
    return interpreter.decide_condition(Expression(code, {"teola_v": values}))


def _key_and_default(arguments: Arguments, name: str) -> tuple[str, Symbol | None] | None:
    """Return the arguments of `get(key)` and `get(key, default)`; None if the key is not known."""
    is_known, key = known_value(arguments.get(name) or UNKNOWN_VALUE)
    is_complete = arguments.complete and len(arguments.all_items()) <= 2
    if not is_known or type(key) is not str or not is_complete:
        return None
    return key, arguments.get("default", 1)


# ------------------------------------------------------------ events


@dataclass(slots=True)
class EventRules:
    """The rules for the events that steps get."""

    _events: dict[int, tuple[Fields, type | None]] = field(default_factory=dict)
    """Symbols of events by their ids, with their classes; None for the class of an event of the template's input."""

    def first_event(self) -> Fields:
        """Return the symbol of the event in the template's input."""
        return self.add(Fields(base=Ref(INPUT).at(EVENT), attributes=True, fields_only=True), None)

    def collected_event(self, key: str, index: int, kind: type) -> Fields:
        """Return the symbol of an event that was collected before the step began."""
        base = Ref(INPUT).at(COLLECTED).at(key).at(index)
        return self.add(Fields(base=base, attributes=True, fields_only=True), kind)

    def add(self, event: Fields, kind: type | None) -> Fields:
        """Note that a symbol is an event of a class."""
        self._events[id(event)] = event, kind
        return event

    def is_first(self, symbol: Symbol | None) -> bool:
        """Return True for the symbol of the event in the template's input."""
        return id(symbol) in self._events and self._events[id(symbol)][1] is None

    def find(self, owner: Symbol, name: str) -> Rule | None:
        """Return the rule for a method or a builtin function of an event."""
        if id(owner) not in self._events:
            return None
        event, kind = self._events[id(owner)]
        rules: dict[str, Rule] = {
            "get": lambda interpreter, arguments: self._read_data(event, kind, interpreter, arguments),
            "isinstance()": lambda interpreter, arguments: self._test_class(kind, interpreter, arguments),
            "hasattr()": lambda interpreter, arguments: self._test_field(event, kind, interpreter, arguments),
            "getattr()": lambda interpreter, arguments: self._read_field(event, kind, interpreter, arguments),
        }
        return rules.get(name)

    @staticmethod
    def _read_data(event: Fields, kind: type | None, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret `event.get(key, default)`, which reads no declared field."""
        key_and_default = _key_and_default(arguments, "key")
        if key_and_default is None:
            return UNKNOWN_VALUE
        key, default = key_and_default
        missing = KnownValue(None) if default is None else default
        if kind is None:
            data = Ref(INPUT).at(EVENT_DATA)
            return missing if _decide_presence(interpreter, data, key) is False else data.at(key)
        if key in getattr(kind, "model_fields", {}):
            return missing
        if event.base is not None:
            return event.base.at(key)
        return event.items.get(key, missing)

    @staticmethod
    def _test_class(kind: type | None, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret `isinstance(event, cls)`, for one class of events or several; unknown for other classes.

        For the event in the template's input the answer depends on the names of its classes.
        """
        symbols = arguments.symbols or []
        is_known, tested = known_value(symbols[1]) if len(symbols) == 2 else (False, None)
        classes = tested if isinstance(tested, tuple) else (tested,)
        if not is_known or not all(is_subclass(one, Event) for one in classes):
            return UNKNOWN_VALUE
        names = [class_names(one)[0] for one in classes]
        if kind is not None:
            return KnownValue(not set(names).isdisjoint(class_names(kind)))
        refs = {"teola_v": Ref(INPUT).at(EVENT_CLASSES)}
        tests: list[ast.expr] = [
            ast.Compare(ast.Constant(name), [ast.In()], [ast.Name("teola_v", ast.Load())]) for name in names
        ]
        return Expression(tests[0] if len(tests) == 1 else ast.BoolOp(ast.Or(), tests), refs)

    @staticmethod
    def _has_field(event: Fields, kind: type | None, interpreter: FunctionInterpreter, name: str) -> bool | None:
        """Return True if an event has a value of this name; None if that is not known."""
        if kind is None:
            return _decide_presence(interpreter, Ref(INPUT).at(EVENT), name)
        is_declared = name in getattr(kind, "model_fields", {})
        return True if is_declared or name in event.items else None if event.base is not None else False

    def _test_field(
        self, event: Fields, kind: type | None, interpreter: FunctionInterpreter, arguments: Arguments
    ) -> Symbol:
        """Interpret `hasattr(event, name)`: True for a field that is there, else unknown."""
        name = _name_argument(arguments, 2)
        has_field = None if name is None else self._has_field(event, kind, interpreter, name)
        return KnownValue(True) if has_field else UNKNOWN_VALUE  # without a field there may be a method

    def _read_field(
        self, event: Fields, kind: type | None, interpreter: FunctionInterpreter, arguments: Arguments
    ) -> Symbol:
        """Interpret `getattr(event, name, default)`: the value of a field that is there, else unknown."""
        name = _name_argument(arguments, 3)
        if name is None or not self._has_field(event, kind, interpreter, name):
            return UNKNOWN_VALUE
        return read_key(event, KnownValue(name)) or UNKNOWN_VALUE


def _name_argument(arguments: Arguments, max_arguments: int) -> str | None:
    """Return the name in `hasattr(event, name)` and `getattr(event, name, default)`; None if it is not known."""
    symbols = arguments.symbols or []
    is_known, name = known_value(symbols[1]) if 1 < len(symbols) <= max_arguments else (False, None)
    return name if is_known and type(name) is str and not arguments.keywords else None


# ------------------------------------------------------------ the context's store


class StoreStandIn:
    """Stands for the store of a step's context."""


class _EditStandIn:
    """Stands for what `store.edit_state()` returns."""


@dataclass(slots=True)
class StoreRules:
    """The rules for the store of a step's context, and what the steps have written to it."""

    state_class: type[BaseModel]
    changing: frozenset[str] | None = frozenset()
    """Keys whose values other steps may change while these run; None if that may be any."""
    _written: dict[str, Symbol] = field(default_factory=dict)
    _states: dict[int, tuple[Fields, bool]] = field(default_factory=dict)
    """Symbols of states by their ids; True for those that are written back."""

    def find(self, owner: Symbol, name: str) -> Rule | None:
        """Return the rule for a method of the store, or for one of a state that was read from it."""
        if isinstance(owner, KnownValue):
            if type(owner.value) is _EditStandIn:
                return {"__enter__": self._begin_edit, "__exit__": self._end_edit}.get(name)
            rules: dict[str, Rule] = {
                "get": self._get,
                "set": self._set,
                "get_state": lambda interpreter, arguments: AwaitableValue(self._state(is_edited=False)),
                "edit_state": lambda interpreter, arguments: KnownValue(_EditStandIn()),
            }
            return rules.get(name, _stop) if type(owner.value) is StoreStandIn else None
        if id(owner) not in self._states:
            return None
        state, is_edited = self._states[id(owner)]
        if name in ("__setattr__", "__setitem__"):
            is_valid = is_edited and (name == "__setattr__" or issubclass(self.state_class, MAPPING_MODEL))
            return partial(self._assign, state) if is_valid else _stop
        return partial(self._get_from, state) if name == "get" else None

    # ------------------------------------------------------------ keys

    def _is_data(self, key: str) -> bool:
        """Return True for a key whose value is set and read without code of the user's."""
        kind = self.state_class
        return _has_plain_fields(kind) and (key in kind.model_fields or (is_dictionary_state(kind) and key[:1] != "_"))

    def _read(self, key: str, path: Sequence[str] = ()) -> Symbol:
        """Return the value of a key as it is now, or what lies under a path in it."""
        if self.changing is None or key in self.changing or not self._is_data(key):
            return UNKNOWN_VALUE
        if key in self._written:
            value: Symbol | None = self._written[key]
            for part in path:
                value = None if value is None else read_key(value, KnownValue(part))
            return UNKNOWN_VALUE if value is None else value
        return Ref(INPUT).at(STORE).at(key, *path)

    def _read_or_default(self, interpreter: FunctionInterpreter, key: str, default: Symbol) -> Symbol:
        """Return the value of a key, or the default if the store has none when the first step begins."""
        value = self._read(key)
        if key in self._written or isinstance(value, Unknown):
            return value
        is_missing = _decide_presence(interpreter, Ref(INPUT).at(STORE), key) is False
        return default if is_missing else value

    def _write(self, interpreter: FunctionInterpreter, key: str, value: Symbol) -> None:
        """Note the value that a step writes under a key of the store, for later reads.

        Raise `OutOfFuel` in a loop or branch, behind which no later read is known.
        """
        if interpreter.is_body or interpreter.nesting:
            raise OutOfFuel  # nobody knows what later reads return
        self._written[key] = value if self._is_data(key) else UNKNOWN_VALUE
        interpreter.shared.helpers -= producers(self._written[key])  # a later step may read them

    # ------------------------------------------------------------ methods of the store

    def _get(self, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret `store.get(path, default)` of a context's store; unknown for a path that is not known."""
        key_and_default = _key_and_default(arguments, "path")
        if key_and_default is None:
            return UNKNOWN_VALUE
        (key, *path), default = key_and_default[0].split("."), key_and_default[1]
        if default is None:
            return AwaitableValue(self._read(key, path))
        return UNKNOWN_VALUE if path else AwaitableValue(self._read_or_default(interpreter, key, default))

    def _set(self, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret `store.set(path, value)` of a context's store.

        A value that is set inside another one makes that unknown. Raise `OutOfFuel` for a path that is not known.
        """
        is_known, path = known_value(arguments.get("path") or UNKNOWN_VALUE)
        value = arguments.get("value", 1)
        if not is_known or type(path) is not str:
            raise OutOfFuel  # nobody knows what later reads return
        key, dot, _ = path.partition(".")
        self._write(interpreter, key, UNKNOWN_VALUE if value is None or dot else value)
        return AwaitableValue(KnownValue(None))

    # ------------------------------------------------------------ the state as one object

    def _state(self, *, is_edited: bool) -> Symbol:
        """Return the state as it is now: an object whose fields may be read."""
        if self.changing is None or not _has_plain_fields(self.state_class):
            return UNKNOWN_VALUE
        items = {**dict.fromkeys(self.changing, UNKNOWN_VALUE), **self._written}
        return self._add(Fields(items, Ref(INPUT).at(STORE), attributes=True, fields_only=True), is_edited)

    def _add(self, state: Fields, is_edited: bool) -> Fields:
        self._states[id(state)] = state, is_edited
        return state

    def _get_from(self, state: Fields, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret `state.get(key, default)` of a state that is a mapping."""
        key_and_default = _key_and_default(arguments, "key")
        if key_and_default is None or not is_dictionary_state(self.state_class):
            return UNKNOWN_VALUE
        key, default = key_and_default
        if key in state.items:
            return state.items[key]
        return self._read_or_default(interpreter, key, KnownValue(None) if default is None else default)

    def _assign(self, state: Fields, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Return the state after an assignment to a field or a key of it."""
        name, value = arguments.symbols or (UNKNOWN_VALUE, UNKNOWN_VALUE)
        is_known, key = known_value(name)
        if not is_known or type(key) is not str:
            raise OutOfFuel  # nobody knows what later reads return
        items = {**state.items, key: value if self._is_data(key) else UNKNOWN_VALUE}
        return self._add(replace(state, items=items), is_edited=True)

    def _begin_edit(self, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        return self._state(is_edited=True)

    def _end_edit(self, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Write the state back."""
        (state,) = arguments.symbols or (UNKNOWN_VALUE,)
        if id(state) not in self._states or not isinstance(state, Fields):
            raise OutOfFuel  # nobody knows what later reads return
        for key, value in state.items.items():
            if key not in (self.changing or ()) and value is not self._written.get(key):
                self._write(interpreter, key, value)
        return UNKNOWN_VALUE

    def forget_changed(self, mutations: Mutations, draft: Draft) -> None:
        """Prepare for the next step, after one that has changed values in place and whose components are in `draft`."""
        changed = [ref.path[1] for ref in mutations.refs if ref.producer == INPUT and ref.path[:1] == (STORE,)]
        self._written |= {str(key): UNKNOWN_VALUE for key in changed}
        for key, value in self._written.items():
            dropped = {one for one in producers(value) if one not in draft.components and not one.startswith("$")}
            is_lost = mutations.has_inside(value)
            self._written[key] = UNKNOWN_VALUE if is_lost else move_to_draft(value, dropped, Draft(), draft)


def _has_plain_fields(kind: type[BaseModel]) -> bool:
    """Return True for a class of states whose fields are set and read without code of the user's, as they are."""
    own_methods = ("__setattr__", "__getattribute__", "__getattr__", "__getitem__", "__setitem__", "get", "model_copy")
    base = MAPPING_MODEL if issubclass(kind, MAPPING_MODEL) else BaseModel
    is_plain = all(getattr(kind, name, None) is getattr(base, name, None) for name in own_methods)
    return is_plain and not kind.model_config.get("validate_assignment") and not kind.model_config.get("extra")


def _stop(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    """Stop at a method after which nobody knows what the store has."""
    raise OutOfFuel


# ------------------------------------------------------------ what steps change while others run

_NO_KEYS: frozenset[str] = frozenset()
_ATTRIBUTES_WITHOUT_STORE = frozenset(
    ("collect_events", "is_running", "retry_info", "send_event", "wait_for_event", "write_event_to_stream")
)
"""Attributes of a context that leave its store as it is."""
_SIMPLE_TYPES = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class StoreUse:
    """The keys of the store that a step, or several, may read and write; None if that may be any."""

    read: frozenset[str] | None = _NO_KEYS
    written: frozenset[str] | None = _NO_KEYS

    def __or__(self, other: StoreUse) -> StoreUse:
        return StoreUse(_union(self.read, other.read), _union(self.written, other.written))


_ANY = StoreUse(None, None)


def _union(keys: frozenset[str] | None, other_keys: frozenset[str] | None) -> frozenset[str] | None:
    return None if keys is None or other_keys is None else keys | other_keys


class StoreUses:
    """The uses of the store by the steps of a workflow, as the source of each step shows them."""

    def __init__(self, steps: Mapping[str, WorkflowStep]) -> None:
        self._steps = steps
        self._uses = {name: _store_use_of_step(step) for name, step in steps.items()}
        self._first = set() if _sends_start_events(steps) else {name for name, step in steps.items() if _is_first(step)}
        """Steps that run only when a run begins."""

    def changing_keys(
        self, name: str, running: Collection[str], values: Mapping[str, Any] | None
    ) -> frozenset[str] | None:
        """Return the keys whose values other steps may change while a step runs; None if that may be any.

        Args:
            name: The step's name.
            running: The names of the steps that are under way.
            values: The values that the store has now; None if they are not known.
        """
        use = StoreUse()
        for other, step in self._steps.items():
            is_over = other in self._first and other not in running
            is_itself = other == name and step.num_workers == 1
            if not (is_over or is_itself):
                use |= self._uses[other]
        if use.written is None:
            return None
        if values is None:
            return _union(use.read, use.written)
        read = values.keys() if use.read is None else use.read & values.keys()
        return use.written | {key for key in read if not _is_constant(values[key])}


def _is_constant(value: object) -> bool:
    """Return True for a value that nobody can change in place."""
    return type(value) in _SIMPLE_TYPES or (type(value) is tuple and all(map(_is_constant, value)))


def changing_attributes(workflow: Any) -> frozenset[str]:
    """Return the attributes of a workflow that its methods, other than its constructor, may assign or change."""
    kinds = [kind for kind in type(workflow).__mro__ if kind not in Workflow.__mro__]
    return frozenset().union(*(_changed_by(method) for kind in kinds for method in _methods(kind, "__init__")))


def _methods(kind: type, *without: str) -> Iterator[FunctionType]:
    """Yield the functions that a class itself defines as methods, except those of the names `without`."""
    for name, method in vars(kind).items():
        function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
        if isinstance(function, FunctionType) and name not in without:
            yield function


def _changed_by(method: FunctionType) -> frozenset[str]:
    return _changed_attributes(method.__code__)


# ------------------------------------------------------------ reading source


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function or a method; None if it is neither."""
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _definition(step: WorkflowStep) -> ast.AST | None:
    code = code_of(step.function)
    return None if code is None else source_of(code)


def _is_first(step: WorkflowStep) -> bool:
    return all(issubclass(kind, StartEvent) for kind in step.accepted_events)


def _sends_start_events(steps: Mapping[str, WorkflowStep]) -> bool:
    """Return True if a step may send an event with which a run begins, by the names that occur in its source."""
    names = {kind.__name__ for step in steps.values() for kind in step.accepted_events if issubclass(kind, StartEvent)}
    definitions = [_definition(step) for step in steps.values()]
    calls = (
        part.func.id
        for definition in definitions
        if definition is not None
        for part in ast.walk(definition)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)
    )
    return None in definitions or not names.isdisjoint(calls)


def _store_use_of_step(step: WorkflowStep) -> StoreUse:
    code = code_of(step.function)
    return _ANY if code is None else _store_use(code, step.context_name)


@lru_cache(maxsize=512)
def _store_use(code: CodeType, context_name: str) -> StoreUse:
    """Return the keys that a step's source reads and writes."""
    definition = source_of(code)
    if definition is None:
        return _ANY
    parents = {child: node for node in ast.walk(definition) for child in ast.iter_child_nodes(node)}
    use = StoreUse()
    for node in parents:
        if isinstance(node, ast.Attribute) and node.attr == "get_step_context":
            return _ANY
        if not isinstance(node, ast.Name) or node.id != context_name or not context_name:
            continue
        attribute = parents[node]
        if not isinstance(attribute, ast.Attribute):
            return _ANY
        if attribute.attr == "store":
            use |= _use_of_store(attribute, parents)
        elif attribute.attr not in _ATTRIBUTES_WITHOUT_STORE:
            return _ANY
    return use


def _use_of_store(store: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> StoreUse:
    """Return the keys that one call of a store's method reads and writes."""
    method = parents[store]
    call = parents.get(method)
    if not isinstance(method, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not method:
        return _ANY
    if method.attr == "get_state":
        return StoreUse(None)
    if method.attr in ("get", "set"):
        key = _constant_text(call.args[0] if call.args else None)
        keys = None if key is None else frozenset((key.split(".", 1)[0],))
        return StoreUse(keys) if method.attr == "get" else StoreUse(keys, keys)
    item = parents.get(call)
    if method.attr == "edit_state" and isinstance(item, ast.withitem) and isinstance(item.optional_vars, ast.Name):
        keys = _keys_of_state(item.optional_vars, parents)
        return StoreUse(keys, keys)
    return _ANY


def _keys_of_state(variable: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> frozenset[str] | None:
    """Return the keys of an edited state that the source names; None if it uses the state in other ways."""
    keys: set[str] = set()
    for node in parents:
        if not isinstance(node, ast.Name) or node.id != variable.id or node is variable:
            continue
        use = parents[node]
        if isinstance(use, ast.withitem) and use.optional_vars is node:
            continue
        key: str | None = None
        if isinstance(use, ast.Attribute) and use.attr != "get":
            key = use.attr
        elif isinstance(use, ast.Subscript):
            key = _constant_text(use.slice)
        elif isinstance(use, ast.Attribute) and isinstance(call := parents[use], ast.Call) and call.args:
            key = _constant_text(call.args[0])
        if key is None:
            return None
        keys.add(key)
    return frozenset(keys)


def _constant_text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@lru_cache(maxsize=1024)
def _changed_attributes(code: CodeType) -> frozenset[str]:
    """Return the attributes of a method's object that its source assigns, or changes in place."""
    definition, owner = source_of(code), code.co_varnames[:1]
    if definition is None or not owner:
        return _NO_KEYS
    return frozenset(
        name for node in ast.walk(definition) for changed in _changed(node) for name in attribute_of(changed, owner[0])
    )


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a node assigns or changes in place."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        yield node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
        yield node.func.value


def attribute_of(node: ast.expr, owner: str) -> Iterator[str]:
    """Yield `name` of `owner.name`, or of what lies in it."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
            yield node.attr
        node = node.value


FRAMEWORK_ATTRIBUTES: frozenset[str] = frozenset().union(*map(_changed_by, _methods(Workflow)))
"""Attributes of workflows that LlamaIndex sets, and no step reads."""
