"""What a tool's function is called with, worked out before its place without running code of the user's own."""

from __future__ import annotations

import datetime
import decimal
import inspect
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from langchain_core.tools import BaseTool
from pydantic import BaseModel

from teola_plugin.shims.langchain_agents import call_arguments

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_ATOMS = (str, int, float, bool, bytes, type(None), Any)
_SHOWN = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_CONTAINERS = (list, tuple, dict, set, frozenset, Union, types.UnionType)
_OWN_CODE = {"__init__", "__new__", "model_post_init", "model_validate", "__get_pydantic_core_schema__", "__setattr__"}
_LENT = ("callbacks", "config", "run_manager", "runtime", "store", "writer", "state", "tool_call_id")
"""Parameters that a framework fills in where the call stands."""
_LENT_TYPES = ("RunnableConfig", "Callback", "Runtime", "Injected", "BaseStore", "StreamWriter")


def given(tool: BaseTool, args: Mapping[str, Any]) -> Given | None:
    """What the function will get, if the tool's schema is plain; None if it is not. Raises what the schema does."""
    return call_arguments(tool, args) if is_plain(tool.args_schema) else None


def takes_its_place(function: Callable[..., Any]) -> bool:
    """Whether a function takes what only its place in the graph can give: a config, a run manager, state, a store."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return any(name in _LENT or _is_lent(one.annotation) for name, one in parameters.items())


def _is_lent(annotation: Any) -> bool:
    return any(name in str(annotation) for name in _LENT_TYPES)


def is_plain(schema: Any) -> bool:
    """Whether arguments are checked by the framework's code alone: by none, or by a model of plain fields without
    validators of the user's own. Models of pydantic 1 are not looked into."""
    if schema is None or isinstance(schema, dict):
        return True
    if not isinstance(schema, type) or not issubclass(schema, BaseModel):
        return False
    below = schema.__mro__[: schema.__mro__.index(BaseModel)]
    own = any(_OWN_CODE & vars(one).keys() for one in below)
    return not own and not _validates(schema) and all(map(_is_plain_field, schema.model_fields.values()))


def _validates(schema: type[BaseModel]) -> bool:
    said = schema.__pydantic_decorators__
    kinds = ("validators", "field_validators", "root_validators", "model_validators")
    return any(getattr(said, kind, True) for kind in kinds)


def _is_plain_field(field: Any) -> bool:
    made = field.default_factory in (None, list, dict, set)
    return made and all(map(_is_constraint, field.metadata)) and _is_plain_type(field.annotation)


def _is_constraint(metadata: Any) -> bool:
    """A description, a bound, a length, a pattern; no function."""
    if isinstance(metadata, str):
        return True
    known = type(metadata).__module__.split(".", 1)[0] in ("annotated_types", "pydantic")
    return (
        known and not hasattr(metadata, "func") and not any(map(callable, getattr(metadata, "__dict__", {}).values()))
    )


def _is_plain_type(kind: Any) -> bool:
    if kind in _ATOMS or kind in _SHOWN:
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_plain_type(inner[0]) and all(map(_is_constraint, inner[1:]))
    return (origin or kind) in _CONTAINERS and all(one is ... or _is_plain_type(one) for one in inner)
