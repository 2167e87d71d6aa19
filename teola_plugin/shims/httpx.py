"""httpx: what providers answer to the calls of models, seen in the methods of its clients that send a request.

OpenAI's, Anthropic's, Mistral's and other clients send by httpx, and repeat a refused request by themselves: nothing
else tells of it, nor of a provider's rate-limit headers.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from teola_plugin.shims.interception import MethodInterceptors


class ResponseWatch(Protocol):
    """Notes a provider's responses, and says how long requests have to wait; see `ProviderLimit`."""

    @property
    def seconds_to_wait(self) -> float: ...

    def note_response(self, status: int, headers: Mapping[str, str], request_characters: int) -> bool: ...


FindWatch = Callable[[], ResponseWatch | None]
"""Returns what is to be told of the response to a request that is sent here; None for requests of no provider call."""

MAX_REPEATS = 2
"""How often one request is sent again because others, which the app has not made yet, were in its way."""

interceptors = MethodInterceptors()


def install(find_watch: FindWatch) -> None:
    """Watch the responses of all clients, if httpx is imported. Idempotent."""
    httpx = sys.modules.get("httpx")
    if httpx is None or interceptors.is_installed:
        return
    interceptors.install([httpx.Client], {"send": functools.partial(_send, find_watch)})
    interceptors.install([httpx.AsyncClient], {"send": functools.partial(_asend, find_watch)})


def uninstall() -> None:
    """Put the clients' methods back as they were."""
    interceptors.uninstall()


def _send(find_watch: FindWatch, original: Any) -> Any:
    """Wrap `httpx.Client.send` so that the watch of the running provider call sees the response.

    A request waits while the provider's limit says so, and is sent again, `MAX_REPEATS` times at most, if the watch
    finds that prefetched calls were in its way. Requests of no provider call are sent as by the original.
    """

    @functools.wraps(original)
    def send(client: Any, request: Any, **options: Any) -> Any:
        """Send a request and show the watch its response; wait and repeat where the provider's limit asks for it."""
        watch = find_watch() if interceptors.is_installed else None
        if watch is None:
            return original(client, request, **options)
        for repeats in range(MAX_REPEATS + 1):
            if seconds := watch.seconds_to_wait:
                time.sleep(seconds)
            response = original(client, request, **options)
            must_repeat = watch.note_response(response.status_code, response.headers, _characters(request))
            if not must_repeat or repeats == MAX_REPEATS or not _can_repeat(request):
                break
            response.close()
        return response

    return send


def _asend(find_watch: FindWatch, original: Any) -> Any:
    """Wrap `httpx.AsyncClient.send`, as `_send` does for the sync client."""

    @functools.wraps(original)
    async def send(client: Any, request: Any, **options: Any) -> Any:
        """Send a request and show the watch its response; wait and repeat where the provider's limit asks for it."""
        watch = find_watch() if interceptors.is_installed else None
        if watch is None:
            return await original(client, request, **options)
        for repeats in range(MAX_REPEATS + 1):
            if seconds := watch.seconds_to_wait:
                await asyncio.sleep(seconds)
            response = await original(client, request, **options)
            must_repeat = watch.note_response(response.status_code, response.headers, _characters(request))
            if not must_repeat or repeats == MAX_REPEATS or not _can_repeat(request):
                break
            await response.aclose()
        return response

    return send


def _can_repeat(request: Any) -> bool:
    """Return True for a request with its body in memory: a streamed body can be sent once."""
    return hasattr(request, "_content")


def _characters(request: Any) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return after how many seconds a refused call may be made again; None if the headers do not say."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        value = headers.get("retry-after") or headers.get("Retry-After")
        if value is None:
            return None
        if re.fullmatch(r"\s*\d+(\.\d*)?\s*", value):
            return float(value)
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
