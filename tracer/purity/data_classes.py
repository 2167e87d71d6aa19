"""Data classes of the user's whose objects are made without any code of the user's, and what may be read of them.

These are dataclasses of the standard library and models of pydantic, without an `__init__`, a `__post_init__`, a
validator or the like of their own. Nothing of a class runs when it is looked at.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of_dataclass
from enum import Enum, EnumMeta
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, WrapperDescriptorType
from typing import Any

_PLAIN_TYPES = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class DataField:
    """A field of a data class."""

    is_argument: bool
    """True if the constructor takes it."""
    is_positional: bool
    """True if it may be an argument without a name."""
    is_readable: bool
    """True if its value is data of the builtin types, provided that the arguments are."""
    default: Any = MISSING
    factory: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class DataClass:
    """A class whose constructor runs no code of the user's, except for the factories of its fields."""

    kind: type
    fields: Mapping[str, DataField]
    converts: bool
    """True if the constructor may convert or refuse its arguments, as pydantic does."""

    @property
    def default_sizes(self) -> dict[str, int]:
        """The size of the default of each field that holds data of the builtin types, in items and characters."""
        return {name: size_of_data(one.default) for name, one in self.fields.items() if one.is_readable}


def data_class_of(kind: Any) -> DataClass | None:
    """Return the description of a class; None for any other class than such a data class, and for other objects."""
    is_model = _is_model(kind)
    if not (is_model or type(kind) in (type, ABCMeta)) or not _has_default_methods(kind):
        return None
    fields = _fields_of_model(kind) if is_model else _fields_of_dataclass(kind)
    if fields is None or any(map(_is_computed, (inspect.getattr_static(kind, name, None) for name in fields))):
        return None
    return DataClass(kind, fields, converts=is_model)


def _is_model(kind: Any) -> bool:
    """Return True for a class of pydantic models; if pydantic was never imported, there are none."""
    if "pydantic" not in sys.modules:
        return False
    from teola_plugin.shims.pydantic import is_model_class

    return is_model_class(kind)


_LIBRARIES = ("abc", "enum", "pydantic", "typing")
"""Modules whose code in a class was put there by the class's metaclass or base, not by its author."""


@lru_cache(maxsize=1024)
def runs_no_own_code(kind: type, method_names: frozenset[str]) -> bool:
    """Return True if objects of a class are compared, printed, measured and iterated over without code of the user's.

    True of no other classes than models of pydantic and enums. They may have methods, and properties that are no fields
    of the model, of any other names than those of operators, of pydantic's own methods and `method_names`. Whether the
    fields are data has to be checked for each object.
    """
    if not _is_model(kind) and type(kind) is not EnumMeta:
        return False
    decorators = getattr(kind, "__pydantic_decorators__", None)
    if decorators is not None and decorators.computed_fields:  # they are printed with the fields
        return False
    own_classes = [cls for cls in kind.__mro__ if cls.__module__.split(".", 1)[0] not in (*_LIBRARIES, "builtins")]
    bases = [cls for cls in kind.__mro__ if cls not in own_classes]
    for name, attribute in ((name, one) for cls in own_classes for name, one in vars(cls).items()):
        if name in method_names and not isinstance(attribute, Enum):
            return False
        is_special = any(hasattr(base, name) for base in bases) or (name.startswith("__") and name.endswith("__"))
        if is_special and _is_own_code(name, attribute):
            return False
    return True


@lru_cache(maxsize=256)
def writes_itself(kind: type) -> bool:
    """Return True for a model of pydantic whose dictionary, JSON and schema are made without code of the user's."""
    schema = getattr(kind, "__pydantic_core_schema__", None)
    return _is_model(kind) and runs_no_own_code(kind, frozenset()) and _holds_no_own_function(schema)


def _holds_no_own_function(schema: Any) -> bool:
    """Return True if a part of a schema holds data, classes and functions of pydantic's, and no other object.

    The same has to hold for the configuration of each class in it.
    """
    if isinstance(schema, dict):
        configs = [getattr(schema.get("cls"), name, None) for name in ("model_config", "__pydantic_config__")]
        return all(map(_holds_no_own_function, (*schema.values(), *configs)))
    if isinstance(schema, (list, tuple, set, frozenset)):
        return all(map(_holds_no_own_function, schema))
    if isinstance(schema, (type, Enum, *_PLAIN_TYPES)):
        return True
    module = (getattr(schema, "__module__", None) if callable(schema) else type(schema).__module__) or ""
    return module.split(".", 1)[0] in ("pydantic", "pydantic_core")


def _is_own_code(name: str, attribute: Any) -> bool:
    """Return True for an attribute of a class that the author of the class may have written as code."""
    if name in ("__dict__", "__weakref__", "_new_member_") or isinstance(attribute, (type, WrapperDescriptorType)):
        return False
    if not callable(attribute) and not hasattr(type(attribute), "__get__"):
        return False
    func = getattr(attribute, "__func__", attribute)
    modules = (getattr(func, "__module__", None) or "", type(func).__module__)
    return not any(module.split(".", 1)[0] in _LIBRARIES for module in modules)


def size_of_data(value: Any) -> int:
    """Return the number of items and characters of data; 1 for any other object."""
    if type(value) in (str, bytes):
        return 1 + len(value)
    if type(value) is int:
        return 1 + value.bit_length()
    parts = (*value, *value.values()) if type(value) is dict else value
    return 1 + sum(map(size_of_data, parts)) if type(value) in (list, tuple, set, frozenset, dict) else 1


def _has_default_methods(kind: type) -> bool:
    """Return True if objects are made, and their fields are read, by the methods of `object`."""
    names = ("__new__", "__getattribute__")
    return all(getattr(kind, name) is getattr(object, name) for name in names)


def _is_computed(attribute: Any) -> bool:
    """Return True for the attribute of a class that decides what reading it of an object gives, such as a property."""
    return hasattr(type(attribute), "__set__") and type(attribute) is not MemberDescriptorType


def _fields_of_dataclass(kind: type) -> dict[str, DataField] | None:
    """Return the fields of a dataclass; None if its constructor is not the generated one, or calls other code."""
    if not isinstance(getattr(kind, "__dataclass_fields__", None), dict):
        return None
    init = inspect.getattr_static(kind, "__init__", None)
    fields = {one.name: one for one in fields_of_dataclass(kind)}
    if type(init) is not FunctionType or init.__code__.co_filename != "<string>":
        return None
    is_frozen = "__setattr__" in init.__code__.co_names
    if not is_frozen and getattr(kind, "__setattr__") is not object.__setattr__:  # noqa: B009
        return None
    if not set(init.__code__.co_names) <= {*fields, "__setattr__"} or len(fields) < len(kind.__dataclass_fields__):  # type: ignore[attr-defined]
        return None
    return {
        name: DataField(
            one.init,
            one.init and not one.kw_only,
            one.default is MISSING or is_data(one.default),
            one.default,
            None if one.default_factory is MISSING else one.default_factory,
        )
        for name, one in fields.items()
        if one.init or one.default is not MISSING or one.default_factory is not MISSING
    }


def is_data(value: Any) -> bool:
    """Return True for a value of the builtin types, and for containers of such values.

    Types have to be exactly these: an object of a subclass may run code of the user's when it is read or compared.
    """
    if type(value) is dict:
        return all(map(is_data, (*value, *value.values())))
    return type(value) in _PLAIN_TYPES or (type(value) in (list, tuple, set, frozenset) and all(map(is_data, value)))


def _fields_of_model(kind: Any) -> dict[str, DataField] | None:
    """Return the fields of a model of pydantic; None if code of the user's takes part in its validation."""
    from teola_plugin.shims.pydantic import model_schema_fields

    schema_fields = model_schema_fields(kind)
    if schema_fields is None:
        return None
    fields: dict[str, DataField] = {}
    for name, one in schema_fields.items():
        has_default = one.has_default and one.factory is None
        is_readable = one.is_plain and (not has_default or is_data(one.default))
        fields[name] = DataField(True, False, is_readable, one.default if has_default else MISSING, one.factory)
    return fields
