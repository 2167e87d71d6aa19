"""Finds where source code touches private names of other packages. It reads syntax trees and imports nothing.

A framework's private names may be touched in `teola_plugin/shims/` only. These are the kinds of touches:

=============  =======================================================================================================
kind           what
=============  =======================================================================================================
`import`       a private name or a private module of another package: `from framework.a import _b`,
               `from framework._a import b`
`attribute`    `x._b`, unless this file, or a class of ours that a class of this file extends, defines `_b`
`inherited`    the same for `self._b`, `cls._b`, `super()._b`
`string`       the same for `"_b"` or `"a._b"`, as passed to `getattr` and similar functions. Documentation and ends of
               other strings do not count
`patch`        a name is set on what another package owns: `Class.method = ...` of an imported class or module
`code`         a code object is made or replaced: `CodeType(...)`, `replace(co_...=...)`, `__code__ = ...`
=============  =======================================================================================================

Names of the standard library (`sys._getframe`, `_replace` of named tuples) and names with two underscores at both ends
do not count. Methods that a framework asks its users to write (`_generate`, `_call`) are found as `inherited` where
they are called but not written. The argument `allowed` is for them.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("teola_plugin", "adapters", "tracer", "server")
OURS = ("teola_plugin", "adapters", "tracer", "server")
STANDARD = frozenset({"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_value2member_map_", "_missing_"})
"""Public names of the standard library's named tuples and enumerations, in spite of their underscore."""
_PRIVATE = re.compile(r"_(?!_)[A-Za-z]\w*|__[A-Za-z]\w*(?<!__)")
_STRING = re.compile(r"(?:\w+\.)*(_(?!_)[A-Za-z]\w*)(?:\.\w+)*")


@dataclass(frozen=True, order=True)
class Touch:
    """One place that touches a private name.

    `path` is relative to the repository, `name` is the private name, `text` is the line of source.
    """

    path: str
    line: int
    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind} {self.name}: {self.text}"


def touches(
    folders: Sequence[str] = SOURCES,
    *,
    leave_out: Sequence[str] = ("teola_plugin/shims",),
    allowed: Mapping[str, Iterable[str]] | None = None,
) -> list[Touch]:
    """Return every touch in the files under `folders`, in order.

    Args:
        folders: files or folders, relative to the repository.
        leave_out: files or folders below `folders` that are not read.
        allowed: names that are no touch, by the file or folder in which they may stand ("" for all). Say why there.
    """
    code = Code.read()
    paths = [path for path in code.modules if _under(path, folders) and not _under(path, leave_out)]
    all_touches = {touch for path in paths for touch in code.touches(path)}
    return sorted(touch for touch in all_touches if not _is_allowed(touch, allowed or {}))


def _is_allowed(touch: Touch, allowed: Mapping[str, Iterable[str]]) -> bool:
    return any(_under(touch.path, (folder,)) and touch.name in names for folder, names in allowed.items())


def _under(path: str, folders: Sequence[str]) -> bool:
    return any(not folder or path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None and name not in STANDARD


@dataclass
class Module:
    """One source file: the private names that it defines, its classes with their bases, and its imports."""

    path: str
    source: str
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by_class: dict[str, set[str]] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)
    imported: dict[str, str] = field(default_factory=dict)

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree.

        Garbage collection is off meanwhile, because it can make parsing fail in Python 3.11.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(self.source)
        finally:
            if collects:
                gc.enable()

    @cached_property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    @cached_property
    def no_names(self) -> set[ast.AST]:
        """Return the strings that are not names: documentation, ends of other strings."""
        strings: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr):
                strings.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                strings.update(node.values[1:])
            elif isinstance(node, ast.Call) and _last_name(node.func) in ("endswith", "removesuffix"):
                strings.update(node.args)
        return strings

    def gather(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = tuple(_last_name(base) for base in node.bases)
                self.by_class.setdefault(node.name, set()).update(_members(node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._imports(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.defined.add(node.id)
            elif isinstance(node, ast.arg):
                self.defined.add(node.arg)
        for names in self.by_class.values():
            self.defined |= names

    def _imports(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imported[alias.asname or alias.name.split(".")[0]] = alias.name
        else:
            for alias in node.names:
                self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"


class Code:
    """All files of the project, since a class may extend one of another file."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.modules = {module.path: module for module in modules}
        self._classes: dict[str, list[tuple[tuple[str, ...], set[str]]]] = {}
        for module in self.modules.values():
            module.gather()
            for name, bases in module.classes.items():
                self._classes.setdefault(name, []).append((bases, module.by_class[name]))

    @classmethod
    def read(cls, root: Path = ROOT, sources: Sequence[str] = SOURCES) -> Code:
        """Read all files.

        Links such as `teola_plugin/adapters` are left out, because their targets are read themselves.
        """
        files = [path for source in sources for path in sorted((root / source).rglob("*.py"))]
        inside = [path for path in files if path.resolve() == path]
        return cls(Module(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in inside)

    def touches(self, path: str) -> Iterator[Touch]:
        module = self.modules[path]
        defined_names = module.defined | {name for cls in module.classes for name in self.members(cls)}
        for node in ast.walk(module.tree):
            for kind, name in _of_node(node, module, defined_names):
                yield Touch(path, node.lineno, kind, name, module.lines[node.lineno - 1].strip())

    def members(self, cls: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Return the names that a class and its bases in the project define. Classes with the same name are merged."""
        members: set[str] = set()
        for bases, names in self._classes.get(cls, []):
            members |= names
            for base in bases:
                if base not in seen:
                    members |= self.members(base, seen | {cls})
        return members


def _of_node(node: ast.AST, module: Module, defined_names: set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (("import", name) for name in _private_imports(node))
    elif isinstance(node, ast.Attribute):
        if is_private(node.attr) and node.attr not in defined_names and not _standard(node.value, module):
            yield ("inherited" if _is_self(node.value) else "attribute"), node.attr
        if isinstance(node.ctx, ast.Store | ast.Del):
            yield from _stored(node, module)
    elif isinstance(node, ast.Call):
        if _last_name(node.func) == "CodeType":
            yield "code", "CodeType"
        yield from (("code", word.arg) for word in node.keywords if word.arg and word.arg.startswith("co_"))
    elif isinstance(node, ast.Name) and node.id == "__code__" and isinstance(node.ctx, ast.Store):
        yield "code", node.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in module.no_names:
        match = _STRING.fullmatch(node.value)
        if match is not None and match[1] not in defined_names and is_private(match[1]):
            yield "string", match[1]


def _stored(node: ast.Attribute, module: Module) -> Iterator[tuple[str, str]]:
    if node.attr == "__code__":
        yield "code", "__code__"
    elif isinstance(node.value, ast.Name) and _foreign(module.imported.get(node.value.id, "")):
        yield "patch", node.attr


def _foreign(dotted: str) -> bool:
    """Return True if the name is imported from a package that is neither ours nor Python's."""
    first = dotted.split(".")[0]
    return bool(first) and first not in OURS and first not in sys.stdlib_module_names


def _private_imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        dotted = [alias.name for alias in node.names]
    elif node.level or node.module is None:
        return []
    else:
        dotted = [f"{node.module}.{alias.name}" for alias in node.names]
    private = []
    for name in dotted:
        if _foreign(name) and any(map(is_private, name.split(".")[1:])):
            private.append(name)
    return private


def _standard(value: ast.expr, module: Module) -> bool:
    """Return True if the value belongs to a module of the standard library, as in `sys._getframe`."""
    while isinstance(value, ast.Attribute):
        value = value.value
    if not isinstance(value, ast.Name):
        return False
    return module.imported.get(value.id, "").split(".")[0] in sys.stdlib_module_names


def _is_self(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _last_name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        return _last_name(base.value)
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _members(cls: ast.ClassDef) -> Iterator[str]:
    """Yield the names in the class's body, and the attributes that its methods set on `self`."""
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield from ([node.value] if _in_slots(cls, node) else [])


def _in_slots(cls: ast.ClassDef, string: ast.Constant) -> bool:
    return any(
        isinstance(statement, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "__slots__" for target in statement.targets)
        and any(node is string for node in ast.walk(statement.value))
        for statement in cls.body
    )
