"""Bodies that are JSON, or a form with JSON and files in it."""

from __future__ import annotations

import base64
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile

from teola_plugin.server.errors import bad_request
from teola_plugin.server.routes.answering import service_of
from teola_plugin.server.wire.chat import parse_json

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
