"""A typed client of what this server has beyond OpenAI's protocol."""

from __future__ import annotations

import base64
import json
import mimetypes
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from teola_plugin.errors import EngineUnavailable, QueryError
from teola_plugin.event_streams import ServerSentEvent, aread_events, read_events

GivenFile = str | Path | Mapping[str, Any]
"""The path of a file, or an object as the server takes it: `{"file_id": ...}`, `{"text": ...}`, `{"url": ...}`."""


def document(given: GivenFile) -> dict[str, Any]:
    """As JSON. Raises `QueryError` for a file that cannot be read."""
    if isinstance(given, Mapping):
        return dict(given)
    path = Path(given)
    try:
        data = path.read_bytes()
    except OSError as error:
        what = f"the document {str(path)!r:.200} cannot be read: {error.strerror or error}."
        raise QueryError(what, hint='give the path of a file, or {"text": "..."}') from error
    type = mimetypes.guess_type(path.name)[0] or ""
    return {"filename": path.name, "file_data": f"data:{type};base64,{base64.b64encode(data).decode()}"}


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


ENDED = ("done", "failed", "cancelled", "interrupted")
_RESTS = (*ENDED, "waiting")


@dataclass(frozen=True, slots=True)
class SubmittedQuery:
    """As the server tells it. Times are Unix times, in seconds."""

    id: str
    model: str
    app: str
    status: str
    """queued, running, waiting (for somebody), done, failed, cancelled or interrupted."""
    created: float
    attempt: int
    ended: float | None = None
    seconds: float | None = None
    goal: float | None = None
    within_goal: bool | None = None
    query: str = ""
    answer: Mapping[str, Any] | None = None
    """`text`, `finish_reason`, `usage`, and what an app tells beside them."""
    error: Mapping[str, Any] | None = None
    waiting: Mapping[str, Any] | None = None
    """Of a graph that has stopped to ask: `interrupts`, each an `id` and a `value`; `next`, the nodes to come."""

    @property
    def over(self) -> bool:
        return self.status in ENDED

    @property
    def rests(self) -> bool:
        """Whether it is over, or waits for somebody: see `resume`."""
        return self.status in _RESTS

    @property
    def text(self) -> str:
        """Of the answer. Raises `QueryError` where there is none."""
        if self.answer is None:
            why = str((self.error or {}).get("message", f"it is {self.status}"))
            raise QueryError(
                f"query {self.id} has no answer: {why}", query_id=self.id, hint="wait for it, or see its error"
            )
        return str(self.answer.get("text", ""))


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """One event of a query. After a `reset`, what came before is void."""

    id: str
    kind: str
    data: Mapping[str, Any]

    @property
    def text(self) -> str:
        """That it adds to the answer."""
        return str(self.data.get("text", "")) if self.kind == "delta" else ""


_WRONG_SERVER = "check that the address is that of teola serve, without a path, and that no proxy answers for it"


def _query(reply: Mapping[str, Any]) -> SubmittedQuery:
    """Return the query that a reply describes. Raise QueryError where a field is missing."""
    values = {field.name: reply[field.name] for field in fields(SubmittedQuery) if field.name in reply}
    objects = [values.get(name) for name in ("answer", "error", "waiting")]
    texts = [values.get(name) for name in ("id", "status")]
    try:
        if all(isinstance(one, str) for one in texts) and all(isinstance(one, dict | None) for one in objects):
            return SubmittedQuery(**values)
    except TypeError:  # fields are missing
        pass
    raise QueryError(f"the server's reply is no query: {str(reply)[:200]}", hint=_WRONG_SERVER)


def _queries(reply: Mapping[str, Any]) -> list[SubmittedQuery]:
    data = reply.get("data")
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        raise QueryError(f"the server's reply is no list of queries: {str(reply)[:200]}", hint=_WRONG_SERVER)
    return [_query(one) for one in data]


def _checked(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a reply; an empty one for a reply without content.

    Raise QueryError for what the server refuses, with what it says, and for a reply that is no JSON object.
    """
    if answer.is_success:
        return _parse_object(answer.content, "the reply") if answer.content else {}
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = answer.text[:300]
    raise QueryError(
        f"the server answered {answer.status_code}: {message}", hint="change what it refuses, or try later"
    )


def _unreachable(url: str, error: httpx.TransportError) -> EngineUnavailable:
    what = f"no server of teola serve answers at {url} ({type(error).__name__})."
    return EngineUnavailable(what, retryable=True, hint="start it, or correct the address")


def _submission(
    model: str,
    input: Any,
    inputs: Any,
    parameters: Mapping[str, Any],
    variables: Mapping[str, Any],
    documents: Sequence[GivenFile],
    settings: Mapping[str, Any] | None,
) -> dict[str, Any]:
    sent = [document(one) for one in documents] or None
    given = {"input": input, "inputs": inputs, "documents": sent, "settings": settings}
    values = {name: {"query": one.id} if isinstance(one, SubmittedQuery) else one for name, one in variables.items()}
    asked = {"model": model, "parameters": dict(parameters), "variables": values}
    return asked | {key: value for key, value in given.items() if value is not None}


def _to_query_event(event: ServerSentEvent) -> QueryEvent:
    """Raise QueryError for an event whose data is no JSON object."""
    return QueryEvent(event.last_event_id, event.type, _parse_object(event.data, "an event"))


def _parse_object(text: str | bytes, name: str) -> dict[str, Any]:
    """Return a JSON object that the server has sent. Raise QueryError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    shown = text if isinstance(text, str) else text.decode(errors="replace")
    raise QueryError(f"{name} of the server is no JSON object: {shown[:200]!r}", hint=_WRONG_SERVER)


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


_TRIES = 5
"""Connections of one stream of events that may break without news in between."""


class TeolaClient:
    """Of a server at `url`, e.g. `http://127.0.0.1:8000`. A context manager; requests join `joining()`.

    Raises `QueryError` for what the server refuses, `EngineUnavailable` where there is none.
    """

    def __init__(self, url: str, api_key: str = "", *, timeout: float = 630.0, **more: Any) -> None:
        self._http = QueryClient(base_url=url, headers=_headers(api_key), timeout=timeout, **more)

    def submit(
        self,
        model: str,
        input: str | list[dict[str, Any]] | None = None,
        *,
        inputs: Any = None,
        parameters: Mapping[str, Any] | None = None,
        variables: Mapping[str, str | SubmittedQuery] | None = None,
        documents: Sequence[GivenFile] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> SubmittedQuery:
        """A query: text or messages, or an app's whole `inputs`. A variable may be another query, done or not.

        `documents`: paths of files, or objects as the server takes them. `settings`: of a workflow, for this query.
        """
        body = _submission(model, input, inputs, parameters or {}, variables or {}, documents, settings)
        return _query(self._ask("POST", "/v1/queries", json=body))

    def get(self, id: str, *, wait: float = 0.0) -> SubmittedQuery:
        """How it is, after at most so many seconds."""
        return _query(self._ask("GET", f"/v1/queries/{id}", params={"wait": wait}))

    def wait(self, id: str) -> SubmittedQuery:
        """The query once it is over, or waits for somebody."""
        while not (found := self.get(id, wait=60)).rests:
            pass
        return found

    def events(self, id: str, last: str = "") -> Iterator[QueryEvent]:
        """What happens to it, until it is over or waits for somebody; connections that break are made again. `last`:
        the id of an event, from behind which to go on."""
        kind, broken = "", 0
        while True:
            try:
                with self._http.stream("GET", f"/v1/queries/{id}/events", headers=_from(last)) as answer:
                    if not answer.is_success:
                        answer.read()
                        _checked(answer)
                    for event in map(_to_query_event, read_events(answer.iter_bytes())):
                        last, kind, broken = event.id, event.kind, 0
                        yield event
                        if kind in ENDED:
                            return
                if kind in _RESTS:
                    return
                broken += 1
            except httpx.TransportError as error:
                broken += 1
                if broken >= _TRIES:
                    raise _unreachable(str(self._http.base_url), error) from error
            if broken >= _TRIES:
                raise QueryError(f"the events of query {id} broke off.", query_id=id, hint="ask for it by its id")

    def resume(self, id: str, value: Any = None) -> SubmittedQuery:
        """Tells a graph what it has stopped to ask for; several questions: values by the ids of the interrupts."""
        return _query(self._ask("POST", f"/v1/queries/{id}/resume", json={"value": value}))

    def cancel(self, id: str) -> SubmittedQuery:
        return _query(self._ask("POST", f"/v1/queries/{id}/cancel"))

    def forget(self, id: str) -> None:
        """Ends it, and nothing of it is kept."""
        self._ask("DELETE", f"/v1/queries/{id}")

    def latest(self, limit: int = 50, status: str = "") -> list[SubmittedQuery]:
        """`status`: only those that are so, e.g. `waiting`."""
        return _queries(self._ask("GET", "/v1/queries", params=_asked(limit, status)))

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            return _checked(self._http.request(method, path, **more))
        except httpx.TransportError as error:
            raise _unreachable(str(self._http.base_url), error) from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class AsyncTeolaClient:
    """`TeolaClient` for a loop: the same methods, awaited."""

    def __init__(self, url: str, api_key: str = "", *, timeout: float = 630.0, **more: Any) -> None:
        self._http = AsyncQueryClient(base_url=url, headers=_headers(api_key), timeout=timeout, **more)

    async def submit(
        self,
        model: str,
        input: str | list[dict[str, Any]] | None = None,
        *,
        inputs: Any = None,
        parameters: Mapping[str, Any] | None = None,
        variables: Mapping[str, str | SubmittedQuery] | None = None,
        documents: Sequence[GivenFile] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> SubmittedQuery:
        body = _submission(model, input, inputs, parameters or {}, variables or {}, documents, settings)
        return _query(await self._ask("POST", "/v1/queries", json=body))

    async def get(self, id: str, *, wait: float = 0.0) -> SubmittedQuery:
        return _query(await self._ask("GET", f"/v1/queries/{id}", params={"wait": wait}))

    async def wait(self, id: str) -> SubmittedQuery:
        while not (found := await self.get(id, wait=60)).rests:
            pass
        return found

    async def events(self, id: str, last: str = "") -> AsyncIterator[QueryEvent]:
        kind, broken = "", 0
        while True:
            try:
                async with self._http.stream("GET", f"/v1/queries/{id}/events", headers=_from(last)) as answer:
                    if not answer.is_success:
                        await answer.aread()
                        _checked(answer)
                    async with aclosing(aread_events(answer.aiter_bytes())) as received:
                        async for event in received:
                            news = _to_query_event(event)
                            last, kind, broken = news.id, news.kind, 0
                            yield news
                            if kind in ENDED:
                                return
                if kind in _RESTS:
                    return
                broken += 1
            except httpx.TransportError as error:
                broken += 1
                if broken >= _TRIES:
                    raise _unreachable(str(self._http.base_url), error) from error
            if broken >= _TRIES:
                raise QueryError(f"the events of query {id} broke off.", query_id=id, hint="ask for it by its id")

    async def resume(self, id: str, value: Any = None) -> SubmittedQuery:
        return _query(await self._ask("POST", f"/v1/queries/{id}/resume", json={"value": value}))

    async def cancel(self, id: str) -> SubmittedQuery:
        return _query(await self._ask("POST", f"/v1/queries/{id}/cancel"))

    async def forget(self, id: str) -> None:
        await self._ask("DELETE", f"/v1/queries/{id}")

    async def latest(self, limit: int = 50, status: str = "") -> list[SubmittedQuery]:
        """`status`: only those that are so, e.g. `waiting`."""
        return _queries(await self._ask("GET", "/v1/queries", params=_asked(limit, status)))

    async def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            return _checked(await self._http.request(method, path, **more))
        except httpx.TransportError as error:
            raise _unreachable(str(self._http.base_url), error) from error

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()


def _asked(limit: int, status: str) -> dict[str, Any]:
    return {"limit": limit, **({"status": status} if status else {})}


def _from(last: str) -> dict[str, str]:
    return {"Last-Event-ID": last} if last else {}
