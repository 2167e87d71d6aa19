"""Which of an object's own models an engine could serve, and the lines that say so to `accelerate`."""

from __future__ import annotations

from typing import Any

from teola_plugin.errors import TeolaError

BY_HAND = "By hand:\n"


def bindings_that_help(plain: Any) -> list[str]:
    """Lines of Python, as `engines="auto"` writes them; none where no model could be served. No engine is made."""
    from teola_plugin.adapters.app_frameworks import engine_specs
    from teola_plugin.adapters.automatic_engines import Bound, Serving, served_text
    from teola_plugin.adapters.engine_specs import EngineSpec

    names: dict[str, str] = {}
    bound = []
    try:
        for obj, spec in engine_specs(plain):
            if isinstance(spec, EngineSpec):
                number = sum(name.startswith(spec.NAME) for name in names.values())
                name = names.setdefault(spec.source_line(), f"{spec.NAME}{number + 1 if number else ''}")
                bound.append(Bound(obj, name, spec))
    except TeolaError:  # an object in which nothing can be replaced
        return []
    _, _, text = served_text(Serving("auto", None, tuple(bound))).partition(BY_HAND)
    return [line.removeprefix("    ") for line in text.split("\n") if line]
