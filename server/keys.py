"""API keys: made once and shown once, stored as hashes, compared in constant time. Standard library only."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

PREFIX = "sk-teola-"


class StoredKey(Protocol):
    """A key in the settings, where only its hash is stored."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...


K = TypeVar("K", bound=StoredKey)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key of 256 random bits, so one fast hash of it is enough."""

    secret: str
    hash: str


def new_key() -> NewKey:
    secret = PREFIX + secrets.token_urlsafe(32)
    return NewKey(secret, hash_secret(secret))


def hash_secret(secret: str) -> str:
    """Return the hash of a key, as it stands in the settings."""
    return "sha256:" + hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def find_key(secret: str, keys: Sequence[K]) -> K | None:
    """Return the key that the secret belongs to. All keys are compared, so that the time reveals nothing."""
    digest, match = hash_secret(secret).encode(), None
    for key in keys:
        if hmac.compare_digest(digest, key.hash.encode()):
            match = key
    return match


def secret_from_headers(authorization: str, x_api_key: str) -> str:
    """Return the secret that a request sends as `Authorization: Bearer ...` or `X-Api-Key`; empty for none."""
    scheme, _, rest = authorization.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" and rest.strip() else x_api_key.strip()
