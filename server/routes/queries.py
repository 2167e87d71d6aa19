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
from teola_plugin.server.routes.answering import request_headers_of, service_of, while_connected
from teola_plugin.server.routes.pages import trace_page
from teola_plugin.server.wire.answers import JSONAnswer, event
from teola_plugin.server.wire.requests import Body, ChatMessage, ClientJson, parse_json

B = TypeVar("B", bound=BaseModel)
_QUERY, _DOCUMENTS = "query", "documents"


async def read_submission(request: Request, kind: type[B]) -> B:
    """Return the body of a submission: JSON, or a form with JSON and files, which become its `documents`.

    Raise `HttpError` or `RequestValidationError`.
    """
    type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if type == "multipart/form-data":
        data = await _read_form(request)
    elif type == "application/json" or type.endswith("+json"):
        data = parse_json(await request.body(), "", "send a JSON object")
    else:
        raise bad_request("the body is neither JSON nor a form.", "send application/json, or multipart/form-data")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


async def _read_form(request: Request) -> Any:
    """Return the submission in a form: the JSON in `query`, with the files in `documents` added to its documents.

    Raise `HttpError` if `query` holds no JSON object.
    """
    settings = service_of(request).settings
    limits = {"max_files": settings.documents.per_query, "max_fields": 4, "max_part_size": settings.max_body}
    async with request.form(**limits) as form:
        query = form.get(_QUERY)
        text = await query.read() if isinstance(query, UploadFile) else query or ""
        submission = parse_json(text, _QUERY, "give the query as JSON")
        if not isinstance(submission, dict):
            raise bad_request("the field query holds no object.", "give the query as JSON", param=_QUERY)
        documents = submission.get(_DOCUMENTS)
        files = [await _form_document(one) for one in form.getlist(_DOCUMENTS)]
        if documents is None or isinstance(documents, list):
            documents = [*(documents or ()), *files]
        return {**submission, _DOCUMENTS: documents}


async def _form_document(value: UploadFile | str) -> dict[str, Any]:
    """Return a file or text of a form as a document in JSON, as a submission without a form would have it.

    A text is the document itself. A file becomes base64 with its name and declared content type; it is read whole into
    memory, within the limits of the request's size.
    """
    if isinstance(value, str):
        return {"text": value}
    data = base64.b64encode(await value.read()).decode()
    return {"filename": value.filename or "file", "file_data": f"data:{value.content_type or ''};base64,{data}"}


def submission_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of the body that `submit` reads by itself, for the schema of the API."""
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
MAX_WAIT_S = 600.0


class Submission(Body):
    """A query: a model or app, its input, parameters of decoding, and values for `{{ names }}` in the input."""

    OWN_DATA = frozenset({"metadata", "inputs", "variables", "settings"})
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    input: str | list[ChatMessage] | None = None
    """Text, or messages of a chat."""
    inputs: Any = None
    """The whole input of an app, instead of messages."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the chat: max_tokens, temperature, response_format, ..."""
    variables: dict[str, Any] = Field(default_factory=dict)
    """Name -> text, or `{"query": id}` for the answer of another query, whether it has ended or not."""
    documents: list[dict[str, Any]] = Field(default_factory=list)
    """Each `{"filename", "file_data"}` in base64, `{"file_id"}`, `{"name", "text"}` or `{"url"}`."""
    settings: dict[str, Any] | None = None
    """Settings of a workflow for this query alone: chunk sizes, prompts, numbers of passages, ..."""

    def as_chat(self) -> dict[str, Any]:
        """Return the query as a chat in JSON. Raise `HttpError` for contradictory fields."""
        if (self.input is None) == (self.inputs is None):
            raise bad_request("a query has either input or inputs.", "give one of both", param="input")
        if reserved := {"model", "messages", "stream", "n"} & self.parameters.keys():
            raise bad_request(f"parameters hold {sorted(reserved)[0]}.", "leave it out", param="parameters")
        input = self.input if self.input is not None else "-"
        messages = (
            [{"role": "user", "content": input}]
            if isinstance(input, str)
            else [one.model_dump(mode="json", exclude_unset=True) for one in input]
        )
        if not messages:
            raise bad_request("input is empty.", "give a text, or messages", param="input")
        more = {"inputs": self.inputs, CONFIG: self.settings}
        metadata = {**(self.metadata or {}), **{key: value for key, value in more.items() if value is not None}}
        parts = [{"type": FILE, "file": one} for one in self.documents]
        messages = with_documents(messages, parts)
        return {**self.parameters, "model": self.model, "messages": messages, "metadata": metadata}


def _queries_and_caller(request: Request) -> tuple[Queries, Caller]:
    queries: Queries = request.app.state.queries
    return queries, service_of(request).caller(request.headers)


@router.post("/queries", status_code=202, openapi_extra=submission_schema(Submission))
async def submit(request: Request) -> Response:
    """Accept a query, as JSON or as a form with the JSON in `query` and files in `documents`.

    The answer has the status 202 and the query's `id`.
    """
    queries, caller = _queries_and_caller(request)
    body = await read_submission(request, Submission)
    submission = queries.submit(caller, request_headers_of(request), body.as_chat(), body.variables)
    record = await while_connected(request, submission)
    return JSONAnswer(record.to_reply(), 202, headers={"Location": f"/v1/queries/{record.id}"})


@router.get("/queries")
async def latest(
    request: Request, limit: int = Query(50, ge=1, le=500), status: Status | None = None
) -> dict[str, Any]:
    """List the tenant's latest queries. `status`: only those of this status, e.g. `waiting`."""
    queries, caller = _queries_and_caller(request)
    records = await queries.store.latest(caller.tenant, limit, status or "")
    return {"object": "list", "data": [one.to_reply() for one in records]}


@router.get("/queries/{id}")
async def get(request: Request, id: str, wait: float = Query(0.0, ge=0, le=MAX_WAIT_S)) -> dict[str, Any]:
    """Return a query. `wait`: seconds for which to wait for its answer."""
    queries, caller = _queries_and_caller(request)
    return (await while_connected(request, queries.wait(caller.tenant, id, wait))).to_reply()


@router.get("/queries/{id}/events")
async def events(request: Request, id: str) -> Response:
    """Stream the query's events, from behind `Last-Event-ID` on.

    They are `running`, `delta`, and at last `done`, `failed`, `cancelled`, `interrupted` or `waiting`. A `reset` says
    that the query runs anew, and that earlier deltas are void.
    """
    queries, caller = _queries_and_caller(request)
    await queries.get(caller.tenant, id)
    news = queries.events(caller.tenant, id, request.headers.get("last-event-id", ""))

    async def lines() -> AsyncIterator[str]:
        async for number, kind, data in news:
            yield event(data, kind, number)

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


class Resumption(ClientJson):
    """The answer to the question that a graph has stopped to ask."""

    OWN_DATA = frozenset({"value"})
    model_config = ConfigDict(extra="forbid")
    value: Any = None
    """Any JSON; for several questions, values by the ids of interrupts. Absent if the graph only waits for approval."""


@router.post("/queries/{id}/resume", status_code=202)
async def resume(request: Request, id: str, body: Resumption) -> Response:
    """Answer the question at which a graph has stopped, so that its query goes on."""
    queries, caller = _queries_and_caller(request)
    record = await queries.resume(caller, request_headers_of(request), id, body.value)
    return JSONAnswer(record.to_reply(), 202, headers={"Location": f"/v1/queries/{record.id}"})


@router.post("/queries/{id}/cancel")
async def cancel(request: Request, id: str) -> dict[str, Any]:
    """End a query, and return it. What is stored of it stays."""
    queries, caller = _queries_and_caller(request)
    return (await queries.cancel(caller.tenant, id)).to_reply()


@router.delete("/queries/{id}", status_code=204)
async def forget(request: Request, id: str) -> Response:
    """End a query and delete what is stored of it."""
    queries, caller = _queries_and_caller(request)
    await queries.forget(caller.tenant, id)
    return Response(status_code=204)


@router.delete("/tenant", status_code=200)
async def forget_tenant(request: Request) -> dict[str, Any]:
    """End what the key's tenant has running, and delete its data.

    These are submitted queries, documents, collections, threads, traces, and outputs that engines draft from.
    """
    queries, caller = _queries_and_caller(request)
    service = service_of(request)
    deleted = await queries.forget_all(caller.tenant)
    files = await request.app.state.documents.store.delete(caller.tenant)
    await service.forget(caller.tenant)
    request.app.state.tickets.forget(caller.tenant)
    return {"object": "tenant", "tenant": caller.tenant, "queries": deleted, "files": files}


# ------------------------------------------------------------ activity


@router.get("/activity")
async def activity(request: Request, limit: int = Query(100, ge=1, le=1000)) -> dict[str, Any]:
    """List all queries of the tenant, latest first, including those that requests began."""
    service = service_of(request)
    queries = service.live.of_tenant(service.caller(request.headers).tenant)[:limit]
    return {"object": "list", "data": [_activity_item(one) for one in queries]}


def _activity_item(query: LiveQuery) -> dict[str, Any]:
    """Return one query of the tenant as the list of its activity shows it. Times are in seconds."""
    within_goal = None if query.goal is None or query.seconds is None else query.seconds <= query.goal
    return {
        "id": query.id,
        "app": query.app,
        "status": query.status,
        "began": query.began_unix,
        "seconds": query.seconds,
        "goal": query.goal,
        "within_goal": within_goal,
        "requests": query.requests,
        "models": query.models,
    }


@router.get("/activity/{id}")
async def trace(request: Request, id: str) -> Response:
    """Return the page of one query: its trace, without prompts."""
    return await trace_page(request, service_of(request).caller(request.headers).tenant, id)
