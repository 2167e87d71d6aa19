"""Read messages of errors, commands and logs from the sources, as syntax trees; nothing of the sources runs.

The reference lists those of errors (tools/docs_site.py), and the check of prose reads them all (tools/check_prose.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("teola_plugin", "adapters", "tracer", "server")
FILLED_IN = "…"
"""Stands in a message for a value that is known at run time."""
_BASES = ("Exception", "ValueError", "TypeError", "RuntimeError", "KeyError", "AttributeError", "ImportError")
_HELP = ("help", "description", "epilog")
_LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ErrorText:
    """A message with its hint, at one place of the sources."""

    file: str
    line: int
    error: str
    """The class of the error; empty for a hint that stands alone, and for texts of commands, logs and enumerations."""
    message: str
    hint: str = ""
    status: str = ""
    """The HTTP status, and the `code` of the body: of errors of the server."""
    code: str = ""


@dataclass
class ErrorMakers:
    """Classes and functions that make errors, and the names of their positional parameters."""

    parameters: dict[str, list[str]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    """By class or function: the class of the errors that it makes."""
    statuses: dict[str, str] = field(default_factory=dict)
    """By function: the HTTP status of the errors that it makes."""


def python_files(root: Path) -> Iterator[Path]:
    """Yield the files of the packages, each once: `teola_plugin` has links to the other packages."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.resolve() == path:
                yield path


def error_texts(root: Path) -> list[ErrorText]:
    """Return the messages and hints of errors that the packages below `root` can raise, as far as they are literals.

    Also the help of commands, messages to logs, and texts of enumerations, such as reasons in reports.
    """
    root = root.resolve()
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in python_files(root)}
    makers = _error_makers(trees)
    texts: list[ErrorText] = []
    for path, tree in trees.items():
        _add_texts(tree, path.relative_to(root).as_posix(), makers, {}, texts)
    return texts


def _error_makers(trees: Mapping[Path, ast.Module]) -> ErrorMakers:
    """Find the classes of errors, and the functions whose return annotation is one of them."""
    makers = ErrorMakers(
        {name: ["message"] for name in _BASES},
        {name: name for name in _BASES},
    )
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    while True:
        added = [
            node
            for node in classes
            if node.name not in makers.classes and any(ast.unparse(base) in makers.classes for base in node.bases)
        ]
        if not added:
            break
        for one in added:
            makers.classes[one.name] = one.name
            own = [part for part in one.body if isinstance(part, _Function) and part.name == "__init__"]
            bases = [ast.unparse(base) for base in one.bases]
            inherited = makers.parameters[next(base for base in bases if base in makers.classes)]
            makers.parameters[one.name] = _parameters(own[0])[1:] if own else inherited
    for node in nodes:
        if isinstance(node, _Function) and node.returns is not None:
            name = ast.unparse(node.returns).strip("'\"")
            if name in makers.classes and node.name not in makers.classes:
                makers.classes[node.name] = makers.classes[name]
                makers.parameters[node.name] = [one for one in _parameters(node) if one not in ("self", "cls")]
                statuses = re.findall(r"HttpError\((\d+)", ast.unparse(node))
                makers.statuses[node.name] = statuses[0] if statuses else ""
    return makers


def _parameters(function: _Function) -> list[str]:
    return [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]


def _add_texts(
    node: ast.AST, file: str, makers: ErrorMakers, known: dict[str, ast.expr], texts: list[ErrorText]
) -> None:
    """Add the messages and hints below a node. `known` are the values of names that were assigned before it."""
    if isinstance(node, _Function):
        known = dict(known)
    if isinstance(node, ast.Call):
        found = [_text_of(node, file, makers, known), *_other_texts(node, file, known)]
        texts.extend(text for text in found if text is not None)
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Enum" for base in node.bases):
        values = [part for statement in node.body if isinstance(statement, ast.Assign) for part in ast.walk(statement)]
        literals = [part for part in values if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        texts.extend(ErrorText(file, part.lineno, "", str(part.value)) for part in literals)
    for child in ast.iter_child_nodes(node):
        _add_texts(child, file, makers, known, texts)
        if isinstance(child, ast.Assign):
            for target in child.targets:
                known.update(_assigned(target, child.value))


def _text_of(node: ast.Call, file: str, makers: ErrorMakers, known: Mapping[str, ast.expr]) -> ErrorText | None:
    """Return the message and the hint in the arguments of a call; None if it has neither."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    arguments = dict(zip(makers.parameters.get(function, ()), node.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    parts = {
        name: literal_text(arguments[name], known)
        for name in ("message", "reason", "hint", "status", "code")
        if name in arguments
    }
    message, hint = parts.get("message", parts.get("reason", "")), parts.get("hint", "")
    error = makers.classes.get(function, "")
    if not (error and re.search(r"[a-z]", message)) and not re.search(r"[a-z]", hint):
        return None
    status = parts.get("status", makers.statuses.get(function, ""))
    return ErrorText(file, node.lineno, error, message, hint, status, parts.get("code", "").strip(FILLED_IN))


def _other_texts(node: ast.Call, file: str, known: Mapping[str, ast.expr]) -> Iterator[ErrorText]:
    """Yield the help of a command or an option in the arguments of a call, or the message of a call of a log."""
    for keyword in node.keywords:
        if keyword.arg in _HELP:
            yield ErrorText(file, node.lineno, "", literal_text(keyword.value, known))
    method = node.func
    if isinstance(method, ast.Attribute) and method.attr in _LOG_METHODS and "log" in ast.unparse(method.value):
        yield from (ErrorText(file, node.lineno, "", literal_text(text, known)) for text in node.args[:1])


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, part in zip(target.elts, value.elts, strict=False):
            yield from _assigned(one, part)


def literal_text(node: ast.AST, known: Mapping[str, ast.expr], depth: int = 0) -> str:
    """Return a text in the sources as far as it is literal.

    Args:
        node: The expression.
        known: Values of names that were assigned before.
        depth: How many names have been replaced by their values to get here.

    Returns:
        The text, with `FILLED_IN` for values of run time, and ` | ` between alternatives.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal_text(part, known, depth) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return literal_text(node.value, known, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal_text(node.left, known, depth) + literal_text(node.right, known, depth)
    if isinstance(node, ast.IfExp):
        return f"{literal_text(node.body, known, depth)} | {literal_text(node.orelse, known, depth)}"
    if isinstance(node, ast.Name) and node.id in known and depth < 4:
        return literal_text(known[node.id], known, depth + 1)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "extra":
        extras = [f"pip install '.[{literal_text(argument, known, depth)}]'" for argument in node.args]
        return f"in a checkout of teola-plugin, {' or '.join(extras)}"
    return FILLED_IN
