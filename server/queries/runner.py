"""Run submitted queries, recover those that a server left unfinished, and serve their events."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from teola_plugin.errors import TeolaError
from teola_plugin.server.callers import Caller, RequestHeaders
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.parts import without_files
from teola_plugin.server.errors import HttpError, bad_request, http_error, not_found, unexpected
from teola_plugin.server.live_queries import RequestSession, SubmittedQueryRef
from teola_plugin.server.models.apps import CONFIG, App, no_settings
from teola_plugin.server.models.base import ChatModel, Model
from teola_plugin.server.models.graphs import WAITING as ANSWER_WAITS
from teola_plugin.server.models.graphs import is_waiting
from teola_plugin.server.queries.checkpoints import Checkpoints
from teola_plugin.server.queries.records import WAITING, Event, Record, RunningQuery, end_events, follow_events
from teola_plugin.server.queries.store import Store
from teola_plugin.server.service import Service
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.requests import ChatRequest, to_chat


@dataclass(frozen=True, slots=True)
class Resume:
    """The decision to run a query, from its beginning or from its last checkpoint."""

    submitted: SubmittedQueryRef


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """The decision to wait, because the query's graph has stopped to ask somebody."""

    waiting: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportInterrupted:
    """The decision to end a query that cannot go on, or must not."""

    error: dict[str, Any]


MODEL_MISSING = "it is gone."
MAY_HAVE_WRITTEN = "the server was stopped while it ran, and it may have written something."


async def recovery_of(
    record: Record, caller: Caller | None, model: Model | None
) -> Resume | KeepWaiting | ReportInterrupted:
    """Decide what to do with a query that an earlier server left unfinished.

    `caller`, `model`: those of the query, if they still exist.
    """
    if caller is None or model is None:
        return ReportInterrupted(_interrupted_error(MODEL_MISSING))
    if record.status == WAITING and record.waiting is not None:
        return KeepWaiting(record.waiting)
    if record.status == "queued":
        return Resume(SubmittedQueryRef(record.id))
    stop = await model.find_stop(record) if isinstance(model, App) else None
    if stop is not None and isinstance(model, App):
        approved = str((record.waiting or {}).get("at", ""))
        if is_waiting(model.fast, stop, approved):
            return KeepWaiting(stop.to_json())
        return Resume(SubmittedQueryRef(record.id, "checkpoint"))
    if record.repeatable:
        return Resume(SubmittedQueryRef(record.id))
    return ReportInterrupted(_interrupted_error(MAY_HAVE_WRITTEN))


def _interrupted_error(reason: str) -> dict[str, Any]:
    return {"message": reason, "type": "server_error", "param": None, "code": "interrupted"}


def check_submission(model: Model, body: ChatRequest) -> None:
    """Raise `HttpError` or `RegistrationError` for what is known to be wrong before anything runs.

    Called before a query is stored. An app checks inputs, settings and documents; an engine has no settings and refuses
    them.
    """
    if isinstance(model, App):
        model.check(body)
    elif (body.metadata or {}).get(CONFIG) is not None:
        raise no_settings(model.name)


def check_resume_value(record: Record, value: Any) -> None:
    """Raise `HttpError` for a value that does not answer the graph's questions."""
    ids = [str(question["id"]) for question in (record.waiting or {}).get("interrupts", ())]
    if not ids and value is not None:
        hint = "send no value"
        raise bad_request("the graph has not asked anything: it waits for leave to go on.", hint, param="value")
    if ids and value is None:
        raise bad_request("the graph has asked something, and null is no answer.", "send a value", param="value")
    if len(ids) > 1 and not (isinstance(value, Mapping) and value and value.keys() <= set(ids)):
        hint = "send an object of values by the ids of its interrupts"
        raise bad_request(f"the graph has asked {len(ids)} things at once.", hint, param="value")


def answer_to_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as it is stored.

    Clients get the same object as the `answer` of their query: text, reason of the end, tokens, calls of tools if there
    are any, and what an app adds, e.g. sources.
    """
    calls = {"tool_calls": [call.to_json() for call in answer.calls]} if answer.calls else {}
    data = {"text": answer.text, "finish_reason": answer.finish, "usage": answer.usage.to_json()}
    return {**data, **calls, **answer.more}


_NAME = re.compile(r"\{\{\s*([A-Za-z_]\w{0,63})\s*\}\}")


def references(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the ids of the queries whose answers are values of variables, by variable.

    Raise `HttpError` for a value that is neither text nor such a reference.
    """
    ids: dict[str, str] = {}
    for name, value in variables.items():
        if isinstance(value, Mapping) and isinstance(value.get("query"), str) and len(value) == 1:
            ids[name] = value["query"]
        elif not isinstance(value, str):
            hint = 'give a text, or {"query": "the id of another one"}'
            raise bad_request(f"the variable {name!r:.80} is neither.", hint, param="variables")
    return ids


def check_variables(body: Any, variables: Mapping[str, Any]) -> None:
    """Raise `HttpError` for a name in the input that is no variable.

    Names are written as `{{ name }}`. A query without variables is not searched, so such text may be part of its input.
    """
    missing = sorted(variable_names_in(body) - variables.keys()) if variables else []
    if missing:
        raise bad_request(f"the input names {missing[0]!r}, which is no variable.", "add it", param="variables")


def variable_names_in(value: Any) -> set[str]:
    """Return the names of variables, written as `{{ name }}`, in all texts of a query's input."""
    if isinstance(value, str):
        return set(_NAME.findall(value))
    if isinstance(value, Mapping):
        return set().union(*(variable_names_in(one) for one in value.values()))
    return set().union(*(variable_names_in(one) for one in value)) if isinstance(value, list) else set()


def fill_in(value: Any, texts: Mapping[str, str]) -> Any:
    """Return the input with the variables' texts in place of `{{ name }}`; the texts themselves are not searched."""
    if isinstance(value, str):
        return _NAME.sub(lambda match: texts.get(match[1], match[0]), value)
    if isinstance(value, Mapping):
        return {key: fill_in(one, texts) for key, one in value.items()}
    return [fill_in(one, texts) for one in value] if isinstance(value, list) else value


log = logging.getLogger("teola_plugin.server")
_MAX_ENDED_LOGS = 256
"""Number of ended queries whose single events are still available."""


class Queries:
    """The submitted queries of a server. `keep`: seconds for which results are stored. The store is open."""

    def __init__(self, service: Service, store: Store, keep: float, documents: Documents) -> None:
        self._service, self.store, self._keep, self._documents = service, store, keep, documents
        self._running: dict[tuple[str, str], RunningQuery] = {}
        self._closing = False
        self.checkpoints = Checkpoints(store, [m for m in service.models.values() if isinstance(m, App)], keep)

    # ------------------------------------------------------------ start and stop

    async def open(self) -> None:
        """Recover unfinished queries: resume those that may be, and report the others as interrupted."""
        await self.checkpoints.open()
        for record in await self.store.unfinished():
            try:
                await self._recover(record)
            except Exception as error:  # e.g. of one app's own checkpoints; the other queries go on
                log.error("query %s cannot be taken up again", record.id, exc_info=error)
                await self._report(record, unexpected(record.id).body()["error"])

    async def close(self) -> None:
        """Give running queries `drain` seconds to end, then stop them as a crash would."""
        tasks = [one.task for one in self._running.values() if one.task is not None and not one.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._service.settings.drain)
        self._closing = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.checkpoints.close()

    async def _recover(self, record: Record) -> None:
        """Take up a query that an earlier server left unfinished: run it, let it wait on, or report it as interrupted.

        Called once for each such query when the server starts.
        """
        service = self._service
        caller = next((c for c in service.callers.values() if c.tenant == record.tenant), None)
        decision = await recovery_of(record, caller, service.models.get(record.model))
        if isinstance(decision, KeepWaiting):
            await self._hold(record, decision.waiting)
        elif isinstance(decision, ReportInterrupted) or caller is None:
            await self._report(record, decision.error if isinstance(decision, ReportInterrupted) else {})
        else:
            try:
                model = service.model(record.model, caller, "chat", "app")
                headers = RequestHeaders(app=record.app)
                session = service.begin_session(_request_id(), caller, headers, model, 0, recovered=True)
            except HttpError as error:
                await self._report(record, error.body()["error"])
                return
            session.submitted = decision.submitted
            self._start_task(record, session)

    async def _hold(self, record: Record, waiting: dict[str, Any]) -> None:
        """Let a query wait for somebody, as it did before or as its checkpoint says."""
        if record.status != WAITING:
            record = self._waiting_record(record, waiting)
            await self.store.put(record)
        live = self._running[record.tenant, record.id] = RunningQuery(record)
        live.log.begin(record.attempt + 1)
        live.add_event(WAITING, record.to_reply())

    async def _report(self, record: Record, error: dict[str, Any]) -> None:
        await self.store.put(self._ended_record(record, "interrupted", error=error))
        await self._documents.forget_query(record.tenant, record.id)

    # ------------------------------------------------------------ what clients do

    async def submit(
        self, caller: Caller, headers: RequestHeaders, body_json: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> Record:
        """Accept a query, store it and begin it. Raise `HttpError` if it is refused."""
        chat = to_chat(body_json)
        model = self._service.model(chat.model, caller, "chat", "app")
        check_variables(without_files(body_json), variables)
        for id in references(variables).values():
            await self.get(caller.tenant, id)
        check_submission(model, chat)
        id = f"q_{secrets.token_hex(12)}"
        try:
            stored = await self._documents.with_stored_documents(caller, body_json, id)
            return await self._accept(id, caller, headers, model, stored, variables)
        except BaseException:
            await self._documents.forget_query(caller.tenant, id)
            raise

    async def _accept(
        self,
        id: str,
        caller: Caller,
        headers: RequestHeaders,
        model: Model,
        body_json: Mapping[str, Any],
        variables: Mapping[str, Any],
    ) -> Record:
        """Begin a query whose documents are stored, and which needs a place in the queue. Raise `HttpError`."""
        body = await self._documents.with_texts(caller.tenant, to_chat(body_json))
        tokens = model.estimate_tokens(body.characters, body.max_completion_tokens or body.max_tokens, 1)
        session = self._service.begin_session(_request_id(), caller, headers, model, tokens)
        elapsed = 0.0 if headers.since is None else self._service.clock() - headers.since
        repeatable = not isinstance(model, App) or model.is_repeatable(body.metadata or {})
        record = Record(
            id=id,
            tenant=caller.tenant,
            model=body.model,
            app=session.query.app,
            body=dict(body_json),
            variables=dict(variables),
            created=time.time() - elapsed,
            goal=session.query.goal,
            repeatable=repeatable,
            query=session.query.id,
        )
        try:
            await self.store.put(record)
        except BaseException:
            session.end("failed")
            raise
        session.submitted = SubmittedQueryRef(record.id)
        self._start_task(record, session)
        return record

    async def resume(self, caller: Caller, headers: RequestHeaders, id: str, value: Any) -> Record:
        """Give the answer to a graph that has stopped to ask somebody, and let it go on. Raise `HttpError`."""
        record = await self.get(caller.tenant, id)
        live = self._running.get((caller.tenant, id))
        if live is None or record.status != WAITING:
            message = f"the query {id} does not wait for anybody: it is {record.status}."
            raise HttpError(409, message, hint="resume one whose status is waiting", code="not_waiting")
        check_resume_value(record, value)
        model = self._service.model(record.model, caller, "chat", "app")
        headers = RequestHeaders(app=record.app, deadline=headers.deadline, goal=headers.goal, since=headers.since)
        session = self._service.begin_session(_request_id(), caller, headers, model, 0)
        session.submitted = SubmittedQueryRef(id, "answer", value)
        session.query.add_part(id, submitted=True)
        # its status changes at once, so that nobody else resumes it
        live.record = replace(record, status="running", expires=None, query=session.query.id)
        live.task = asyncio.create_task(self._run(live, session))
        return live.record

    async def get(self, tenant: str, id: str) -> Record:
        """Return the query. Raise `HttpError` for one that this tenant does not have."""
        live = self._running.get((tenant, id))
        record = live.record if live is not None else await self.store.get(tenant, id)
        if record is None:
            raise not_found(f"there is no query {id!r:.140}.", "see GET /v1/queries", code="query_not_found")
        return record

    async def wait(self, tenant: str, id: str, seconds: float | None) -> Record:
        """Return the query once it is at rest, or after at most `seconds`.

        None waits without a limit. At rest is a query that has ended or waits for somebody. The query itself goes on if
        the caller stops waiting. Raise `HttpError` for one that this tenant does not have.
        """
        live = self._running.get((tenant, id))
        if live is not None and live.task is not None and live.is_running:
            await asyncio.wait({live.task}, timeout=seconds)
        return await self.get(tenant, id)

    async def cancel(self, tenant: str, id: str) -> Record:
        """Cancel the query; one that has ended stays as it is. Idempotent."""
        live = self._running.get((tenant, id))
        if live is not None and live.task is not None and live.is_running:
            live.task.cancel()
            await asyncio.gather(live.task, return_exceptions=True)
        elif live is not None and live.record.status == WAITING:
            await self._end(live, "cancelled")
        return await self.get(tenant, id)

    async def forget(self, tenant: str, id: str) -> None:
        """Cancel the query if it runs, and delete what is stored of it. Raise `HttpError` for an unknown one."""
        record = await self.cancel(tenant, id)
        self._running.pop((tenant, id), None)
        model = self._service.models.get(record.model)
        if isinstance(model, App):
            await self.checkpoints.forget(model, record)
        await self.store.delete(tenant, id)
        await self._documents.forget_query(tenant, id)

    async def forget_all(self, tenant: str) -> int:
        """Delete all submitted queries of a tenant; cancel those that run."""
        for key in [key for key in self._running if key[0] == tenant]:
            await self.cancel(*key)
            self._running.pop(key, None)
        await self.checkpoints.forget_all(tenant)
        return await self.store.delete(tenant)

    async def events(self, tenant: str, id: str, last: str = "") -> AsyncIterator[Event]:
        """Yield the events after `last` until the query is at rest. After a `reset`, earlier events are void.

        `last`: the id of an event, empty for all of them. For a query that ran in another process or long ago only its
        end is left. Raise `HttpError` for one that this tenant does not have.
        """
        record = await self.get(tenant, id)
        live = self._running.get((tenant, id))
        async for event in follow_events(live, last) if live is not None else end_events(record, last):
            yield event

    async def expire(self) -> None:
        """Delete results, and queries that wait for somebody, that are older than the settings allow."""
        now = time.time()
        for key, live in list(self._running.items()):
            if live.record.expires is not None and live.record.expires <= now:
                del self._running[key]
                await self._documents.forget_query(*key)
        await self.store.expire(now)
        await self._documents.store.expire(now)
        await self.checkpoints.expire(now)
        ended_keys = [key for key, live in self._running.items() if live.record.has_ended]
        for key in ended_keys[: max(0, len(ended_keys) - _MAX_ENDED_LOGS)]:
            del self._running[key]

    # ------------------------------------------------------------ running

    def _start_task(self, record: Record, session: RequestSession) -> None:
        """Start the task that runs an accepted query, and a log of its events for those who follow it."""
        session.query.add_part(record.id, submitted=True)
        live = RunningQuery(record)
        live.log.begin(record.attempt + 1)
        self._running[record.tenant, record.id] = live
        live.task = asyncio.create_task(self._run(live, session))

    async def _run(self, live: RunningQuery, session: RequestSession) -> None:
        """Run a query to its end, and store its answer, its error, or the question that it waits with.

        It is the body of the query's task. A query that is stopped because the server closes stays unfinished in the
        store, for the next server.
        """
        outcome, changes = "failed", dict[str, Any]()
        try:
            answer = await self._answer(live, session)
            waiting = answer.more.get(ANSWER_WAITS)
            outcome, changes = ("done", {"answer": answer_to_json(answer)}) if waiting is None else (WAITING, waiting)
        except asyncio.CancelledError:
            outcome = "cancelled"
        except TeolaError as error:
            changes = {"error": http_error(error).body()["error"]}
        except Exception as error:
            log.error("query %s failed", live.record.id, exc_info=error)
            changes = {"error": unexpected(live.record.id).body()["error"]}
        session.end("done" if outcome == WAITING else outcome)
        if outcome == "cancelled" and self._closing:
            return
        await self._end(live, outcome, **changes)

    async def _end(self, live: RunningQuery, outcome: str, **changes: Any) -> None:
        """Store the query, which is at rest, and tell its followers."""
        if outcome == WAITING:
            record = self._waiting_record(live.record, changes)
        else:
            record = self._ended_record(live.record, outcome, **changes)
        try:
            await self.store.put(record)
            if record.has_ended:
                await self._documents.forget_query(record.tenant, record.id)
        except Exception as error:  # followers are told all the same
            log.error("the end of query %s cannot be kept", record.id, exc_info=error)
        live.record = record
        live.add_event(record.status, record.to_reply())

    async def _answer(self, live: RunningQuery, session: RequestSession) -> Answer:
        """Record that the query runs, let its model answer, and return the answer. Pieces of text become events on the
        way.

        It waits for other queries whose answers are its variables. Raise `HttpError` if one of these has none.
        """
        record = live.record
        body = to_chat(fill_in(record.body, await self._values(record)))
        body = await self._documents.with_texts(record.tenant, body)
        live.record = replace(record, status="running", attempt=live.log.attempt, query=session.query.id)
        await self.store.put(live.record)  # before anything runs, so that a crash finds it begun
        live.add_event("running", {})
        name = self._service.model(record.model, session.caller, "chat", "app").name
        model = cast(ChatModel, self._service.models[name])
        async with aclosing(model.stream(body, session)) as deltas:
            async for delta in deltas:
                if delta.text:
                    live.add_event("delta", {"text": delta.text})
                if delta.end is not None:
                    return delta.end
        raise HttpError(502, "the model has given no answer.", kind="server_error")

    async def _values(self, record: Record) -> dict[str, str]:
        """Return the texts of the query's variables once they exist. Raise `HttpError` if one never will."""
        texts = {name: value for name, value in record.variables.items() if isinstance(value, str)}
        for name, id in references(record.variables).items():
            other = await self._until_ended(record.tenant, id)
            if other.status != "done" or other.answer is None:
                message = f"the variable {name!r} has no value: query {id} is {other.status}."
                raise bad_request(message, "submit it again", param="variables")
            texts[name] = str(other.answer["text"])
        return texts

    async def _until_ended(self, tenant: str, id: str) -> Record:
        """Return the query once it has ended; one that waits for somebody has not.

        A query whose variable is the answer of this one waits here, without a limit of its own. Raise `HttpError` if it
        is deleted meanwhile.
        """
        live = self._running.get((tenant, id))
        while live is not None and not live.record.has_ended:
            await live.news.wait()
        return await self.get(tenant, id)

    def _waiting_record(self, record: Record, waiting: dict[str, Any]) -> Record:
        return replace(record, status=WAITING, waiting=waiting, expires=time.time() + self._keep)

    def _ended_record(self, record: Record, status: str, **changes: Any) -> Record:
        now = time.time()
        return replace(record, status=status, ended=now, expires=now + self._keep, **changes)


def _request_id() -> str:
    return f"req_{secrets.token_hex(12)}"
