"""Settings of Python's garbage collector that keep collections cheap in the tests."""

from __future__ import annotations

import gc


def freeze_objects() -> None:
    """Exclude all objects that exist now from later collections.

    The suite imports so many modules that a collection of all their objects takes a second. The objects stay frozen,
    because the next collection would be a full one otherwise. `tests/conftest.py` runs a full collection at the end of
    the session.
    """
    gc.collect(1)
    gc.freeze()
