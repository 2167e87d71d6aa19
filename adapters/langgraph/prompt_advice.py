"""Values that make the beginning of a prompt another in every call, or in every process: found in source, nothing runs.

An engine computes the beginning of a prompt once and keeps it, as long as it stays the same. With a clock, a random
number or the order of a set in it, everything behind it is computed anew. Searched are values that go into a prompt: a
message, the argument of a call of a model or a template, what a function returns that is named after a prompt; and
lists of tools.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool

from teola_plugin.tracer.functions.lookup import FreeNames
from teola_plugin.tracer.functions.source import Definition, source_of
from teola_plugin.tracer.functions.symbols import KnownValue


class Variation(Enum):
    """The way in which a value varies."""

    TIME = "the time, another in every call"
    RANDOM = "random, another in every call"
    ORDER = "a set, whose order is another in every process"


@dataclass(frozen=True, slots=True)
class VaryingValue:
    """A value that breaks the reuse of a prompt's beginning."""

    source: str
    """The expression, as it is written."""
    variation: Variation
    function: str
    line: int
    """The line in its file; 0 if no function of the user's has it."""

    def __str__(self) -> str:
        is_order = self.variation is Variation.ORDER
        remedy = "sort it" if is_order else "put it last: what stands behind it is computed anew"
        where = f"{self.function}, line {self.line}" if self.line else self.function
        return f"{where}: `{self.source}` is {self.variation.value}; {remedy}."


@dataclass(frozen=True, slots=True)
class FunctionAnalysis:
    """The varying values of a function."""

    in_prompts: tuple[VaryingValue, ...] = ()
    """Those that go into a prompt, in the function or in helpers that it calls."""
    returned: Mapping[str, VaryingValue] = field(default_factory=dict)
    """Those in its result, by the keys of the dictionary that it returns; the key "" for the result itself."""


def varying_in_prompts(function: object) -> tuple[VaryingValue, ...]:
    """Return the varying values in prompts that a function makes, as far as its source is available. Never raises."""
    return analyse(function).in_prompts


def analyse(function: object, depth: int = 0) -> FunctionAnalysis:
    """Analyse the source of a function, and of the helpers that it calls. Never raises."""
    plain: Any = function.__func__ if type(function) is MethodType else function
    if type(plain) is not FunctionType:
        return FunctionAnalysis()
    try:
        definition = source_of(plain.__code__)
        return FunctionAnalysis() if definition is None else _Analyser(plain, definition, depth).analyse()
    except Exception:  # a source that is stranger than was thought of
        return FunctionAnalysis()


def varying_partials(template: BasePromptTemplate[Any]) -> Iterator[VaryingValue]:
    """Yield the varying values of variables that a template fills in itself, by a function."""
    for name, value in template.partial_variables.items():
        varying = analyse(value).returned.get("")
        variation = _variation_of(_qualified_name(value)) if callable(value) else None
        if varying is None and variation is not None:
            varying = VaryingValue(_qualified_name(value), variation, "", 0)
        if varying is not None:
            yield replace(varying, function=f"the template's variable {name!r}", line=varying.line)


# ------------------------------------------------------------ one function

_CALLING = ("invoke", "ainvoke", "stream", "astream", "batch", "abatch", "generate", "agenerate", "predict")
_FORMATTING = ("partial", "format_messages", "format_prompt", "from_template", "from_messages")
_PROMPT_METHODS = frozenset({*_CALLING, *_FORMATTING, "complete", "acomplete", "chat", "achat"})
"""Methods of models and templates."""
_TEMPLATES = ("PromptTemplate", "Message", "MessagePromptTemplate")
"""Ends of the names of functions and classes that make prompts."""
_TOOL_LISTS = frozenset({"bind_tools", "create_agent", "create_react_agent", "ToolNode"})
"""Functions that are given tools, whose order counts."""
_PROMPT_NAMES = ("prompt", "system", "instruction")
_MAX_DEPTH = 3
"""Levels of helpers that are analysed."""


class _Analyser:
    """The analysis of one function, for any order of its statements."""

    def __init__(self, function: FunctionType, definition: Definition, depth: int) -> None:
        self._function, self._definition, self._depth = function, definition, depth
        self._free_names = FreeNames.of_function(function)
        self._locals: dict[str, VaryingValue | None] = {}
        """Names that are assigned here, with what varies in their values."""
        self._imports: dict[str, str] = {}
        """Names that are imported here, with their full names."""
        self._in_helpers: list[VaryingValue] = []

    def analyse(self) -> FunctionAnalysis:
        nodes = list(ast.walk(self._definition))
        for node in nodes:
            self._bind(node)
        while any(list(map(self._assign, nodes))):
            pass
        results = ((key, self._varying(value)) for key, value in self._returned(nodes))
        returned = {key: varying for key, varying in results if varying is not None}
        in_prompts = [*self._in_prompts(nodes), *self._in_helpers]
        name = self._function.__name__.lower()
        if "" in returned and any(word in name for word in _PROMPT_NAMES):
            in_prompts.append(returned[""])
        return FunctionAnalysis(tuple(dict.fromkeys(in_prompts)), returned)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self._imports |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            self._imports |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._locals[node.id] = None
        elif isinstance(node, ast.arg):
            self._locals[node.arg] = None

    def _assign(self, node: ast.AST) -> bool:
        """Note the names that a statement gives a varying value. Return True if there were any new ones."""
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            targets, value = [node.target], node.iter
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            return False
        names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        new_names = [name for name in names if self._locals.get(name) is None]
        varying = self._varying(value) if new_names else None
        if varying is None:
            return False
        self._locals |= dict.fromkeys(new_names, varying)
        return True

    def _returned(self, nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
        """Yield the results of the function: by key, if they are a dictionary or a `Command` with one."""
        values = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
        if isinstance(self._definition, ast.Lambda):
            values.append(self._definition.body)
        for value in values:
            if isinstance(value, ast.Call):
                value = next((one.value for one in value.keywords if one.arg == "update"), value)
            if not isinstance(value, ast.Dict):
                yield "", value
                continue
            for key, item in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, item

    def _in_prompts(self, nodes: list[ast.AST]) -> Iterator[VaryingValue]:
        """Yield the varying values in arguments of calls that make or send prompts."""
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_method = isinstance(node.func, ast.Attribute) and name in _PROMPT_METHODS
            makes_prompt = name.endswith(_TEMPLATES) or is_method
            if not makes_prompt and name not in _TOOL_LISTS:
                continue
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if isinstance(owner, ast.Name) and issubclass(type(self._object(owner)), (BaseRetriever, BaseTool)):
                continue  # a method of an object that is no model
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            values = [varying for argument in arguments if (varying := self._varying(argument)) is not None]
            yield from (varying for varying in values if makes_prompt or varying.variation is Variation.ORDER)

    # ------------------------------------------------------------ expressions

    def _varying(self, value: ast.expr) -> VaryingValue | None:
        """Return the part of an expression whose value varies from call to call."""
        if isinstance(value, ast.Compare):
            return None
        if isinstance(value, ast.Set | ast.SetComp):
            return self._varying_value(value, Variation.ORDER)
        if isinstance(value, ast.Lambda):
            return self._varying(value.body)
        if isinstance(value, ast.FormattedValue) and _is_date_format(value.format_spec):
            return None
        if isinstance(value, ast.Name | ast.Attribute):
            return self._varying_name(value)
        if isinstance(value, ast.Call):
            return self._varying_call(value)
        return self._first_varying(ast.iter_child_nodes(value))

    def _first_varying(self, nodes: Iterable[ast.AST]) -> VaryingValue | None:
        for node in nodes:
            expression = node.iter if isinstance(node, ast.comprehension) else node
            varying = self._varying(expression) if isinstance(expression, ast.expr) else None
            if varying is not None:
                return varying
        return None

    def _varying_name(self, value: ast.Name | ast.Attribute) -> VaryingValue | None:
        variation = _variation_of(self._full_name(value))
        if variation is not None and variation is not Variation.ORDER:
            return self._varying_value(value, variation)
        if isinstance(value, ast.Attribute):
            return None if value.attr in _PARTS_OF_DATE else self._varying(value.value)
        if issubclass(type(self._object(value)), (set, frozenset)):
            return self._varying_value(value, Variation.ORDER)
        return self._locals.get(value.id)

    def _varying_call(self, call: ast.Call) -> VaryingValue | None:
        name = self._full_name(call.func)
        if name in _ORDERLESS:
            return None
        variation = _variation_of(name)
        if variation is not None:
            is_date = name == "time.strftime" and len(call.args) == 1 and _is_date_format(call.args[0])
            return None if is_date else self._varying_value(call, variation)
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method in _PARTS_OF_DATE or (method == "strftime" and call.args and _is_date_format(call.args[0])):
            return None
        arguments = (*call.args, *(keyword.value for keyword in call.keywords))
        owner = (call.func.value,) if isinstance(call.func, ast.Attribute) else ()
        return self._varying_helper(call) or self._first_varying((*owner, *arguments))

    def _varying_helper(self, call: ast.Call) -> VaryingValue | None:
        """Return the call itself if it calls another function of the user's whose result varies."""
        helper = self._object(call.func) if isinstance(call.func, ast.Name) else None
        if type(helper) is not FunctionType or helper is self._function or self._depth >= _MAX_DEPTH:
            return None
        analysis = analyse(helper, self._depth + 1)
        self._in_helpers += analysis.in_prompts
        varying = analysis.returned.get("")
        return None if varying is None else self._varying_value(call, varying.variation)

    def _varying_value(self, value: ast.expr, variation: Variation) -> VaryingValue:
        function = self._function.__qualname__.rpartition("<locals>.")[2]
        return VaryingValue(ast.unparse(value), variation, function, value.lineno)

    # ------------------------------------------------------------ names

    def _object(self, name: ast.expr) -> Any:
        """Return the object that a free name stands for; None where that is not known."""
        if not isinstance(name, ast.Name) or name.id in self._locals or name.id in self._imports:
            return None
        value = self._free_names.read(name.id)
        return value.value if isinstance(value, KnownValue) else None

    def _full_name(self, value: ast.expr) -> str:
        """Return a name with its module; empty if it cannot be told."""
        if isinstance(value, ast.Attribute):
            owner = self._full_name(value.value)
            return f"{owner}.{value.attr}" if owner else ""
        if isinstance(value, ast.Name):
            return self._imports.get(value.id) or _qualified_name(self._object(value))
        return ""


# ------------------------------------------------------------ functions whose result varies, by the names of libraries

_CLOCKS = frozenset(
    {
        *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
        *(f"time.{name}" for name in ("time", "time_ns", "ctime", "localtime", "gmtime", "asctime", "monotonic")),
        *("time.perf_counter", "time.strftime", "django.utils.timezone.now"),
        *("pendulum.now", "arrow.now", "arrow.utcnow"),
    }
)
_RANDOM = ("random.", "secrets.", "numpy.random.", "uuid.uuid1", "uuid.uuid4", "uuid.uuid6", "uuid.uuid7", "os.urandom")
_SETS = frozenset({"builtins.set", "builtins.frozenset"})
_ORDERLESS = frozenset(f"builtins.{name}" for name in ("sorted", "min", "max", "sum", "len", "any", "all", "bool"))
"""Builtins whose result does not depend on the order of their argument."""
_PARTS_OF_DATE = frozenset({"date", "toordinal", "weekday", "isoweekday", "year", "month", "day"})
_TIME_FORMATS = ("%H", "%M", "%S", "%f", "%c", "%X", "%s", "%T", "%R", "%I", "%p", "%r")
"""Formats that show more than the day."""


def _variation_of(name: str) -> Variation | None:
    if name in _SETS:
        return Variation.ORDER
    if name in _CLOCKS:
        return Variation.TIME
    return Variation.RANDOM if name.startswith(_RANDOM) else None


def _is_date_format(expression: ast.expr | None) -> bool:
    """Return True for the format of a time that shows the day and nothing more."""
    is_one_text = isinstance(expression, ast.JoinedStr) and len(expression.values) == 1
    text = expression.values[0] if is_one_text else expression  # type: ignore[union-attr]
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str) or "%" not in text.value:
        return False
    return not any(time_format in text.value for time_format in _TIME_FORMATS)


def _qualified_name(obj: Any) -> str:
    kind = type(obj)
    if obj is None:
        return ""
    if kind is ModuleType:
        return str(obj.__name__)
    if kind is BuiltinFunctionType:
        owner = obj.__self__
        if isinstance(owner, ModuleType):
            return f"{owner.__name__}.{obj.__name__}"
        return f"{(owner if isinstance(owner, type) else type(owner)).__module__}.{obj.__qualname__}"
    function = obj.__func__ if kind is MethodType else obj if issubclass(kind, (FunctionType, type)) else kind
    return f"{function.__module__}.{function.__qualname__}"
