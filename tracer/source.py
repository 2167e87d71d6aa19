"""The source of a function: found by the line at which its code begins, and compared with the code that runs."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Location = tuple[int, str]
"""First line and name of a function."""

_MAX_FILE_CHARACTERS = 1_000_000
_GENERATOR_FLAGS = 0x20 | 0x200
"""`co_flags` of generators and asynchronous generators."""
_SIGNATURE_FLAGS = 0x3FF
"""`co_flags` that say what a function is, without those of its file's `from __future__` imports."""


@lru_cache(maxsize=1024)
def source_of(code: CodeType) -> Definition | None:
    """Return the syntax tree that `code` was compiled from.

    Return None if there is no source, if it is no longer the same, or if the function is a generator.
    """
    if code.co_flags & _GENERATOR_FLAGS:
        return None
    try:
        text = "".join(linecache.getlines(code.co_filename))
        file = _parse_file(text) if text and len(text) <= _MAX_FILE_CHARACTERS else None
    except Exception:  # no source that can be read, or of another Python
        return None
    codes = () if file is None else file.codes.get(_location(code), ())
    compiled = next((compiled for compiled in codes if _is_same_code(code, compiled)), None)
    if file is None or compiled is None:
        return None
    definitions = file.definitions.get(_location(code), ())
    if len(definitions) > 1:
        definitions = [node for node in definitions if _compiles_to(node, compiled)][-1:]  # the innermost
    return definitions[0] if definitions else None


def _compiles_to(node: Definition, compiled: CodeType) -> bool:
    """Return True if all instructions of the code stand inside a lambda, which may not be alone in its line."""
    body = node.body
    if not isinstance(node, ast.Lambda) or not isinstance(body, ast.expr):
        return False
    begin, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    spans = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in compiled.co_positions()
        if end_column
    ]
    return bool(spans) and all(begin <= first and last <= end for first, last in spans)  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class _SourceFile:
    """The functions of a file, as syntax trees and compiled."""

    definitions: Mapping[Location, list[Definition]]
    codes: Mapping[Location, list[CodeType]]


@lru_cache(maxsize=64)
def _parse_file(text: str) -> _SourceFile:
    """Parse the text of a file, and compile it. Return its functions by first line and name."""
    tree = ast.parse(text)
    definitions: dict[Location, list[Definition]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            definitions.setdefault(location_of(node), []).append(node)
    codes: dict[Location, list[CodeType]] = {}
    for code in _nested_codes(compile(tree, "<source>", "exec", dont_inherit=True)):
        codes.setdefault(_location(code), []).append(code)
    return _SourceFile(definitions, codes)


def location_of(node: Definition) -> Location:
    """Return the first line of a definition, decorators included, and its name, as its code object has them."""
    if isinstance(node, ast.Lambda):
        return node.lineno, "<lambda>"
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.name


def _location(code: CodeType) -> Location:
    return code.co_firstlineno, code.co_name


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of all functions and classes inside a code object, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested_codes(constant)


def _is_same_code(left: CodeType, right: CodeType) -> bool:
    """Return True if both do the same, wherever they stand in their files."""
    return _behavior(left) == _behavior(right) and _are_equal_constants(left.co_consts, right.co_consts)


def _behavior(code: CodeType) -> tuple[Any, ...]:
    """Return the parts of a code object that decide what it does, apart from its constants."""
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags & _SIGNATURE_FLAGS,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
    )


def _are_equal_constants(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Return True if both tuples hold equal constants of the same types, nested functions included."""
    if len(left) != len(right):
        return False
    for one, other in zip(left, right, strict=True):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            if not _is_same_code(one, other):
                return False
        elif type(one) is not type(other) or one != other:
            return False
    return True
