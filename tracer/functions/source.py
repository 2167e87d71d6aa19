"""The source of a function at hand: found by where its code says it stands, and compared with what runs."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_LONGEST = 1_000_000
"""Characters of a file that is looked into."""
_YIELDS = 0x20 | 0x200
"""Flags of a code that gives its values one by one."""


@lru_cache(maxsize=1024)
def source_of(code: CodeType) -> Definition | None:
    """What the code was compiled from; None where that is not at hand, is no longer the same, or yields values."""
    if code.co_flags & _YIELDS:
        return None
    try:
        lines = linecache.getlines(code.co_filename)
        return _found(code, "".join(lines)) if lines else None
    except Exception:  # no source that can be read, or of another Python
        return None


def _found(code: CodeType, text: str) -> Definition | None:
    file = _file(text) if len(text) <= _LONGEST else None
    if file is None or not any(_same(code, one) for one in file.codes.get(_place(code), ())):
        return None
    here = file.definitions.get(_place(code), ())
    return here[0] if len(here) == 1 else None


_SHAPE = 0x3FF
"""Flags that say what a function is, not what its file imports of the future."""
Place = tuple[int, str]
"""First line and name of a function."""


@dataclass(frozen=True, slots=True)
class _File:
    definitions: Mapping[Place, list[Definition]]
    codes: Mapping[Place, list[CodeType]]


@lru_cache(maxsize=64)
def _file(text: str) -> _File:
    tree = ast.parse(text)
    definitions: dict[Place, list[Definition]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            definitions.setdefault(standing(node), []).append(node)
    codes: dict[Place, list[CodeType]] = {}
    for code in _inside(compile(tree, "<source>", "exec", dont_inherit=True)):
        codes.setdefault(_place(code), []).append(code)
    return _File(definitions, codes)


def standing(node: Definition) -> Place:
    """Where a definition begins, and its name."""
    if isinstance(node, ast.Lambda):
        return node.lineno, "<lambda>"
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]), node.name


def _place(code: CodeType) -> Place:
    return code.co_firstlineno, code.co_name


def _inside(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _inside(const)


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether both do the same, wherever they stand."""
    return _does(one) == _does(other) and _constants_agree(one.co_consts, other.co_consts)


def _does(code: CodeType) -> tuple[Any, ...]:
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags & _SHAPE,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
    )


def _constants_agree(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            if not _same(one, other):
                return False
        elif type(one) is not type(other) or one != other:
            return False
    return True
