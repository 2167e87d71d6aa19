"""The objects that an object is made of: read from its attributes, and from what functions name. Nothing runs."""

from __future__ import annotations

import dis
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain, islice
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from teola_plugin.pool import EnginePool

ReferentsOf = Callable[[Any], Iterable[Any]]
"""Returns the objects that an object holds, as far as it is looked into."""
MAX_OBJECTS = 20_000
"""The most objects that a search looks at."""
MAX_ITEMS = 1_000
"""The most items of one container that a search looks at."""
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, CodeType)
"""Types of objects that hold no other object."""
_LIBRARIES = sys.stdlib_module_names | {
    *("langchain", "langchain_core", "langchain_classic", "langchain_community", "langchain_text_splitters"),
    *("langchain_openai", "langchain_huggingface", "langgraph", "langgraph_sdk", "langsmith", "llama_index"),
    *("langchain_chroma", "pydantic", "pydantic_core", "teola_plugin", "httpx", "httpx2", "openai", "chromadb"),
    *("numpy", "torch", "transformers", "sentence_transformers"),
}
"""Packages whose functions read no object of the user's by a global name."""


def reachable(root: Any, referents_of: ReferentsOf, *, limit: int | None = None) -> Iterator[Any]:
    """Yield `root`, the objects that it holds, and those that they hold: each once, the nearest first.

    At most `limit` objects are looked at.
    """
    pending, seen = deque([root]), dict[object, Any]()
    while pending:
        obj = pending.popleft()
        if _identity(obj) in seen:
            continue
        seen[_identity(obj)] = obj  # an object that is created by the search must not get the identity of another
        yield obj
        room = None if limit is None else max(0, limit - len(seen) - len(pending))
        pending += islice(referents_of(obj), room)


def _identity(node: Any) -> object:
    """Return what tells an object from others; bound methods are created anew at each access."""
    return (id(node.__self__), id(node.__func__)) if type(node) is MethodType else id(node)


def referents(node: Any) -> Iterable[Any]:
    """Return the objects that an object holds, or that a function names."""
    cls = type(node)  # `isinstance` would ask a proxy which object it stands for
    if issubclass(cls, (*_ATOMS, EnginePool)):
        return ()
    objects: Iterable[Any]
    if cls is FunctionType:
        objects = _of_function(node)
    elif cls is MethodType:
        objects = (node.__self__, node.__func__, *_named_in_method(node.__self__, node.__func__))
    elif cls is partial:
        objects = (node.func, *node.args, *node.keywords.values())
    else:
        objects = chain(_items(node, cls), _attributes(node))
    return (obj for obj in islice(objects, MAX_ITEMS) if not issubclass(type(obj), _ATOMS))


def _items(node: Any, cls: type) -> Iterator[Any]:
    """Yield the items of a container as the interpreter's own class does, whatever a subclass overrides."""
    if issubclass(cls, dict):
        return iter(tuple(dict.values(node)))  # all at once: another thread may change it
    container = next((base for base in _CONTAINERS if issubclass(cls, base)), None)
    return iter(()) if container is None else iter(tuple(container.__iter__(node)))


def _of_function(func: FunctionType) -> Iterator[Any]:
    """Yield the values of a function's closure, defaults and attributes, and the globals that its code names."""
    for cell in func.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    yield from func.__defaults__ or ()
    yield from (func.__kwdefaults__ or {}).values()
    yield from vars(func).values()
    if is_users_function(func):
        yield from _named_by(func.__code__, func.__globals__)


def is_users_function(func: FunctionType) -> bool:
    """Return True unless a function is of a library whose functions name no object of the user's."""
    return str(func.__module__).partition(".")[0] not in _LIBRARIES


def _named_by(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the globals that a code object names; of modules among them, the attributes that it may name."""
    globally, anywhere = _names_in(code)
    for name in globally & names.keys():
        value = names[name]
        if type(value) is not ModuleType:
            yield value
        elif value.__name__.partition(".")[0] not in _LIBRARIES:
            yield from (vars(value)[attribute] for attribute in anywhere & vars(value).keys())


def _named_in_method(owner: Any, func: Any) -> Iterator[Any]:
    """Yield the attributes of its class that the code of a method may name: constants, and other methods."""
    code = getattr(func, "__code__", None)
    for name in _names_in(code)[1] if isinstance(code, CodeType) else ():
        value = inspect.getattr_static(type(owner), name, None)
        yield MethodType(value, owner) if type(value) is FunctionType else value


@lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a code object reads from the globals, and all names in it; inner functions included."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    all_names = frozenset(code.co_names).union(*(names for _, names in inner))
    return frozenset(read).union(*(names for names, _ in inner)), all_names


def _attributes(node: Any) -> Iterator[Any]:
    """Yield the values of an object's attributes, Pydantic's private ones and those in slots among them."""
    cls: Any = type(node)
    for descriptor in _descriptors(cls):
        if descriptor.__name__.startswith("__teola"):  # the plugin's own
            continue
        try:
            value = descriptor.__get__(node, cls)
        except AttributeError:
            continue
        if descriptor.__name__ == "__dict__" and hasattr(cls, "__teola_replaced__"):
            value = {**value, **_replaced(node, value)}
        if descriptor.__name__ not in ("__dict__", "__pydantic_private__"):
            yield value
        elif type(value) is dict:
            yield from value.values()


def _replaced(node: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Return what an object that shares the state of another reads instead of attributes in that state."""
    replaced = node.__teola_replaced__.items()
    return {name: value for name, (before, value) in replaced if shared.get(name) is before}


@lru_cache(maxsize=1024)
def _descriptors(cls: type) -> tuple[Any, ...]:
    """Return the interpreter's own descriptors of where objects of a class keep their attributes: they run no code."""
    descriptors: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__slots__" in vars(base) or "__dict__" in vars(base):
            for name, descriptor in vars(base).items():
                descriptors.setdefault(name, descriptor)
    return tuple(
        descriptor
        for name, descriptor in descriptors.items()
        if type(descriptor) is MemberDescriptorType or (name == "__dict__" and type(descriptor) is GetSetDescriptorType)
    )
