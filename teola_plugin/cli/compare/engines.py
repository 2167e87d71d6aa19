"""What `--pool` and `--bind` name, and which bindings would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.named_objects import Target, made_by, object_named
from teola_plugin.errors import RegistrationError, unknown_name

if TYPE_CHECKING:
    from teola_plugin.pool import EnginePool

ARGUMENTS = ("app", "bind", "concurrent", "engines", "passes", "pool", "speculate", "strict")
"""Of `accelerate`, as far as they make sense here."""


def arguments_of(
    target: Target, pool: str, bind: Sequence[str], speculate: str | None, engines: str | None = None
) -> dict[str, Any]:
    """What `accelerate` is called with: what the module says, and what the command line says instead, or in addition.

    Raises `RegistrationError`.
    """
    given = dict(target.arguments)
    for key in given:
        if key not in ARGUMENTS:
            raise unknown_name("argument of accelerate for comparing", str(key), list(ARGUMENTS))
    if pool:
        given["pool"] = pool_named(pool)
    if bind:
        before = given.get("bind") or ()
        given["bind"] = [*(before.items() if isinstance(before, Mapping) else before), *map(_binding, bind)]
    given |= {key: value for key, value in (("speculate", speculate), ("engines", engines)) if value is not None}
    if target.fast is not None and given:
        raise RegistrationError(
            "the object is accelerated already, on terms of its own.",
            hint="leave --pool, --bind, --engines and --speculate away, or name the plain object",
        )
    return {"app": "compare", **given}


def pool_named(name: str) -> EnginePool:
    """A pool, or a function that returns one, as `module:object`; or a pool's YAML file. Raises `RegistrationError`."""
    if name.endswith((".yaml", ".yml")):
        return _pool_in(name)
    from teola_plugin.pool import EnginePool

    found = object_named(name)
    if callable(found):
        found = made_by(found, name)
    if isinstance(found, EnginePool):
        return found
    raise RegistrationError(
        f"--pool names {name}, which is a {type(found).__qualname__}, not an EnginePool.",
        hint="name an EnginePool, a function without arguments that returns one, or a YAML file",
    )


def _pool_in(path: str) -> EnginePool:
    """The engines of a YAML file, in this process."""
    try:
        from teola_plugin.pool import EnginePool

        return EnginePool.from_yaml(path)
    except ImportError as error:
        raise RegistrationError(
            f"a pool's YAML cannot be read without {error.name}.",
            hint=f"install {error.name}, or make the pool in Python: --pool module:object",
        ) from error


def _binding(text: str) -> tuple[Any, str]:
    """An object of the user's and the engine that serves it, of `module:object=engine`."""
    name, equals, engine = text.rpartition("=")
    if not (name and equals and engine):
        raise RegistrationError(
            f"--bind {text!r} is not of the form module:object=engine.", hint="e.g. --bind my_app.chains:model=llm"
        )
    return object_named(name), engine
