"""`/v1/files`: documents that are stored for later requests, in OpenAI's form. Their text is what is stored."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, PlainTextResponse, Response

from teola_plugin.server.callers import Caller
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.parts import ClientDocument, file_name
from teola_plugin.server.errors import HttpError, bad_request, too_many
from teola_plugin.server.routes.answering import service_of, while_connected

router = APIRouter(prefix="/v1")
FORM_OVERHEAD = 1 << 16
"""Bytes of an upload without the document."""
_PURPOSES = ("user_data", "assistants")
_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(_PURPOSES), "default": _PURPOSES[0]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 1},
                    },
                }
            }
        },
    }
}


def _documents_and_caller(request: Request) -> tuple[Documents, Caller]:
    """Return the documents and the caller, who is identified before the request's body is read.

    Raise `HttpError` (401) for a missing or unknown key, so that nobody without a key can make the server read an
    upload.
    """
    documents: Documents = request.app.state.documents
    return documents, service_of(request).caller(request.headers)


@router.post("/files", openapi_extra=_SCHEMA)
async def upload(request: Request) -> Response:
    """Read a document (text, HTML or PDF) and store its text."""
    documents, caller = _documents_and_caller(request)
    refusal = caller.limits.begin(service_of(request).clock())
    if refusal is not None:
        message = f"the key {caller.key.name!r} has reached its limit of {refusal.limit}."
        raise too_many(message, refusal.retry_after, code=f"{refusal.limit}_limit", hint="wait as long as it says")
    try:
        async with request.form(max_files=1, max_fields=8, max_part_size=4096) as form:
            document, purpose, seconds = await _document(form), _purpose(form), _expiry_seconds(form)
        stored = await while_connected(request, documents.upload(caller, document, purpose=purpose, seconds=seconds))
    finally:
        caller.limits.end(0)
    return JSONResponse(stored.to_json())


async def _document(form: FormData) -> ClientDocument:
    """Return the uploaded document. Raise `HttpError` if there is none."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise bad_request("there is no document.", "send it as `file` of multipart/form-data", param="file")
    return ClientDocument(
        file_name(file.filename or "") or "file", data=await file.read(), type=file.content_type or ""
    )


def _purpose(form: FormData) -> str:
    """Return the purpose that an upload's form gives, by default `user_data`. Raise `HttpError` for an unknown one."""
    purpose = form.get("purpose", _PURPOSES[0])
    if purpose not in _PURPOSES:
        raise bad_request(f"the purpose {purpose!r:.80} is none of this server's.", "send user_data", param="purpose")
    return str(purpose)


def _expiry_seconds(form: FormData) -> float | None:
    """Return the seconds for which an upload's form asks to store the document; None if it does not say.

    Raise `HttpError` for what is no positive whole number.
    """
    value = form.get("expires_after[seconds]")
    if value is None:
        return None
    if not (isinstance(value, str) and value.isascii() and value.isdigit() and int(value[:12]) >= 1):
        raise bad_request("expires_after[seconds] is no number of seconds.", "e.g. 3600", param="expires_after")
    return float(value[:12])


@router.get("/files")
async def list_files(
    request: Request,
    limit: int = Query(10_000, ge=1, le=10_000),
    after: str = Query("", max_length=256),
    order: Literal["asc", "desc"] = "desc",
    purpose: str = Query("", max_length=256),
) -> dict[str, Any]:
    """Return the tenant's uploaded documents. `after`: the id of the last one that the client has already."""
    documents, caller = _documents_and_caller(request)
    uploaded = [one for one in await documents.store.uploaded(caller.tenant) if purpose in ("", one.purpose)]
    uploaded = uploaded if order == "desc" else uploaded[::-1]
    ids = [one.id for one in uploaded]
    if after and after not in ids:
        raise HttpError(404, f"there is no file {after!r:.140}.", hint="leave after out", code="file_not_found")
    rest = uploaded[ids.index(after) + 1 :] if after else uploaded
    data = [one.to_json() for one in rest[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(rest) > limit}


@router.get("/files/{id}")
async def get_file(request: Request, id: str) -> dict[str, Any]:
    """Return name, size and times of an uploaded document."""
    documents, caller = _documents_and_caller(request)
    return (await documents.get(caller.tenant, id)).to_json()


@router.get("/files/{id}/content", response_class=PlainTextResponse)
async def get_content(request: Request, id: str) -> Response:
    """Return the text that was read from the document, as apps and models get it."""
    documents, caller = _documents_and_caller(request)
    return PlainTextResponse((await documents.get(caller.tenant, id)).text)


@router.delete("/files/{id}")
async def delete_file(request: Request, id: str) -> dict[str, Any]:
    """Delete a stored document."""
    documents, caller = _documents_and_caller(request)
    await documents.get(caller.tenant, id)
    await documents.store.delete(caller.tenant, id)
    return {"id": id, "object": "file", "deleted": True}
