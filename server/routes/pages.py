"""The pages, and what they show that has no address of its own. A page of one query is opened by a ticket: browsers
send no key when they follow a link."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from teola_plugin.graph import LLM_KINDS
from teola_plugin.observe.html import html_page
from teola_plugin.server.errors import HttpError, not_found
from teola_plugin.server.live_queries import LiveQuery
from teola_plugin.server.metrics import load_of
from teola_plugin.server.models.base import shown_model
from teola_plugin.server.queries.runner import Queries
from teola_plugin.server.query_page import sections
from teola_plugin.server.query_traces import whole_trace
from teola_plugin.server.routes.answering import service_of
from teola_plugin.server.routes.operations import operators_only
from teola_plugin.server.service import Service

router = APIRouter()
_SCRIPTS = ("page.js", "asking.js", "settings.js", "try.js", "query.js")
_TYPES = {"page.css": "text/css", **dict.fromkeys(_SCRIPTS, "text/javascript")}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'"  # forms are sent by scripts, with the key of the tab: no other page can
)
_TRACE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; sandbox allow-scripts"
_SECONDS = 60.0
"""For which a ticket is good."""
_MOST = 1000


class Tickets:
    """Random names for pages of queries, each good once and for a short time."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[str, str, float]] = {}

    def new(self, tenant: str, id: str, now: float) -> str:
        self._made = {t: kept for t, kept in list(self._made.items())[-_MOST:] if kept[2] > now}
        made = secrets.token_urlsafe(24)
        self._made[made] = (tenant, id, now + _SECONDS)
        return made

    def forget(self, tenant: str) -> None:
        self._made = {ticket: kept for ticket, kept in self._made.items() if kept[0] != tenant}

    def taken(self, ticket: str, now: float) -> tuple[str, str] | None:
        """Whose, and of what."""
        tenant, id, until = self._made.pop(ticket, ("", "", 0.0))
        return (tenant, id) if until > now else None


@router.get("/", include_in_schema=False)
def page() -> Response:
    return HTMLResponse(_file("page.html"), headers={"Content-Security-Policy": _POLICY})


@router.get("/pages/{name}.{kind}", include_in_schema=False)
def asset(name: str, kind: str) -> Response:
    file = f"{name}.{kind}"
    if file not in _TYPES:
        raise not_found("there is no such file.", "open /")
    return Response(_file(file), media_type=_TYPES[file])


def _file(name: str) -> str:
    return resources.files("teola_plugin.server.pages").joinpath(name).read_text(encoding="utf-8")


@router.get("/pages/pool", include_in_schema=False)
async def pool(request: Request) -> dict[str, Any]:
    """How the pool is now; with keys, for operators."""
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
    """An address of the page of one query of the caller's."""
    service = service_of(request)
    tenant = service.caller(request.headers).tenant
    traced(service, tenant, id)
    made = request.app.state.tickets.new(tenant, id, service.clock())
    return JSONResponse({"url": f"/pages/queries/{made}"})


@router.get("/pages/queries/{name}", include_in_schema=False)
async def by_ticket(request: Request, name: str) -> Response:
    service = service_of(request)
    found = request.app.state.tickets.taken(name, service.clock())
    if found is None:
        raise not_found("this address was good once, and for a minute.", "open the query from / again")
    return await trace_page(request, *found)


async def trace_page(request: Request, tenant: str, id: str) -> Response:
    """Graph, timeline by engine, critical path, batch-mates; the answer, if it is kept. Raises `HttpError`."""
    service = service_of(request)
    query, trace = traced(service, tenant, id)
    queries: Queries = request.app.state.queries
    records = []
    for submitted in query.submitted:
        with suppress(HttpError):  # it was forgotten, or has expired
            records.append(await queries.get(tenant, submitted))
    more = sections(service, query, trace, records)
    text = await asyncio.to_thread(html_page, [trace], f"Query {query.id}", more=more)
    return HTMLResponse(text, headers={"Content-Security-Policy": _TRACE_POLICY})


def traced(service: Service, tenant: str, id: str) -> tuple[LiveQuery, Any]:
    """Raises `HttpError` for a query that this tenant does not have, or that is not over."""
    query = service.live.find(tenant, id)
    found = None if query is None else whole_trace(service.traces.get, query)
    if query is None or found is None:
        why = "is under way" if query is not None and query.run is not None else "has no trace"
        raise not_found(f"the query {id!r:.140} {why}.", "see GET /v1/activity", code="no_trace")
    return query, found
