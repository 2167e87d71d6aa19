"""Pydantic's objects and classes: copies of objects of another class, and what validation by a class runs.

Copies need no more than the names of Pydantic's `__slots__`, validation needs the schema that its core validates by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

_SLOTS = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
"""Where Pydantic keeps what is not in an object's `__dict__`."""


def sharing(cls: type, obj: Any) -> Any:
    """Return an object of the class `cls` that shares its attributes with `obj`: what is set on one is set on both."""
    shared: Any = object.__new__(cls)
    object.__setattr__(shared, "__dict__", vars(obj))
    for slot in _SLOTS:
        if hasattr(obj, slot):
            object.__setattr__(shared, slot, getattr(obj, slot))
    return shared


def validated_field(cls: type[BaseModel], name: str, value: Any) -> Any:
    """Return a value as it is after it was set as a field of an object of the class.

    Raises `ValidationError` where the field takes no such value. `model_construct` makes the object in newer releases;
    with Pydantic 2.8, it never ends for a class whose `__getattr__` reads private attributes.
    """
    obj = cls.__new__(cls)
    object.__setattr__(obj, "__dict__", {})
    for slot in _SLOTS:
        object.__setattr__(obj, slot, set() if slot == "__pydantic_fields_set__" else None)
    cls.__pydantic_validator__.validate_assignment(obj, name, value)
    return vars(obj)[name]


def of_class(cls: type, obj: Any, attributes: Mapping[str, Any], private: Mapping[str, Any]) -> Any:
    """Return a copy of a Pydantic object, of the class `cls`, with more attributes and other private ones."""
    copied = obj.model_copy()
    converted = sharing(cls, copied)
    object.__setattr__(converted, "__dict__", {**vars(copied), **attributes})
    if private:
        object.__setattr__(converted, "__pydantic_private__", {**(copied.__pydantic_private__ or {}), **private})
    return converted


# ------------------------------------------------------------ what validation runs

_PLAIN_SCHEMAS = frozenset(("str", "int", "float", "bool", "bytes", "none", "any", "literal"))
"""Types of schemas whose values are of the builtin types, if what is validated is."""
_CONTAINER_SCHEMAS = frozenset(("nullable", "list", "set", "frozenset", "tuple", "dict", "union"))
"""Types of schemas that validate by other schemas, and give containers of the builtin types."""
_INNER_KEYS = ("schema", "items_schema", "keys_schema", "values_schema")


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A field of a model, as Pydantic validates it."""

    is_plain: bool
    """True if it validates to a value of the builtin types, provided that it gets one."""
    has_default: bool = False
    default: Any = None
    factory: Callable[[], Any] | None = None


def is_model_class(kind: Any) -> bool:
    """Return True for a model of Pydantic, whose metaclass is Pydantic's own. Runs no code of the class."""
    return type(kind) is type(BaseModel)


def model_schema_fields(cls: Any) -> dict[str, SchemaField] | None:
    """Return the fields of a model by name; None if its validation may run code of the user's.

    Such code are validators, `model_post_init`, arbitrary types, and factories that take data. Factories that take none
    are named in the fields. Reads `__pydantic_core_schema__`; since pydantic 2.0. Returns None also for a model with
    private attributes, or with names that are not resolved yet.
    """
    if cls.__init__ is not BaseModel.__init__ or cls.__setattr__ is not BaseModel.__setattr__:
        return None
    schema: Any = getattr(cls, "__pydantic_core_schema__", None)
    while isinstance(schema, dict) and schema.get("type") == "definitions":
        schema = schema["schema"]
    if not _is_plain_model(schema) or schema["cls"] is not cls:
        return None
    fields = {name: _schema_field(field["schema"]) for name, field in schema["schema"]["fields"].items()}
    known_fields = {name: field for name, field in fields.items() if field is not None}
    return known_fields if len(known_fields) == len(fields) else None


def _is_plain_model(schema: Any) -> bool:
    """Return True for the schema of a model without code of the user's, apart from that of its fields."""
    if not isinstance(schema, dict) or schema.get("type") != "model":
        return False
    inner = schema["schema"]
    has_own_code = schema.get("custom_init") or schema.get("post_init") or schema.get("root_model")
    return not has_own_code and inner["type"] == "model-fields" and "extras_schema" not in inner


def _schema_field(schema: Mapping[str, Any]) -> SchemaField | None:
    """Return a field by its schema; None if its validation may run code of the user's."""
    if schema["type"] != "default":
        return SchemaField(_is_plain(schema)) if _runs_no_code(schema) else None
    inner, factory, default = schema["schema"], schema.get("default_factory"), schema.get("default")
    is_copied = schema.get("copy_default") and not _is_plain(inner)
    if schema.get("default_factory_takes_data") or schema.get("on_error") or is_copied or not _runs_no_code(inner):
        return None
    return SchemaField(_is_plain(inner), "default" in schema, default, factory)


def _runs_no_code(schema: Mapping[str, Any]) -> bool:
    """Return True if validation by a schema runs no code of the user's, such as validators or default factories."""
    kind = schema["type"]
    if kind == "enum":
        return not schema.get("missing")
    if kind == "model":
        return _is_plain_model(schema) and all(
            field is not None and field.factory is None
            for field in (_schema_field(one["schema"]) for one in schema["schema"]["fields"].values())
        )
    return kind in _PLAIN_SCHEMAS or (kind in _CONTAINER_SCHEMAS and all(map(_runs_no_code, _inner_schemas(schema))))


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Return True if a schema that runs no code of the user's validates to values of the builtin types."""
    kind = schema["type"]
    if kind == "literal":
        return not any(isinstance(value, Enum) for value in schema["expected"])
    return kind in _PLAIN_SCHEMAS or (kind in _CONTAINER_SCHEMAS and all(map(_is_plain, _inner_schemas(schema))))


def _inner_schemas(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas by which a schema validates items, keys, values or choices."""
    several = schema.get("choices") or (schema["items_schema"] if schema["type"] == "tuple" else ())
    choices = [choice[0] if isinstance(choice, tuple) else choice for choice in several]
    single = [schema[key] for key in _INNER_KEYS if isinstance(schema.get(key), dict)]
    return [*choices, *single]
