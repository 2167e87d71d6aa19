"""Marks for tests that hold only with current releases of a framework."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version


def is_older(distribution: str, than: str) -> bool:
    """Return True if an older version of the distribution is installed."""
    try:
        return Version(version(distribution)) < Version(than)
    except PackageNotFoundError:
        return False


OLD_LLAMA_INDEX = is_older("llama-index-core", "0.14.25")
needs_current_llama_index = pytest.mark.skipif(
    OLD_LLAMA_INDEX, reason="the original itself fails here with an older LlamaIndex; seen to hold from 0.14.25 on"
)
