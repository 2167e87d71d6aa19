"""Engines that compute with a model which one of the user's objects has loaded."""

from __future__ import annotations

from typing import Any


def computes_with(engine: Any, loaded: Any) -> bool:
    """Whether an engine was given that very model, or an equal one: then there is nothing else to compare."""
    given = getattr(engine, "given", None)
    if given is None or loaded is None:
        return False
    from teola_plugin.engines.sentence_transformers.loaded_models import same_model

    return same_model(given, loaded)
