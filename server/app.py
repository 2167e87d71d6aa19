"""The ASGI app of a service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from teola_plugin import __version__
from teola_plugin.errors import TeolaError
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.files import files_of
from teola_plugin.server.envelope import Envelope, respond
from teola_plugin.server.errors import HttpError, http_error, invalid
from teola_plugin.server.logs import log, named
from teola_plugin.server.queries.runner import Queries
from teola_plugin.server.queries.store import Store
from teola_plugin.server.routes import files, openai, operations, pages, responses
from teola_plugin.server.routes import queries as queries_routes
from teola_plugin.server.service import Service
from teola_plugin.server.wire.answers import JSONAnswer

_SWEEP = 1.0
_LOOKING = 0.1
"""Seconds between looks at how late the loop is."""


def create_app(service: Service, store: Store) -> FastAPI:
    """The addresses of a service whose pool is running."""

    documents = Documents(service.settings.documents, files_of(store), service.clock)
    queries = Queries(service, store, service.settings.keep, documents)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await documents.store.open()
        await service.names.open(store)  # before queries that were left go on under them
        await queries.open()
        sweeping = asyncio.create_task(_sweep(service, queries))
        lagging = asyncio.create_task(_lag(service))
        try:
            yield
        finally:
            for task in (sweeping, lagging):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await queries.close()

    made = FastAPI(
        title="teola",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        default_response_class=JSONAnswer,
    )
    made.state.service = service
    made.state.queries = queries
    made.state.documents = documents
    made.state.tickets = pages.Tickets()
    for rooms in (operations, openai, responses, queries_routes, files, pages):
        made.include_router(rooms.router)
    made.add_exception_handler(TeolaError, _failed)
    made.add_exception_handler(RequestValidationError, _invalid)
    made.add_exception_handler(HTTPException, _refused)
    made.add_middleware(Envelope, service=service)
    return made


async def _sweep(service: Service, queries: Queries) -> None:
    while True:
        await asyncio.sleep(min(_SWEEP, service.settings.joined_idle / 2, service.settings.keep / 2))
        service.live.sweep()
        try:
            await queries.expire()
        except Exception as error:
            log.warning("results cannot be expired: %s", type(error).__name__)


async def _lag(service: Service) -> None:
    """How late the loop comes to what is due: whoever asks waits so much longer."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LOOKING
        await asyncio.sleep(_LOOKING)
        service.metrics.lagged(max(0.0, loop.time() - due))


def _failed(request: Request, error: Any) -> Response:
    found = http_error(error)
    if found.status >= 500:
        settings = request.app.state.service.settings
        log.warning("request %s failed (%s): %s", request.scope["teola.request_id"], found.code, named(error, settings))
    return respond(found)


_OUR_OWN = ("/v1/activity", "/v1/queries", "/v1/rerank")
"""Addresses that OpenAI's protocol has not."""


def _invalid(request: Request, error: Any) -> Response:
    of_openai = not request.url.path.startswith(_OUR_OWN)
    reference = "OpenAI's reference for the parameter" if of_openai else "/openapi.json for what this address takes"
    return respond(invalid(error.errors()[0], f"see {reference}"))


def _refused(request: Request, error: Any) -> Response:
    """What the framework says itself: no such address, no such method."""
    hint = "see /openapi.json for the addresses" if error.status_code in (404, 405) else ""
    made = HttpError(error.status_code, f"{error.detail}.", hint=hint, headers=error.headers)
    return respond(made)
