"""`/v1/files`: documents that are kept for later requests, in OpenAI's form. What is kept is the text."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, PlainTextResponse, Response

from teola_plugin.server.callers import Caller
from teola_plugin.server.documents.documents import Documents
from teola_plugin.server.documents.parts import GivenDocument, name_of
from teola_plugin.server.errors import HttpError, bad_request, too_many
from teola_plugin.server.routes.answering import service_of, while_connected

router = APIRouter(prefix="/v1")
FORM_OVERHEAD = 1 << 16
"""Bytes of an upload beside the document."""
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


def _of(request: Request) -> tuple[Documents, Caller]:
    """Who asks is known before anything that they send is read."""
    found: Documents = request.app.state.documents
    return found, service_of(request).caller(request.headers)


@router.post("/files", openapi_extra=_SCHEMA)
async def upload(request: Request) -> Response:
    """Reads a document: text, HTML or PDF."""
    documents, caller = _of(request)
    refusal = caller.limits.begin(service_of(request).clock())
    if refusal is not None:
        message = f"the key {caller.key.name!r} has reached its limit of {refusal.what}."
        raise too_many(message, refusal.retry_after, code=f"{refusal.what}_limit", hint="wait as long as it says")
    try:
        async with request.form(max_files=1, max_fields=8, max_part_size=4096) as form:
            given, purpose, seconds = await _given(form), _purpose(form), _seconds(form)
        made = await while_connected(request, documents.upload(caller, given, purpose=purpose, seconds=seconds))
    finally:
        caller.limits.end(0)
    return JSONResponse(made.told())


async def _given(form: FormData) -> GivenDocument:
    """Raises `HttpError`."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise bad_request("there is no document.", "send it as `file` of multipart/form-data", param="file")
    return GivenDocument(name_of(file.filename or "") or "file", data=await file.read(), type=file.content_type or "")


def _purpose(form: FormData) -> str:
    found = form.get("purpose", _PURPOSES[0])
    if found not in _PURPOSES:
        raise bad_request(f"the purpose {found!r:.80} is none of this server's.", "send user_data", param="purpose")
    return str(found)


def _seconds(form: FormData) -> float | None:
    found = form.get("expires_after[seconds]")
    if found is None:
        return None
    if not (isinstance(found, str) and found.isascii() and found.isdigit() and int(found[:12]) >= 1):
        raise bad_request("expires_after[seconds] is no number of seconds.", "e.g. 3600", param="expires_after")
    return float(found[:12])


@router.get("/files")
async def files(
    request: Request,
    limit: int = Query(10_000, ge=1, le=10_000),
    after: str = Query("", max_length=256),
    order: Literal["asc", "desc"] = "desc",
    purpose: str = Query("", max_length=256),
) -> dict[str, Any]:
    """The tenant's. `after`: the id of the last one that is known already."""
    documents, caller = _of(request)
    found = [one for one in await documents.store.uploaded(caller.tenant) if purpose in ("", one.purpose)]
    found = found if order == "desc" else found[::-1]
    ids = [one.id for one in found]
    if after and after not in ids:
        raise HttpError(404, f"there is no file {after!r:.140}.", hint="leave after out", code="file_not_found")
    rest = found[ids.index(after) + 1 :] if after else found
    data = [one.told() for one in rest[:limit]]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(rest) > limit}


@router.get("/files/{id}")
async def file(request: Request, id: str) -> dict[str, Any]:
    documents, caller = _of(request)
    return (await documents.get(caller.tenant, id)).told()


@router.get("/files/{id}/content", response_class=PlainTextResponse)
async def content(request: Request, id: str) -> Response:
    """The text that was read from it, as apps and models are given it."""
    documents, caller = _of(request)
    return PlainTextResponse((await documents.get(caller.tenant, id)).text)


@router.delete("/files/{id}")
async def forget(request: Request, id: str) -> dict[str, Any]:
    documents, caller = _of(request)
    await documents.get(caller.tenant, id)
    await documents.store.delete(caller.tenant, id)
    return {"id": id, "object": "file", "deleted": True}
