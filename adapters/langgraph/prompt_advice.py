"""What makes the beginning of a prompt another in every call, or in every process: found in source, nothing runs.

A prompt's beginning is computed once and kept, as long as it stays the same. A clock, a random number or the order of a
set in it means that everything behind it is computed anew. Looked for where a value goes into a prompt: a message, the
argument of a call of a model or a template, what a function gives that is named after a prompt; and in lists of tools.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any

from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool

from teola_plugin.adapters.langgraph.varying import OF_DAYS, SETTLED, Kind, kind_of, name_of, says_the_day
from teola_plugin.tracer.functions.lookup import FreeNames
from teola_plugin.tracer.functions.source import Definition, source_of
from teola_plugin.tracer.functions.symbols import KnownValue


@dataclass(frozen=True, slots=True)
class Breaker:
    """A value that breaks the reuse of a prompt's beginning."""

    source: str
    """As it is written."""
    kind: Kind
    function: str
    line: int
    """In its file; 0 where it is of no function of the user's."""

    def __str__(self) -> str:
        remedy = "sort it" if self.kind is Kind.ORDER else "put it last: what stands behind it is computed anew"
        where = f"{self.function}, line {self.line}" if self.line else self.function
        return f"{where}: `{self.source}` is {self.kind.value}; {remedy}."


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a function."""

    breakers: tuple[Breaker, ...] = ()
    returned: Mapping[str, Breaker] = field(default_factory=dict)
    """Keys of the dictionary that it returns -> what varies there; the key "" for the value itself."""


def breakers_in(func: object) -> tuple[Breaker, ...]:
    """Of a function and of what it calls, as far as its source is at hand. Runs nothing, never raises."""
    return found_in(func).breakers


def found_in(func: object, depth: int = 0) -> Found:
    """`breakers_in`, and what the function gives on."""
    plain: Any = func.__func__ if type(func) is MethodType else func
    if type(plain) is not FunctionType:
        return Found()
    try:
        definition = source_of(plain.__code__)
        return Found() if definition is None else _Reader(plain, definition, depth).read()
    except Exception:  # a source that is stranger than was thought of
        return Found()


def varying_partials(template: BasePromptTemplate[Any]) -> Iterator[Breaker]:
    """Variables of a template that it fills in itself, by a function."""
    for name, value in template.partial_variables.items():
        made = found_in(value).returned.get("")
        kind = kind_of(name_of(value)) if callable(value) else None
        if made is None and kind is not None:
            made = Breaker(name_of(value), kind, "", 0)
        if made is not None:
            yield replace(made, function=f"the template's variable {name!r}", line=made.line)


# ------------------------------------------------------------ where it goes

_ASKING = ("invoke", "ainvoke", "stream", "astream", "batch", "abatch", "generate", "agenerate", "predict")
_WRITING = ("partial", "format_messages", "format_prompt", "from_template", "from_messages")
_FILLING = frozenset({*_ASKING, *_WRITING, "complete", "acomplete", "chat", "achat"})
"""Methods of models and templates."""
_TEMPLATES = ("PromptTemplate", "Message", "MessagePromptTemplate")
_TOOLS = frozenset({"bind_tools", "create_agent", "create_react_agent", "ToolNode"})
_NAMED_SO = ("prompt", "system", "instruction")
_DEEPEST = 3
"""Helpers of helpers that are looked into."""


class _Reader:
    """One function. The order of its statements counts for nothing: what varies once may vary everywhere."""

    def __init__(self, func: FunctionType, definition: Definition, depth: int) -> None:
        self._func, self._definition, self._depth = func, definition, depth
        self._around = FreeNames.of_function(func)
        self._local: dict[str, Breaker | None] = {}
        """Names that are assigned here -> what varies in them."""
        self._imported: dict[str, str] = {}
        self._inner: list[Breaker] = []

    def read(self) -> Found:
        nodes = list(ast.walk(self._definition))
        for node in nodes:
            self._bind(node)
        while any(list(map(self._assign, nodes))):
            pass
        returned = {key: found for key, value in self._given(nodes) if (found := self.varies(value)) is not None}
        breakers = [*self._sinks(nodes), *self._inner]
        name = self._func.__name__.lower()
        if "" in returned and any(word in name for word in _NAMED_SO):
            breakers.append(returned[""])
        return Found(tuple(dict.fromkeys(breakers)), returned)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self._imported |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            self._imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._local[node.id] = None
        elif isinstance(node, ast.arg):
            self._local[node.arg] = None

    def _assign(self, node: ast.AST) -> bool:
        """Whether more is known to vary than before."""
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            targets, value = [node.target], node.iter
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            return False
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        new = [name for name in names if self._local.get(name) is None]
        found = self.varies(value) if new else None
        if found is None:
            return False
        self._local |= dict.fromkeys(new, found)
        return True

    def _given(self, nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
        """What it returns: by key, where that is a dictionary or a `Command` with one."""
        values = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
        if isinstance(self._definition, ast.Lambda):
            values.append(self._definition.body)
        for value in values:
            if isinstance(value, ast.Call):
                value = next((one.value for one in value.keywords if one.arg == "update"), value)
            if not isinstance(value, ast.Dict):
                yield "", value
                continue
            for key, one in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, one

    def _sinks(self, nodes: list[ast.AST]) -> Iterator[Breaker]:
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [*node.args, *(one.value for one in node.keywords)]
            fills = name.endswith(_TEMPLATES) or (isinstance(node.func, ast.Attribute) and name in _FILLING)
            if (not fills and name not in _TOOLS) or self._is_no_prompt(node.func):
                continue
            found = [one for value in given if (one := self.varies(value)) is not None]
            yield from (one for one in found if fills or one.kind is Kind.ORDER)

    def _is_no_prompt(self, func: ast.expr) -> bool:
        """Whether it is the method of an object that is known to be no model."""
        owner = func.value if isinstance(func, ast.Attribute) else None
        return isinstance(owner, ast.Name) and issubclass(type(self._known(owner)), (BaseRetriever, BaseTool))

    # ------------------------------------------------------------ values

    def varies(self, value: ast.expr) -> Breaker | None:
        """What of a value is another in every call."""
        if isinstance(value, ast.Compare):
            return None
        if isinstance(value, ast.Set | ast.SetComp):
            return self._breaker(value, Kind.ORDER)
        if isinstance(value, ast.Lambda):
            return self.varies(value.body)
        if isinstance(value, ast.FormattedValue) and says_the_day(value.format_spec):
            return None
        if isinstance(value, ast.Name | ast.Attribute):
            return self._named(value)
        if isinstance(value, ast.Call):
            return self._called(value)
        return self._any(ast.iter_child_nodes(value))

    def _any(self, nodes: Any) -> Breaker | None:
        for node in nodes:
            if isinstance(node, ast.comprehension):
                node = node.iter
            found = self.varies(node) if isinstance(node, ast.expr) else None
            if found is not None:
                return found
        return None

    def _named(self, value: ast.Name | ast.Attribute) -> Breaker | None:
        kind = kind_of(self._full_name(value))
        if kind is not None and kind is not Kind.ORDER:
            return self._breaker(value, kind)
        if isinstance(value, ast.Attribute):
            return None if value.attr in OF_DAYS else self.varies(value.value)
        if issubclass(type(self._known(value)), (set, frozenset)):
            return self._breaker(value, Kind.ORDER)
        return self._local.get(value.id)

    def _called(self, call: ast.Call) -> Breaker | None:
        name = self._full_name(call.func)
        if name in SETTLED:
            return None
        kind = kind_of(name)
        if kind is not None:
            told = name == "time.strftime" and len(call.args) == 1 and says_the_day(call.args[0])
            return None if told else self._breaker(call, kind)
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method in OF_DAYS or (method == "strftime" and call.args and says_the_day(call.args[0])):
            return None
        helper = self._helped(call)
        given = (*call.args, *(one.value for one in call.keywords))
        owner = (call.func.value,) if isinstance(call.func, ast.Attribute) else ()
        return helper or self._any((*owner, *given))

    def _helped(self, call: ast.Call) -> Breaker | None:
        """Of a call of another function of the user's."""
        helper = self._known(call.func) if isinstance(call.func, ast.Name) else None
        if type(helper) is not FunctionType or helper is self._func or self._depth >= _DEEPEST:
            return None
        found = found_in(helper, self._depth + 1)
        self._inner += found.breakers
        made = found.returned.get("")
        return None if made is None else replace(made, source=ast.unparse(call), **self._place(call))

    def _breaker(self, value: ast.expr, kind: Kind) -> Breaker:
        return Breaker(ast.unparse(value), kind, **self._place(value))

    def _place(self, value: ast.expr) -> dict[str, Any]:
        return {"function": self._func.__qualname__.rpartition("<locals>.")[2], "line": value.lineno}

    # ------------------------------------------------------------ names

    def _known(self, name: ast.expr) -> Any:
        """The object that a free name stands for; None where that is not known."""
        if not isinstance(name, ast.Name) or name.id in self._local or name.id in self._imported:
            return None
        found = self._around.read(name.id)
        return found.value if isinstance(found, KnownValue) else None

    def _full_name(self, value: ast.expr) -> str:
        """With its module; empty for what cannot be told."""
        if isinstance(value, ast.Attribute):
            owner = self._full_name(value.value)
            return f"{owner}.{value.attr}" if owner else ""
        if isinstance(value, ast.Name):
            return self._imported.get(value.id) or name_of(self._known(value))
        return ""
