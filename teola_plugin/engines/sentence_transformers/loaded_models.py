"""Models of sentence-transformers that somebody else has loaded."""

from __future__ import annotations

from typing import Any

UNNAMED = "loaded"
"""Of a model that does not tell where it is from."""


def model_name_of(model: Any) -> str:
    """The folder or the hub name of a model: of a text that is it, or as a loaded one tells it."""
    if isinstance(model, str):
        return model
    inner = getattr(next(iter(model), None), "auto_model", None)
    return str(getattr(inner, "name_or_path", "") or UNNAMED)


def same_model(one: Any, other: Any) -> bool:
    """Return True if two loaded models have equal modules, settings and weights. Reads all weights once."""
    import torch

    if one is other:
        return True
    told = ("max_seq_length", "truncate_dim", "dtype", "device", "prompts", "default_prompt_name")
    if any(getattr(one, name, None) != getattr(other, name, None) for name in told) or repr(one) != repr(other):
        return False
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)
