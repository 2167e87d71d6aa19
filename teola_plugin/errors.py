"""Every error this package raises on its own account.

::

    TeolaError                      .hint is always the next thing to do
    ├─ TraceError                   a framework object cannot be lowered (.path inside the chain)
    ├─ GraphError                   an invalid graph; the message ends with the graph around the fault
    │   └─ PassError                a pass broke the graph (.pass_name)
    ├─ MissingPackage               a package of an extra is not installed; an ImportError, too
    ├─ RegistrationError            an unknown engine, pass or option; lists the known names
    │   └─ ConfigError              a pool's settings are wrong; names file, line and remedy
    ├─ EngineError                  .engine .replica .retryable
    │   ├─ EngineUnavailable        the engine is not installed, did not start, or died
    │   ├─ EngineOverloaded         its queue is full; try again later
    │   └─ RequestTooLarge          one request is larger than the engine can ever take
    └─ QueryError                   .query_id .primitive .story; chained from its cause
        ├─ QueryTimeout             the deadline passed
        └─ QueryCancelled           the caller, or its framework, cancelled the query

An exception raised by the user's own code is never wrapped: it passes through unchanged. All of these survive
pickling, so they cross process boundaries as they are.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


class TeolaError(Exception):
    """Base of all errors of this package. `str()` gives the message and the hint."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        """Create the error.

        Args:
            message: What went wrong, with the names and values that matter.
            hint: What the user can do about it; empty if nothing is known.
        """
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} Next: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> Any:
        # Keyword-only fields do not survive Exception's own pickling; rebuild from the replica dictionary.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class TraceError(TeolaError):
    """A framework object cannot be lowered. `path` says where, e.g. `chain.steps[2]`."""

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class GraphError(TeolaError):
    """A graph that breaks its own rules (unknown ref, cycle, duplicate id, ...)."""


class PassError(GraphError):
    """A pass returned an invalid graph or raised. `pass_name` says which."""

    def __init__(self, message: str, *, pass_name: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.pass_name = pass_name


class MissingPackage(TeolaError, ModuleNotFoundError):
    """A feature needs a package that is not installed; the hint names the extra that brings it.

    It is an `ImportError`, too, so `try: ... except ImportError:` works as with any other package.
    """


class RegistrationError(TeolaError):
    """An unknown engine, pass, option or input name."""


class ConfigError(RegistrationError):
    """A pool's settings cannot be used; the message names file and line of each fault."""


class EngineError(TeolaError):
    """An engine could not do a request. `retryable` says whether doing it again may help."""

    is_final: bool = False
    """Whether the server that the user's own client talks to would refuse the same request again: whoever asks for the
    same gets this error, and no second request is sent."""

    def __init__(
        self, message: str, *, engine: str = "", replica: str = "", retryable: bool = False, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.engine = engine
        self.replica = replica
        self.retryable = retryable


class EngineUnavailable(EngineError):
    """The engine is not installed, did not start, or died."""


class EngineOverloaded(EngineError):
    """The engine's queue is full."""


class RequestTooLarge(EngineError):
    """One request is larger than the engine can ever take; doing it again cannot help."""


class QueryError(TeolaError):
    """A query could not be finished. `story` lists what happened to it so far."""

    def __init__(
        self,
        message: str,
        *,
        query_id: str = "",
        primitive: str = "",
        story: tuple[str, ...] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.query_id = query_id
        self.primitive = primitive
        self.story = story


class QueryTimeout(QueryError):
    """The query's deadline passed before its output was ready."""


class QueryCancelled(QueryError):
    """The query was cancelled."""


def unknown_name(kind: str, name: str, known_names: tuple[str, ...] | list[str]) -> RegistrationError:
    """Return the error for an unknown name of something (`kind`), with the known names and the nearest one."""
    import difflib

    near = difflib.get_close_matches(name, known_names, n=1)
    guess = f"did you mean {near[0]!r}?" if near else "use one of the known names"
    listing = ", ".join(sorted(known_names)) or "none"
    return RegistrationError(f"unknown {kind} {name!r}; known: {listing}.", hint=guess)


def extra(name: str, *others: str) -> str:
    """Return the hint that installs an extra, or any of the `others`.

    The package is at no package index yet, so its name alone installs nothing.
    """
    commands = " or ".join(f"pip install '.[{one}]'" for one in (name, *others))
    return f"in a checkout of teola-plugin, {commands}"


_PACKAGES = {"yaml": "PyYAML", "llama_index": "llama-index-core"}
"""Top-level module -> the package that installs it, where the names differ by more than `_` and `-`."""


def package_of(module: str) -> str:
    """Return the package that installs a module, e.g. `PyYAML` for `yaml`, for the message that it is missing."""
    top_module = module.partition(".")[0]
    return _PACKAGES.get(top_module, top_module.replace("_", "-"))


def missing_package(feature: str, module: str, *extras: str) -> MissingPackage:
    """Return the error for a feature whose package is not installed.

    Args:
        feature: What needs the package, as the subject of the sentence, e.g. `teola serve`.
        module: The module that cannot be imported, e.g. `yaml`.
        extras: The extras that bring the package; each of them suffices.
    """
    command = extra(*extras)
    error = MissingPackage(f"{feature} needs {package_of(module)}, which is not installed.", hint=command)
    error.name = module
    return error


def require_modules(feature: str, modules: Sequence[str], *extras: str) -> None:
    """Raise `MissingPackage` for the first of `modules` that is not installed.

    Modules are looked for, but not imported. `feature` and `extras` are those of `missing_package`.
    """
    for module in modules:
        try:
            spec = find_spec(module)
            is_missing = spec is None or spec.origin is None  # without a file it is a folder of the same name
        except ModuleNotFoundError:  # the package that the module is in
            is_missing = True
        except ValueError:  # it was made by hand and has no spec
            is_missing = False
        if is_missing:
            raise missing_package(feature, module, *extras)


def pool_closed(engine: str = "") -> EngineUnavailable:
    """Return the error for calls to a closed pool, and for calls that were running when it was closed."""
    detail = f": engine {engine!r} is not there any more" if engine else ""
    return EngineUnavailable(
        f"the engine pool is closed{detail}.",
        engine=engine,
        hint="call its start() again, or use it inside its `with` block",
    )


def pool_not_started() -> EngineUnavailable:
    """Return the error for calls before a pool's first `start()`."""
    return EngineUnavailable(
        "the engine pool is not running.", hint="call its start(), or use it inside `with EnginePool...:`"
    )


def pool_forked() -> EngineUnavailable:
    """Return the error for calls in a process that was forked while a pool was running."""
    return EngineUnavailable(
        "the engine pool was started before this process was forked, and runs in the parent process alone.",
        hint="make and start the pool in the child (e.g. in gunicorn's post_fork hook), or start processes by spawn. "
        "To share engines, use `teola up`, and EnginePool.connect() in each process",
    )
