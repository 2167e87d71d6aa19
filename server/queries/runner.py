"""Run submitted queries, recover those that a server left unfinished, and serve their events."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from teola_plugin.errors import TeolaError
from teola_plugin.server.callers import Caller, Told
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.parts import without_files
from teola_plugin.server.errors import HttpError, bad_request, http_error, not_found, unexpected
from teola_plugin.server.live_queries import Kept, Visit
from teola_plugin.server.models.apps import CONFIG, App, no_settings
from teola_plugin.server.models.base import ChatModel, Model
from teola_plugin.server.models.graphs import WAITING as ANSWER_WAITS
from teola_plugin.server.queries.checkpoints import Checkpoints
from teola_plugin.server.queries.records import WAITING, Event, Record, Running, ended, followed
from teola_plugin.server.queries.store import Store
from teola_plugin.server.service import Service
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.requests import ChatRequest, to_chat


@dataclass(frozen=True, slots=True)
class Begin:
    """It runs: from its beginning, or from its last checkpoint."""

    kept: Kept


@dataclass(frozen=True, slots=True)
class Wait:
    """It has stopped to ask somebody."""

    waiting: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """It cannot go on, or must not."""

    error: dict[str, Any]


GONE = "it is gone."
WROTE = "the server was stopped while it ran, and it may have written something."


async def recovered(record: Record, caller: Caller | None, model: Model | None) -> Begin | Wait | Report:
    """What is to be done with a query that is not over. `caller`, `model`: those it was of, if they are still there."""
    if caller is None or model is None:
        return Report(_error(GONE))
    if record.status == WAITING and record.waiting is not None:
        return Wait(record.waiting)
    if record.status == "queued":
        return Begin(Kept(record.id))
    stop = await model.stopped(record) if isinstance(model, App) else None
    if stop is not None and isinstance(model, App):
        approved = str((record.waiting or {}).get("at", ""))
        if model.waits(stop, approved):
            return Wait(stop.told())
        return Begin(Kept(record.id, "checkpoint"))
    return Begin(Kept(record.id)) if record.repeatable else Report(_error(WROTE))


def _error(why: str) -> dict[str, Any]:
    return {"message": why, "type": "server_error", "param": None, "code": "interrupted"}


def check_asked(model: Model, body: ChatRequest) -> None:
    """Raises `HttpError`, `RegistrationError` for what is known to be wrong before anything runs."""
    if isinstance(model, App):
        model.check(body)
    elif (body.metadata or {}).get(CONFIG) is not None:
        raise no_settings(model.name)


def check_told(record: Record, value: Any) -> None:
    """Raises `HttpError` for what does not answer what the graph has asked."""
    asked = [str(one["id"]) for one in (record.waiting or {}).get("interrupts", ())]
    if not asked and value is not None:
        hint = "send no value"
        raise bad_request("the graph has not asked anything: it waits for leave to go on.", hint, param="value")
    if asked and value is None:
        raise bad_request("the graph has asked something, and null is no answer.", "send a value", param="value")
    if len(asked) > 1 and not (isinstance(value, Mapping) and value and value.keys() <= set(asked)):
        hint = "send an object of values by the ids of its interrupts"
        raise bad_request(f"the graph has asked {len(asked)} things at once.", hint, param="value")


def told_of(answer: Answer) -> dict[str, Any]:
    calls = {"tool_calls": [call.told() for call in answer.calls]} if answer.calls else {}
    about = {"text": answer.text, "finish_reason": answer.finish, "usage": answer.usage.told()}
    return {**about, **calls, **answer.more}


_NAME = re.compile(r"\{\{\s*([A-Za-z_]\w{0,63})\s*\}\}")


def references(variables: Mapping[str, Any]) -> dict[str, str]:
    """Name -> id of the query whose answer is its value. Raises `HttpError` for what is neither text nor that."""
    found: dict[str, str] = {}
    for name, value in variables.items():
        if isinstance(value, Mapping) and isinstance(value.get("query"), str) and len(value) == 1:
            found[name] = value["query"]
        elif not isinstance(value, str):
            hint = 'give a text, or {"query": "the id of another one"}'
            raise bad_request(f"the variable {name!r:.80} is neither.", hint, param="variables")
    return found


def check(body: Any, variables: Mapping[str, Any]) -> None:
    """Raises `HttpError` for a name in the input that nothing is said of."""
    missing = sorted(names_in(body) - variables.keys()) if variables else []
    if missing:
        raise bad_request(f"the input names {missing[0]!r}, which is no variable.", "add it", param="variables")


def names_in(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(_NAME.findall(value))
    if isinstance(value, Mapping):
        return set().union(*(names_in(one) for one in value.values()))
    return set().union(*(names_in(one) for one in value)) if isinstance(value, list) else set()


def filled(value: Any, known: Mapping[str, str]) -> Any:
    """With the values for `{{ name }}`; what they hold is text, whatever it looks like."""
    if isinstance(value, str):
        return _NAME.sub(lambda found: known.get(found[1], found[0]), value)
    if isinstance(value, Mapping):
        return {key: filled(one, known) for key, one in value.items()}
    return [filled(one, known) for one in value] if isinstance(value, list) else value


log = logging.getLogger("teola_plugin.server")
_KEPT_LOGS = 256
"""Queries that have ended and whose events are still there, one by one."""


class Queries:
    """`keep`: seconds for which results are kept. The store is open."""

    def __init__(self, service: Service, store: Store, keep: float, documents: Documents) -> None:
        self._service, self.store, self._keep, self._documents = service, store, keep, documents
        self._running: dict[tuple[str, str], Running] = {}
        self._closing = False
        self.checkpoints = Checkpoints(store, [m for m in service.models.values() if isinstance(m, App)], keep)

    # ------------------------------------------------------------ life

    async def open(self) -> None:
        """Knows what was finished before; begins again what may be, and reports the rest as interrupted."""
        await self.checkpoints.open()
        for record in await self.store.unfinished():
            try:
                await self._recover(record)
            except Exception as error:  # of one app's own checkpoints, say; the others go on
                log.error("query %s cannot be taken up again", record.id, exc_info=error)
                await self._report(record, unexpected(record.id).body()["error"])

    async def close(self) -> None:
        """What still runs has `drain` seconds to end; the rest is as after a crash."""
        tasks = [one.task for one in self._running.values() if one.task is not None and not one.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._service.settings.drain)
        self._closing = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.checkpoints.close()

    async def _recover(self, record: Record) -> None:
        service = self._service
        caller = next((c for c in service.callers.values() if c.tenant == record.tenant), None)
        found = await recovered(record, caller, service.models.get(record.model))
        if isinstance(found, Wait):
            await self._hold(record, found.waiting)
        elif isinstance(found, Report) or caller is None:
            await self._report(record, found.error if isinstance(found, Report) else {})
        else:
            await self._take_up(record, caller, found)

    async def _take_up(self, record: Record, caller: Caller, found: Begin) -> None:
        try:
            model = self._service.model(record.model, caller, "chat", "app")
            visit = self._service.visit(_request_id(), caller, Told(app=record.app), model, 0, again=True)
        except HttpError as error:
            await self._report(record, error.body()["error"])
            return
        visit.kept = found.kept
        self._begin(record, visit)

    async def _hold(self, record: Record, waiting: dict[str, Any]) -> None:
        """It waits for somebody, as it did before or as its checkpoint tells."""
        if record.status != WAITING:
            record = self._waiting(record, waiting)
            await self.store.put(record)
        live = self._running[record.tenant, record.id] = Running(record)
        live.log.begin(record.attempt + 1)
        live.tell(WAITING, record.told())

    async def _report(self, record: Record, error: dict[str, Any]) -> None:
        await self.store.put(self._ended(record, "interrupted", error=error))
        await self._documents.query_over(record.tenant, record.id)

    # ------------------------------------------------------------ what clients do

    async def submit(
        self, caller: Caller, told: Told, asked: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Record:
        """The query is taken and kept. Raises `HttpError` where it is not."""
        body = to_chat(asked)
        model = self._service.model(body.model, caller, "chat", "app")
        check(without_files(asked), variables)
        for id in references(variables).values():
            await self.get(caller.tenant, id)
        check_asked(model, body)
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
        body = await self._documents.read(caller.tenant, to_chat(asked))
        tokens = model.tokens(body.characters, body.max_completion_tokens or body.max_tokens, 1)
        visit = self._service.visit(_request_id(), caller, told, model, tokens)
        repeatable = not isinstance(model, App) or model.repeatable(body.metadata or {})
        record = Record(
            id=id,
            tenant=caller.tenant,
            model=body.model,
            app=visit.query.app,
            body=dict(asked),
            variables=dict(variables),
            created=time.time() - self._gone(told),
            goal=visit.query.goal,
            repeatable=repeatable,
            query=visit.query.id,
        )
        try:
            await self.store.put(record)
        except BaseException:
            visit.end("failed")
            raise
        visit.kept = Kept(record.id)
        self._begin(record, visit)
        return record

    def _gone(self, told: Told) -> float:
        """Seconds since its request began to come."""
        return 0.0 if told.since is None else self._service.clock() - told.since

    async def resume(self, caller: Caller, told: Told, id: str, value: Any) -> Record:
        """A graph that has stopped to ask somebody is told the answer, and goes on. Raises `HttpError`."""
        record = await self.get(caller.tenant, id)
        live = self._running.get((caller.tenant, id))
        if live is None or record.status != WAITING:
            message = f"the query {id} does not wait for anybody: it is {record.status}."
            raise HttpError(409, message, hint="resume one whose status is waiting", code="not_waiting")
        check_told(record, value)
        model = self._service.model(record.model, caller, "chat", "app")
        told = Told(app=record.app, deadline=told.deadline, goal=told.goal, since=told.since)
        visit = self._service.visit(_request_id(), caller, told, model, 0)
        visit.kept = Kept(id, "told", value)
        visit.query.ran(id, submitted=True)
        live.record = record.with_(status="running", expires=None, query=visit.query.id)  # nobody else resumes it
        live.task = asyncio.create_task(self._run(live, visit))
        return live.record

    async def get(self, tenant: str, id: str) -> Record:
        """Raises `HttpError` for one that this tenant does not have."""
        live = self._running.get((tenant, id))
        found = live.record if live is not None else await self.store.get(tenant, id)
        if found is None:
            raise not_found(f"there is no query {id!r:.140}.", "see GET /v1/queries", code="query_not_found")
        return found

    async def wait(self, tenant: str, id: str, seconds: float | None) -> Record:
        """The query, once it is over or waits for somebody, or after so many seconds as it is then."""
        live = self._running.get((tenant, id))
        if live is not None and live.task is not None and live.runs:
            await asyncio.wait({live.task}, timeout=seconds)
        return await self.get(tenant, id)

    async def cancel(self, tenant: str, id: str) -> Record:
        """Idempotent; one that is over stays as it is."""
        live = self._running.get((tenant, id))
        if live is not None and live.task is not None and live.runs:
            live.task.cancel()
            await asyncio.gather(live.task, return_exceptions=True)
        elif live is not None and live.record.status == WAITING:
            await self._end(live, "cancelled")
        return await self.get(tenant, id)

    async def forget(self, tenant: str, id: str) -> None:
        record = await self.cancel(tenant, id)
        self._running.pop((tenant, id), None)
        await self._drop_thread(record)
        await self.store.delete(tenant, id)
        await self._documents.query_over(tenant, id)

    async def _drop_thread(self, record: Record) -> None:
        model = self._service.models.get(record.model)
        if isinstance(model, App):
            await self.checkpoints.forget(model, record)

    async def forget_all(self, tenant: str) -> int:
        """All submitted queries of a tenant, those that run included."""
        for key in [key for key in self._running if key[0] == tenant]:
            await self.cancel(*key)
            self._running.pop(key, None)
        await self.checkpoints.forget_all(tenant)
        return await self.store.delete(tenant)

    async def events(self, tenant: str, id: str, last: str = "") -> AsyncIterator[Event]:
        """From behind the event `last` on, until it rests. `reset`: what was told before is void."""
        record = await self.get(tenant, id)
        live = self._running.get((tenant, id))
        async for event in followed(live, last) if live is not None else ended(record, last):
            yield event

    async def expire(self) -> None:
        """Drops results, and queries that wait for somebody, that are older than the policy allows."""
        now = time.time()
        for key, one in list(self._running.items()):
            if one.record.expires is not None and one.record.expires <= now:
                del self._running[key]
                await self._documents.query_over(*key)
        await self.store.expire(now)
        await self._documents.store.expire(now)
        await self.checkpoints.expire(now)
        over = [key for key, one in self._running.items() if one.record.over]
        for key in over[: max(0, len(over) - _KEPT_LOGS)]:
            del self._running[key]

    # ------------------------------------------------------------ running

    def _begin(self, record: Record, visit: Visit) -> None:
        visit.query.ran(record.id, submitted=True)
        live = Running(record)
        live.log.begin(record.attempt + 1)
        self._running[record.tenant, record.id] = live
        live.task = asyncio.create_task(self._run(live, visit))

    async def _run(self, live: Running, visit: Visit) -> None:
        outcome, changes = "failed", dict[str, Any]()
        try:
            answer = await self._answer(live, visit)
            waiting = answer.more.get(ANSWER_WAITS)
            outcome, changes = ("done", {"answer": told_of(answer)}) if waiting is None else (WAITING, waiting)
        except asyncio.CancelledError:
            outcome = "cancelled"
        except TeolaError as error:
            changes = {"error": http_error(error).body()["error"]}
        except Exception as error:
            log.error("query %s failed", live.record.id, exc_info=error)
            changes = {"error": unexpected(live.record.id).body()["error"]}
        visit.end("done" if outcome == WAITING else outcome)
        if outcome == "cancelled" and self._closing:
            return
        await self._end(live, outcome, **changes)

    async def _end(self, live: Running, outcome: str, **changes: Any) -> None:
        """It rests: kept, and told to whoever follows it."""
        if outcome == WAITING:
            rests = self._waiting(live.record, changes)
        else:
            rests = self._ended(live.record, outcome, **changes)
        try:
            await self.store.put(rests)
            if rests.over:
                await self._documents.query_over(rests.tenant, rests.id)
        except Exception as error:  # whoever waits is told all the same
            log.error("the end of query %s cannot be kept", rests.id, exc_info=error)
        live.record = rests
        live.tell(rests.status, rests.told())

    async def _answer(self, live: Running, visit: Visit) -> Answer:
        record = live.record
        body = to_chat(filled(record.body, await self._values(record)))
        body = await self._documents.read(record.tenant, body)
        live.record = record.with_(status="running", attempt=live.log.attempt, query=visit.query.id)
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
            other = await self._over(record.tenant, id)
            if other.status != "done" or other.answer is None:
                why = f"the variable {name!r} has no value: query {id} is {other.status}."
                raise bad_request(why, "submit it again", param="variables")
            found[name] = str(other.answer["text"])
        return found

    async def _over(self, tenant: str, id: str) -> Record:
        """The query once it is over: one that waits for somebody is not."""
        live = self._running.get((tenant, id))
        while live is not None and not live.record.over:
            await live.news.wait()
        return await self.get(tenant, id)

    def _waiting(self, record: Record, waiting: dict[str, Any]) -> Record:
        return record.with_(status=WAITING, waiting=waiting, expires=time.time() + self._keep)

    def _ended(self, record: Record, status: str, **changes: Any) -> Record:
        now = time.time()
        return record.with_(status=status, ended=now, expires=now + self._keep, **changes)


def _request_id() -> str:
    return f"req_{secrets.token_hex(12)}"
