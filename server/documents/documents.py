"""The documents of a server: accept them within limits, fetch, read, store and delete them. Used on its loop.

A document is fetched from an address that a client gives, without reaching what only this machine can reach. Every hop
is checked: scheme, host and port against the settings, then all addresses of the name, which have to be those of hosts
that anybody could ask. The name is resolved once, and the connection goes to the address that was checked, so that an
answer that changes meanwhile (DNS rebinding) changes nothing. No cookies, keys or proxies; the certificate has to be
that of the name.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from typing import Any

import httpcore
import httpx

from teola_plugin.server.callers import Caller
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
from teola_plugin.server.settings import DocumentSettings, UrlSettings
from teola_plugin.server.wire.requests import ChatRequest

_REFUSED_4 = (
    IPv4Network("192.0.0.0/24"),  # for protocols; some versions of Python call it global
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv4Network("168.63.129.16/32"),  # a cloud's own services, at a global address
)
_UNICAST_6 = IPv6Network("2000::/3")
_REFUSED_6 = (
    IPv6Network("2001::/23"),  # Teredo, ORCHID and the like
    IPv6Network("2002::/16"),  # 6to4: holds an IPv4 address
    IPv6Network("2620:4f:8000::/48"),
    IPv6Network("3fff::/20"),  # documentation
    IPv6Network("5f00::/16"),
)
_NUMBER = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]+)\.?$")
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")


def is_public(address: str) -> bool:
    """Return True for an address of one host of the public internet.

    It is no address of this machine, of a private network or of many hosts, and stands for no other address.
    """
    if "%" in address:
        return False
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv4Address):
        is_special = ip.is_multicast or ip.is_reserved or any(ip in network for network in _REFUSED_4)
        return ip.is_global and not is_special
    if ip.ipv4_mapped is not None or ip not in _UNICAST_6:
        return False
    isatap = (int(ip) >> 32) & 0xFFFFFFFF in (0x00005EFE, 0x02005EFE)  # holds an IPv4 address, too
    return ip.is_global and not isatap and not any(ip in network for network in _REFUSED_6)


def name_of_host(host: str) -> str:
    """Return the host as it is compared: in lower case, without the last dot.

    Empty for what is neither a name nor a plain address, such as numbers in other bases, which resolvers read
    differently.
    """
    host = host.strip("[]").lower().removesuffix(".")
    try:
        return str(ip_address(host)) if "%" not in host else ""
    except ValueError:
        pass
    if len(host) > 253 or not _NAME.fullmatch(host) or _NUMBER.fullmatch(host.rpartition(".")[2]):
        return ""
    return host


def is_named(host: str, allowed: Sequence[str]) -> bool:
    """Return True if the settings name the host. `*.example.org` matches all names below it, not `example.org`
    itself."""
    return any(one in ("*", host) or (one.startswith("*.") and host.endswith(one[1:])) for one in allowed)


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(name, port) -> addresses. Raises `OSError`."""
_HEADERS = [(b"User-Agent", b"teola"), (b"Accept", b"text/*, application/pdf"), (b"Accept-Encoding", b"identity")]
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_URL = 2048


@dataclass(frozen=True, slots=True)
class Fetched:
    """A document that was fetched."""

    data: bytes
    type: str
    """Content type that the server declares."""
    name: str


@dataclass(frozen=True, slots=True)
class _Hop:
    url: httpx.URL
    host: str
    port: int


class Fetcher:
    """A fetcher of documents. `settings`: None if nothing may be fetched. `resolve` and `network` are for tests."""

    def __init__(
        self,
        settings: UrlSettings | None,
        max_bytes: int,
        resolve: Resolve | None = None,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._settings, self._max_bytes = settings, max_bytes
        self._resolve = resolve or _resolve_host
        self._network = network or httpcore.AnyIOBackend()

    async def fetch(self, url: str) -> Fetched:
        """Return the document at the address. Raise `HttpError` (400, 413) if it may not or cannot be fetched."""
        if self._settings is None:
            hint = "upload the document; or see server.documents.urls"
            raise _fetch_error("this server fetches no documents.", "urls_off", hint)
        try:
            async with asyncio.timeout(self._settings.seconds):
                return await self._fetch_with_redirects(self._settings, url)
        except TimeoutError:
            raise _fetch_error(
                f"{_display(url)} has not answered in time.", "url_timeout", "upload the document"
            ) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise _fetch_error(
                f"{_display(url)} cannot be fetched.", "url_unreachable", "upload the document"
            ) from None

    async def _fetch_with_redirects(self, settings: UrlSettings, url: str) -> Fetched:
        """Fetch the document at an address, and check every redirect on the way as strictly as the address itself.

        Raise `HttpError` for an address that may not be fetched, and after too many redirects.
        """
        next_url, first = _parse_url(url), url
        for _ in range(settings.redirects + 1):
            hop = _check_hop(settings, next_url, first)
            reply = await self._request(hop, await self._address(hop, first), first)
            if isinstance(reply, Fetched):
                return reply
            next_url = _join_location(hop.url, reply, first)
        raise _fetch_error(f"{_display(first)} redirects too often.", "url_redirects", "give the last address")

    async def _address(self, hop: _Hop, first: str) -> str:
        """Return the address to connect to. The name is refused if any of its addresses is."""
        try:
            addresses = await self._resolve(hop.host, hop.port)
        except OSError:
            addresses = []
        if not addresses or not all(map(is_public, addresses)):
            raise _forbidden(first)
        return addresses[0]

    async def _request(self, hop: _Hop, address: str, first: str) -> Fetched | str:
        """Return the document, or the location that the server redirects to."""
        target = httpcore.URL(
            scheme=hop.url.raw_scheme, host=hop.host.encode(), port=hop.port, target=hop.url.raw_path or b"/"
        )
        network = _PinnedBackend(self._network, hop.host, address)
        async with (
            httpcore.AsyncConnectionPool(network_backend=network, max_connections=1, retries=0) as pool,
            pool.stream("GET", target, headers=_HEADERS) as answer,
        ):
            headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in answer.headers}
            if answer.status in _REDIRECTS and headers.get("location"):
                return headers["location"]
            if answer.status != 200:
                raise _fetch_error(f"{_display(first)} answers {answer.status}.", "url_refused", "check the address")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise _fetch_error(f"{_display(first)} is compressed.", "url_compressed", "upload the document")
            data = await self._read(answer.aiter_stream(), headers.get("content-length", ""), first)
        return Fetched(data, headers.get("content-type", ""), hop.url.path.rpartition("/")[2][:200] or hop.host)

    async def _read(self, chunks: Any, length: str, first: str) -> bytes:
        """Read the body of a reply up to the size limit. Raise `HttpError` (413) for a larger one.

        `length`: the declared length in bytes, so that a body that is known to be too large is not read at all.
        `first`: the address that the client gave, for the message.
        """
        parts, remaining = list[bytes](), self._max_bytes
        if length.isascii() and length.isdigit() and int(length[:20]) > remaining:
            remaining = -1
        else:
            async for chunk in chunks:
                remaining -= len(chunk)
                if remaining < 0:
                    break
                parts.append(chunk)
        if remaining < 0:
            raise HttpError(
                413, f"{_display(first)} is larger than {self._max_bytes} bytes.", hint="split it", param="url"
            )
        return b"".join(parts)


class _PinnedBackend(httpcore.AsyncNetworkBackend):
    """A network that connects to one host alone, at the address that was checked."""

    def __init__(self, network: httpcore.AsyncNetworkBackend, host: str, address: str) -> None:
        self._network, self._host, self._address = network, host, address

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the address that was checked, not to what the name resolves to by now.

        Raise `ConnectError` for any other host.
        """
        if name_of_host(host) != self._host:
            raise httpcore.ConnectError(f"{host} was not checked")
        return await self._network.connect_tcp(self._address, port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("not for documents")

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


def _check_hop(settings: UrlSettings, url: httpx.URL, first: str) -> _Hop:
    """Return the hop to an address. Raise `HttpError` for an address that the settings do not allow."""
    host = name_of_host(url.raw_host.decode("ascii", "replace"))
    port = {"https": 443, "http": 80}.get(url.scheme, 0) if url.port is None else url.port
    plain = url.scheme in settings.schemes and port in settings.ports and not url.userinfo
    if not plain or not host or not is_named(host, settings.hosts):
        raise _forbidden(first)
    return _Hop(url, host, port)


def _parse_url(url: str) -> httpx.URL:
    """Parse an address that a client or a redirect gives. Raise `HttpError` for one that is malformed or too long."""
    if len(url) > _MOST_URL or not url.isprintable() or "\\" in url or " " in url:
        raise _forbidden(url)
    try:
        return httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise _forbidden(url) from None


def _join_location(url: httpx.URL, location: str, first: str) -> httpx.URL:
    """Return the address that a redirect leads to; `location` may be relative. Raise `HttpError` for a malformed one.

    `first`: the address that the client gave, for the message.
    """
    try:
        return url.join(_parse_url(location))
    except (httpx.InvalidURL, ValueError):
        raise _forbidden(first) from None


async def _resolve_host(host: str, port: int) -> list[str]:
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]


def _display(url: str) -> str:
    """Return the address as errors show it, without a password and what may follow the path."""
    return repr(url.partition("?")[0].partition("#")[0].rpartition("@")[2])[:200]


def _forbidden(url: str) -> HttpError:
    """Return the error for an address that may not be fetched.

    It is the same for a name that does not exist and for one that leads inside, so that it reveals nothing.
    """
    hint = "give an address that the server's settings allow, or upload the document"
    return _fetch_error(f"{_display(url)} may not be fetched here.", "url_not_allowed", hint)


def _fetch_error(message: str, code: str, hint: str) -> HttpError:
    return bad_request(message, hint, param="url", code=code)


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
        """Read a document that a client gives as text, as data or as an address, and count it against the key's limit
        of uploads.

        Raise `HttpError` if a limit is reached, or the document cannot be fetched or read.
        """
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
        """Raise `HttpError` (413) for a document of more bytes than the key or the server allows.

        The key's `max_upload` can only lower the server's limit.
        """
        max_bytes = min(caller.key.max_upload or self.settings.max_bytes, self.settings.max_bytes)
        if size > max_bytes:
            raise too_large(name, max_bytes)

    async def _check_room(self, caller: Caller, size: int) -> None:
        """Raise `HttpError` (413) if one more document, of `size` bytes, exceeds what its tenant may store."""
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
        """Return a stored document. Raise `HttpError` for one that this tenant does not have.

        A document that has expired counts as missing (404), also while it is not deleted yet.
        """
        file = await self.store.get(tenant, id)
        if file is None or (file.expires is not None and file.expires <= time.time()):
            raise not_found(f"there is no file {id!r:.140}.", "see GET /v1/files", code="file_not_found")
        return file

    # ------------------------------------------------------------ in requests

    async def with_stored_documents(self, caller: Caller, body: Mapping[str, Any], query: str) -> dict[str, Any]:
        """Return a chat as JSON with all its documents stored, for a query that runs later. Raise `HttpError`."""
        self._check_number(body.get("messages"))

        async def store_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
            """Store the document in a part of a message, unless it is stored. Return a part that names it by its id."""
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
            """Return a part with a document's text for one that names or holds it, unless the engine reads it."""
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
        """Raise `HttpError` if messages hold more documents than one query may have."""
        number, max_documents = sum(1 for _ in file_parts(messages)), self.settings.per_query
        if number > max_documents:
            raise bad_request(
                f"{number} documents are given; {max_documents} are taken at a time.", "give less", param="documents"
            )

    # ------------------------------------------------------------ forgetting

    async def forget_query(self, tenant: str, query: str) -> None:
        """Delete the documents that came with a query, which has ended."""
        await self.store.delete(tenant, query=query)
