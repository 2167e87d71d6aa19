"""Which calls of the user's own objects may be made ahead of their place: LlamaIndex's classes that were tested so."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

from teola_plugin.adapters.llamaindex.own_models.calls import Turns
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.shims.llamaindex.models import is_paced

HTTP_CLIENTS = frozenset({"llama_index.llms.openai.base.OpenAI", "llama_index.llms.openai_like.base.OpenAILike"})
"""Models behind an API, whose client takes calls of several threads."""
STORES = frozenset({"llama_index.core.vector_stores.simple.SimpleVectorStore"})
"""May be searched by several threads."""
LISTED = HTTP_CLIENTS | STORES
IN_TURN = frozenset({"llama_index.embeddings.huggingface.base.HuggingFaceEmbedding"})
"""May be called from any thread, by one at a time."""


@dataclass(frozen=True)
class Permission:
    """What may be called on threads, beside the plain object."""

    threads: ThreadSafety

    def early(self, leaf: Any) -> bool:
        """Whether calls may be made ahead. A rate limiter or a cache is asked in the plain object's place."""
        if is_paced(leaf) or type(leaf) in _never:
            return False
        return self.anywhere(leaf) or self.turns(leaf) is not None

    def anywhere(self, leaf: Any) -> bool:
        """Whether all of it may be asked on other threads, what says how its prompts are written, too."""
        return self.threads.allows(leaf, LISTED)

    def never(self, leaf: Any) -> None:
        """Its calls cannot be told from their events."""
        _never.add(type(leaf))

    def turns(self, leaf: Any) -> Turns | None:
        """Of an object that takes one call at a time, whatever the thread."""
        if self.threads.told_of(leaf) or not self.threads.allows(leaf, IN_TURN):
            return None
        return _turns_of(leaf)


_never: WeakSet[type] = WeakSet()
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
