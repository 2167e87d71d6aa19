"""Make a LangChain or LlamaIndex app answer faster, without a rewrite and with the same answer.

>>> import teola_plugin as teola
>>> fast = teola.accelerate(chain)      # doctest: +SKIP
>>> fast.invoke({"question": "..."})    # doctest: +SKIP

Everything public is in `__all__`; names are imported when they are first used, so importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teola_plugin.lazy_names import lazy

if TYPE_CHECKING:
    from teola_plugin.adapters import accelerate, uninstall
    from teola_plugin.errors import (
        ConfigError,
        EngineError,
        EngineOverloaded,
        EngineUnavailable,
        GraphError,
        MissingPackage,
        PassError,
        QueryCancelled,
        QueryError,
        QueryTimeout,
        RegistrationError,
        RequestTooLarge,
        TeolaError,
        TraceError,
    )
    from teola_plugin.observe.spans import Price
    from teola_plugin.pool import EnginePool
    from teola_plugin.workflow import Workflow

__version__ = "0.1.0"

_HOMES = {
    "accelerate": "teola_plugin.adapters",
    "uninstall": "teola_plugin.adapters",
    "EnginePool": "teola_plugin.pool",
    "Price": "teola_plugin.observe.spans",
    "Workflow": "teola_plugin.workflow",
}
"""Where public names live; errors, the rest, in `teola_plugin.errors`."""

__all__ = [
    "ConfigError",
    "EngineError",
    "EngineOverloaded",
    "EnginePool",
    "EngineUnavailable",
    "GraphError",
    "MissingPackage",
    "PassError",
    "Price",
    "QueryCancelled",
    "QueryError",
    "QueryTimeout",
    "RegistrationError",
    "RequestTooLarge",
    "TeolaError",
    "TraceError",
    "Workflow",
    "accelerate",
    "uninstall",
]


__getattr__, _names = lazy(__name__, {name: _HOMES.get(name, "teola_plugin.errors") for name in __all__})


def __dir__() -> list[str]:
    return [*_names(), "__version__"]
