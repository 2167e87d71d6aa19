"""Models of sentence-transformers: loading them without progress bars, and models that the user has loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

UNNAMED = "loaded"
"""Name of a model without a folder or a hub name."""


def model_name_of(model: Any) -> str:
    """Return the folder or the hub name of a model, which is a text or a loaded model.

    Return `UNNAMED` for a loaded model that does not say where it came from.
    """
    if isinstance(model, str):
        return model
    inner = getattr(next(iter(model), None), "auto_model", None)
    return str(getattr(inner, "name_or_path", "") or UNNAMED)


def same_model(one: Any, other: Any) -> bool:
    """Return True if two loaded models have equal modules, settings and weights. Reads all weights once."""
    import torch

    if one is other:
        return True
    attributes = ("max_seq_length", "truncate_dim", "dtype", "device", "prompts", "default_prompt_name")
    if any(getattr(one, name, None) != getattr(other, name, None) for name in attributes) or repr(one) != repr(other):
        return False
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


_lock = threading.Lock()


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Hide transformers' bars during the block, for the whole process. Blocks take turns."""
    from transformers.utils import logging

    with _lock:
        was_enabled = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if was_enabled:
                logging.enable_progress_bar()
