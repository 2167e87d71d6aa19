"""The documents of a server: accept them within limits, read, store and delete them. Used on its loop."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from teola_plugin.server.callers import Caller
from teola_plugin.server.documents.fetching import Fetcher
from teola_plugin.server.documents.files import FileStore, StoredFile
from teola_plugin.server.documents.parts import (
    FILE,
    ClientDocument,
    document_part,
    file_name,
    file_parts,
    has_files,
    parse_document,
    with_parts,
)
from teola_plugin.server.documents.reading import ReadDocument, Reader, too_large
from teola_plugin.server.errors import HttpError, bad_request, not_found, too_many
from teola_plugin.server.settings import DocumentSettings
from teola_plugin.server.wire.requests import ChatRequest

_MAX_FILES = 10_000
"""Documents that one tenant may store."""


class Documents:
    """The documents of a server, in an open `store`. `clock`: that of the keys' limits."""

    def __init__(
        self, settings: DocumentSettings, store: FileStore, clock: Callable[[], float], fetcher: Fetcher | None = None
    ) -> None:
        self.settings, self.store = settings, store
        self._clock = clock
        self._reader = Reader(settings)
        self._fetcher = fetcher or Fetcher(settings.urls, settings.max_bytes)

    # ------------------------------------------------------------ uploads

    async def upload(
        self, caller: Caller, document: ClientDocument, *, purpose: str, seconds: float | None = None, query: str = ""
    ) -> StoredFile:
        """Read a document and store it, for `seconds` at most; with a `query` for as long as that query.

        Raise `HttpError`.
        """
        content = await self._read(caller, document)
        await self._check_room(caller, content.bytes)
        now = time.time()
        keep = min(self.settings.keep, seconds or self.settings.keep)
        file = StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            tenant=caller.tenant,
            name=file_name(content.name) or "file",
            purpose=purpose,
            kind=content.kind,
            bytes=content.bytes,
            created=now,
            expires=None if query else now + keep,
            pages=content.pages,
            query=query,
            text=content.text,
        )
        await self.store.put(file)
        return file

    async def _read(self, caller: Caller, document: ClientDocument) -> ReadDocument:
        refusal = caller.limits.begin_upload(self._clock())
        if refusal is not None:
            message = f"the key {caller.key.name!r} has reached its limit of uploads."
            raise too_many(message, refusal.retry_after, code="uploads_limit", hint="wait as long as Retry-After says")
        if document.text is not None:
            return self._from_text(document.name, document.text, caller)
        data, type, name = document.data, document.type, document.name
        if data is None:
            fetched = await self._fetcher.fetch(document.url)
            data, type, name = fetched.data, fetched.type, name or file_name(fetched.name)
        self._check_size(caller, len(data), name)
        return await self._reader.read(name, data, type)

    def _from_text(self, name: str, text: str, caller: Caller) -> ReadDocument:
        """Return the document that came as text. Raise `HttpError` for an empty one."""
        size = len(text.encode("utf-8", "replace"))
        self._check_size(caller, size, name)
        if not text.strip():
            raise bad_request(
                f"the document {name!r:.140} holds no text.", "send one", param="documents", code="no_text"
            )
        return ReadDocument(name, "text", text.replace("\0", "\ufffd"), size)

    def _check_size(self, caller: Caller, size: int, name: str) -> None:
        max_bytes = min(caller.key.max_upload or self.settings.max_bytes, self.settings.max_bytes)
        if size > max_bytes:
            raise too_large(name, max_bytes)

    async def _check_room(self, caller: Caller, size: int) -> None:
        max_bytes = min(caller.key.max_kept or self.settings.max_kept, self.settings.max_kept)
        if await self.store.total_bytes(caller.tenant) + size > max_bytes:
            hint = "delete some of GET /v1/files, or let them expire"
            raise HttpError(
                413, f"there are {max_bytes} bytes for all documents.", hint=hint, code="files_full", param="file"
            )
        if len(await self.store.uploaded(caller.tenant)) >= _MAX_FILES:
            hint = "delete some of GET /v1/files"
            raise HttpError(
                413, f"there are {_MAX_FILES} documents already.", hint=hint, code="files_full", param="file"
            )

    async def get(self, tenant: str, id: str) -> StoredFile:
        """Return a stored document. Raise `HttpError` for one that this tenant does not have."""
        file = await self.store.get(tenant, id)
        if file is None or (file.expires is not None and file.expires <= time.time()):
            raise not_found(f"there is no file {id!r:.140}.", "see GET /v1/files", code="file_not_found")
        return file

    # ------------------------------------------------------------ in requests

    async def with_stored_documents(self, caller: Caller, body: Mapping[str, Any], query: str) -> dict[str, Any]:
        """Return a chat as JSON with all its documents stored, for a query that runs later. Raise `HttpError`."""
        self._check_number(body.get("messages"))

        async def store_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
            document = parse_document(part)
            if document.id:
                file = await self.get(caller.tenant, document.id)
            else:
                file = await self.upload(caller, document, purpose="user_data", query=query)
            return {"type": FILE, "file": {"file_id": file.id}}

        if not any(True for _ in file_parts(body.get("messages"))):
            return dict(body)
        return {**body, "messages": await with_parts(body["messages"], store_part)}

    async def with_texts(
        self, tenant: str, body: ChatRequest, caller: Caller | None = None, *, carried: bool = False
    ) -> ChatRequest:
        """Return a chat with the texts of its documents.

        Stored documents are always read. Those that come in the chat are read only with a `caller`, and left to an
        engine whose server gets the chat as it is (`carried`). Raise `HttpError`.
        """
        if not has_files(body):
            return body
        messages = [one.model_dump(mode="json", exclude_unset=True) for one in body.messages]
        self._check_number(messages)

        async def read_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
            document = parse_document(part)
            if document.id:
                file = await self.get(tenant, document.id)
                return document_part(file.name, file.text)
            if caller is None or (carried and document.data is not None):
                return part
            content = await self._read(caller, document)
            return document_part(content.name, content.text)

        changed = body.model_dump(mode="json", exclude_unset=True) | {"messages": await with_parts(messages, read_part)}
        return ChatRequest.model_validate(changed)

    def _check_number(self, messages: Any) -> None:
        number, max_documents = sum(1 for _ in file_parts(messages)), self.settings.per_query
        if number > max_documents:
            raise bad_request(
                f"{number} documents are given; {max_documents} are taken at a time.", "give less", param="documents"
            )

    # ------------------------------------------------------------ forgetting

    async def forget_query(self, tenant: str, query: str) -> None:
        """Delete the documents that came with a query, which has ended."""
        await self.store.delete(tenant, query=query)
