"""Which objects are exactly what LlamaIndex made them, so that what they do is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate

from teola_plugin.shims.llamaindex.copies import Overlay, attributes, held, own_template
from teola_plugin.shims.llamaindex.records import Unreadable, missing
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
"""In the names of modules whose classes are built of parts."""
_HARMLESS = frozenset({"class_name", "__init__", "__repr__", "__str__", "__doc__"})


def rule_for(node: object, rules: Mapping[type, T]) -> T:
    """The entry of the class that `node` behaves like. Raises `NotUnderstood` where code of the user's own is in it."""
    known = next((cls for cls in type(node).__mro__ if cls in rules), None)
    if known is None:
        raise NotUnderstood(f"{type(node).__name__} is not known")
    if other := changed(node, known):
        raise NotUnderstood(f"{other} changes what {known.__name__} does")
    return rules[known]


def changed(node: object, known: type) -> str:
    """What overrides something of the class `known`: a subclass, or a method set on the object; empty for nothing."""
    for cls in type(node).__mro__:
        if cls is known:
            break
        if cls is Overlay or Overlay in cls.__bases__:
            continue
        if any(callable(value) and name not in _HARMLESS and hasattr(known, name) for name, value in vars(cls).items()):
            return cls.__name__
    own = next((name for name, value in attributes(node).items() if callable(value) and _is_method(known, name)), "")
    return f"{type(node).__name__}.{own}" if own else ""


def _is_method(cls: type, name: str) -> bool:
    return callable(getattr(cls, name, None))


@contextmanager
def as_made() -> Iterator[None]:
    """In the body, an attribute that is missing means: not what LlamaIndex makes, at least not the tested versions."""
    try:
        yield
    except Unreadable as error:
        raise NotUnderstood(str(error)) from error
    except AttributeError as error:
        raise NotUnderstood(str(missing(error.obj, error.name))) from error


def own_prompt(template: BasePromptTemplate) -> BasePromptTemplate:
    """A copy to be formatted beside the original, if that runs nothing of the user's. Raises `NotUnderstood`."""
    inner = [template]
    if isinstance(template, SelectorPromptTemplate):
        inner += [template.default_template, *(one for _, one in template.conditionals or ())]
    for one in inner:
        if type(one) not in TEMPLATES and not type(one).__module__.startswith("llama_index.core."):
            raise NotUnderstood(f"{type(one).__name__} is not known to be pure")
        if one.function_mappings:
            raise NotUnderstood("a variable of the prompt is computed by a function")
        parser = one.output_parser
        if parser is not None and not type(parser).__module__.startswith("llama_index.core."):
            raise NotUnderstood(f"{type(parser).__name__} is not known to be pure")
    return own_template(template)


def own_function(function: Callable[..., Any]) -> bool:
    """Whether a function is LlamaIndex's own."""
    return isinstance(function, FunctionType) and function.__module__.startswith("llama_index.core.")


def is_leaf(node: object) -> bool:
    """Whether an object of a pool does its work."""
    return hasattr(type(node), "request") and hasattr(node, "pool")


def level(node: object) -> Level:
    """Of an object that runs as it always did: whether pool-backed objects are in it."""
    return "joined" if any(is_leaf(one) for one in inside(node)) else "original"


def inside(root: object) -> Iterator[object]:
    """All objects of LlamaIndex below `root`, through attributes and containers, and it."""
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
                todo += held(node)


def is_composite(node: object) -> bool:
    """Whether it is built of parts that may be pool-backed; data (nodes, documents, stores) is not looked into."""
    names = [cls.__module__ for cls in type(node).__mro__]
    return not is_leaf(node) and any(part in name for name in names for part in _BUILT)
