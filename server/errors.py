"""Errors as clients get them: a status and a body, in the form of OpenAI's protocol or of Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teola_plugin.engines.openai.http import broken_in, refusal_in
from teola_plugin.errors import (
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    QueryCancelled,
    QueryTimeout,
    RegistrationError,
    RequestTooLarge,
    TeolaError,
)

CLIENT_GONE = 499
"""Status, for the log alone, of a request whose client has left."""


class HttpError(TeolaError):
    """An error that a client gets instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        hint: str = "",
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the body in OpenAI's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, hint: str = "", *, param: str | None = None, code: str | None = None) -> HttpError:
    return HttpError(400, message, hint=hint, param=param, code=code)


def invalid(fault: Mapping[str, Any], hint: str) -> HttpError:
    """Return the refusal of a field that pydantic does not accept. `fault`: one of `ValidationError.errors()`."""
    location = [str(part) for part in fault["loc"] if part != "body"]
    field = getattr(fault.get("ctx", {}).get("error"), "field", "")  # a `JsonFault` says it
    field = field or ".".join(part for part in location if not part.startswith("function-"))
    reason = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
    hint = hint if field else "send a JSON object"
    return bad_request(f"{field or 'the body'}: {reason}.", hint, param=field or None, code="invalid_value")


def unsupported(param: str, reason: str, hint: str) -> HttpError:
    """Return the refusal of what a protocol has and this server does not."""
    return bad_request(f"{param}: {reason}", hint, param=param, code="unsupported")


def not_found(message: str, hint: str = "", *, code: str = "not_found") -> HttpError:
    return HttpError(404, message, hint=hint, code=code)


def too_many(message: str, seconds: int, *, code: str, hint: str = "") -> HttpError:
    """Return a 429 that names the seconds after which the request may be sent again.

    The caller raises it. `seconds` become the header `Retry-After`, and `code` tells clients which limit it was, e.g.
    `queue_full`.
    """
    headers = {"Retry-After": str(seconds)}
    return HttpError(429, message, hint=hint, kind="rate_limit_error", code=code, headers=headers)


ANTHROPIC_OVERLOADED = 529
"""Anthropic's status for a server that has too much to do."""
THREADS_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's code for a request to keep a conversation, which its client sends again without that."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    ANTHROPIC_OVERLOADED: "overloaded_error",
}


def to_anthropic(error: HttpError, request_id: str) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in the form of Anthropic's protocol, which has 529 for an overload."""
    is_overload = error.status == 503 or error.code == "engine_overloaded"
    status = ANTHROPIC_OVERLOADED if is_overload else error.status
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    fault: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.code == THREADS_UNSUPPORTED:
        fault["details"] = {"error_code": error.code, "unsupported": ["model"]}
    return status, {"type": "error", "error": fault, "request_id": request_id}


def unexpected(request_id: str) -> HttpError:
    """Return the error for a fault of the server, or of an app's own code. Its details stand in the log alone.

    `request_id` leads from the client's error to the log's line; for a submitted query it is the query's id. The
    message of the exception is left out, since it may repeat a prompt.
    """
    hint = f"see the server's log for request {request_id}"
    return HttpError(500, "the server could not do that.", hint=hint, kind="server_error", code="internal_error")


def http_error(error: TeolaError) -> HttpError:
    """Return the error that a client gets for an error of the pool. What a server behind an engine refuses of a request
    is refused with its status; any other reply of it that is no answer is 502."""
    if isinstance(error, HttpError):
        return error
    refusal = refusal_in(error) if isinstance(error, EngineError) else None
    if refusal is not None and 400 <= refusal.status < 500 and refusal.status not in (401, 403):
        return HttpError(refusal.status, error.message, hint=error.hint, code="refused_by_server")
    if type(error) is EngineError and refusal is None and not error.retryable and not broken_in(error):
        return bad_request(error.message, error.hint, code="refused_by_engine")
    for error_class, status, kind, code in _TABLE:
        if isinstance(error, error_class):
            headers = {"Retry-After": "1"} if status in (429, 503) else None
            return HttpError(status, error.message, hint=error.hint, kind=kind, code=code, headers=headers)
    return HttpError(500, error.message, hint=error.hint, kind="server_error", code="internal_error")


_TABLE: tuple[tuple[type[TeolaError], int, str, str], ...] = (
    (RequestTooLarge, 400, "invalid_request_error", "context_length_exceeded"),
    (EngineOverloaded, 429, "rate_limit_error", "engine_overloaded"),
    (EngineUnavailable, 503, "server_error", "engine_unavailable"),
    (QueryTimeout, 504, "timeout_error", "deadline_exceeded"),
    (QueryCancelled, CLIENT_GONE, "invalid_request_error", "cancelled"),
    (RegistrationError, 400, "invalid_request_error", "invalid_value"),
    (EngineError, 502, "server_error", "engine_error"),
)
