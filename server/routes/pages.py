"""The pages, and the data that only they show.

A page of one query is opened by a ticket, because browsers send no key when they follow a link.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from importlib import resources
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from teola_plugin.graph import LLM_KINDS, Batching
from teola_plugin.observe.html import html_page
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.server.errors import HttpError, not_found
from teola_plugin.server.live_queries import LiveQuery
from teola_plugin.server.metrics import load_of
from teola_plugin.server.models.base import shown_model
from teola_plugin.server.queries.records import WAITING, Record
from teola_plugin.server.queries.runner import Queries
from teola_plugin.server.routes.answering import service_of
from teola_plugin.server.routes.operations import operators_only
from teola_plugin.server.service import Service
from teola_plugin.server.traces import whole_trace

MAX_ROWS = 50
"""Number of rows of a table, and of sources of an answer."""


def sections(service: Service, query: LiveQuery, trace: QueryTrace, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the sections of a query's page beside its trace. Called on the server's loop.

    `records`: the submitted queries that ran as part of it; prompts and answers of direct requests are not stored.
    """
    links = ("Other queries", '<p><a href="/">All queries</a></p>')
    return [*answers(records), *batch_mates(service, query, trace), links]


def answers(records: Iterable[Record]) -> Iterable[tuple[str, str]]:
    """Yield the answers of submitted queries, with their sources; of one that waits for somebody, its questions."""
    for record in records:
        if record.status == WAITING:
            interrupts = (record.waiting or {}).get("interrupts") or ()
            questions = "".join(_pre(_plain(interrupt.get("value"))) for interrupt in interrupts[:MAX_ROWS])
            questions = questions or "<p>It only waits to be told to go on.</p>"
            yield f"{record.id} waits", f'{questions}<p><a href="/#query/{quote(record.id)}">Answer it</a></p>'
        if record.answer is not None:
            yield f"Answer of {record.id}", _pre(str(record.answer.get("text", "")))
            sources = record.answer.get("sources")
            if isinstance(sources, Sequence) and sources and not isinstance(sources, str):
                yield (
                    "Sources",
                    "".join(
                        f"<details><summary>{n}</summary>{_pre(_text(one))}</details>"
                        for n, one in enumerate(sources[:MAX_ROWS], 1)
                    ),
                )
        elif record.error is not None:
            yield f"Error of {record.id}", _pre(str(record.error.get("message", "")))


def batch_mates(service: Service, query: LiveQuery, trace: QueryTrace) -> Iterable[tuple[str, str]]:
    """Yield a table of the tenant's queries that shared a batch with this one; other tenants' queries are not shown.

    What runs at an LLM at the same time is one batch.
    """
    tenant_queries = service.live.by_trace(query.tenant)
    continuous = [n for n, profile in service.pool.profiles.items() if profile.batching is Batching.CONTINUOUS]
    rows = []
    for shared in service.traces.shared_batches(trace, continuous):
        queries = dict.fromkeys(
            tenant_queries[id]
            for id in shared.other_queries
            if id in tenant_queries and tenant_queries[id] is not query
        )
        if queries:
            names = ", ".join(f"{one.id} ({one.app})" for one in list(queries)[:MAX_ROWS])
            rows.append((shared.engine, ", ".join(shared.primitives), names))
    if rows:
        yield "Batch-mates", _table(("engine", "of this query", "in the same batch"), rows[:MAX_ROWS])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in HTML, with all texts escaped. It scrolls on its own where it is wider than the page."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _text(source: Any) -> str:
    if isinstance(source, Mapping) and isinstance(source.get("text"), str):
        return str(source["text"])
    return _plain(source)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


router = APIRouter()
_SCRIPTS = ("page.js", "asking.js", "settings.js", "try.js", "query.js")
_TYPES = {"page.css": "text/css", **dict.fromkeys(_SCRIPTS, "text/javascript")}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'"  # forms are sent by scripts, with the key of the tab: no other page can
)
_TRACE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; sandbox allow-scripts"
_VALID_S = 60.0
"""Seconds for which a ticket is valid."""
_MAX_TICKETS = 1000


class Tickets:
    """Random names for pages of queries, each valid once and for a short time."""

    def __init__(self) -> None:
        """Begin without tickets. Each is stored with its tenant, the id of its query and its time of expiry.

        The server's app has one such object. A browser redeems a ticket for the page of that query.
        """
        self._tickets: dict[str, tuple[str, str, float]] = {}

    def new(self, tenant: str, id: str, now: float) -> str:
        """Return a new ticket for the page of a tenant's query, valid for `_VALID_S` seconds from `now`.

        Expired tickets are dropped on the way.
        """
        self._tickets = {t: entry for t, entry in list(self._tickets.items())[-_MAX_TICKETS:] if entry[2] > now}
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = (tenant, id, now + _VALID_S)
        return ticket

    def forget(self, tenant: str) -> None:
        self._tickets = {ticket: entry for ticket, entry in self._tickets.items() if entry[0] != tenant}

    def redeem(self, ticket: str, now: float) -> tuple[str, str] | None:
        """Return the tenant and the id of the query; None for a ticket that is used, expired or unknown.

        The ticket is used up by this call. `now`: seconds on the clock that `new` was called with.
        """
        tenant, id, until = self._tickets.pop(ticket, ("", "", 0.0))
        return (tenant, id) if until > now else None


@router.get("/", include_in_schema=False)
def page() -> Response:
    return HTMLResponse(_read_page_file("page.html"), headers={"Content-Security-Policy": _POLICY})


@router.get("/pages/{name}.{kind}", include_in_schema=False)
def asset(name: str, kind: str) -> Response:
    """Return a style sheet or script of the server's pages. Raise `HttpError` (404) for any other file."""
    file = f"{name}.{kind}"
    if file not in _TYPES:
        raise not_found("there is no such file.", "open /")
    return Response(_read_page_file(file), media_type=_TYPES[file])


def _read_page_file(name: str) -> str:
    return resources.files("teola_plugin.server.pages").joinpath(name).read_text(encoding="utf-8")


@router.get("/pages/pool", include_in_schema=False)
async def pool(request: Request) -> dict[str, Any]:
    """Return figures of the pool as it is now; where there are keys, to operators alone."""
    operators_only(request)
    service = service_of(request)
    counts = service.admission.counts
    return {
        "figures": _figures(service),
        "engines": [_engine(service, name) for name in service.pool.engine_names],
        "apps": [
            {
                "app": app,
                "accepted": one.accepted,
                "refused": one.refused,
                "answered": one.answered,
                "within_goal": one.within_goal,
            }
            for app, one in counts.items()
        ],
    }


def _figures(service: Service) -> dict[str, Any]:
    """Return the figures of all apps together that the page of the pool shows, as texts and numbers by label."""
    counts = service.admission.counts.values()
    answered = sum(one.answered for one in counts)
    within = sum(one.within_goal for one in counts)
    return {
        "under way": service.admission.running,
        "accepted": sum(one.accepted for one in counts),
        "refused": sum(one.refused for one in counts),
        "loop late by": f"{1000 * service.metrics.lag:.0f} ms",
        "within their goal": f"{100 * within / answered:.0f} %" if answered else "–",
    }


def _engine(service: Service, name: str) -> dict[str, Any]:
    """Return the name, model and load of an engine for the page of the pool; None for what is not known."""
    load = load_of(service.pool, name)
    writes = service.pool.engine(name).kinds & LLM_KINDS
    return {
        "name": name,
        "model": shown_model(service.pool, name),
        "requests": None if load is None else load.requests,
        "kv_used": load.kv_used if load is not None and writes else None,
    }


@router.post("/pages/tickets/{id}", include_in_schema=False)
async def ticket(request: Request, id: str) -> Response:
    """Return the address of the page of one of the caller's queries."""
    service = service_of(request)
    tenant = service.caller(request.headers).tenant
    traced(service, tenant, id)
    name = request.app.state.tickets.new(tenant, id, service.clock())
    return JSONResponse({"url": f"/pages/queries/{name}"})


@router.get("/pages/queries/{name}", include_in_schema=False)
async def by_ticket(request: Request, name: str) -> Response:
    """Return the page of the query that a ticket stands for, and use the ticket up. Raise `HttpError` (404)."""
    service = service_of(request)
    query = request.app.state.tickets.redeem(name, service.clock())
    if query is None:
        raise not_found("this address was good once, and for a minute.", "open the query from / again")
    return await trace_page(request, *query)


async def trace_page(request: Request, tenant: str, id: str) -> Response:
    """Return a query's page: graph, timeline, critical path, batch-mates, stored answers. Raise `HttpError`."""
    service = service_of(request)
    query, trace = traced(service, tenant, id)
    queries: Queries = request.app.state.queries
    records = []
    for submitted in query.submitted:
        with suppress(HttpError):  # it was deleted, or has expired
            records.append(await queries.get(tenant, submitted))
    more = sections(service, query, trace, records)
    text = await asyncio.to_thread(html_page, [trace], f"Query {query.id}", more=more)
    return HTMLResponse(text, headers={"Content-Security-Policy": _TRACE_POLICY})


def traced(service: Service, tenant: str, id: str) -> tuple[LiveQuery, Any]:
    """Return the query and its trace. Raise `HttpError` for one that this tenant does not have, or that still runs."""
    query = service.live.find(tenant, id)
    trace = None if query is None else whole_trace(service.traces.get, query)
    if query is None or trace is None:
        reason = "is under way" if query is not None and query.run is not None else "has no trace"
        raise not_found(f"the query {id!r:.140} {reason}.", "see GET /v1/activity", code="no_trace")
    return query, trace
