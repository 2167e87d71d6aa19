"""What flows between the components of a workflow: kinds of values, documents, and their text in prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from teola_plugin.graph import Ref
from teola_plugin.requests.payloads import Chunk, Hit


class Kind(Enum):
    """The kind of value that a component reads or gives.

    `ANY` fits every other kind, and `LIST` the kinds of lists: their actual type is checked when the value is used.
    """

    TEXT = "a text"
    TEXTS = "a list of texts"
    DOCUMENTS = "a document, or a list of them"
    CHUNKS = "chunks of documents"
    VECTOR = "a vector"
    VECTORS = "a list of vectors"
    PASSAGES = "passages that were found"
    ROWS = "ids of rows"
    LIST = "a list"
    FLAG = "true or false"
    ANY = "any value"

    def fits(self, accepted: Sequence[Kind]) -> bool:
        """Return True if a value of this kind may be read where one of `accepted` is expected."""
        listed = self is Kind.LIST and not _LISTS.isdisjoint(accepted)
        return listed or self is Kind.ANY or Kind.ANY in accepted or self in accepted


_LISTS = frozenset({Kind.TEXTS, Kind.CHUNKS, Kind.VECTORS, Kind.PASSAGES, Kind.DOCUMENTS, Kind.ROWS})


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of the number of items of a list, from the query's input, before anything runs."""

    ref: Ref
    """What of the query's input it is told from."""
    count: Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Value:
    """A value that some component gives: where it is, what it is, and how many items it is expected to have."""

    ref: Ref
    kind: Kind
    width: int | Estimate | None = None
    written: bool = False
    """A list whose items a model writes one after the other: work on each may begin as it closes."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is to be indexed, and what is known of it. As JSON: `{"text": ..., "metadata": {...}}`."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


def documents_of(value: Any) -> list[Document]:
    """Convert `value` to documents: texts, mappings as in JSON, or a framework's own documents, one or a list.

    Raises `TypeError` for anything else.
    """
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return [_document(one) for one in (value if several else [value])]


def _document(value: Any) -> Document:
    """Convert a text, a mapping or a framework's document. Raise TypeError for another value."""
    if isinstance(value, Document):
        return value
    if isinstance(value, Mapping):
        text, metadata = value.get("text"), value.get("metadata") or {}
    else:  # of LangChain, of LlamaIndex, or a text
        text = value if isinstance(value, str) else getattr(value, "page_content", getattr(value, "text", None))
        metadata = getattr(value, "metadata", None) or {}
    if not isinstance(text, str) or not isinstance(metadata, Mapping):
        raise TypeError(f"{type(value).__name__} is no document")
    return Document(text, dict(metadata))


def plain(value: Any) -> Any:
    """Return a value as JSON data, for `Result.to_dict`.

    Passages, chunks and documents become objects; values without a JSON form become text.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Chunk, Document, Hit)):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple, set, frozenset)) else str(value)


def text_of(value: Any) -> str:
    """A value as it stands in a prompt: a text as it is, of passages and lists the texts, an empty line between."""
    if isinstance(value, str):
        return value
    if isinstance(value, (Chunk, Document, Hit)):
        return value.text
    if isinstance(value, (list, tuple)):
        return "\n\n".join(map(text_of, value))
    return str(value)


def text_size(value: Any, limit: int) -> int:
    """Characters of values that `text_of` reads at once; more than `limit` for all else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (Chunk, Document, Hit)):
        return len(value.text)
    inner = list(value.values()) if type(value) is dict else value if type(value) in (list, tuple) else None
    if inner is None or len(inner) > limit:
        return limit + 1
    total = 0
    for one in inner:
        total += 1 + text_size(one, limit)
        if total > limit:
            break
    return total
