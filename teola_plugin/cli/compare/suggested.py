"""Which of an object's own models an engine could serve, and the lines that say so to `accelerate`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import TeolaError

if TYPE_CHECKING:
    from teola_plugin.adapters.engine_specs import SpecOrReason

BY_HAND = "By hand:\n"


def bindings_that_help(plain: Any) -> list[str]:
    """Lines of Python, as `engines="auto"` writes them; none where no model could be served. No engine is made."""
    from teola_plugin.adapters.automatic_engines import Bound, Serving, served_text
    from teola_plugin.adapters.engine_specs import EngineSpec

    names: dict[str, str] = {}
    bound = []
    try:
        for obj, spec in _specs(plain):
            if isinstance(spec, EngineSpec):
                number = sum(name.startswith(spec.NAME) for name in names.values())
                name = names.setdefault(spec.source_line(), f"{spec.NAME}{number + 1 if number else ''}")
                bound.append(Bound(obj, name, spec))
    except TeolaError:  # an object in which nothing can be replaced
        return []
    _, _, text = served_text(Serving("auto", None, tuple(bound))).partition(BY_HAND)
    return [line.removeprefix("    ") for line in text.split("\n") if line]


def _specs(plain: Any) -> Iterable[tuple[Any, SpecOrReason]]:
    if any(cls.__module__.startswith(("llama_index.core.", "workflows.")) for cls in type(plain).__mro__):
        from teola_plugin.adapters.llamaindex.binding import serve as llamaindex

        return [(one, llamaindex.engine_for(one, starts_engines=False)) for one in llamaindex.models_in(plain)]
    from teola_plugin.adapters.langchain.binding import serve as langchain

    nodes = getattr(plain, "nodes", None)
    parts = [node.bound for node in nodes.values()] if isinstance(nodes, dict) else plain
    return [(one, langchain.engine_for(one, starts_engines=False)) for one in langchain.models_in(parts)]
