"""A typed client, sync and async, of what a server of `teola serve` has beyond OpenAI's protocol.

It submits queries, and lets requests of other clients join one query: all that an app sends within `joining()`.

::

    from openai import AsyncOpenAI, OpenAI
    from teola_plugin.server.client import AsyncQueryClient, QueryClient, joining

    client = OpenAI(base_url=url, http_client=QueryClient())  # or AsyncOpenAI(..., http_client=AsyncQueryClient())
    with joining(app="support", goal=3.0):
        client.chat.completions.create(model="llm", messages=messages)

Without these clients, `joining().headers` are the headers to send (`default_headers=`, `extra_headers=`). Needs httpx,
and nothing of the server's.
"""

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

from teola_plugin.errors import EngineUnavailable, QueryError, missing_package
from teola_plugin.event_streams import ServerSentEvent, aread_events, read_events

try:
    import httpx
except ModuleNotFoundError as error:
    raise missing_package("teola_plugin.server.client", "httpx", "openai") from error

ClientFile = str | Path | Mapping[str, Any]
"""The path of a file, or an object as the server takes it: `{"file_id": ...}`, `{"text": ...}`, `{"url": ...}`."""


def document_to_json(file: ClientFile) -> dict[str, Any]:
    """Return a document as JSON. Raise `QueryError` for a file that cannot be read."""
    if isinstance(file, Mapping):
        return dict(file)
    path = Path(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        message = f"the document {str(path)!r:.200} cannot be read: {error.strerror or error}."
        raise QueryError(message, hint='give the path of a file, or {"text": "..."}') from error
    type = mimetypes.guess_type(path.name)[0] or ""
    return {"filename": path.name, "file_data": f"data:{type};base64,{base64.b64encode(data).decode()}"}


@dataclass(frozen=True, slots=True)
class Joined:
    """A query that requests join by its name."""

    query: str
    app: str = ""
    deadline: float | None = None
    goal: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers by which a request joins this query, with its app, deadline and goal.

        Deadline and goal are in seconds. Values that are not set have no header. Send them as `default_headers` or
        `extra_headers` where the client is none of this module's.
        """
        texts = {"X-Teola-Query": self.query, "X-Teola-App": self.app}
        seconds = {"X-Teola-Deadline": self.deadline, "X-Teola-Goal": self.goal}
        texts |= {name: f"{value:g}" for name, value in seconds.items() if value is not None}
        return {name: text for name, text in texts.items() if text}


_current: ContextVar[Joined | None] = ContextVar("teola_joined_query", default=None)


@contextmanager
def joining(
    query: str | None = None, *, app: str = "", deadline: float | None = None, goal: float | None = None
) -> Iterator[Joined]:
    """Make all requests in the body, by the clients of this module, one query. Draw a name if none is given.

    `deadline`, `goal`: seconds from its first request, after which it fails, and within which it should end.
    """
    joined = Joined(query or f"query_{secrets.token_hex(12)}", app, deadline, goal)
    token = _current.set(joined)
    try:
        yield joined
    finally:
        _current.reset(token)


def _mark(request: httpx.Request) -> None:
    """Add the headers of the query that `joining` has begun to a request that is about to be sent.

    A request outside `joining` is left as it is. The query is found in a context variable, so threads and tasks only
    see it if they run in a copy of the caller's context.
    """
    joined = _current.get()
    if joined is not None:
        request.headers.update(joined.headers)


class QueryClient(httpx.Client):
    """An `httpx.Client` that sends the headers of the query which `joining` has begun."""

    def send(self, request: httpx.Request, **more: Any) -> httpx.Response:
        _mark(request)
        return super().send(request, **more)


class AsyncQueryClient(httpx.AsyncClient):
    """An `httpx.AsyncClient` that sends the headers of the query which `joining` has begun."""

    async def send(self, request: httpx.Request, **more: Any) -> httpx.Response:
        _mark(request)
        return await super().send(request, **more)


ENDED = ("done", "failed", "cancelled", "interrupted")
_AT_REST = (*ENDED, "waiting")


@dataclass(frozen=True, slots=True)
class SubmittedQuery:
    """A submitted query as the server describes it. Times are Unix times, in seconds."""

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
    """`text`, `finish_reason`, `usage`, and what an app adds to them."""
    error: Mapping[str, Any] | None = None
    waiting: Mapping[str, Any] | None = None
    """The stop of a graph that asks somebody: `interrupts`, each an `id` and a `value`; `next`, the nodes to come."""

    @property
    def over(self) -> bool:
        return self.status in ENDED

    @property
    def rests(self) -> bool:
        """True if it has ended, or waits for somebody: see `resume`."""
        return self.status in _AT_REST

    @property
    def text(self) -> str:
        """The answer's text. Raise `QueryError` if there is no answer."""
        if self.answer is None:
            reason = str((self.error or {}).get("message", f"it is {self.status}"))
            raise QueryError(
                f"query {self.id} has no answer: {reason}", query_id=self.id, hint="wait for it, or see its error"
            )
        return str(self.answer.get("text", ""))


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """One event of a query. After a `reset`, earlier events are void."""

    id: str
    kind: str
    data: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The text that it adds to the answer."""
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
    """Return the queries that a reply lists. Raise `QueryError` for a reply that is no list of queries.

    Such a reply usually comes from another server or a proxy at the address, so the error's hint says to check it.
    """
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
    message = f"no server of teola serve answers at {url} ({type(error).__name__})."
    return EngineUnavailable(message, retryable=True, hint="start it, or correct the address")


def _submission_body(
    model: str,
    input: Any,
    inputs: Any,
    parameters: Mapping[str, Any],
    variables: Mapping[str, Any],
    documents: Sequence[ClientFile],
    settings: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the JSON body that submits a query, for the synchronous and the asynchronous client.

    Files among `documents` are read here. A variable that is a submitted query becomes a reference to its answer. Raise
    `QueryError` for a file that cannot be read.
    """
    files = [document_to_json(file) for file in documents] or None
    optional = {"input": input, "inputs": inputs, "documents": files, "settings": settings}
    values = {name: {"query": one.id} if isinstance(one, SubmittedQuery) else one for name, one in variables.items()}
    required = {"model": model, "parameters": dict(parameters), "variables": values}
    return required | {key: value for key, value in optional.items() if value is not None}


def _to_query_event(event: ServerSentEvent) -> QueryEvent:
    """Return the event of a query. Raise QueryError for an event whose data is no JSON object."""
    return QueryEvent(event.last_event_id, event.type, _parse_object(event.data, "an event"))


def _parse_object(text: str | bytes, name: str) -> dict[str, Any]:
    """Return a JSON object that the server has sent. Raise QueryError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    content = text if isinstance(text, str) else text.decode(errors="replace")
    raise QueryError(f"{name} of the server is no JSON object: {content[:200]!r}", hint=_WRONG_SERVER)


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


_MAX_BROKEN = 5
"""Connections that may break one after the other without an event between them."""


class TeolaClient:
    """A client of the server at `url`, e.g. `http://127.0.0.1:8000`. A context manager; its requests join `joining()`.

    Its methods raise `QueryError` for what the server refuses, and `EngineUnavailable` if there is no server.
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
        documents: Sequence[ClientFile] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> SubmittedQuery:
        """Submit a query: text or messages, or an app's whole `inputs`. A variable may be another query, ended or not.

        `documents`: paths of files, or objects as the server takes them. `settings`: of a workflow, for this query.
        """
        body = _submission_body(model, input, inputs, parameters or {}, variables or {}, documents, settings)
        return _query(self._send("POST", "/v1/queries", json=body))

    def get(self, id: str, *, wait: float = 0.0) -> SubmittedQuery:
        """Return the query, after at most `wait` seconds if it is not at rest before."""
        return _query(self._send("GET", f"/v1/queries/{id}", params={"wait": wait}))

    def wait(self, id: str) -> SubmittedQuery:
        """Return the query once it has ended, or waits for somebody.

        The server is asked in requests that wait up to 60 seconds each; there is no limit to their number. A failed
        query is returned, too: see its `status`. Raise `QueryError` and `EngineUnavailable` as `get` does.
        """
        while not (query := self.get(id, wait=60)).rests:
            pass
        return query

    def events(self, id: str, last: str = "") -> Iterator[QueryEvent]:
        """Yield the query's events until it ends or waits for somebody. Connections that break are made again.

        `last`: the id of an event, after which to begin.
        """
        kind, broken = "", 0
        while True:
            try:
                with self._http.stream("GET", f"/v1/queries/{id}/events", headers=_resume_headers(last)) as answer:
                    if not answer.is_success:
                        answer.read()
                        _checked(answer)
                    for event in map(_to_query_event, read_events(answer.iter_bytes())):
                        last, kind, broken = event.id, event.kind, 0
                        yield event
                        if kind in ENDED:
                            return
                if kind in _AT_REST:
                    return
                broken += 1
            except httpx.TransportError as error:
                broken += 1
                if broken >= _MAX_BROKEN:
                    raise _unreachable(str(self._http.base_url), error) from error
            if broken >= _MAX_BROKEN:
                raise QueryError(f"the events of query {id} broke off.", query_id=id, hint="ask for it by its id")

    def resume(self, id: str, value: Any = None) -> SubmittedQuery:
        """Answer the question that a graph has stopped to ask; several: values by the ids of the interrupts."""
        return _query(self._send("POST", f"/v1/queries/{id}/resume", json={"value": value}))

    def cancel(self, id: str) -> SubmittedQuery:
        return _query(self._send("POST", f"/v1/queries/{id}/cancel"))

    def forget(self, id: str) -> None:
        """End the query, and delete what is stored of it."""
        self._send("DELETE", f"/v1/queries/{id}")

    def latest(self, limit: int = 50, status: str = "") -> list[SubmittedQuery]:
        """Return the latest queries. `status`: only those of this status, e.g. `waiting`."""
        return _queries(self._send("GET", "/v1/queries", params=_list_parameters(limit, status)))

    def _send(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Send a request, and return the JSON object of the reply.

        Raise `QueryError` for what the server refuses, and `EngineUnavailable` if it cannot be reached.
        """
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
    """The same as `TeolaClient`, with methods to await."""

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
        documents: Sequence[ClientFile] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> SubmittedQuery:
        """Submit a query; see `TeolaClient.submit`."""
        body = _submission_body(model, input, inputs, parameters or {}, variables or {}, documents, settings)
        return _query(await self._send("POST", "/v1/queries", json=body))

    async def get(self, id: str, *, wait: float = 0.0) -> SubmittedQuery:
        return _query(await self._send("GET", f"/v1/queries/{id}", params={"wait": wait}))

    async def wait(self, id: str) -> SubmittedQuery:
        while not (query := await self.get(id, wait=60)).rests:
            pass
        return query

    async def events(self, id: str, last: str = "") -> AsyncIterator[QueryEvent]:
        """Yield the query's events until it ends or waits for somebody; see `TeolaClient.events`."""
        kind, broken = "", 0
        while True:
            try:
                async with self._http.stream(
                    "GET", f"/v1/queries/{id}/events", headers=_resume_headers(last)
                ) as answer:
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
                if kind in _AT_REST:
                    return
                broken += 1
            except httpx.TransportError as error:
                broken += 1
                if broken >= _MAX_BROKEN:
                    raise _unreachable(str(self._http.base_url), error) from error
            if broken >= _MAX_BROKEN:
                raise QueryError(f"the events of query {id} broke off.", query_id=id, hint="ask for it by its id")

    async def resume(self, id: str, value: Any = None) -> SubmittedQuery:
        return _query(await self._send("POST", f"/v1/queries/{id}/resume", json={"value": value}))

    async def cancel(self, id: str) -> SubmittedQuery:
        return _query(await self._send("POST", f"/v1/queries/{id}/cancel"))

    async def forget(self, id: str) -> None:
        await self._send("DELETE", f"/v1/queries/{id}")

    async def latest(self, limit: int = 50, status: str = "") -> list[SubmittedQuery]:
        """Return the latest queries. `status`: only those of this status, e.g. `waiting`."""
        return _queries(await self._send("GET", "/v1/queries", params=_list_parameters(limit, status)))

    async def _send(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Send a request, and return the JSON object of the reply.

        Raise `QueryError` for what the server refuses, and `EngineUnavailable` if it cannot be reached.
        """
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


def _list_parameters(limit: int, status: str) -> dict[str, Any]:
    return {"limit": limit, **({"status": status} if status else {})}


def _resume_headers(last: str) -> dict[str, str]:
    return {"Last-Event-ID": last} if last else {}
