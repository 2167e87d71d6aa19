"""Tests of own models that a sync caller calls on threads, and of models that do not bear it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from differential.llamaindex.compare import settled
from differential.llamaindex.composed import sub_questions_sync
from llama_index.core.embeddings import MockEmbedding

from benchmarks.llamaindex.engines import ASKED, shown
from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex.prefetching import takes_threads
from teola_plugin.adapters.thread_safety import NOBODY, ThreadSafety
from tests.support.llamaindex_own import WatchedKit, create_watched_kit


class RemoteEmbedding(MockEmbedding):
    """Stands for a class of one of LlamaIndex's packages, by the name of its module."""


class LocalEmbedding(MockEmbedding):
    """Stands for a class that runs in this process."""


RemoteEmbedding.__module__ = "llama_index.embeddings.mistralai.base"
LocalEmbedding.__module__ = "llama_index.embeddings.fastembed.base"


class OwnEmbedding(RemoteEmbedding):
    """A subclass that counts its calls, which threads would do at once."""

    calls: int = 0

    def _get_query_embedding(self, query: str) -> list[float]:
        self.calls += 1
        return super()._get_query_embedding(query)


@pytest.fixture
def own_kit() -> Iterator[WatchedKit]:
    made = create_watched_kit()
    with made.kit.in_force():
        yield made
    settled()


def test_api_clients_may_be_called_on_threads() -> None:
    assert takes_threads(RemoteEmbedding(embed_dim=3), NOBODY)


@pytest.mark.parametrize("kind", [LocalEmbedding, OwnEmbedding, MockEmbedding])
def test_other_models_need_concurrent_option_for_calls_on_threads(kind: type[MockEmbedding]) -> None:
    model = kind(embed_dim=3)
    assert not takes_threads(model, NOBODY)
    assert takes_threads(model, ThreadSafety((model,)))


def test_embedding_that_fails_on_a_thread_is_called_again(own_kit: WatchedKit, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sub_questions_sync(own_kit.kit)
    own_kit.fresh()
    expected = shown(engine.query(ASKED))
    here, kind, refused = threading.current_thread(), type(own_kit.kit.embedding), []
    embed = kind._now

    def embed_here(self: Any, role: str, texts: list[str]) -> Any:
        if threading.current_thread() is not here:
            refused.append(texts)
            raise RuntimeError("created in another thread")
        return embed(self, role, texts)

    monkeypatch.setattr(kind, "_now", embed_here)
    fast = accelerate(engine, concurrent=[own_kit.kit.llm, type(own_kit.kit.reports.vector_store)])
    own_kit.fresh()
    assert shown(fast.query(ASKED)) == expected
    assert refused
