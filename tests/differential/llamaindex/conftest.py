"""A fixture that all of these tests need."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture(autouse=True)
def no_loop_of_the_thread() -> None:
    """Where a thread has none, LlamaIndex makes one for its sync entries, and leaves it open."""
    asyncio.set_event_loop(None)
