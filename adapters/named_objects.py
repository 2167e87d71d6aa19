"""Objects of the user's that are given by name, `module:object`: to the command line, to a server's settings."""

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
    """Of `accelerate`."""
    fast: Any = None
    """The object itself, where it is accelerated already; `plain` is its original then."""


def load(name: str, pool: Any = None) -> Target:
    """The object `module:object`; modules of the current folder are found, a factory is called without arguments, or
    with the `pool` where there is one and it takes one.

    A pair is an object, and the arguments of `accelerate`. Raises `RegistrationError`.
    """
    found = named(name)
    if _is_factory(found):
        found = made_by(found, name, {} if pool is None or not _takes_pool(found) else {"pool": pool})
    arguments: Any = {}
    if isinstance(found, tuple):
        if len(found) != 2 or not isinstance(found[1], Mapping):
            raise RegistrationError(
                f"{name} is a tuple that is no pair of an object and the arguments of accelerate().",
                hint='e.g. return chain, {"pool": pool, "bind": [(model, "llm")]}',
            )
        found, arguments = found
    if not getattr(type(found), "__teola_accelerated__", False):
        return Target(found, arguments)
    if arguments:
        raise RegistrationError(
            f"{name} is accelerated already, and comes with arguments for accelerate().", hint="give one of both"
        )
    return Target(found.__teola_of__()[0], {}, found)


def _is_factory(found: Any) -> bool:
    """Whether it is a function, or a class: objects of frameworks may be callable, too."""
    asked = any(hasattr(found, name) for name in ("invoke", "query", "retrieve", "run", "chat"))
    return isinstance(found, type) or (callable(found) and not asked)


def _takes_pool(factory: Any) -> bool:
    try:
        return "pool" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # built in
        return False


def made_by(factory: Any, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """What a function of the user's returns. Raises `RegistrationError`."""
    try:
        return factory(**(arguments or {}))
    except Exception as error:
        given = ", ".join(f"{key}=..." for key in arguments or {})
        raise RegistrationError(
            f"the factory {name} raised {_told(error)}",
            hint=f"it is called as {name.partition(':')[2]}({given}); run it by itself",
        ) from error


def named(name: str) -> Any:
    """What `module:object` names. Raises `RegistrationError`."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise RegistrationError(f"{name!r} is not of the form module:object.", hint="e.g. my_app.chains:rag")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise RegistrationError(
            f"importing {module_name} raised {_told(error)}",
            hint=f"python -c 'import {module_name}' in {folder} must work",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise RegistrationError(f"{module_name} has no {path!r}.", hint="name a variable or a function of it")
        found = getattr(found, part)
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__qualname__}: {error}"
