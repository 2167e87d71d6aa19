"""API keys: made once and shown once, kept as hashes, compared in constant time. Standard library only."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

PREFIX = "sk-teola-"


class Kept(Protocol):
    """What is known of a key."""

    @property
    def name(self) -> str: ...

    @property
    def hash(self) -> str: ...


K = TypeVar("K", bound=Kept)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key of 256 random bits, which is why one fast hash of it is enough."""

    secret: str
    hash: str


def new_key() -> NewKey:
    secret = PREFIX + secrets.token_urlsafe(32)
    return NewKey(secret, hashed(secret))


def hashed(secret: str) -> str:
    """As it stands in the settings."""
    return "sha256:" + hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def found(secret: str, kept: Sequence[K]) -> K | None:
    """The key that the secret belongs to. Every one is looked at, so that the time tells nothing."""
    digest, match = hashed(secret).encode(), None
    for one in kept:
        if hmac.compare_digest(digest, one.hash.encode()):
            match = one
    return match


def secret_in(authorization: str, x_api_key: str) -> str:
    """What a request carries: `Authorization: Bearer ...`, or `X-Api-Key`. Empty for none."""
    scheme, _, rest = authorization.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" and rest.strip() else x_api_key.strip()
