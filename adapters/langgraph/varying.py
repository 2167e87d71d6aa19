"""Functions whose result is another in every call or process, by the names of their libraries."""

from __future__ import annotations

import ast
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any


class Kind(Enum):
    TIME = "the time, another in every call"
    RANDOM = "random, another in every call"
    ORDER = "a set, whose order is another in every process"


_TIMES = frozenset(
    {
        *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
        *(f"time.{name}" for name in ("time", "time_ns", "ctime", "localtime", "gmtime", "asctime", "monotonic")),
        *("time.perf_counter", "django.utils.timezone.now", "pendulum.now", "arrow.now", "arrow.utcnow"),
    }
)
_RANDOM = ("random.", "secrets.", "numpy.random.", "uuid.uuid1", "uuid.uuid4", "uuid.uuid6", "uuid.uuid7", "os.urandom")
_SETS = frozenset({"builtins.set", "builtins.frozenset"})
SETTLED = frozenset(f"builtins.{name}" for name in ("sorted", "min", "max", "sum", "len", "any", "all", "bool"))
"""Builtins whose result has nothing of the order of what they are given."""
OF_DAYS = frozenset({"date", "toordinal", "weekday", "isoweekday", "year", "month", "day"})
"""What a time says of its day."""
_WITHIN_A_DAY = ("%H", "%M", "%S", "%f", "%c", "%X", "%s", "%T", "%R", "%I", "%p", "%r")
"""Formats that tell more than the day."""


def kind_of(name: str) -> Kind | None:
    if name in _SETS:
        return Kind.ORDER
    if name in _TIMES or name == "time.strftime":
        return Kind.TIME
    return Kind.RANDOM if name.startswith(_RANDOM) else None


def says_the_day(format_: ast.expr | None) -> bool:
    text = format_.values[0] if isinstance(format_, ast.JoinedStr) and len(format_.values) == 1 else format_
    known = isinstance(text, ast.Constant) and isinstance(text.value, str) and "%" in text.value
    return known and not any(one in text.value for one in _WITHIN_A_DAY)  # type: ignore[union-attr]


def name_of(obj: Any) -> str:
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
    named = obj.__func__ if kind is MethodType else obj if issubclass(kind, (FunctionType, type)) else kind
    return f"{named.__module__}.{named.__qualname__}"
