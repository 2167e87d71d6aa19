"""Modules whose functions stand between a user's call and the framework's method, hidden from `stacklevel=`.

`warnings.warn(..., stacklevel=2)` names the caller of the function that warns. Between the user's line and the
framework's method stand entry points of accelerated objects, which would be named instead.
"""

from __future__ import annotations

import linecache
from types import CodeType, FunctionType
from typing import Any

HIDDEN = " [importlib._bootstrap]"
"""The end of the file name of hidden code. `warnings.warn` does not count frames whose file name has both words, so
that a warning names the line that imports; seen in CPython 3.11. An interpreter that counts them names a line of ours
in such a warning."""


def hide_from_stack_levels(module: dict[str, Any]) -> None:
    """Hide the functions and methods that a module defines; called at its end with `globals()`.

    Tracebacks show them with their source, and `HIDDEN` behind the name of the file.
    """
    for value in list(module.values()):
        defined_here = getattr(value, "__module__", None) == module["__name__"]
        for member in vars(value).values() if isinstance(value, type) and defined_here else (value,):
            for function in (member, getattr(member, "__func__", None), getattr(member, "__wrapped__", None)):
                if isinstance(function, FunctionType) and function.__globals__ is module:
                    function.__code__ = _hidden(function.__code__)
    linecache.lazycache(module["__file__"] + HIDDEN, module)


def _hidden(code: CodeType) -> CodeType:
    """Return a copy of a function's code, and of the functions inside it, whose file name ends with `HIDDEN`."""
    if code.co_filename.endswith(HIDDEN):
        return code
    inner = tuple(_hidden(const) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=code.co_filename + HIDDEN, co_consts=inner)
