"""Which calls of the user's own objects may be made ahead of their place: LlamaIndex's classes that were tested so."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import ref

from teola_plugin.adapters.llamaindex.own_models.calls import Turns
from teola_plugin.adapters.thread_safety import ThreadSafety

HTTP_CLIENTS = frozenset({"llama_index.llms.openai.base.OpenAI", "llama_index.llms.openai_like.base.OpenAILike"})
"""Models behind an API, whose client takes calls of several threads."""
STORES = frozenset({"llama_index.core.vector_stores.simple.SimpleVectorStore"})
"""May be searched by several threads."""
LISTED = HTTP_CLIENTS | STORES
IN_TURN = frozenset({"llama_index.embeddings.huggingface.base.HuggingFaceEmbedding"})
"""May be called from any thread, by one at a time."""


@dataclass(frozen=True)
class Permission:
    """Of one query: `is_async` where its calls are made on the caller's loop, which needs no threads."""

    threads: ThreadSafety
    is_async: bool = False

    def early(self, leaf: Any) -> bool:
        """Whether a call may be made ahead. A rate limiter or a cache of its own is asked in the plain object's place."""
        if getattr(leaf, "rate_limiter", None) is not None or getattr(leaf, "embeddings_cache", None) is not None:
            return False
        if self.is_async or self.threads.allows(leaf, LISTED):
            return True
        return self.turns(leaf) is not None

    def turns(self, leaf: Any) -> Turns | None:
        """Of an object that takes one call at a time, whatever the thread."""
        if self.is_async or self.threads.told_of(leaf) or not self.threads.allows(leaf, IN_TURN):
            return None
        return _turns_of(leaf)


_lock = threading.Lock()
_turns: dict[int, tuple[ref[Any], Turns]] = {}


def _turns_of(leaf: Any) -> Turns:
    """The same for all queries that call it."""
    key = id(leaf)
    with _lock:
        known = _turns.get(key)
        if known is None or known[0]() is not leaf:
            known = _turns[key] = (ref(leaf, lambda _: _turns.pop(key, None)), Turns())
    return known[1]
