"""Request keys of requests to engines: everything that decides a result, and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple, cast

from teola_plugin.requests.payloads import (
    CallTool,
    EmbedText,
    Generate,
    IngestRow,
    Sampling,
    ScorePair,
    SearchText,
    SearchVector,
    Warmup,
)
from teola_plugin.runtime.claims import ClaimRule


class RemoteValue:
    """Stands for a value that only engines read. It is looked up before anybody else may see it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<remote value>"


_RULES: dict[type, ClaimRule] = {
    EmbedText: ClaimRule.PURE,
    ScorePair: ClaimRule.PURE,
    SearchVector: ClaimRule.PURE,
    Generate: ClaimRule.ONCE_PER_CALLER,
    SearchText: ClaimRule.ONCE_PER_CALLER,
    Warmup: ClaimRule.WARM_UP,
    IngestRow: ClaimRule.WRITE,
}


def rule_of(payload: Any) -> ClaimRule:
    """Return the claim rule of a payload's kind."""
    if type(payload) is CallTool and payload.read_only:
        return ClaimRule.ONCE_PER_CALLER
    return _RULES.get(type(payload), ClaimRule.ALONE)


class EngineFingerprint(NamedTuple):
    """The properties of an engine that decide its results."""

    engine: str
    model: str = ""
    revision: str = ""
    prompts: str = ""
    """Prefixes that the engine puts before texts, by role."""
    normalisation: str = ""


class RequestKey(NamedTuple):
    """Everything that decides a result. Values that only Python takes for equal (`True`, `1`, `1.0`) differ."""

    tenant: str
    engine: EngineFingerprint
    payload: Hashable
    """The payload, with the types of its values."""


def request_key(engine: EngineFingerprint, tenant: str, payload: Any) -> RequestKey | None:
    """Return the key of a request; None if it may not be claimed, or cannot be compared with others."""
    snapshot_payload = _PAYLOAD_KEYS.get(type(payload))
    try:
        key = None if snapshot_payload is None else snapshot_payload(payload)
        hash(key)
    except (TypeError, ValueError, OverflowError):  # e.g. a vector of no numbers: its engine will say so
        return None
    return None if key is None else RequestKey(tenant, engine, key)


_sampling_values = attrgetter(*(f.name for f in fields(Sampling)))
"""Return the values of a `Sampling`. (`dataclasses.astuple` copies each of them, which takes ten times as long.)"""


def _generation_key(payload: Generate) -> Hashable:
    return payload, typed(_sampling_values(payload.sampling))


def _search_key(payload: SearchVector) -> Hashable:
    return "search", payload.collection, payload.k, typed(payload.filter), _vector_bytes(payload.vector)


def _web_search_key(payload: SearchText) -> Hashable:
    return "search by words", payload.query, payload.k


def _tool_key(payload: CallTool) -> Hashable | None:
    return ("tool", payload.tool, typed(dict(payload.arguments))) if payload.read_only else None


def _row_key(payload: IngestRow) -> Hashable:
    chunk, vector = payload.chunk, payload.vector
    digest = ("kept", id(vector)) if isinstance(vector, RemoteValue) else _digest(_vector_bytes(vector))
    return "row", payload.collection, chunk.id, chunk.text, typed(dict(chunk.metadata)), digest


def _warmup_key(payload: Warmup) -> Hashable:
    return "warm-up", _digest(payload.prompt.known_prefix().encode(errors="surrogatepass"))


def _payload_itself(payload: Any) -> Hashable:
    return cast(Hashable, payload)


_PAYLOAD_KEYS: dict[type, Callable[[Any], Hashable | None]] = {
    EmbedText: _payload_itself,
    ScorePair: _payload_itself,
    Generate: _generation_key,
    SearchVector: _search_key,
    SearchText: _web_search_key,
    CallTool: _tool_key,
    IngestRow: _row_key,
    Warmup: _warmup_key,
}
"""By the very class, which is quickly looked up: both callers need the key of each of their requests."""


def typed(value: Any) -> Hashable:
    """Return the value with its types all the way down: `True`, `1` and `1.0` differ, as they do for an engine.

    Raises TypeError for what is neither plain data nor hashable.
    """
    kind = type(value)
    if kind is dict:
        return "dict", tuple((typed(key), typed(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return kind.__name__, tuple(map(typed, value))
    if kind is float:
        return "float", value.hex()
    hash(value)
    return kind, value


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _vector_bytes(vector: Sequence[float]) -> bytes:
    """Return float32 bytes, equal for a numpy vector and for the list of floats made from it."""
    astype = getattr(vector, "astype", None)
    return bytes(astype("float32").tobytes()) if astype is not None else array("f", vector).tobytes()


def fingerprint(name: str, engine: Any) -> EngineFingerprint:
    """Return the fingerprint of an engine as it is known here."""
    versions = engine.versions()
    prompt_of = getattr(engine, "prompt_of", None)
    prompts = "" if prompt_of is None else repr([prompt_of(role) for role in ("query", "document")])
    model = str(versions.get("model", getattr(engine, "model_name", "")))
    return EngineFingerprint(
        name, model, str(versions.get("revision", "")), prompts, str(getattr(engine, "normalize", ""))
    )
