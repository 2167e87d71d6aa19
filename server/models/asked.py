"""What an app is asked, and how objects of one kind are asked it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from teola_plugin.server.settings import AppSettings
from teola_plugin.server.visits import Kept
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.chat import ChatRequest


@dataclass(frozen=True, slots=True)
class Asked:
    """What an app is given."""

    value: Any
    thread: str
    """The conversation that a graph with checkpoints goes on with: each tenant has its own."""
    config: Any = None
    """Settings of a deployed workflow, for this query alone."""
    kept: Kept | None = None
    """Of a submitted query."""
    told: tuple[Any, ...] = ()
    """What a graph that has stopped to ask somebody is told; one value, or none where it has not asked."""
    began: Callable[[str], object] = bool
    """Is told the id of a query of its own in the pool, where the app begins one."""


Pieces = AsyncIterator["str | Answer"]
"""Text as it comes, then the whole answer, unless it is that text and nothing more. An app that cannot stream gives the
whole answer alone."""


@dataclass(frozen=True, slots=True)
class Way:
    """How objects of one kind are asked."""

    given: Callable[[Any, ChatRequest, AppSettings], Any]
    """The input that messages make."""
    whole: Callable[[Any, Any, AppSettings], Any]
    """A coroutine of its whole answer."""
    stream: Callable[[Any, Any, AppSettings], Pieces]
    check: Callable[[Any, Any, AppSettings], None]
    """Raises `HttpError` for inputs of a client's own that the app cannot take."""
    alone: bool = False
    """Whether it keeps the conversation of a call in itself, so that it answers one after the other."""
