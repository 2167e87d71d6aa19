"""Runs submitted queries, and tells of them. Lives on the server's loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from teola_plugin.errors import TeolaError
from teola_plugin.server.access.terms import Caller, Told
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.parts import without_files
from teola_plugin.server.errors import HttpError, bad_request, http_error, not_found, unexpected
from teola_plugin.server.models.apps import CONFIG, App, no_settings
from teola_plugin.server.models.base import ChatModel, Model
from teola_plugin.server.queries.records import EventLog, Record
from teola_plugin.server.queries.store import Store
from teola_plugin.server.queries.variables import check, filled, references
from teola_plugin.server.service import Service
from teola_plugin.server.visits import Visit
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.chat import ChatRequest

log = logging.getLogger("teola_plugin.server")
_KEPT_LOGS = 256
"""Queries that have ended and whose events are still there, one by one."""


@dataclass(slots=True, eq=False)
class Running:
    """A submitted query of this process."""

    record: Record
    log: EventLog = field(default_factory=EventLog)
    task: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to read; a new one is made then."""

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        self.log.events.append((kind, data))
        self.news.set()
        self.news = asyncio.Event()


class Queries:
    """`keep`: seconds for which results are kept. The store is open."""

    def __init__(self, service: Service, store: Store, keep: float, documents: Documents) -> None:
        self._service, self.store, self._keep, self._documents = service, store, keep, documents
        self._running: dict[tuple[str, str], Running] = {}
        self._closing = False

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Knows what was finished before; begins again what may be, and reports the rest as interrupted."""
        for record in await self.store.unfinished():
            await self._recover(record)

    async def close(self) -> None:
        """What still runs has `drain` seconds to end; the rest is as after a crash."""
        tasks = [one.task for one in self._running.values() if one.task is not None and not one.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._service.settings.drain)
        self._closing = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _recover(self, record: Record) -> None:
        caller = next((c for c in self._service.callers.values() if c.tenant == record.tenant), None)
        begun = record.status == "running" and not record.repeatable
        if begun or caller is None or record.model not in self._service.models:
            why = "the server was stopped while it ran, and it may have written something" if begun else "it is gone"
            error = {"message": f"{why}.", "type": "server_error", "param": None, "code": "interrupted"}
            await self._interrupted(record, error)
            return
        told = Told(app=record.app)
        try:
            model = self._service.model(record.model, caller, "chat", "app")
            visit = self._service.visit(_request_id(), caller, told, model, 0, again=True)
        except HttpError as error:
            await self._interrupted(record, error.body()["error"])
            return
        self._begin(record, visit)

    async def _interrupted(self, record: Record, error: dict[str, Any]) -> None:
        await self.store.put(self._ended(record, "interrupted", error=error))
        await self._documents.query_over(record.tenant, record.id)

    # ------------------------------------------------------------ what clients do

    async def submit(
        self, caller: Caller, told: Told, asked: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Record:
        """The query is taken and kept. Raises `HttpError` where it is not."""
        model = self._service.model(_chat(asked).model, caller, "chat", "app")
        check(without_files(asked), variables)
        for id in references(variables).values():
            await self.get(caller.tenant, id)
        _check(model, _chat(asked))
        id = f"q_{secrets.token_hex(12)}"
        try:
            kept = await self._documents.kept(caller, asked, id)
            return await self._taken(id, caller, told, model, kept, variables)
        except BaseException:
            await self._documents.query_over(caller.tenant, id)
            raise

    async def _taken(
        self,
        id: str,
        caller: Caller,
        told: Told,
        model: Model,
        asked: Mapping[str, Any],
        variables: Mapping[str, Any],
    ) -> Record:
        """A query whose documents are kept has a place, and begins. Raises `HttpError`."""
        body = _chat(asked)
        read = await self._documents.read(caller.tenant, body)
        tokens = model.tokens(read.characters, body.max_completion_tokens or body.max_tokens, 1)
        visit = self._service.visit(_request_id(), caller, told, model, tokens)
        repeatable = not isinstance(model, App) or model.settings.repeatable
        record = Record(
            id=id,
            tenant=caller.tenant,
            model=body.model,
            app=visit.query.app,
            body=dict(asked),
            variables=dict(variables),
            created=time.time(),
            goal=visit.query.goal,
            repeatable=repeatable,
            query=visit.query.id,
        )
        try:
            await self.store.put(record)
        except BaseException:
            visit.end("failed")
            raise
        self._begin(record, visit)
        return record

    async def get(self, tenant: str, id: str) -> Record:
        """Raises `HttpError` for one that this tenant does not have."""
        live = self._running.get((tenant, id))
        found = live.record if live is not None else await self.store.get(tenant, id)
        if found is None:
            raise not_found(f"there is no query {id!r:.140}.", "see GET /v1/queries", code="query_not_found")
        return found

    async def wait(self, tenant: str, id: str, seconds: float | None) -> Record:
        """The query, once it is over, or after so many seconds as it is then."""
        live = self._running.get((tenant, id))
        if live is not None and live.task is not None and not live.record.over:
            await asyncio.wait({live.task}, timeout=seconds)
        return await self.get(tenant, id)

    async def cancel(self, tenant: str, id: str) -> Record:
        """Idempotent; one that is over stays as it is."""
        live = self._running.get((tenant, id))
        if live is not None and live.task is not None and not live.task.done():
            live.task.cancel()
            await asyncio.gather(live.task, return_exceptions=True)
        return await self.get(tenant, id)

    async def forget(self, tenant: str, id: str) -> None:
        await self.cancel(tenant, id)
        self._running.pop((tenant, id), None)
        await self.store.delete(tenant, id)
        await self._documents.query_over(tenant, id)

    async def forget_all(self, tenant: str) -> int:
        """All submitted queries of a tenant, those that run included."""
        for key in [key for key in self._running if key[0] == tenant]:
            await self.cancel(*key)
            self._running.pop(key, None)
        return await self.store.delete(tenant)

    async def events(self, tenant: str, id: str, last: str = "") -> AsyncIterator[tuple[str, str, dict[str, Any]]]:
        """(id, kind, data) from behind the event `last` on, to the end. `reset`: what was told before is void."""
        record = await self.get(tenant, id)
        live = self._running.get((tenant, id))
        if live is None:  # of another process, or long ago: its end is what is left
            if last:
                yield f"{record.attempt}-0", "reset", {}
            yield f"{record.attempt}-1", record.status, record.told()
            return
        at, void = live.log.after(last)
        attempt = live.log.attempt
        if void:
            yield f"{attempt}-0", "reset", {}
        while True:
            if live.log.attempt != attempt:
                attempt, at = live.log.attempt, 0
                yield f"{attempt}-0", "reset", {}
            news = live.news
            for kind, data in live.log.events[at:]:
                at += 1
                yield f"{attempt}-{at}", kind, data
            if live.record.over and at >= len(live.log.events):
                return
            if live.news is news and at >= len(live.log.events):
                await news.wait()

    async def expire(self) -> None:
        """Drops results that are older than the policy allows."""
        await self.store.expire(time.time())
        await self._documents.store.expire(time.time())
        over = [key for key, one in self._running.items() if one.record.over]
        for key in over[: max(0, len(over) - _KEPT_LOGS)]:
            del self._running[key]

    # ------------------------------------------------------------ running

    def _begin(self, record: Record, visit: Visit) -> None:
        live = Running(record)
        live.log.begin(record.attempt + 1)
        self._running[record.tenant, record.id] = live
        live.task = asyncio.create_task(self._run(live, visit))

    async def _run(self, live: Running, visit: Visit) -> None:
        outcome, changes = "failed", dict[str, Any]()
        try:
            answer = await self._answer(live, visit)
            outcome, changes = "done", {"answer": _told(answer)}
        except asyncio.CancelledError:
            outcome = "cancelled"
        except TeolaError as error:
            changes = {"error": http_error(error).body()["error"]}
        except Exception as error:
            log.error("query %s failed", live.record.id, exc_info=error)
            changes = {"error": unexpected(live.record.id).body()["error"]}
        visit.end(outcome)
        if outcome == "cancelled" and self._closing:
            return
        ended = self._ended(live.record, outcome, **changes)
        try:
            await self.store.put(ended)
            await self._documents.query_over(ended.tenant, ended.id)
        except Exception as error:  # whoever waits is told all the same
            log.error("the end of query %s cannot be kept", ended.id, exc_info=error)
        live.record = ended
        live.tell(ended.status, ended.told())

    async def _answer(self, live: Running, visit: Visit) -> Answer:
        record = live.record
        body = _chat(filled(record.body, await self._values(record)))
        body = await self._documents.read(record.tenant, body)
        live.record = record.with_(status="running", attempt=record.attempt + 1)
        await self.store.put(live.record)  # before anything runs: after a crash it is known to have begun
        live.tell("running", {})
        model = cast(ChatModel, self._service.models[self._name(record.model, visit.caller)])
        async with aclosing(model.stream(body, visit)) as deltas:
            async for delta in deltas:
                if delta.text:
                    live.tell("delta", {"text": delta.text})
                if delta.end is not None:
                    return delta.end
        raise HttpError(502, "the model has given no answer.", kind="server_error")

    def _name(self, model: str, caller: Caller) -> str:
        return self._service.model(model, caller, "chat", "app").name

    async def _values(self, record: Record) -> dict[str, str]:
        """Of its variables, once they are there. Raises `HttpError` where one will never be."""
        found = {name: value for name, value in record.variables.items() if isinstance(value, str)}
        for name, id in references(record.variables).items():
            other = await self.wait(record.tenant, id, None) if (record.tenant, id) in self._running else None
            other = other or await self.get(record.tenant, id)
            if other.status != "done" or other.answer is None:
                why = f"the variable {name!r} has no value: query {id} is {other.status}."
                raise bad_request(why, "submit it again", param="variables")
            found[name] = str(other.answer["text"])
        return found

    def _ended(self, record: Record, status: str, **changes: Any) -> Record:
        now = time.time()
        return record.with_(status=status, ended=now, expires=now + self._keep, **changes)


def _check(model: Model, body: ChatRequest) -> None:
    """Raises `HttpError`, `RegistrationError` for what is known to be wrong before anything runs."""
    if isinstance(model, App):
        model.check(body)
    elif (body.metadata or {}).get(CONFIG) is not None:
        raise no_settings(model.name)


def _request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def _chat(asked: Any) -> ChatRequest:
    """Raises `HttpError` for what is no chat."""
    try:
        return ChatRequest.model_validate(asked)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(one) for one in fault["loc"])
        raise bad_request(f"{where}: {fault['msg']}.", "see OpenAI's reference of chats", param=where) from None


def _told(answer: Answer) -> dict[str, Any]:
    calls = {"tool_calls": [call.told() for call in answer.calls]} if answer.calls else {}
    about = {"text": answer.text, "finish_reason": answer.finish, "usage": answer.usage.told()}
    return {**about, **calls, **answer.more}
