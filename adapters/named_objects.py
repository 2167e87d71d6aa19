"""Objects of the user that the command line or a server's settings name as `module:object`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.errors import RegistrationError


@dataclass(frozen=True, slots=True)
class Target:
    """The object that the user named."""

    plain: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `accelerate`."""
    fast: Any = None
    """The named object itself if it is accelerated already; `plain` is its original then."""


def load(name: str, pool: Any = None) -> Target:
    """Import `module:object`, also from the current folder.

    A factory is called without arguments, or with the `pool` if there is one and it takes one. A pair is an object and
    the arguments of `accelerate`. Raise `RegistrationError` for anything else.
    """
    target = object_named(name)
    if _is_factory(target):
        target = made_by(target, name, {} if pool is None or not _takes_pool(target) else {"pool": pool})
    arguments: Any = {}
    if isinstance(target, tuple):
        if len(target) != 2 or not isinstance(target[1], Mapping):
            raise RegistrationError(
                f"{name} is a tuple that is no pair of an object and the arguments of accelerate().",
                hint='e.g. return chain, {"pool": pool, "bind": [(model, "llm")]}',
            )
        target, arguments = target
    if not getattr(type(target), "__teola_accelerated__", False):
        return Target(target, arguments)
    if arguments:
        raise RegistrationError(
            f"{name} is accelerated already, and comes with arguments for accelerate().", hint="give one of both"
        )
    return Target(target.__teola_of__()[0], {}, target)


def _is_factory(obj: Any) -> bool:
    """Return True for a function or a class, and False for a callable object of a framework."""
    has_entry_point = any(hasattr(obj, name) for name in ("invoke", "query", "retrieve", "run", "chat"))
    return isinstance(obj, type) or (callable(obj) and not has_entry_point)


def _takes_pool(factory: Any) -> bool:
    try:
        return "pool" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # built in
        return False


def made_by(factory: Any, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Call a factory of the user. Raise `RegistrationError` if it raises."""
    try:
        return factory(**(arguments or {}))
    except Exception as error:
        arguments_text = ", ".join(f"{key}=..." for key in arguments or {})
        raise RegistrationError(
            f"the factory {name} raised {_described(error)}",
            hint=f"it is called as {name.partition(':')[2]}({arguments_text}); run it by itself",
        ) from error


def object_named(name: str) -> Any:
    """Import the object that `module:object` names. Raise `RegistrationError` if there is none."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise RegistrationError(f"{name!r} is not of the form module:object.", hint="e.g. my_app.chains:rag")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        obj: Any = importlib.import_module(module_name)
    except Exception as error:
        raise RegistrationError(
            f"importing {module_name} raised {_described(error)}",
            hint=f"python -c 'import {module_name}' in {folder} must work",
        ) from error
    for part in path.split("."):
        if not hasattr(obj, part):
            raise RegistrationError(f"{module_name} has no {path!r}.", hint="name a variable or a function of it")
        obj = getattr(obj, part)
    return obj


def _described(error: Exception) -> str:
    return f"{type(error).__qualname__}: {error}"
