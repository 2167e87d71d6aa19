"""Names and attributes of existing objects, and what their functions share, read without running any of their code.

Data that a plan was made with may be other data when the plan is used again. `DataGuards` remember what was read.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import gc
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from pydantic import BaseModel, SecretStr

from teola_plugin.runtime.query_run import during
from teola_plugin.tracer.functions.symbols import UNKNOWN_VALUE, KnownValue, Symbol, is_constant
from teola_plugin.tracer.source import source_of

_FRAMEWORKS = ("langchain", "langchain_classic", "langchain_core", "langchain_openai", "llama_index", "teola_plugin")
_MISSING = object()
_BUILTINS = vars(builtins)
_classes_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""Returns the classes that a class is made of, itself included, without asking its metaclass."""
_C_METHOD_TYPES = (MethodDescriptorType, ClassMethodDescriptorType)

# ------------------------------------------------------------ classes


def is_framework_code(thing: Any) -> bool:
    """Return True for a class or function that the framework, or this project, defines."""
    module = getattr(thing, "__module__", "")
    return isinstance(module, str) and module.split(".", 1)[0] in _FRAMEWORKS


def is_instance(value: object, kind: type) -> bool:
    """Return True if `kind` is among the classes of `value`. Runs none of their code, unlike `isinstance`."""
    return is_subclass(type(value), kind)


def is_subclass(kind: type, *bases: type) -> bool:
    """Return True if one of `bases` is among the classes that `kind` is made of. Runs no code of a metaclass.

    `issubclass` may run some: abstract classes ask their subclasses, too, and those of Pydantic 2.11 read an attribute
    of `kind`.
    """
    return any(cls is base for cls in _classes_of(kind) for base in bases)


# ------------------------------------------------------------ guards on data

_DATA_TYPES = (str, int, float, bool, bytes, type(None))
_CONTAINER_TYPES = (list, tuple, set, frozenset, dict)
MAX_ITEMS = 64
"""Items of a container that are compared; of a longer one only its identity and length are."""
MAX_NESTING = 3
"""Containers inside each other that are compared."""
MAX_CHANGES = 2
"""Changes of one name after which its value is no longer relied on."""

_recording_guards: ContextVar[DataGuards | None] = ContextVar("teola_data_guards", default=None)


class DataGuards:
    """The data of globals, closures and attributes that the plans of one node rely on."""

    def __init__(self) -> None:
        self.read_environment = False
        """True once a plan was made that depends on environment variables."""
        self._snapshots: dict[tuple[int, str], tuple[Callable[[], Any], Any, object]] = {}
        self._changes: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the data that are read in the body of the `with` statement.

        The body traces a plan. The guards are found by a context variable, so only reads of this thread or task are
        recorded.
        """
        with during(_recording_guards, self):
            yield

    def record(self, owner: object, name: str, value: Any, read_again: Callable[[], Any]) -> bool:
        """Record a value that was read. Return False if it has changed too often to be relied on.

        `owner`, `name`: where it was read. `read_again`: reads it once more when `are_unchanged` compares. The owner is
        kept, so that no other object can get its identity.
        """
        if self._changes[id(owner), name] >= MAX_CHANGES:
            return False
        self._snapshots[id(owner), name] = (read_again, _snapshot(value), owner)
        return True

    def are_unchanged(self) -> bool:
        """Return True if all recorded data are as they were. Each change is reported, and counted, once."""
        changed = []
        for key, (read_again, snapshot, _) in list(self._snapshots.items()):
            try:
                current = _snapshot(read_again())
            except Exception:  # it is not there any more, or changes at this moment
                current = None
            if current != snapshot:
                changed.append(key)
        for key in changed:
            self._changes[key] += 1
            self._snapshots.pop(key, None)
        return not changed


def note_environment() -> None:
    """Note in the guards that are recording that a plan depends on environment variables.

    Nothing happens where no guards are recording.
    """
    guards = _recording_guards.get()
    if guards is not None:
        guards.read_environment = True


def is_recording() -> bool:
    """Return True if guards record the data that are read here."""
    return _recording_guards.get() is not None


def is_reliable(owner: object, name: str, value: Any, read_again: Callable[[], Any]) -> bool:
    """Return True if a plan may rely on `owner`'s value of that name.

    Data are recorded in the guards that are recording. Other objects, such as models and functions, are always relied
    on.
    """
    guards = _recording_guards.get()
    is_data = type(value) in (*_DATA_TYPES, *_CONTAINER_TYPES, SecretStr) and type(owner) is not dataclasses.Field
    return guards is None or not is_data or guards.record(owner, name, value, read_again)


_MODEL_VARIABLES = (
    *("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_ORGANIZATION", "OPENAI_PROJECT_ID"),
    *("OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_API_TYPE", "OPENAI_API_VERSION", "OPENAI_CUSTOM_HEADERS"),
    *("OPENAI_PROXY", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AZURE_OPENAI_ENDPOINT", "LC_OUTPUT_VERSION"),
)
"""Environment variables that models of the providers `openai` and `azure_openai` read when they are made."""

_MODULE_SETTINGS = ("api_key", "base_url", "api_version", "api_type", "organization", "project")
"""Settings of the module `openai` that LlamaIndex's models read when they are made."""


def are_model_variables_reliable() -> bool:
    """Return True if a plan may rely on environment variables and settings of `openai` that new models read.

    They are recorded in the guards that are recording, as data are.
    """

    def read() -> tuple[Any, ...]:
        module = sys.modules.get("openai")
        settings = {} if module is None else vars(module)
        return (*map(os.environ.get, _MODEL_VARIABLES), *map(settings.get, _MODULE_SETTINGS))

    return is_reliable(os.environ, "", read(), read)


def _snapshot(value: Any, nesting: int = MAX_NESTING) -> Any:
    """Return an object that is equal for equal data. Runs no code of the user's."""
    kind = type(value)
    if kind in _DATA_TYPES:
        return kind, value
    if kind is SecretStr:
        return kind, value.get_secret_value()
    if kind not in _CONTAINER_TYPES or not nesting or len(value) > MAX_ITEMS:
        return kind, id(value), len(value) if kind in _CONTAINER_TYPES else 0
    items = (part for pair in value.items() for part in pair) if kind is dict else value
    return kind, tuple(_snapshot(item, nesting - 1) for item in items)


# ------------------------------------------------------------ attributes


def read_object_attribute(owner: Any, name: str) -> Symbol:
    """Return `owner.name`; an unknown value for what a property, or any other code, would return."""
    symbol = _read_statically(owner, name)
    if not isinstance(symbol, KnownValue):
        return symbol

    def read_again() -> Any:
        current = _read_statically(owner, name)
        return current.value if isinstance(current, KnownValue) else current

    return symbol if is_reliable(owner, name, symbol.value, read_again) else UNKNOWN_VALUE


def _read_statically(owner: Any, name: str) -> Symbol:
    """Return an attribute of an object or a module without running code of the user's; unknown if that needs code."""
    if is_instance(owner, ModuleType):
        value = vars(owner).get(name, _MISSING)
        return UNKNOWN_VALUE if value is _MISSING else KnownValue(value)
    try:
        attribute = inspect.getattr_static(owner, name, _MISSING)
    except Exception:  # an object that is strange enough
        return UNKNOWN_VALUE
    if attribute is _MISSING:
        return UNKNOWN_VALUE
    return _bind_attribute(owner, name, attribute)


def _bind_attribute(owner: Any, name: str, attribute: Any) -> Symbol:
    """Return what reading an attribute gives, by the object that `owner` or its class has under that name."""
    kind = type(attribute)
    owner_is_class = is_instance(owner, type)
    of_instance = not owner_is_class and attribute is _instance_attributes(owner).get(name, _MISSING)
    if of_instance or not any("__get__" in vars(cls) for cls in kind.__mro__):
        return KnownValue(attribute)
    if kind is MemberDescriptorType and not owner_is_class:
        try:
            return KnownValue(attribute.__get__(owner, type(owner)))
        except AttributeError:
            return UNKNOWN_VALUE
    if kind in _C_METHOD_TYPES:
        return KnownValue(attribute.__get__(None, owner) if owner_is_class else attribute.__get__(owner, type(owner)))
    if kind is property and attribute.fget is not None and is_framework_code(attribute.fget):
        try:
            return KnownValue(attribute.__get__(owner, type(owner)))
        except Exception:
            return UNKNOWN_VALUE
    if kind is staticmethod:
        return KnownValue(attribute.__func__)
    if kind is classmethod and isinstance(attribute.__func__, FunctionType):
        return KnownValue(MethodType(attribute.__func__, owner if owner_is_class else type(owner)))
    if kind in (FunctionType, CACHED_FUNCTION):
        return KnownValue(attribute if owner_is_class else MethodType(attribute, owner))
    return UNKNOWN_VALUE


def getter_of(owner: Any, name: str) -> FunctionType | None:
    """Return the user's function that runs when an attribute is read; None if none does, or one that is not known.

    It is that of a `property`, or of a `functools.cached_property` that has no value yet.
    """
    if is_instance(owner, type) or is_instance(owner, ModuleType):
        return None
    try:
        attribute = inspect.getattr_static(owner, name, None)
    except Exception:  # an object that is strange enough
        return None
    if type(attribute) is property:
        return attribute.fget if type(attribute.fget) is FunctionType else None
    if type(attribute) is not functools.cached_property or type(attribute.func) is not FunctionType:
        return None

    def read_again() -> tuple[Any, ...]:
        attributes = _instance_attributes(owner)
        return (attributes[name],) if name in attributes else ()

    return attribute.func if is_reliable(owner, name, (), read_again) else None


def _instance_attributes(owner: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object, which its class cannot intercept; empty if it has none."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


# ------------------------------------------------------------ functions whose results are cached

CACHED_FUNCTION = functools._lru_cache_wrapper
"""The class of functions under `functools.cache` and `functools.lru_cache`."""


def cached_result(func: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the result that such a function has cached for these arguments, as a tuple with one item.

    Return an empty tuple if it has cached none, and None if that changes too often to be relied on. Runs no code of the
    user's, and counts neither as a hit nor as a miss.
    """

    def read() -> tuple[Any, ...]:
        results = (result for key, result in _cached_items(func) if _is_key_of(key, arguments, keywords))
        return next(((result,) for result in results), ())

    result = read()
    values = [value if is_constant(value) else id(value) for value in (*arguments, *keywords.values())]
    return result if is_reliable(func, repr((values, *keywords)), result, read) else None


def _cached_items(func: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and results in the cache of a function, as CPython shows them to its garbage collector.

    A cache without a limit is a dictionary. One with a limit is a list of links, each of which shows three objects: the
    key, the result, and its own class.
    """
    referents = gc.get_referents(func)
    if func.cache_parameters()["maxsize"] is None:
        results = next((one for one in referents if type(one) is dict), {})
        yield from list(results.items())
    for key, result, link_class in zip(referents[1::3], referents[2::3], referents[3::3], strict=False):
        if getattr(link_class, "__name__", "") != "_lru_list_elem":
            return
        yield key, result


def _is_key_of(key: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return True for the key under which `functools.lru_cache` keeps the result for these arguments.

    The key of one text or integer is that itself. Any other is a tuple, in which a mark stands before the keywords; if
    the cache is typed, classes of the arguments follow, which are not compared.
    """
    if type(key) is not tuple:
        return len(arguments) == 1 and not keywords and _is_same(key, arguments[0])
    expected = [*arguments, *([_MISSING] if keywords else ()), *(part for pair in keywords.items() for part in pair)]
    has_mark = len(key) > len(arguments) and type(key[len(arguments)]) is object
    if len(key) not in (len(expected), len(expected) + len(arguments) + len(keywords)) or has_mark != bool(keywords):
        return False
    return all(one is _MISSING or _is_same(part, one) for part, one in zip(key, expected, strict=False))


def _is_same(left: Any, right: Any) -> bool:
    """Return True for one object, and for equal constants of one type. Runs no code of the user's."""
    return left is right or (type(left) is type(right) and is_constant(left) and left == right)


# ------------------------------------------------------------ free names


@dataclass(frozen=True, slots=True)
class FreeNames:
    """The names that a function reads from outside: its closure, its module's globals, and builtins."""

    cells: Mapping[str, Any]
    """The values of the closure, by name."""
    globals: Mapping[str, Any]
    cell_objects: Mapping[str, CellType] = field(default_factory=dict)
    """The cells that hold the values of the closure."""

    @staticmethod
    def of_function(func: FunctionType) -> FreeNames:
        """Return the free names of a function, without those of its closure that have no value yet."""
        values: dict[str, Any] = {}
        cell_objects = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
        for name, cell in cell_objects.items():
            try:
                values[name] = cell.cell_contents
            except ValueError:  # not there yet
                continue
        return FreeNames(values, func.__globals__, cell_objects)

    def has(self, *names: str) -> bool:
        """Return True if all these names have a value."""
        return all(any(name in namespace for namespace in (self.cells, self.globals, _BUILTINS)) for name in names)

    def owner_of(self, name: str) -> object | None:
        """Return the cell or the globals that hold the value of a name; None if neither is known."""
        return self.cell_objects.get(name, self.globals or None)

    def read(self, name: str) -> Symbol:
        """Return the value of a name, unknown if there is none, or none that a plan may rely on."""
        if name in self.cells:
            value, cell = self.cells[name], self.cell_objects.get(name)
            reliable = cell is None or is_reliable(cell, name, value, lambda: cell.cell_contents)
        elif name in self.globals:
            value = self.globals[name]
            reliable = is_reliable(self.globals, name, value, lambda: self.globals[name])
        else:
            return KnownValue(_BUILTINS[name]) if name in _BUILTINS else UNKNOWN_VALUE
        return KnownValue(value) if reliable else UNKNOWN_VALUE


NO_FREE_NAMES = FreeNames({}, {})


# ------------------------------------------------------------ functions whose calls share nothing that changes

_THREAD_SAFE = frozenset(
    {
        *("openai.OpenAI", "openai.lib.azure.AzureOpenAI", "httpx.Client", "httpx.get", "httpx.post"),
        *("requests.api.get", "requests.api.post", "json.dumps", "json.loads", "time.sleep"),
    }
)
"""Clients that several threads may use at once, and functions that they may call."""
_MODULES = ("httpx", "json", "openai", "requests", "time")
_HARMLESS_BUILTINS = (bool, dict, enumerate, float, int, len, list, range, str, tuple, zip)
_PLAIN = (str, int, float, bool, bytes, type(None))
_METHODS = frozenset(
    {
        *("create", "get", "post", "request", "json", "raise_for_status", "model_dump", "tolist"),
        *("append", "extend", "items", "keys", "values", "join", "split", "strip", "replace", "format", "lower"),
    }
)
"""Methods that change no client, and else only what the call itself has made."""
_UNDERSTOOD = (
    *(ast.Return, ast.Assign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.With, ast.Raise, ast.Pass),
    *(ast.Try, ast.ExceptHandler, ast.keyword, ast.Slice, ast.Constant, ast.expr_context, ast.Starred),
    *(ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.comprehension, ast.JoinedStr, ast.FormattedValue),
    *(ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.operator, ast.boolop, ast.unaryop, ast.cmpop),
)


def shares_nothing(function: Any, callers: Sequence[CodeType] = ()) -> bool:
    """Return True if the source of a function or method shows that its calls share nothing that changes.

    It may read constants and attributes that are plain, use clients that bear several threads, and call functions and
    methods of its object that share nothing either. Runs none of its code.
    """
    owner, plain_function = None, function
    if isinstance(function, MethodType):
        owner, plain_function = function.__self__, function.__func__
    plain_function = getattr(plain_function, "__teola_original__", plain_function)
    if not isinstance(plain_function, FunctionType) or plain_function.__code__ in callers:
        return False
    definition = source_of(plain_function.__code__)
    defaults = (*(plain_function.__defaults__ or ()), *(plain_function.__kwdefaults__ or {}).values())
    if not isinstance(definition, ast.FunctionDef) or not all(type(value) in _PLAIN for value in defaults):
        return False
    reader = _SharingReader(
        owner, definition, FreeNames.of_function(plain_function), (*callers, plain_function.__code__)
    )
    return all(map(reader.is_harmless, reader.nodes))


class _SharingReader:
    """Judges the nodes of one function's source, each apart from its parts."""

    def __init__(
        self, owner: Any, definition: ast.FunctionDef, free_names: FreeNames, callers: Sequence[CodeType]
    ) -> None:
        """`owner`: the object that a method is bound to; None for a function."""
        self._owner, self._free_names, self._callers = owner, free_names, callers
        self.nodes = [node for statement in definition.body for node in _executed_nodes(statement)]
        self._parents = {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}
        arguments = definition.args
        all_arguments = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        parameters = [one.arg for one in all_arguments if one is not None]
        self._owner_name = parameters[0] if owner is not None and parameters else None
        local_names = {node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self._local_names = local_names.union(parameters) - {self._owner_name}

    def is_harmless(self, node: ast.AST) -> bool:
        """Return True if another call cannot notice what this node does."""
        if isinstance(node, ast.Name):
            return self._is_harmless_name(node)
        if isinstance(node, ast.Attribute):
            return isinstance(node.ctx, ast.Load) and self._is_harmless_attribute(node)
        if isinstance(node, ast.Subscript):
            return isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.Call):
            return self._is_harmless_call(node.func)
        if isinstance(node, ast.withitem):  # what it closes was made here
            return isinstance(node.context_expr, ast.Call) and isinstance(node.context_expr.func, ast.Name)
        return isinstance(node, _UNDERSTOOD)

    def _is_harmless_name(self, node: ast.Name) -> bool:
        """Return True if reading this name cannot show or change what another call sees.

        The method's own object and modules may only be read by their attributes, which are judged apart.
        """
        if node.id in self._local_names:
            return True
        if node.id == self._owner_name or self._is_module(node.id):
            return isinstance(node.ctx, ast.Load) and isinstance(self._parents.get(id(node)), ast.Attribute)
        return self._is_harmless_value(self._free_names.read(node.id))

    def _is_module(self, name: str) -> bool:
        value = self._free_names.read(name)
        return isinstance(value, KnownValue) and isinstance(value.value, ModuleType)

    def _is_harmless_attribute(self, node: ast.Attribute) -> bool:
        """Return True for a harmless attribute of the object or a module, and for parts of other values."""
        if not isinstance(node.value, ast.Name) or node.value.id in self._local_names:
            return True
        if node.value.id == self._owner_name:
            private = getattr(self._owner, "__pydantic_private__", None) or {}
            if node.attr in private:
                return self._is_harmless_value(KnownValue(private[node.attr]))
            return self._is_harmless_value(read_object_attribute(self._owner, node.attr))
        value = self._free_names.read(node.value.id)
        if not isinstance(value, KnownValue) or not isinstance(value.value, ModuleType):
            return True
        is_known = value.value.__name__ in _MODULES
        return is_known and self._is_harmless_value(read_object_attribute(value.value, node.attr))

    def _is_harmless_call(self, function: ast.expr) -> bool:
        """Return True for a function or own method, which is judged as a value, and for a known method of a value."""
        if isinstance(function, ast.Name):
            return function.id not in self._local_names
        if not isinstance(function, ast.Attribute):
            return False
        name = function.value.id if isinstance(function.value, ast.Name) else None
        if name is None or name in self._local_names:
            return function.attr in _METHODS
        return name == self._owner_name or self._is_module(name) or function.attr in _METHODS

    def _is_harmless_value(self, symbol: Symbol) -> bool:
        """Return True for a value that does not change, or that several threads may use at once."""
        if not isinstance(symbol, KnownValue):
            return False
        value = symbol.value
        if type(value) in _PLAIN or any(value is one for one in _HARMLESS_BUILTINS):
            return True
        kind = value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)
        if f"{kind.__module__}.{kind.__qualname__}" in _THREAD_SAFE:
            return True
        if isinstance(value, type):
            is_error = is_subclass(value, Exception) and value.__module__ == "builtins"
            return is_error or (is_subclass(value, BaseModel) and is_framework_code(value))
        is_own_method = isinstance(value, MethodType) and value.__self__ is self._owner
        return (is_own_method or isinstance(value, FunctionType)) and shares_nothing(value, self._callers)


def _executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its parts, without annotations."""
    yield node
    annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
    for child in ast.iter_child_nodes(node):
        if child is not annotation:
            yield from _executed_nodes(child)
