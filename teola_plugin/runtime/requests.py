"""Primitive + its inputs -> payloads for its engine, and the values of the requests -> the primitive's value.

Also the identity of what is asked: two requests of equal identities ask for the same thing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import astuple
from hashlib import blake2b
from typing import Any

from teola_plugin.engines.payloads import (
    Chunk,
    EmbedText,
    Generate,
    IngestRow,
    ScorePair,
    SearchVector,
    Warmup,
)
from teola_plugin.graph import Primitive, PrimitiveKind, runs_on_loop
from teola_plugin.runtime.kept_values import KeptValue
from teola_plugin.runtime.works import Fingerprint, Identity

Calls = Mapping[str, Callable[..., Any]]
"""Callables of the client by key; see `Primitive.call`."""

_K = PrimitiveKind


def payloads(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """One payload per request. Raises what the client's callables raise, TypeError for values of the wrong kind."""
    return _BUILD[p.kind](p, inputs, calls)


def value(p: Primitive, results: Sequence[Any]) -> Any:
    """The primitive's value: a list when it is batchable (or reranks), else its single result."""
    return list(results) if p.batchable or p.kind is _K.RERANKING else results[0]


def _texts(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    given = inputs["texts"]
    role = p.option("role", "query")
    found = []
    for item in given if p.batchable else [given]:
        text = item.text if isinstance(item, Chunk) else item
        if not isinstance(text, str):
            raise TypeError(f"{p.id} embeds text, but got {type(text).__name__}")
        found.append(EmbedText(text, role))
    return found


def _rows(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    collection = p.option("collection", "")
    return [IngestRow(collection, c, v) for c, v in zip(inputs["chunks"], inputs["vectors"], strict=True)]


def _searches(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    if p.option("wrapped"):  # the user's own retriever: one call of the object
        return [calls[p.call](inputs)]
    vectors = inputs["vectors"] if p.batchable else [inputs["vectors"]]
    collection, k, wanted = p.option("collection", ""), p.option("k", 4), p.option("filter", ())
    return [SearchVector(collection, vector, k, wanted) for vector in vectors]


def _pairs(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [ScorePair(inputs["query"], text) for text in inputs["texts"]]


def _generate(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [calls[p.call](inputs)]


def _warmup(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [Warmup(calls[p.call](inputs).prompt)]


_BUILD: dict[PrimitiveKind, Callable[[Primitive, Mapping[str, Any], Calls], list[Any]]] = {
    _K.EMBEDDING: _texts,
    _K.INGESTION: _rows,
    _K.SEARCHING: _searches,
    _K.RERANKING: _pairs,
    _K.PREFILLING: _generate,
    _K.FULL_PREFILLING: _generate,
    _K.PARTIAL_PREFILLING: _warmup,
}


def needs_client(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> bool:
    """Whether code of the client makes its payloads or its value that may take its time."""
    return bool(p.call) and p.call in calls and not runs_on_loop(calls[p.call], inputs)


def identity(engine: Fingerprint, tenant: str, payload: Any) -> Identity | None:
    """What the request asks for; None for what is never shared, or cannot be told from something else."""
    try:
        key = _key(payload)
        hash(key)
    except (TypeError, ValueError, OverflowError):  # e.g. a vector of no numbers: its engine will say so
        return None
    return None if key is None else Identity(tenant, engine, key)


def _key(payload: Any) -> Hashable | None:
    if isinstance(payload, EmbedText | ScorePair):
        return payload
    if isinstance(payload, Generate):
        return payload, typed(astuple(payload.sampling))
    if isinstance(payload, SearchVector):
        return "search", payload.collection, payload.k, typed(payload.filter), _bytes(payload.vector)
    if isinstance(payload, IngestRow):
        chunk = payload.chunk
        return "row", payload.collection, chunk.id, chunk.text, typed(dict(chunk.metadata)), _vector_key(payload.vector)
    return None


def typed(value: Any) -> Hashable:
    """The value with its types all the way down: `True`, `1` and `1.0` differ, as they do for an engine.

    Raises TypeError for what is neither plain data nor hashable.
    """
    kind = type(value)
    if kind is dict:
        return "dict", tuple((typed(key), typed(one)) for key, one in value.items())
    if kind in (list, tuple):
        return kind.__name__, tuple(map(typed, value))
    if kind is float:
        return "float", value.hex()
    hash(value)
    return kind, value


def _vector_key(vector: Any) -> Hashable:
    return ("kept", id(vector)) if isinstance(vector, KeptValue) else blake2b(_bytes(vector), digest_size=16).digest()


def _bytes(vector: Sequence[float]) -> bytes:
    """float32 bytes, equal for a numpy vector and for the list of floats made from it."""
    astype = getattr(vector, "astype", None)
    return bytes(astype("float32").tobytes()) if astype is not None else array("f", vector).tobytes()


def fingerprint(name: str, engine: Any) -> Fingerprint:
    """Of an engine as it is known here."""
    versions = engine.versions()
    prompt_of = getattr(engine, "prompt_of", None)
    prompts = "" if prompt_of is None else repr([prompt_of(role) for role in ("query", "document")])
    model = str(versions.get("model", getattr(engine, "model_name", "")))
    return Fingerprint(name, model, str(versions.get("revision", "")), prompts, str(getattr(engine, "normalize", "")))
