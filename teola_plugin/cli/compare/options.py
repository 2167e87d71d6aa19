"""The values of the options of `teola compare`: inputs, a pool, bindings; and the bindings that it suggests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.named_objects import Target, made_by, object_named
from teola_plugin.errors import RegistrationError, TeolaError, unknown_name

if TYPE_CHECKING:
    from teola_plugin.adapters.comparison import Entries
    from teola_plugin.pool import EnginePool

ACCELERATE_ARGUMENTS = (
    *("app", "bind", "concurrent", "engines", "passes", "pool"),
    *("prices", "prompt_cache", "read_only", "speculate", "strict"),
)
"""The arguments of `accelerate` that a comparison accepts."""
_BY_HAND = "By hand:\n"


# ------------------------------------------------------------ inputs


@dataclass(frozen=True, slots=True)
class InputLine:
    """An input of the object, and the number of the line that it comes from."""

    line: int
    value: Any


def read_inputs(path: str, limit: int | None = None) -> list[InputLine]:
    """Read the inputs from a file with one JSON value a line, without blank lines. Raise `RegistrationError`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RegistrationError(
            f"cannot read {path}: {error.strerror}.", hint="check the path after --inputs"
        ) from error
    except UnicodeDecodeError as error:
        raise RegistrationError(f"{path} is not UTF-8: {error.reason}.", hint="save it as UTF-8") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RegistrationError(f"{path} holds no inputs.", hint='one JSON value a line, e.g. {"question": "..."}')
    return [InputLine(number, _parse_json(path, number, line)) for number, line in lines[:limit]]


def check_inputs(inputs: Sequence[InputLine], entries: Entries, path: str) -> None:
    """Raise `RegistrationError` for an input that the object cannot take."""
    for entry in inputs:
        if fault := entries.fault_in(entry.value):
            raise RegistrationError(
                f"{path}, line {entry.line}: no input of a {entries.kind}.", hint=f"{fault}, one JSON value a line"
            )


def _parse_json(path: str, number: int, line: str) -> Any:
    """Return the value of one line of inputs. Raise `RegistrationError`, with line and column, for invalid JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RegistrationError(
            f"{path}, line {number}, column {error.colno}: no JSON value: {error.msg}.",
            hint='one JSON value a line; a text needs quotes: "What do lambs eat?"',
        ) from error


# ------------------------------------------------------------ pool and bindings


def accelerate_arguments(
    target: Target,
    pool: str,
    bindings: Sequence[str],
    speculate: str | None,
    engines: str | None = None,
    read_only: Sequence[str] = (),
    *,
    prompt_cache: bool = False,
) -> dict[str, Any]:
    """Return the arguments for `accelerate`: those that the user's module gives, with the command line's over them.

    `bindings` and `read_only` are added to those of the module. Raise `RegistrationError` for invalid options.
    """
    arguments = dict(target.arguments)
    for key in arguments:
        if key not in ACCELERATE_ARGUMENTS:
            raise unknown_name("argument of accelerate for comparing", str(key), list(ACCELERATE_ARGUMENTS))
    if pool:
        arguments["pool"] = _load_pool(pool)
    if bindings:
        module_bindings = arguments.get("bind") or ()
        if isinstance(module_bindings, Mapping):
            module_bindings = module_bindings.items()
        arguments["bind"] = [*module_bindings, *map(_parse_binding, bindings)]
    if prompt_cache:
        arguments["prompt_cache"] = True
    if read_only:
        arguments["read_only"] = [*(arguments.get("read_only") or ()), *read_only]
    arguments |= {key: value for key, value in (("speculate", speculate), ("engines", engines)) if value is not None}
    if target.fast is not None and arguments:
        raise RegistrationError(
            "the object is accelerated already, with options of its own.",
            hint="leave --pool, --bind, --engines, --speculate, --read-only and --prompt-cache away, "
            "or name the original",
        )
    return {"app": "compare", **arguments}


def _load_pool(name: str) -> EnginePool:
    """Return the pool that `module:object` names, the result of a function that it names, or the pool of a YAML file.

    Raise `RegistrationError` if there is none.
    """
    from teola_plugin.pool import EnginePool

    if name.endswith((".yaml", ".yml")):
        try:
            return EnginePool.from_yaml(name)
        except ImportError as error:
            raise RegistrationError(
                f"a pool's YAML cannot be read without {error.name}.",
                hint=f"install {error.name}, or make the pool in Python: --pool module:object",
            ) from error
    pool = object_named(name)
    if callable(pool):
        pool = made_by(pool, name)
    if isinstance(pool, EnginePool):
        return pool
    raise RegistrationError(
        f"--pool names {name}, which is a {type(pool).__qualname__}, not an EnginePool.",
        hint="name an EnginePool, a function without arguments that returns one, or a YAML file",
    )


def _parse_binding(text: str) -> tuple[Any, str]:
    """Return the user's object and the name of the engine that serves it, from `module:object=engine`."""
    name, equals, engine = text.rpartition("=")
    if not (name and equals and engine):
        raise RegistrationError(
            f"--bind {text!r} is not of the form module:object=engine.", hint="e.g. --bind my_app.chains:model=llm"
        )
    return object_named(name), engine


def suggest_bindings(original: Any) -> list[str]:
    """Return lines of Python that bind the object's own models to engines; none if no engine can serve any of them.

    The lines are those that `engines="auto"` writes. No engine is made.
    """
    from teola_plugin.adapters.app_frameworks import engine_specs
    from teola_plugin.adapters.automatic_engines import Bound, Serving, served_text
    from teola_plugin.adapters.engine_specs import EngineSpec

    names: dict[str, str] = {}
    bound = []
    try:
        for obj, spec in engine_specs(original):
            if isinstance(spec, EngineSpec):
                number = sum(name.startswith(spec.NAME) for name in names.values())
                name = names.setdefault(spec.source_line(), f"{spec.NAME}{number + 1 if number else ''}")
                bound.append(Bound(obj, name, spec))
    except TeolaError:  # an object in which nothing can be replaced
        return []
    _, _, text = served_text(Serving("auto", None, tuple(bound))).partition(_BY_HAND)
    return [line.removeprefix("    ") for line in text.split("\n") if line]
