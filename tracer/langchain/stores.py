"""Stores of the user's own, in this process: which code of theirs touches what."""

from __future__ import annotations

from langchain_core.vectorstores import InMemoryVectorStore

from teola_plugin.graph import UNKNOWN_EFFECT, Effect
from teola_plugin.tracer.langchain.classes import changed

_WRITERS = ("add_documents", "add_texts", "aadd_documents", "aadd_texts")


def resource(store: InMemoryVectorStore) -> str:
    """Its name among the effects of a graph."""
    return f"memory:{id(store.store):x}"


def written(func: object) -> tuple[Effect, ...]:
    """What else than any user code might a store's own method changes: its documents, which are read ahead else."""
    store, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
    if type(store) is not InMemoryVectorStore or name not in _WRITERS or changed(store, InMemoryVectorStore):
        return ()
    return UNKNOWN_EFFECT, Effect(resource(store), writes=True)
