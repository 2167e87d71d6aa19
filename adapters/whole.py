"""What is bound to an engine is bound wherever the object holds it, or not at all: never in part."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from teola_plugin.adapters.held import MOST, below, held, trail
from teola_plugin.errors import RegistrationError

_NOTHING_OF_YOURS = frozenset(
    {"asyncio", "chromadb", "faiss", "httpx", "httpx2", "logging", "numpy", "openai", "threading", "tokenizers"}
    | {"sentence_transformers", "torch", "transformers"}
)
"""Packages whose objects hold no model of the user's."""
_FUNCTIONS = (FunctionType, MethodType, partial)


def kept_by(root: Any, obj: Any, closed: tuple[type, ...] = (), *, functions: bool = False) -> str:
    """In words, what below `root` still holds that very object: in its closure, its globals, an attribute; empty for
    nothing. Runs nothing of the user's.

    `closed`: classes whose objects are not looked into, for what they hold stays as it is. With `functions`, only what
    functions of the user's hold counts.
    """

    def reach(node: Any) -> Iterable[Any]:
        home = str(getattr(type(node), "__module__", "")).partition(".")[0]
        return () if home in _NOTHING_OF_YOURS or issubclass(type(node), closed) else held(node)

    if functions:
        root = tuple(one for one in below(root, reach, most=MOST) if type(one) in _FUNCTIONS)
    way = [*trail(root, obj, reach, most=MOST)][:-1]
    named = next((one for one in reversed(way) if type(one) in _FUNCTIONS), None)
    if named is not None:
        return f"the function {_name_of(named)}"
    if not way:
        return ""
    return f"a {next((type(one).__name__ for one in reversed(way) if type(one) not in (dict, list, tuple)), 'part')}"


def in_part(obj: Any, keeper: str) -> RegistrationError:
    """The error for an object that is bound at one place, while `keeper` still holds the plain one."""
    return RegistrationError(
        f"the {type(obj).__name__} in bind= is also held by {keeper}, where it cannot be replaced.",
        hint="put model = pool.bound(model, engine) in its place there, or everywhere; or leave it unbound",
    )


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__).replace("<locals>.", "")
    return name if code is None else f"{name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"
