"""Requests of one query: whatever an app asks the server for within `joining()` belongs together.

::

    from openai import AsyncOpenAI, OpenAI
    from teola_plugin.server.client import AsyncQueryClient, QueryClient, joining

    client = OpenAI(base_url=url, http_client=QueryClient())  # or AsyncOpenAI(..., http_client=AsyncQueryClient())
    with joining(app="support", goal=3.0):
        client.chat.completions.create(model="llm", messages=messages)

Without the clients, `joining().headers` are the headers to send (`default_headers=`, `extra_headers=`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Joined:
    """A query that requests join."""

    query: str
    app: str = ""
    deadline: float | None = None
    goal: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        told = {"X-Teola-Query": self.query, "X-Teola-App": self.app}
        told |= {"X-Teola-Deadline": _text(self.deadline), "X-Teola-Goal": _text(self.goal)}
        return {name: value for name, value in told.items() if value}


def _text(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:g}"


_current: ContextVar[Joined | None] = ContextVar("teola_joined_query", default=None)


@contextmanager
def joining(
    query: str | None = None, *, app: str = "", deadline: float | None = None, goal: float | None = None
) -> Iterator[Joined]:
    """Requests that are made in the body, by clients of this module, are one query. A name is made where none is given.

    `deadline`, `goal`: seconds from its first request, after which it fails; in which it should be done.
    """
    made = Joined(query or f"query_{secrets.token_hex(12)}", app, deadline, goal)
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)


def _mark(request: httpx.Request) -> None:
    joined = _current.get()
    if joined is not None:
        request.headers.update(joined.headers)


class QueryClient(httpx.Client):
    """An `httpx.Client` whose requests say which query they belong to."""

    def send(self, request: httpx.Request, **more: Any) -> httpx.Response:
        _mark(request)
        return super().send(request, **more)


class AsyncQueryClient(httpx.AsyncClient):
    """The same for a loop."""

    async def send(self, request: httpx.Request, **more: Any) -> httpx.Response:
        _mark(request)
        return await super().send(request, **more)
