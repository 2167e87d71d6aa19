"""Jinja templates that are compiled once: LlamaIndex compiles a `RichPromptTemplate` each time it is formatted.

A compilation takes a millisecond in which no other thread of the process runs, and what runs ahead formats the same
template several times a query.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

from llama_index.core.prompts import BasePromptTemplate, RichPromptTemplate

from teola_plugin.shims import report_missing

REMEMBERED = 256
"""Templates that are kept compiled."""
_METHODS = ("format", "format_messages")


def compiled(template: BasePromptTemplate) -> BasePromptTemplate:
    """`template`, or for a `RichPromptTemplate` a copy that is compiled once. What it formats is the same.

    Touches the global name `Prompt` of LlamaIndex's module, which stands for what compiles: the copy's methods are
    LlamaIndex's own, with another function under that name. Without it (another version): the very template.
    """
    kind = _compiling_once() if type(template) is RichPromptTemplate else None
    if kind is None:
        return template
    made = template.model_copy()
    made.__class__ = kind
    return made


@lru_cache(maxsize=1)
def _compiling_once() -> type[RichPromptTemplate] | None:
    own = {name: inspect.getattr_static(RichPromptTemplate, name, None) for name in _METHODS}
    if not all(isinstance(method, FunctionType) and "Prompt" in method.__globals__ for method in own.values()):
        report_missing("llama-index-core", "RichPromptTemplate(Prompt)", "a template is compiled for each call")
        return None
    once = _once(own["format"].__globals__["Prompt"])
    methods = {name: _with(method, Prompt=once) for name, method in own.items()}
    return type("RichPromptTemplate", (RichPromptTemplate,), {"__module__": RichPromptTemplate.__module__, **methods})


def _with(method: FunctionType, **names: Any) -> FunctionType:
    """The same code, which finds other objects under these global names."""
    made = FunctionType(
        method.__code__, {**method.__globals__, **names}, method.__name__, method.__defaults__, method.__closure__
    )
    made.__kwdefaults__, made.__qualname__, made.__doc__ = method.__kwdefaults__, method.__qualname__, method.__doc__
    return made


def _once(prompt: Any) -> Callable[[str], Any]:
    """Compiles a text once; what it renders is not kept, since prompts hold users' data."""

    @lru_cache(maxsize=REMEMBERED)
    def make(text: str) -> Any:
        return prompt(text, render_cache=_Nothing())

    return make


class _Nothing:
    """A cache of rendered prompts that keeps none."""

    def get(self, context: dict[str, Any]) -> str | None:
        return None

    def set(self, context: dict[str, Any], prompt: str) -> None: ...

    def clear(self) -> None: ...
