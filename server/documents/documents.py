"""What a server does with documents: takes them within limits, reads, keeps and forgets them. Lives on its loop."""

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
    GivenDocument,
    document_part,
    file_parts,
    given_document,
    has_files,
    name_of,
    with_parts,
)
from teola_plugin.server.documents.reading import ReadDocument, Reader, too_large
from teola_plugin.server.errors import HttpError, bad_request, not_found, too_many
from teola_plugin.server.settings import DocumentSettings
from teola_plugin.server.wire.requests import ChatRequest

_MOST_FILES = 10_000
"""Of one tenant."""


class Documents:
    """`store` is open. `clock`: that of the keys' limits."""

    def __init__(
        self, settings: DocumentSettings, store: FileStore, clock: Callable[[], float], fetcher: Fetcher | None = None
    ) -> None:
        self.settings, self.store = settings, store
        self._clock = clock
        self._reader = Reader(settings)
        self._fetcher = fetcher or Fetcher(settings.urls, settings.max_bytes)

    # ------------------------------------------------------------ uploads

    async def upload(
        self, caller: Caller, given: GivenDocument, *, purpose: str, seconds: float | None = None, query: str = ""
    ) -> StoredFile:
        """Reads and keeps it, for `seconds` at most; with a query for as long as that. Raises `HttpError`."""
        found = await self._read(caller, given)
        await self._has_room(caller, found.bytes)
        now = time.time()
        keep = min(self.settings.keep, seconds or self.settings.keep)
        made = StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            tenant=caller.tenant,
            name=name_of(found.name) or "file",
            purpose=purpose,
            kind=found.kind,
            bytes=found.bytes,
            created=now,
            expires=None if query else now + keep,
            pages=found.pages,
            query=query,
            text=found.text,
        )
        await self.store.put(made)
        return made

    async def _read(self, caller: Caller, given: GivenDocument) -> ReadDocument:
        refusal = caller.limits.upload(self._clock())
        if refusal is not None:
            message = f"the key {caller.key.name!r} has reached its limit of uploads."
            raise too_many(message, refusal.retry_after, code="uploads_limit", hint="wait as long as Retry-After says")
        if given.text is not None:
            return self._plain(given.name, given.text, caller)
        data, type, name = given.data, given.type, given.name
        if data is None:
            fetched = await self._fetcher.fetch(given.url)
            data, type, name = fetched.data, fetched.type, name or name_of(fetched.name)
        self._not_too_large(caller, len(data), name)
        return await self._reader.read(name, data, type)

    def _plain(self, name: str, text: str, caller: Caller) -> ReadDocument:
        """A text that came as one."""
        size = len(text.encode("utf-8", "replace"))
        self._not_too_large(caller, size, name)
        if not text.strip():
            raise bad_request(
                f"the document {name!r:.140} holds no text.", "send one", param="documents", code="no_text"
            )
        return ReadDocument(name, "text", text.replace("\0", "\ufffd"), size)

    def _not_too_large(self, caller: Caller, size: int, name: str) -> None:
        most = min(caller.key.max_upload or self.settings.max_bytes, self.settings.max_bytes)
        if size > most:
            raise too_large(name, most)

    async def _has_room(self, caller: Caller, size: int) -> None:
        most = min(caller.key.max_kept or self.settings.max_kept, self.settings.max_kept)
        if await self.store.kept(caller.tenant) + size > most:
            hint = "delete some of GET /v1/files, or let them expire"
            raise HttpError(
                413, f"there are {most} bytes for all documents.", hint=hint, code="files_full", param="file"
            )
        if len(await self.store.uploaded(caller.tenant)) >= _MOST_FILES:
            hint = "delete some of GET /v1/files"
            raise HttpError(
                413, f"there are {_MOST_FILES} documents already.", hint=hint, code="files_full", param="file"
            )

    async def get(self, tenant: str, id: str) -> StoredFile:
        """Raises `HttpError` for one that this tenant does not have."""
        found = await self.store.get(tenant, id)
        if found is None or (found.expires is not None and found.expires <= time.time()):
            raise not_found(f"there is no file {id!r:.140}.", "see GET /v1/files", code="file_not_found")
        return found

    # ------------------------------------------------------------ in requests

    async def kept(self, caller: Caller, body: Mapping[str, Any], query: str) -> dict[str, Any]:
        """A chat as JSON, with all its documents kept: for a query that runs later. Raises `HttpError`."""
        self._not_too_many(body.get("messages"))

        async def keep(part: Mapping[str, Any]) -> Mapping[str, Any]:
            given = given_document(part)
            if given.id:
                file = await self.get(caller.tenant, given.id)
            else:
                file = await self.upload(caller, given, purpose="user_data", query=query)
            return {"type": FILE, "file": {"file_id": file.id}}

        if not any(True for _ in file_parts(body.get("messages"))):
            return dict(body)
        return {**body, "messages": await with_parts(body["messages"], keep)}

    async def read(
        self, tenant: str, body: ChatRequest, caller: Caller | None = None, *, carried: bool = False
    ) -> ChatRequest:
        """A chat with the text of its documents: kept ones, and with a `caller` those that come in it, which are left
        to a server that is `carried` to. Raises `HttpError`."""
        if not has_files(body):
            return body
        messages = [one.model_dump(mode="json", exclude_unset=True) for one in body.messages]
        self._not_too_many(messages)

        async def read(part: Mapping[str, Any]) -> Mapping[str, Any]:
            given = given_document(part)
            if given.id:
                file = await self.get(tenant, given.id)
                return document_part(file.name, file.text)
            if caller is None or (carried and given.data is not None):
                return part
            found = await self._read(caller, given)
            return document_part(found.name, found.text)

        made = body.model_dump(mode="json", exclude_unset=True) | {"messages": await with_parts(messages, read)}
        return ChatRequest.model_validate(made)

    def _not_too_many(self, messages: Any) -> None:
        number, most = sum(1 for _ in file_parts(messages)), self.settings.per_query
        if number > most:
            raise bad_request(
                f"{number} documents are given; {most} are taken at a time.", "give less", param="documents"
            )

    # ------------------------------------------------------------ forgetting

    async def query_over(self, tenant: str, query: str) -> None:
        """What came with it is not needed any more."""
        await self.store.delete(tenant, query=query)
