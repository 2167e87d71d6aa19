"""Make a LangChain or LlamaIndex app answer sooner, without a rewrite and with the same answer.

>>> import teola_plugin as teola
>>> fast = teola.accelerate(chain)      # doctest: +SKIP
>>> fast.invoke({"question": "..."})    # doctest: +SKIP

Everything public is in `__all__`; names are imported when they are first used, so importing this package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teola_plugin.adapters import accelerate
    from teola_plugin.errors import (
        ConfigError,
        EngineError,
        EngineOverloaded,
        EngineUnavailable,
        GraphError,
        PassError,
        QueryCancelled,
        QueryError,
        QueryTimeout,
        RegistrationError,
        RequestTooLarge,
        TeolaError,
        TraceError,
    )
    from teola_plugin.pool import EnginePool

__version__ = "0.1.0"

_HOMES = {"accelerate": "teola_plugin.adapters", "EnginePool": "teola_plugin.pool"}
"""Where public names live; errors, the rest, in `teola_plugin.errors`."""

__all__ = [
    "ConfigError",
    "EngineError",
    "EngineOverloaded",
    "EnginePool",
    "EngineUnavailable",
    "GraphError",
    "PassError",
    "QueryCancelled",
    "QueryError",
    "QueryTimeout",
    "RegistrationError",
    "RequestTooLarge",
    "TeolaError",
    "TraceError",
    "accelerate",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "teola_plugin.errors")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
