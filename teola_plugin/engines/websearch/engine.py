"""The engine of a web search service: several concurrent searches, each with its own retries."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.request_tasks import Inbox, RequestTasks
from teola_plugin.engines.websearch.services import SERVICES, SearchService, ServiceRequest
from teola_plugin.errors import EngineError, EngineUnavailable, RegistrationError, extra, unknown_name
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Hit, Request, Result, SearchText

if TYPE_CHECKING:
    import httpx


class WebSearchEngine:
    """A search of the web through `service`: `searxng`, `brave` or `tavily` (or your own `SearchService`).

    `base_url`: address of a SearXNG, by default that of the variable `SEARXNG_URL`; the other services have their own.
    `api_key`: by default that of `BRAVE_SEARCH_API_KEY` or `TAVILY_API_KEY`; it is sent in the header of requests and
    used nowhere else. `options` are further parameters of the service (`{"language": "de"}`).
    A search that fails on the network, or that the service defers, is tried `attempts` times in all, when the service
    allows it; if that is more than `patience` seconds away, it fails. `timeout`: seconds between two signs of life.
    `max_requests` searches run at a time. `dedicated` declares that it may get speculative searches, as your own
    SearXNG may; hosted services charge for each search.
    Raises `RegistrationError` for an unknown service, or one without its address or key.
    """

    kinds: frozenset[PrimitiveKind] = frozenset({PrimitiveKind.SEARCHING})

    def __init__(
        self,
        name: str = "web",
        *,
        service: str | SearchService = "searxng",
        base_url: str | None = None,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        dedicated: bool = False,
        max_requests: int = 8,
        timeout: float = 10.0,
        attempts: int = 3,
        patience: float = 10.0,
    ) -> None:
        self.name, self.service = name, _find_service(service)
        url = (base_url or os.environ.get(self.service.url_variable, "") or self.service.base_url).rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise _incomplete(name, self.service, "address", "base_url", self.service.url_variable)
        self.base_url = without_credentials(url)
        self._login = (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None
        variable = self.service.key_variable
        self._key = ApiKey(api_key, variable) if api_key else ApiKey.of_environment(variable)
        if variable and not self._key:
            raise _incomplete(name, self.service, "key", "api_key", variable)
        self._options = dict(options or {})
        self._timeout, self._attempts, self._patience = timeout, max(1, attempts), patience
        self._profile = EngineProfile(
            batching=Batching.CONTINUOUS,
            max_batch=max_requests,
            max_efficient_batch=max_requests,
            max_requests=max_requests,
            device=self.base_url,
            dedicated=dedicated,
        )
        self._client: httpx.AsyncClient | None = None
        self._tasks = RequestTasks(name)

    @property
    def profile(self) -> EngineProfile:
        """The engine's profile, without curves: measuring would cost searches."""
        return self._profile

    # Life cycle

    async def start(self) -> None:
        """Start the engine without asking the service. Idempotent. Raises `EngineUnavailable` without httpx."""
        if self._client is not None:
            return
        try:
            import httpx
        except ImportError as error:
            raise EngineUnavailable(
                f"{self.name}: httpx is not installed.", engine=self.name, hint=extra("websearch")
            ) from error
        self._client = httpx.AsyncClient(
            headers={"Accept": "application/json"},
            auth=self._login,
            timeout=httpx.Timeout(self._timeout),
            limits=httpx.Limits(max_connections=self._profile.max_requests),
        )

    async def stop(self) -> None:
        """Stop the engine. Idempotent. Searches under way fail."""
        client, self._client = self._client, None
        self._tasks.cancel_all()
        if client is not None:
            await client.aclose()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield one `Done` with a tuple of `Hit`, or `Failed`, for each search, as they come."""
        async with aclosing(self._tasks.serving(batch, self._value)) as results:
            async for result in results:
                yield result

    async def _value(self, request: Request, inbox: Inbox) -> tuple[Hit, ...]:
        return await self._search(self._check_payload(request))

    def _check_payload(self, request: Request) -> SearchText:
        """Return the search of a request. Raise `EngineError` for an empty query, or more results than the service
        gives."""
        payload = request.payload
        if request.kind not in self.kinds or not isinstance(payload, SearchText):
            got = f"{request.kind.value} of {type(payload).__name__}"
            raise EngineError(f"{self.name}: it does searching of SearchText, not {got}.", engine=self.name)
        if not isinstance(payload.query, str) or not payload.query.strip():
            raise EngineError(f"{self.name}: the query is empty.", engine=self.name, hint="search for some words")
        if not isinstance(payload.k, int) or not 0 < payload.k <= self.service.most:
            raise EngineError(
                f"{self.name}: {payload.k!r} results of one search are wanted.",
                engine=self.name,
                hint=f"{self.service.name} gives 1 to {self.service.most}",
            )
        return payload

    async def _search(self, search: SearchText) -> tuple[Hit, ...]:
        """Search, with retries. Raises `EngineError`, which is not retryable: all retries were made."""
        request = self.service.ask(search.query, search.k, self._options)
        for attempt in range(self._attempts):
            last = attempt + 1 == self._attempts
            answer = await self._answer(request, last=last)
            if answer is not None and answer.status_code == 200:
                return self._read(answer, search.k)
            wait = wait_of({} if answer is None else answer.headers, attempt)
            if answer is not None and (last or answer.status_code not in RETRYABLE or wait > self._patience):
                too_long = wait if answer.status_code in RETRYABLE and wait > self._patience else None
                secret = self._key.value
                raise refusal_error(self.name, self.service.name, answer.status_code, answer.text, secret, too_long)
            await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _answer(self, request: ServiceRequest, *, last: bool) -> httpx.Response | None:
        """Send the request. Return None if the service could not be reached and may be tried again."""
        import httpx

        if self._client is None:
            raise EngineUnavailable(
                f"{self.name} is not started.", engine=self.name, retryable=True, hint="start the pool"
            )
        headers = {self.service.key_header: self.service.key_prefix + self._key.value} if self._key else {}
        url = self.base_url + request.path
        try:
            return await self._client.request(
                request.method, url, params=dict(request.params) or None, json=request.json, headers=headers
            )
        except httpx.HTTPError as error:
            if not last:
                return None
            late = isinstance(error, httpx.TimeoutException)
            failure = f"did not answer within {self._timeout:g} s" if late else f"could not be reached ({error})"
            hint = "raise the engine's timeout" if late else "check base_url, and that the service is up"
            raise EngineError(f"{self.name}: {self.base_url} {failure}.", engine=self.name, hint=hint) from None

    def _read(self, answer: httpx.Response, k: int) -> tuple[Hit, ...]:
        """Return the hits in a reply of the service. Raise `EngineError` for a reply of another form."""
        try:
            return self.service.hits(answer.json(), k)
        except (ValueError, RecursionError) as error:  # no JSON, too deep, or of another form
            raise EngineError(
                f"{self.name}: {self.base_url}: {error}",
                engine=self.name,
                hint="check base_url, and the service's version",
            ) from error

    async def cancel(self, request_id: str) -> None:
        self._tasks.cancel(request_id)

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._tasks))

    async def reset(self) -> None:
        """Do nothing: there are no caches."""

    def versions(self) -> Mapping[str, str]:
        return {"service": self.service.name, "url": self.base_url}

    def __repr__(self) -> str:
        return f"<WebSearchEngine {self.name}: {self.service.name} at {self.base_url}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings. In another process the key is read from the environment, and there is no login."""
        return {**self.__dict__, "_client": None, "_tasks": RequestTasks(self.name), "_login": None}


def _find_service(service: str | SearchService) -> SearchService:
    """Return the service of a name, or the user's own. Raise `RegistrationError` for an unknown name."""
    if isinstance(service, SearchService):
        return service
    if service not in SERVICES:
        raise unknown_name("web search service", str(service), list(SERVICES))
    return SERVICES[service]


def _incomplete(name: str, service: SearchService, setting: str, argument: str, variable: str) -> RegistrationError:
    where = f", or set {variable}" if variable else ""
    return RegistrationError(f"engine {name!r}: {service.name} needs its {setting}.", hint=f"give {argument}={where}")


class ApiKey:
    """A secret key for request headers. A copy in another process reads the environment variable `variable` there."""

    __slots__ = ("_value", "variable")

    def __init__(self, value: str, variable: str = "") -> None:
        self._value, self.variable = value.strip(), variable

    @classmethod
    def of_environment(cls, variable: str) -> ApiKey:
        """Create the key from an environment variable; an empty key if it is not set."""
        return cls(os.environ.get(variable, "") if variable else "", variable)

    @property
    def value(self) -> str:
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "ApiKey(***)" if self._value else "ApiKey(none)"

    def __reduce__(self) -> Any:
        return ApiKey.of_environment, (self.variable,)


RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a search may be retried: it changes nothing."""
_MAX_MESSAGE = 300
"""Maximum characters of a service's own message."""


def wait_of(headers: Mapping[str, str], attempt: int) -> float:
    """Return the seconds until the next attempt: by the headers `Retry-After` or `X-RateLimit-Reset` (Brave).

    Without them 0.5, 1, 2, ...; `attempt` counts from 0.
    """
    header = headers.get("retry-after", "") or headers.get("x-ratelimit-reset", "").split(",")[0]
    seconds = _seconds(header.strip())
    return 0.5 * 2**attempt if seconds is None else max(0.0, seconds)


def _seconds(header: str) -> float | None:
    """Return the seconds to wait by a header, which has a number or a date; None if it has neither."""
    try:
        seconds = float(header)
        return seconds if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None


def refusal_error(engine: str, service: str, status: int, content: str, secret: str, wait: float | None) -> EngineError:
    """Return the error for a refusal. `wait`: the seconds that the service asked for, if that is too long."""
    message = _message(content)
    if secret:
        message = message.replace(secret, "***")
    reason = f"{engine}: {service} answered {status}: {message[:_MAX_MESSAGE] or 'no message'}"
    hint = _HINTS.get(status, f"see what {service} says of it")
    if wait is not None:
        hint = f"it asks to wait for {wait:.0f} s: search less often, or raise the engine's patience"
    return EngineError(reason, engine=engine, hint=hint)


_HINTS = {
    401: "give the engine a key of the service that holds",
    403: "give the engine a key that may do this; a SearXNG must have json among the formats in its settings",
    404: "check base_url",
    422: "check the engine's key and its options",
    429: "lower max_requests of the engine, or search less often",
    432: "the plan of the key is used up",
    433: "the limit of the key is used up",
}


def _message(content: str) -> str:
    """Return the message in a service's error, which is JSON in one of several forms, or plain text."""
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError):
        return " ".join(content.split())
    for key in ("detail", "error", "message"):
        while isinstance(value, dict) and key in value:
            value = value[key]
    if isinstance(value, dict):
        value = value.get("detail") or value.get("error") or value
    return str(value)
