"""Limits on documents, and what may be fetched."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MB = 1 << 20


class UrlSettings(BaseModel):
    """What may be fetched for a client that gives an address instead of a document."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    hosts: tuple[str, ...] = Field(min_length=1)
    """Names that may be asked: `docs.example.org`, `*.example.org` for those below one, `*` for any."""
    schemes: tuple[Literal["https", "http"], ...] = Field(("https",), min_length=1)
    ports: tuple[int, ...] = Field((443,), min_length=1)
    redirects: int = Field(3, ge=0, le=20)
    """That are followed, each checked as the first address."""
    seconds: float = Field(10.0, gt=0)
    """For all of it, redirects included."""

    @field_validator("hosts")
    @classmethod
    def _hosts(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(name.strip().rstrip(".").lower() for name in given)
        for name in found:
            rest = name.removeprefix("*.")
            if name != "*" and (not rest or "*" in rest or "/" in rest or ":" in rest):
                raise ValueError(f"{name!r:.80} is no name of a host: write docs.example.org, *.example.org or *")
        return found


class DocumentSettings(BaseModel):
    """Of one document, unless something else is said."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    max_bytes: int = Field(8 * MB, ge=1)
    max_pages: int = Field(500, ge=1)
    """Of a PDF."""
    max_characters: int = Field(4_000_000, ge=1)
    """Of the text that is read from it."""
    seconds: float = Field(20.0, gt=0)
    """For reading it."""
    memory: int = Field(1024 * MB, ge=128 * MB)
    """Bytes that reading it may take."""
    at_once: int = Field(2, ge=1)
    """Documents that are read at a time, each in a process of its own."""
    waiting: int = Field(32, ge=0)
    """Documents that wait to be read; more get 429."""
    per_query: int = Field(16, ge=1)
    """Documents of one query."""
    keep: float = Field(86_400.0, gt=0)
    """Seconds for which uploaded ones are kept."""
    max_kept: int = Field(256 * MB, ge=1)
    """Bytes of uploaded documents that one tenant keeps at a time."""
    urls: UrlSettings | None = None
    """None: nothing is fetched."""
