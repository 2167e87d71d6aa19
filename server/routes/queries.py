"""`/v1/queries`: submit, get, follow, cancel, list, forget; `/v1/activity`: what happened to all requests."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.responses import Response, StreamingResponse

from teola_plugin.server.callers import Caller
from teola_plugin.server.documents.parts import FILE, with_documents
from teola_plugin.server.errors import bad_request
from teola_plugin.server.live_queries import LiveQuery
from teola_plugin.server.models.apps import CONFIG
from teola_plugin.server.queries.records import Status
from teola_plugin.server.queries.runner import Queries
from teola_plugin.server.routes.answering import service_of, terms_of, while_connected
from teola_plugin.server.routes.pages import trace_page
from teola_plugin.server.wire.answers import JSONAnswer, event
from teola_plugin.server.wire.requests import Body, ChatMessage, ClientJson, parse_json

B = TypeVar("B", bound=BaseModel)
_QUERY, _DOCUMENTS = "query", "documents"


async def submitted(request: Request, kind: type[B]) -> B:
    """The body as JSON says it, and the files beside it as its `documents`. Raises `HttpError`,
    `RequestValidationError`."""
    type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if type == "multipart/form-data":
        given = await _of_form(request)
    elif type == "application/json" or type.endswith("+json"):
        given = parse_json(await request.body(), "", "send a JSON object")
    else:
        raise bad_request("the body is neither JSON nor a form.", "send application/json, or multipart/form-data")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


async def _of_form(request: Request) -> Any:
    settings = service_of(request).settings
    limits = {"max_files": settings.documents.per_query, "max_fields": 4, "max_part_size": settings.max_body}
    async with request.form(**limits) as form:
        query = form.get(_QUERY)
        text = await query.read() if isinstance(query, UploadFile) else query or ""
        given = parse_json(text, _QUERY, "give the query as JSON")
        if not isinstance(given, dict):
            raise bad_request("the field query holds no object.", "give the query as JSON", param=_QUERY)
        documents = given.get(_DOCUMENTS)
        files = [await _document(one) for one in form.getlist(_DOCUMENTS)]
        if documents is None or isinstance(documents, list):
            documents = [*(documents or ()), *files]
        return {**given, _DOCUMENTS: documents}


async def _document(given: UploadFile | str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"text": given}
    data = base64.b64encode(await given.read()).decode()
    return {"filename": given.filename or "file", "file_data": f"data:{given.content_type or ''};base64,{data}"}


def submission_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """For the schema of the API: what the route reads itself."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)  # other routes have brought them
    form = {
        "type": "object",
        "required": [_QUERY],
        "properties": {
            _QUERY: {"type": "string", "contentMediaType": "application/json"},
            _DOCUMENTS: {"type": "array", "items": {"type": "string", "format": "binary"}},
        },
    }
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


router = APIRouter(prefix="/v1")
MOST_WAIT = 600.0


class Submission(Body):
    """A query: a model or app, its input, how to decode, values for `{{ names }}` in it."""

    OWN_DATA = frozenset({"metadata", "inputs", "variables", "settings"})
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    input: str | list[ChatMessage] | None = None
    inputs: Any = None
    """The whole input of an app, instead of messages."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Of the chat: max_tokens, temperature, response_format, ..."""
    variables: dict[str, Any] = Field(default_factory=dict)
    """Name -> text, or `{"query": id}` for the answer of another query, done or not."""
    documents: list[dict[str, Any]] = Field(default_factory=list)
    """Each `{"filename", "file_data"}` in base64, `{"file_id"}`, `{"name", "text"}` or `{"url"}`."""
    settings: dict[str, Any] | None = None
    """Of an app that is a workflow: chunk sizes, prompts, how many passages, ... for this query alone."""

    def as_chat(self) -> dict[str, Any]:
        """Raises `HttpError`."""
        if (self.input is None) == (self.inputs is None):
            raise bad_request("a query has either input or inputs.", "give one of both", param="input")
        if reserved := {"model", "messages", "stream", "n"} & self.parameters.keys():
            raise bad_request(f"parameters hold {sorted(reserved)[0]}.", "leave it out", param="parameters")
        given = self.input if self.input is not None else "-"
        messages = (
            [{"role": "user", "content": given}]
            if isinstance(given, str)
            else [one.model_dump(mode="json", exclude_unset=True) for one in given]
        )
        if not messages:
            raise bad_request("input is empty.", "give a text, or messages", param="input")
        more = {"inputs": self.inputs, CONFIG: self.settings}
        metadata = {**(self.metadata or {}), **{key: value for key, value in more.items() if value is not None}}
        parts = [{"type": FILE, "file": one} for one in self.documents]
        messages = with_documents(messages, parts)
        return {**self.parameters, "model": self.model, "messages": messages, "metadata": metadata}


def _of(request: Request) -> tuple[Queries, Caller]:
    found: Queries = request.app.state.queries
    return found, service_of(request).caller(request.headers)


@router.post("/queries", status_code=202, openapi_extra=submission_schema(Submission))
async def submit(request: Request) -> Response:
    """As JSON; or as a form, with the JSON in `query` and files in `documents`."""
    queries, caller = _of(request)
    body = await submitted(request, Submission)
    taken = queries.submit(caller, terms_of(request), body.as_chat(), body.variables)
    record = await while_connected(request, taken)
    return JSONAnswer(record.told(), 202, headers={"Location": f"/v1/queries/{record.id}"})


@router.get("/queries")
async def latest(
    request: Request, limit: int = Query(50, ge=1, le=500), status: Status | None = None
) -> dict[str, Any]:
    """`status`: only those that are so, e.g. `waiting`."""
    queries, caller = _of(request)
    found = await queries.store.latest(caller.tenant, limit, status or "")
    return {"object": "list", "data": [one.told() for one in found]}


@router.get("/queries/{id}")
async def get(request: Request, id: str, wait: float = Query(0.0, ge=0, le=MOST_WAIT)) -> dict[str, Any]:
    """`wait`: seconds for which the answer may be waited for."""
    queries, caller = _of(request)
    return (await while_connected(request, queries.wait(caller.tenant, id, wait))).told()


@router.get("/queries/{id}/events")
async def events(request: Request, id: str) -> Response:
    """What happens to it, from behind `Last-Event-ID` on."""
    queries, caller = _of(request)
    await queries.get(caller.tenant, id)
    told = queries.events(caller.tenant, id, request.headers.get("last-event-id", ""))

    async def lines() -> AsyncIterator[str]:
        async for number, kind, data in told:
            yield event(data, kind, number)

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


class Resumption(ClientJson):
    """The answer to what a graph has stopped to ask for."""

    OWN_DATA = frozenset({"value"})
    model_config = ConfigDict(extra="forbid")
    value: Any = None
    """Any JSON; for several questions at once, values by the ids of the interrupts. Not given: it may go on."""


@router.post("/queries/{id}/resume", status_code=202)
async def resume(request: Request, id: str, body: Resumption) -> Response:
    """A query that waits for somebody goes on."""
    queries, caller = _of(request)
    record = await queries.resume(caller, terms_of(request), id, body.value)
    return JSONAnswer(record.told(), 202, headers={"Location": f"/v1/queries/{record.id}"})


@router.post("/queries/{id}/cancel")
async def cancel(request: Request, id: str) -> dict[str, Any]:
    queries, caller = _of(request)
    return (await queries.cancel(caller.tenant, id)).told()


@router.delete("/queries/{id}", status_code=204)
async def forget(request: Request, id: str) -> Response:
    """Nothing of it is kept."""
    queries, caller = _of(request)
    await queries.forget(caller.tenant, id)
    return Response(status_code=204)


@router.delete("/tenant", status_code=200)
async def forget_tenant(request: Request) -> dict[str, Any]:
    """Ends what the key's tenant has under way, and forgets it: submitted queries, documents, collections, threads,
    what happened to its requests, outputs that engines draft from."""
    queries, caller = _of(request)
    service = service_of(request)
    dropped = await queries.forget_all(caller.tenant)
    files = await request.app.state.documents.store.delete(caller.tenant)
    await service.forget(caller.tenant)
    request.app.state.tickets.forget(caller.tenant)
    return {"object": "tenant", "tenant": caller.tenant, "queries": dropped, "files": files}


# ------------------------------------------------------------ what happened


@router.get("/activity")
async def activity(request: Request, limit: int = Query(100, ge=1, le=1000)) -> dict[str, Any]:
    """All queries of the tenant, latest first: those that requests make, too."""
    service = service_of(request)
    found = service.live.of(service.caller(request.headers).tenant)[:limit]
    return {"object": "list", "data": [_shown(one) for one in found]}


def _shown(query: LiveQuery) -> dict[str, Any]:
    late = None if query.goal is None or query.seconds is None else query.seconds <= query.goal
    return {
        "id": query.id,
        "app": query.app,
        "status": query.status,
        "began": query.wall,
        "seconds": query.seconds,
        "goal": query.goal,
        "within_goal": late,
        "requests": query.requests,
        "models": query.models,
    }


@router.get("/activity/{id}")
async def trace(request: Request, id: str) -> Response:
    """The page of one query."""
    return await trace_page(request, service_of(request).caller(request.headers).tenant, id)
