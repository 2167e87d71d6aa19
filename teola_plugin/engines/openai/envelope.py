"""How a client addresses its server, beside the body of a request: what decides the answer, and what must not be shown.

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
"""Made anew by whoever sends."""
_CLIENT_HEADERS = ("x-stainless-",)
"""What the `openai` package says of itself and of the attempt: it differs between its two kinds of clients."""
_CLIENT_NAMES = ("OpenAI/", "AsyncOpenAI/")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The address and the headers of a request, as its client wrote them."""

    params: tuple[tuple[str, str], ...] = field(repr=False)
    """Query parameters, in their order."""
    identity: str = field(repr=False)
    """A digest of all that decides the answer beside the body: address, query, headers with their keys."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    """All that are sent."""

    @classmethod
    def of(cls, url: str, params: Iterable[tuple[str, str]], headers: Iterable[tuple[str, str]]) -> Envelope:
        sent_headers = tuple((name, value) for name, value in headers if name.lower() not in _CONNECTION_HEADERS)
        deciding = sorted((name.lower(), value) for name, value in sent_headers if not _describes_client(name, value))
        query = tuple(params)
        digest = hashlib.sha256(json.dumps([without_credentials(url), query, deciding]).encode()).hexdigest()
        return cls(query, digest, sent_headers)


def _describes_client(name: str, value: str) -> bool:
    name = name.lower()
    return name.startswith(_CLIENT_HEADERS) or (name == "user-agent" and value.startswith(_CLIENT_NAMES))


def without_credentials(url: str) -> str:
    """The address as it may be shown: without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
