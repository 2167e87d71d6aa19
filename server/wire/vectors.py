"""`/v1/embeddings` and `/v1/rerank`, as clients ask."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.server.wire.chat import Body


class EmbeddingRequest(Body):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    input_type: Literal["query", "document"] = "document"
    """Some models put something else before questions than before documents."""


class Document(BaseModel):
    model_config = ConfigDict(extra="ignore")
    text: str


class RerankRequest(Body):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
