"""The engine of a web search service: several searches side by side, each with its own patience."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.request_tasks import Inbox, RequestTasks
from teola_plugin.engines.websearch.api_key import ApiKey
from teola_plugin.engines.websearch.refusals import AGAIN, refused, wait_of
from teola_plugin.engines.websearch.services import SERVICES, Asked, SearchService
from teola_plugin.errors import EngineError, EngineUnavailable, RegistrationError, extra, unknown_name
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Hit, SearchText
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Result

if TYPE_CHECKING:
    import httpx


class WebSearch:
    """Searches the web through `service`: `searxng`, `brave` or `tavily` (or a `SearchService` of your own).

    `base_url`: of a SearXNG, by default what `SEARXNG_URL` says; the others have theirs. `api_key`: by default what
    `BRAVE_SEARCH_API_KEY` or `TAVILY_API_KEY` says; it goes into the header of requests and nowhere else.
    `options` are further parameters of the service (`{"language": "de"}`, `{"search_depth": "advanced"}`).
    A search that fails on the way, or that the service puts off, is asked for again, `attempts` times in all, when the
    service says so; if that is more than `patience` seconds away, it fails. `timeout`: seconds between two
    signs of life.
    `max_requests` searches run at a time. `dedicated` declares that it may be asked for what nobody waits for yet, as a
    SearXNG of one's own may; hosted services count each search.
    Raises `RegistrationError` for a service that is not known, or without its address or key.
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
        self.name, self.service = name, _known(service)
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
        """Idempotent. Nothing is asked: a search tells. Raises `EngineUnavailable` without httpx."""
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
        """Idempotent. Searches under way fail."""
        client, self._client = self._client, None
        self._tasks.cancel_all()
        if client is not None:
            await client.aclose()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """One `Done` with a tuple of `Hit`, or `Failed`, for each search, as they come."""
        async with aclosing(self._tasks.serving(batch, self._value)) as results:
            async for result in results:
                yield result

    async def _value(self, request: Request, inbox: Inbox) -> tuple[Hit, ...]:
        return await self._search(self._asked(request))

    def _asked(self, request: Request) -> SearchText:
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

    async def _search(self, wanted: SearchText) -> tuple[Hit, ...]:
        """Raises `EngineError`, which is not retryable: what may help was tried."""
        asked = self.service.ask(wanted.query, wanted.k, self._options)
        for attempt in range(self._attempts):
            last = attempt + 1 == self._attempts
            answer = await self._answer(asked, last=last)
            if answer is not None and answer.status_code == 200:
                return self._read(answer, wanted.k)
            wait = wait_of({} if answer is None else answer.headers, attempt)
            if answer is not None and (last or answer.status_code not in AGAIN or wait > self._patience):
                too_long = wait if answer.status_code in AGAIN and wait > self._patience else None
                secret = self._key.value
                raise refused(self.name, self.service.name, answer.status_code, answer.text, secret, too_long)
            await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _answer(self, asked: Asked, *, last: bool) -> httpx.Response | None:
        """Send the request. Return None if the service could not be reached and may be tried again."""
        import httpx

        if self._client is None:
            raise EngineUnavailable(
                f"{self.name} is not started.", engine=self.name, retryable=True, hint="start the pool"
            )
        headers = {self.service.key_header: self.service.key_prefix + self._key.value} if self._key else {}
        url = self.base_url + asked.path
        try:
            return await self._client.request(
                asked.method, url, params=dict(asked.params) or None, json=asked.json, headers=headers
            )
        except httpx.HTTPError as error:
            if not last:
                return None
            late = isinstance(error, httpx.TimeoutException)
            what = f"did not answer within {self._timeout:g} s" if late else f"could not be reached ({error})"
            hint = "raise the engine's timeout" if late else "check base_url, and that the service is up"
            raise EngineError(f"{self.name}: {self.base_url} {what}.", engine=self.name, hint=hint) from None

    def _read(self, answer: httpx.Response, k: int) -> tuple[Hit, ...]:
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
        return f"<WebSearch {self.name}: {self.service.name} at {self.base_url}>"

    def __getstate__(self) -> dict[str, Any]:
        """Settings alone; in another process the key is read from the environment, and a login is not there."""
        return {**self.__dict__, "_client": None, "_tasks": RequestTasks(self.name), "_login": None}


def _known(service: str | SearchService) -> SearchService:
    if isinstance(service, SearchService):
        return service
    if service not in SERVICES:
        raise unknown_name("web search service", str(service), list(SERVICES))
    return SERVICES[service]


def _incomplete(name: str, service: SearchService, what: str, argument: str, variable: str) -> RegistrationError:
    where = f", or set {variable}" if variable else ""
    return RegistrationError(f"engine {name!r}: {service.name} needs its {what}.", hint=f"give {argument}={where}")
