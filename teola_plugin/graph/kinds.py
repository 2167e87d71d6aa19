"""The kinds of primitives (paper, Table 1), and sets of kinds with a common property."""

from __future__ import annotations

from enum import Enum


class PrimitiveKind(Enum):
    """A kind of primitive. Two kinds differ if engines or schedulers must treat them differently."""

    CHUNKING = "chunking"
    EMBEDDING = "embedding"
    INGESTION = "ingestion"
    SEARCHING = "searching"
    RERANKING = "reranking"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PARTIAL_PREFILLING = "partial_prefilling"
    FULL_PREFILLING = "full_prefilling"
    PARTIAL_DECODING = "partial_decoding"
    CONDITION = "condition"
    AGGREGATE = "aggregate"
    CALL = "call"
    """Pure code of the framework (a parser, a key access): cheap, and may run more than once."""
    VERIFY = "verify"
    """Compares predicted items with the real ones."""
    TOOL = "tool"
    MAP = "map"
    FOLD = "fold"
    LOOP = "loop"
    BRANCH = "branch"
    OPAQUE = "opaque"
    """User code: runs once, where the original would run it; the graph only receives its result."""

    def __repr__(self) -> str:
        return self.name

    # Members are singletons; Enum's own hash runs Python code for each set membership.
    __hash__ = object.__hash__


_K = PrimitiveKind

LLM_PREFILLS = frozenset({_K.PREFILLING, _K.FULL_PREFILLING})
"""Kinds that begin an LLM request: a prefilling and its decodings are sent to the engine as one."""
LLM_DECODES = frozenset({_K.DECODING, _K.PARTIAL_DECODING})
LLM_KINDS = LLM_PREFILLS | LLM_DECODES | {_K.PARTIAL_PREFILLING}
ENGINE_KINDS = LLM_KINDS | {_K.EMBEDDING, _K.INGESTION, _K.SEARCHING, _K.RERANKING}
"""Kinds that only engines execute. All others run at the client, except a tool that names its engine."""
SERVED_KINDS = ENGINE_KINDS | {_K.TOOL}
"""Kinds that an engine may execute."""
FRAGMENT_KINDS = frozenset({_K.MAP, _K.FOLD, _K.LOOP, _K.BRANCH})
IMPURE_KINDS = frozenset({_K.TOOL, _K.OPAQUE})
"""Kinds that never run twice, never run before the original reaches them, and are never retried."""
