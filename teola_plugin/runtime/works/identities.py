"""What decides a result, and how often a result may be used.

Two parties of a query ask for the same work: the e-graph, ahead of time, and the plain object, in its own order. Only
what the plain object claims can become visible, so early work never changes an answer. What that rests on is the
identity of what is asked: all that decides its result, and nothing else.
"""

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
from teola_plugin.runtime.works.remote_values import RemoteValue

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


class Fingerprint(NamedTuple):
    """What about an engine decides its results."""

    engine: str
    model: str = ""
    revision: str = ""
    prompts: str = ""
    """What it puts before texts, by role."""
    normalisation: str = ""


class Identity(NamedTuple):
    """All that decides a result. Values that Python alone takes as equal (`True`, `1`, `1.0`) differ."""

    tenant: str
    engine: Fingerprint
    payload: Hashable
    """What is asked, with its types."""


def identity(engine: Fingerprint, tenant: str, payload: Any) -> Identity | None:
    """What the request asks for; None for what is never shared, or cannot be told from something else."""
    try:
        key = _key(payload)
        hash(key)
    except (TypeError, ValueError, OverflowError):  # e.g. a vector of no numbers: its engine will say so
        return None
    return None if key is None else Identity(tenant, engine, key)


_sampling = attrgetter(*(f.name for f in fields(Sampling)))
"""Its values. (`dataclasses.astuple` copies each of them, which takes ten times as long.)"""


def _key(payload: Any) -> Hashable | None:
    made = _KEYS.get(type(payload))
    return None if made is None else made(payload)


def _of_generate(payload: Generate) -> Hashable:
    return payload, typed(_sampling(payload.sampling))


def _of_search(payload: SearchVector) -> Hashable:
    return "search", payload.collection, payload.k, typed(payload.filter), _bytes(payload.vector)


def _of_words(payload: SearchText) -> Hashable:
    return "search by words", payload.query, payload.k


def _of_tool(payload: CallTool) -> Hashable | None:
    return ("tool", payload.tool, typed(dict(payload.arguments))) if payload.read_only else None


def _of_row(payload: IngestRow) -> Hashable:
    chunk = payload.chunk
    return "row", payload.collection, chunk.id, chunk.text, typed(dict(chunk.metadata)), _vector_key(payload.vector)


def _of_warmup(payload: Warmup) -> Hashable:
    return "warm-up", blake2b(payload.prompt.known().encode(errors="surrogatepass"), digest_size=16).digest()


def _itself(payload: Any) -> Hashable:
    return cast(Hashable, payload)


_KEYS: dict[type, Callable[[Any], Hashable | None]] = {
    EmbedText: _itself,
    ScorePair: _itself,
    Generate: _of_generate,
    SearchVector: _of_search,
    SearchText: _of_words,
    CallTool: _of_tool,
    IngestRow: _of_row,
    Warmup: _of_warmup,
}
"""By the very class, which is quickly found: it is asked for each request of each party."""


def typed(value: Any) -> Hashable:
    """The value with its types all the way down: `True`, `1` and `1.0` differ, as they do for an engine.

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


def _vector_key(vector: Any) -> Hashable:
    return ("kept", id(vector)) if isinstance(vector, RemoteValue) else blake2b(_bytes(vector), digest_size=16).digest()


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
