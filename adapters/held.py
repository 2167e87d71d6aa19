"""What objects hold, and functions name, read without running anything."""

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

Reach = Callable[[Any], Iterable[Any]]
"""What an object holds, as far as it is looked into."""
MOST = 20_000
"""Objects of one node that are looked at."""
WIDEST = 1_000
"""Items of one container."""
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, CodeType)
"""What holds nothing."""
_LIBRARIES = sys.stdlib_module_names | {
    *("langchain", "langchain_core", "langchain_classic", "langchain_community", "langchain_text_splitters"),
    *("langchain_openai", "langchain_huggingface", "langgraph", "langgraph_sdk", "langsmith", "llama_index"),
    *("langchain_chroma", "pydantic", "pydantic_core", "teola_plugin", "httpx", "httpx2", "openai", "chromadb"),
    *("numpy", "torch", "transformers", "sentence_transformers"),
}
"""Packages whose functions read no object of the user's by a global name."""


def trail(root: Any, wanted: Any, reach: Reach, *, most: int = MOST) -> tuple[Any, ...]:
    """A shortest way from `root` to that very object, both included; empty if there is none."""
    before: dict[object, Any] = {}

    def noted(node: Any) -> Iterator[Any]:
        for one in reach(node):
            before.setdefault(_identity(one), node)
            yield one

    found = [node for node in below(root, noted, most=most) if node is wanted][:1]
    while found and found[0] is not root:
        found.insert(0, before[_identity(found[0])])
    return tuple(found)


def below(root: Any, reach: Reach, *, most: int | None = None) -> Iterator[Any]:
    """`root`, what it holds, what that holds: each once."""
    todo, seen = deque([root]), dict[object, Any]()
    while todo:
        node = todo.popleft()
        if _identity(node) in seen:
            continue
        seen[_identity(node)] = node  # what is made on the way must not give its number to another
        yield node
        room = None if most is None else max(0, most - len(seen) - len(todo))
        todo += islice(reach(node), room)


def _identity(node: Any) -> object:
    """Bound methods are made anew wherever they are asked for."""
    return (id(node.__self__), id(node.__func__)) if type(node) is MethodType else id(node)


def held(node: Any) -> Iterable[Any]:
    """What an object holds, and a function names, read without running anything."""
    kind = type(node)  # and no `isinstance`, which asks a proxy what it stands for
    if issubclass(kind, (*_PLAIN, EnginePool)):
        return ()
    found: Iterable[Any]
    if kind is FunctionType:
        found = _of_function(node)
    elif kind is MethodType:
        found = (node.__self__, node.__func__, *_named_of(node.__self__, node.__func__))
    elif kind is partial:
        found = (node.func, *node.args, *node.keywords.values())
    else:
        found = chain(_items(node, kind), attributes(node))
    return (one for one in islice(found, WIDEST) if not issubclass(type(one), _PLAIN))


def _items(node: Any, kind: type) -> Iterator[Any]:
    """Of a container, as the interpreter's own class iterates, whatever a subclass does."""
    if issubclass(kind, dict):
        return iter(tuple(dict.values(node)))  # at once: somebody may change it meanwhile
    known = next((one for one in _CONTAINERS if issubclass(kind, one)), None)
    return iter(()) if known is None else iter(tuple(known.__iter__(node)))


def _of_function(func: FunctionType) -> Iterator[Any]:
    """Its cells, defaults and attributes, and the globals that its code names."""
    for cell in func.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not there yet
            continue
    yield from func.__defaults__ or ()
    yield from (func.__kwdefaults__ or {}).values()
    yield from vars(func).values()
    if is_own(func):
        yield from _named_by(func.__code__, func.__globals__)


def is_own(func: FunctionType) -> bool:
    """Whether a function is the user's own: none of a library's that is known."""
    return str(func.__module__).partition(".")[0] not in _LIBRARIES


def _named_by(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The globals that it names, and of modules among them what it may name there."""
    globally, anywhere = _names(code)
    for name in globally & names.keys():
        value = names[name]
        if type(value) is not ModuleType:
            yield value
        elif value.__name__.partition(".")[0] not in _LIBRARIES:
            yield from (vars(value)[one] for one in anywhere & vars(value).keys())


def _named_of(owner: Any, func: Any) -> Iterator[Any]:
    """What the code of a method may name of its class: constants, and other methods."""
    code = getattr(func, "__code__", None)
    for name in _names(code)[1] if isinstance(code, CodeType) else ():
        found = inspect.getattr_static(type(owner), name, None)
        yield MethodType(found, owner) if type(found) is FunctionType else found


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """What a code reads from the globals; all names in it. The same of the functions inside."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(read).union(*(one for one, _ in inner)), frozenset(code.co_names).union(*(two for _, two in inner))


def attributes(node: Any) -> Iterator[Any]:
    """Values of an object's own attributes, Pydantic's private ones and those in slots among them."""
    kind: Any = type(node)
    for place in _places(kind):
        if place.__name__.startswith("__teola"):  # of the plugin's own
            continue
        try:
            value = place.__get__(node, kind)
        except AttributeError:
            continue
        if place.__name__ == "__dict__" and hasattr(kind, "__teola_replaced__"):
            value = {**value, **_replaced(node, value)}
        if place.__name__ not in ("__dict__", "__pydantic_private__"):
            yield value
        elif type(value) is dict:
            yield from value.values()


def _replaced(node: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Return what an object that shares the state of another reads instead of attributes in that state."""
    replaced = node.__teola_replaced__.items()
    return {name: value for name, (before, value) in replaced if shared.get(name) is before}


@lru_cache(maxsize=1024)
def _places(cls: type) -> tuple[Any, ...]:
    """Where objects of a class keep their attributes: descriptors of the interpreter's own, which run no code."""
    found: dict[str, Any] = {}
    for one in cls.__mro__:
        for name, place in vars(one).items() if "__slots__" in vars(one) or "__dict__" in vars(one) else ():
            found.setdefault(name, place)
    return tuple(
        place
        for name, place in found.items()
        if type(place) is MemberDescriptorType or (name == "__dict__" and type(place) is GetSetDescriptorType)
    )
