"""HTTP requests to a server, and their failures as errors of this package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from teola_plugin.engines.openai.wire import MalformedReply, error_message, parse_object
from teola_plugin.errors import EngineError, EngineUnavailable, RequestTooLarge, extra

if TYPE_CHECKING:
    import httpx

_CONNECTION_HEADERS = frozenset({"accept-encoding", "connection", "host", "content-length", "content-type"})
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a retry may help."""
_TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses of refusals that do not concern the request itself."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer of a server that refused a request."""

    status: int
    content: str
    headers: Mapping[str, str]


def refusal_error(name: str, status: int, content: str, headers: Mapping[str, str], *, retryable: bool) -> EngineError:
    """Return the error for a refusal. With `retryable` it may be retried here; otherwise by the caller."""
    message = error_message(content) or "no message"
    kind = RequestTooLarge if status == 400 and "context length" in message else EngineError
    error = kind(
        f"{name}: the server answered {status}: {message}",
        engine=name,
        retryable=retryable and status in _RETRYABLE,
        hint=_HINTS.get(status, "see the server's log"),
    )
    error.is_final = not retryable and 400 <= status < 500 and status not in _TRANSIENT
    error.__dict__["refusal"] = Refusal(status, content, dict(headers))
    return error


_HINTS = {
    400: "change what the server refuses",
    401: "give the engine the server's api_key",
    403: "give the engine the server's api_key",
    404: "check base_url and the name of the model",
    429: "lower max_requests of the engine",
}


def refusal_in(error: EngineError) -> Refusal | None:
    """Return the server's refusal, None if the error is not one."""
    refusal = error.__dict__.get("refusal")
    return refusal if isinstance(refusal, Refusal) else None


def not_started(name: str, *, retryable: bool) -> EngineUnavailable:
    """Return the error for a request that was not sent because the engine is not started.

    The error is marked so that `unsent` is true of it.

    Args:
        name: The engine's name.
        retryable: True if the same request may be sent again once the engine has started.
    """
    error = EngineUnavailable(f"{name} is not started.", engine=name, retryable=retryable, hint="start the pool")
    error.__dict__["unsent"] = True
    return error


def unsent(error: BaseException) -> bool:
    """Return True if the request was certainly not sent."""
    return bool(error.__dict__.get("unsent"))


def unreachable(name: str, url: str, error: BaseException) -> EngineUnavailable:
    """Return the error for a server that cannot be reached at all."""
    return EngineUnavailable(
        f"{name}: no server answers at {url} ({_describe_error(error)}).",
        engine=name,
        hint="start the server, or correct base_url",
    )


def malformed(
    name: str,
    url: str,
    fault: ValueError,
    content: str,
    headers: Iterable[tuple[str, str]],
    expected: str = "completion",
) -> EngineError:
    """Return the error for a reply with status 200 that is not what was expected. It carries the reply, for clients
    that read replies themselves."""
    excerpt = f" It begins with {content[:200]!r}." if content else ""
    error = EngineError(
        f"{name}: the reply of {url} is no {expected}: {fault}.{excerpt}",
        engine=name,
        hint="see the server's log, and check that base_url is that of an OpenAI-compatible server",
    )
    error.__dict__["refusal"] = Refusal(200, content, dict(headers))
    return error


def new_client(
    base_url: str,
    api_key: str | None,
    headers: Mapping[str, str] | None,
    timeout_s: float,
    max_connections: int,
    name: str,
) -> httpx.AsyncClient:
    """Return a client for the server at `base_url`, which may name a user and a password.

    `name`: the engine's, for the error. Raise EngineUnavailable if httpx is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise EngineUnavailable(f"{name}: httpx is not installed.", engine=name, hint=extra("openai")) from error
    parts = urlsplit(base_url)
    login = (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None
    return httpx.AsyncClient(
        headers={**({"Authorization": f"Bearer {api_key}"} if api_key else {}), **(headers or {})},
        auth=login,
        timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
        limits=httpx.Limits(max_connections=max_connections),
    )


async def send_body(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    payload: Any,
    *,
    stream: bool = False,
    hints: Mapping[str, str] | None = None,
) -> httpx.Response:
    """Send a request as its own client addresses the server, or in the engine's way if it has no client.

    `payload`: has the client's address and headers in `envelope`, if a client wrote the request. `hints`: headers for
    a router; those that the request has already stay.
    """
    envelope = getattr(payload, "envelope", None)
    if envelope is None:
        request = client.build_request("POST", url, json=body)
        _add_missing(request.headers, hints)
        return await client.send(request, stream=stream)
    request = client.build_request("POST", url, json=body, params=list(envelope.params) or None)
    for name in client.headers:  # headers of the engine are not the client's
        if name.lower() not in _CONNECTION_HEADERS:
            request.headers.pop(name, None)
    for name in {name for name, _ in envelope.headers}:
        request.headers.pop(name, None)
    request.headers = type(request.headers)([*request.headers.multi_items(), *envelope.headers])
    _add_missing(request.headers, hints)
    return await client.send(request, stream=stream, auth=None)


def _add_missing(headers: Any, hints: Mapping[str, str] | None) -> None:
    for name, value in (hints or {}).items():
        headers.setdefault(name, value)


def failed_by_network(name: str, url: str, error: BaseException, *, retryable: bool) -> EngineError:
    """Return the error for a request without an answer, or with an unreadable one. Only the former may be retried."""
    if isinstance(error, ValueError):
        return EngineError(f"{name}: {error}", engine=name, hint="see the server's log")
    late = "Timeout" in type(error).__name__
    reason = f"{url} did not answer in time" if late else f"{url} could not be reached"
    hint = "raise the engine's timeout" if late else "see whether the server is up"
    failed = EngineError(
        f"{name}: {reason} ({_describe_error(error)}).", engine=name, retryable=retryable and not late, hint=hint
    )
    failed.__dict__["broken"] = type(error).__name__
    return failed


def broken_in(error: EngineError) -> str:
    """Return the name of httpx's exception if the connection failed, else ""."""
    return str(error.__dict__.get("broken", ""))


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def root_of(base_url: str) -> str:
    """Return the base address of endpoints that are not part of OpenAI's protocol."""
    return base_url.removesuffix("/v1").removesuffix("/v2")


def json_of(text: str) -> dict[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    try:
        return parse_object(text)
    except MalformedReply:
        return {}


def text_of(response: httpx.Response) -> str:
    """Return the text of a JSON reply, decoded as `json.loads` decodes bytes; bytes that are no text are replaced."""
    encoding = json.detect_encoding(response.content)
    try:
        return response.content.decode(encoding, "surrogatepass")
    except UnicodeDecodeError:
        return response.content.decode(encoding, "replace")
