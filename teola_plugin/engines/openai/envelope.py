"""The address and headers of a client's request, which decide the answer together with its body.

Headers hold keys, and addresses may hold passwords: neither is ever printed, traced or part of an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

_CONNECTION_HEADERS = frozenset(
    {"host", "content-length", "content-type", "connection", "accept-encoding", "transfer-encoding", "keep-alive"}
)
"""Headers that the sender creates for each connection."""
_CLIENT_HEADERS = ("x-stainless-", "x-amzn-trace-id")
"""Prefixes of headers in which the `openai` package describes itself and the attempt, and `huggingface_hub` gives each
request an id. The two clients of `openai` differ there."""
_CLIENT_NAMES = ("OpenAI/", "AsyncOpenAI/")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The address and the headers of a request, as its client wrote them."""

    params: tuple[tuple[str, str], ...] = field(repr=False)
    """Query parameters, in order."""
    identity: str = field(repr=False)
    """A digest of all that decides the answer but the body: address, query, headers with their keys."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    """All headers that are sent."""

    @classmethod
    def of(cls, url: str, params: Iterable[tuple[str, str]], headers: Iterable[tuple[str, str]]) -> Envelope:
        """Return the envelope for a request that a client is about to send; connection headers are left out.

        Headers by which a client describes itself or a single request do not count for `identity`.
        """
        sent_headers = tuple((name, value) for name, value in headers if name.lower() not in _CONNECTION_HEADERS)
        deciding = sorted((name.lower(), value) for name, value in sent_headers if not _describes_client(name, value))
        query = tuple(params)
        digest = hashlib.sha256(json.dumps([without_credentials(url), query, deciding]).encode()).hexdigest()
        return cls(query, digest, sent_headers)


def _describes_client(name: str, value: str) -> bool:
    name = name.lower()
    return name.startswith(_CLIENT_HEADERS) or (name == "user-agent" and value.startswith(_CLIENT_NAMES))


def without_credentials(url: str) -> str:
    """Return an address without user, password, query and fragment, so that it may be shown."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
