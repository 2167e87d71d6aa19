"""A typed client of what this server has beyond OpenAI's protocol: queries as resources. Sync and async."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import httpx

from teola_plugin.errors import EngineUnavailable, QueryError
from teola_plugin.server.client.documents import GivenFile, document
from teola_plugin.server.client.joining import AsyncQueryClient, QueryClient

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
        return str(self.answer["text"])


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


def _query(told: Mapping[str, Any]) -> SubmittedQuery:
    known = {field.name for field in fields(SubmittedQuery)}
    return SubmittedQuery(**{key: value for key, value in told.items() if key in known})


def _checked(answer: httpx.Response) -> Any:
    """The JSON of an answer. Raises `QueryError` with what the server says."""
    if answer.is_success:
        return answer.json() if answer.content else None
    try:
        told = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        told = answer.text[:300]
    raise QueryError(f"the server answered {answer.status_code}: {told}", hint="change what it refuses, or try later")


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


class _Events:
    """Reads lines of server-sent events."""

    def __init__(self) -> None:
        self._part: dict[str, str] = {}

    def line(self, line: str) -> QueryEvent | None:
        if line:
            name, _, value = line.partition(": ")
            self._part[name] = value
            return None
        part, self._part = self._part, {}
        if "data" not in part:
            return None
        return QueryEvent(part.get("id", ""), part.get("event", ""), json.loads(part["data"]))


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
                    reader = _Events()
                    for line in answer.iter_lines():
                        event = reader.line(line)
                        if event is not None:
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
        return [_query(one) for one in self._ask("GET", "/v1/queries", params=_asked(limit, status))["data"]]

    def _ask(self, method: str, path: str, **more: Any) -> Any:
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
                    reader = _Events()
                    async for line in answer.aiter_lines():
                        event = reader.line(line)
                        if event is not None:
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

    async def resume(self, id: str, value: Any = None) -> SubmittedQuery:
        return _query(await self._ask("POST", f"/v1/queries/{id}/resume", json={"value": value}))

    async def cancel(self, id: str) -> SubmittedQuery:
        return _query(await self._ask("POST", f"/v1/queries/{id}/cancel"))

    async def forget(self, id: str) -> None:
        await self._ask("DELETE", f"/v1/queries/{id}")

    async def latest(self, limit: int = 50, status: str = "") -> list[SubmittedQuery]:
        """`status`: only those that are so, e.g. `waiting`."""
        return [_query(one) for one in (await self._ask("GET", "/v1/queries", params=_asked(limit, status)))["data"]]

    async def _ask(self, method: str, path: str, **more: Any) -> Any:
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
