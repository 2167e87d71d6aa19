"""Checks that an object behaves as LlamaIndex wrote it, so that it can be lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import CO_COROUTINE, CO_GENERATOR
from types import FunctionType, MethodType
from typing import Any, TypeVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate

from teola_plugin.shims.llamaindex.copies import attribute_values, copy_template
from teola_plugin.shims.llamaindex.engines import PROMPT_METHODS, QUERY_METHODS
from teola_plugin.shims.llamaindex.interceptors import defining_class, worker_of, written_function
from teola_plugin.shims.llamaindex.records import Unreadable, missing_attribute
from teola_plugin.tracer.report import Level
from teola_plugin.tracer.symbols import NotUnderstood

T = TypeVar("T")
TEMPLATES = (PromptTemplate, ChatPromptTemplate, SelectorPromptTemplate)
_BUILT = (
    ".query_engine",
    ".retriever",
    ".response_synthesizer",
    ".postprocessor",
    ".chat_engine",
    ".selector",
    ".question_gen",
    ".program",
    ".indices",
    ".tools",
    ".query_transform",
    ".ingestion",
    ".agent",
    "workflows.workflow",
    ".evaluation",
    ".base_",
)
"""Substrings of the names of modules whose classes are built of other objects."""
_HARMLESS = frozenset({"class_name", "__init__", "__repr__", "__str__", "__doc__"})


def rule_for(node: object, rules: Mapping[type, T]) -> T:
    """Return the rule of the class that `node` behaves like.

    Raises `NotUnderstood` if no rule fits, or if the user's own code changes what the class does.
    """
    base = next((cls for cls in type(node).__mro__ if cls in rules), None)
    if base is None:
        raise NotUnderstood(f"{type(node).__name__} is not known")
    if override := find_override(node, base):
        raise NotUnderstood(f"{override} changes what {base.__name__} does")
    return rules[base]


def written_method(node: object, *, is_async: bool) -> MethodType | None:
    """Return the method of the user's own class with which an engine or a retriever answers a query.

    None if LlamaIndex's code answers it, or if the class changes more than LlamaIndex leaves to it. An async query
    calls the sync method of a class without an async one.
    """
    kind = type(node)
    base: type = next((cls for cls in kind.__mro__ if is_framework_class(cls)), object)
    names = QUERY_METHODS.get(base)
    if names is None or find_override(node, base, (*names, *PROMPT_METHODS)):
        return None
    name = next((one for one in names[is_async::-1] if not is_framework_class(defining_class(kind, one))), "")
    function = written_function(kind, name) if name else None
    if function is None or function.__code__.co_flags & CO_GENERATOR:
        return None
    is_coroutine = bool(function.__code__.co_flags & CO_COROUTINE)
    return MethodType(function, node) if is_coroutine == (name == names[1]) else None


def is_framework_class(cls: type) -> bool:
    """Return True if a class is LlamaIndex's own."""
    return cls.__module__.startswith("llama_index.")


def find_override(node: object, base: type, ignored: Sequence[str] = ()) -> str:
    """Return the name of what overrides a method of the class `base`: a subclass, or a method set on the object.

    Empty if nothing does. `ignored`: names of methods that subclasses may override.
    """
    harmless = _HARMLESS.union(ignored)
    for cls in type(node).__mro__:
        if cls is base:
            break
        if any(callable(value) and name not in harmless and hasattr(base, name) for name, value in vars(cls).items()):
            return cls.__name__
    overriding_name = next(
        (name for name, value in vars(node).items() if callable(value) and callable(getattr(base, name, None))),
        "",
    )
    return f"{type(node).__name__}.{overriding_name}" if overriding_name else ""


@contextmanager
def refuse_unknown_attributes() -> Iterator[None]:
    """Raise `NotUnderstood` if the body of the `with` statement reads an attribute that the object lacks.

    Tested versions of LlamaIndex give it to all such objects.
    """
    try:
        yield
    except Unreadable as error:
        raise NotUnderstood(str(error)) from error
    except AttributeError as error:
        raise NotUnderstood(str(missing_attribute(error.obj, error.name))) from error


def copy_prompt(template: BasePromptTemplate) -> BasePromptTemplate:
    """Return a copy that may be formatted while the original is in use.

    Raises `NotUnderstood` if formatting runs code of the user's own.
    """
    templates = [template]
    if isinstance(template, SelectorPromptTemplate):
        templates += [template.default_template, *(part for _, part in template.conditionals or ())]
    for part in templates:
        if type(part) not in TEMPLATES and not type(part).__module__.startswith("llama_index.core."):
            raise NotUnderstood(f"{type(part).__name__} is not known to be pure")
        if part.function_mappings:
            raise NotUnderstood("a variable of the prompt is computed by a function")
        parser = part.output_parser
        if parser is not None and not type(parser).__module__.startswith("llama_index.core."):
            raise NotUnderstood(f"{type(parser).__name__} is not known to be pure")
    return copy_template(template)


def is_framework_function(function: Callable[..., Any]) -> bool:
    """Return True if a function is LlamaIndex's own."""
    return isinstance(function, FunctionType) and function.__module__.startswith("llama_index.core.")


def pool_backed(node: object) -> Any:
    """Return the object that sends the requests of a model, reranker or store to an engine of a pool.

    That is the worker of a routed object, or the object itself. None for an object that no engine serves.
    """
    worker = worker_of(node)
    if worker is None and hasattr(type(node), "request") and hasattr(node, "pool"):
        return node
    return worker


def is_pool_object(node: object) -> bool:
    """Return True for a model, reranker or store whose requests go to an engine of a pool."""
    return pool_backed(node) is not None


def report_level(node: object) -> Level:
    """Return the report's level of an object that is not lowered: `joined` if it contains pool-backed objects."""
    return "joined" if any(is_pool_object(one) for one in reachable_objects(node)) else "original"


def reachable_objects(root: object) -> Iterator[object]:
    """Yield `root` and the objects of LlamaIndex that it holds, through attributes and containers."""
    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen or isinstance(node, (str, bytes, int, float, CallbackManager, BasePromptTemplate)):
            continue
        seen.add(id(node))
        if isinstance(node, Mapping):
            todo += node.values()
        elif isinstance(node, (list, tuple)):
            todo += node
        elif hasattr(node, "__dict__") and not isinstance(node, type):
            yield node
            if is_composite(node):
                todo += attribute_values(node)


def is_composite(node: object) -> bool:
    """Return True for an object built of parts that may be pool-backed.

    False for data: nodes, documents and stores are not searched.
    """
    names = [cls.__module__ for cls in type(node).__mro__]
    return not is_pool_object(node) and any(part in name for name in names for part in _BUILT)
