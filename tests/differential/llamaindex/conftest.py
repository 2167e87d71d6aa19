"""A fixture that all of these tests need."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture(autouse=True)
def no_loop_of_the_thread() -> None:
    """Close the event loop that LlamaIndex creates for sync entry points, and leaves open, if the thread has none."""
    asyncio.set_event_loop(None)
