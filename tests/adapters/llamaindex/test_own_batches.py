"""Tests of embedding batches of an own model in ingestion: in parallel if the model is thread-safe."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from differential.llamaindex.compare import settled
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import Document, TextNode
from pydantic import PrivateAttr

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex import TeolaEmbedding
from teola_plugin.pool import EnginePool

WAIT_S = 0.03
TOGETHER = 3
"""Calls that are under way at once at the least, where they are made side by side."""


class ByText(BaseEmbedding):
    """Asked text after text, as `BaseEmbedding` does by default; each with a span."""

    _asked: list[str] = PrivateAttr(default_factory=list)
    _under_way: list[int] = PrivateAttr(default_factory=lambda: [0, 0])
    _lock: Any = PrivateAttr(default_factory=threading.Condition)
    _wanted: int = PrivateAttr(default=1)
    """No call ends before so many are under way, however late a busy machine begins them."""
    _over: threading.Event | None = PrivateAttr(default=None)
    """Where that is given, no call but the one of the bad text ends before it is set."""

    def _vector(self, text: str) -> list[float]:
        with self._lock:
            self._asked.append(text)
            self._under_way[0] += 1
            self._under_way[1] = max(self._under_way)
            self._lock.notify_all()
            self._lock.wait_for(lambda: self._under_way[1] >= self._wanted, 10)
        time.sleep(WAIT_S)
        if self._over is not None and text != "bad":
            self._over.wait(10)
        with self._lock:
            self._under_way[0] -= 1
        if text == "bad":
            raise ValueError("this one cannot be embedded")
        return [float(len(text)), 1.0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vector(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)


class ByBatch(ByText):
    """Asked batch after batch, as models behind an API are."""

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [*map(self._vector, texts[:1]), *([float(len(text)), 1.0] for text in texts[1:])]


class OwnWay(ByText):
    def get_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        return [self._vector(text) for text in texts]


TEXTS = [f"text {i}" * (i + 1) for i in range(10)]
MODELS = [ByText, ByBatch]


def nodes(texts: list[str] = TEXTS) -> list[TextNode]:
    return [TextNode(id_=f"n{i}", text=text) for i, text in enumerate(texts)]


def create_model(kind: type[ByText], recorder: Recorder | None = None, *, wanted: int = 1, **given: Any) -> ByText:
    model = kind(embed_batch_size=2, callback_manager=CallbackManager([recorder] if recorder else []), **given)
    model._wanted = wanted
    return model


def pipeline_of(model: Any, **options: Any) -> IngestionPipeline:
    plain = IngestionPipeline(transformations=[model], disable_cache=True)
    return accelerate(plain, **options) if options else plain


def ingest(model: Any, texts: list[str] = TEXTS, **options: Any) -> list[Any]:
    return [node.embedding for node in pipeline_of(model, **options).run(nodes=nodes(texts))]


@pytest.mark.parametrize("kind", MODELS)
def test_pipeline_embeds_concurrently_with_the_originals_events(kind: type[ByText]) -> None:
    """Vectors, calls, callbacks, events and spans; several calls at once."""
    recordings, found = [], []
    for options in ({}, {"concurrent": [ByText]}):
        recorder = Recorder()
        model = create_model(kind, recorder, wanted=TOGETHER if options else 1)
        pipeline = pipeline_of(model, **options)
        with recorded(recorder):
            found.append([node.embedding for node in pipeline.run(nodes=nodes())])
        recordings.append((recorder.callbacks, recorder.events, recorder.spans, Counter(model._asked)))
        assert model._under_way[1] == 1 or options
    assert found[0] == found[1] and recordings[0] == recordings[1]
    assert TOGETHER <= model._under_way[1] <= 8


@pytest.mark.parametrize("kind", MODELS)
def test_index_embeds_its_nodes_concurrently(kind: type[ByText]) -> None:
    model = create_model(kind, wanted=TOGETHER)
    index = VectorStoreIndex([], embed_model=model)
    fast = accelerate(index, concurrent=[model])
    fast.insert_nodes(nodes())
    assert TOGETHER <= model._under_way[1] <= 8
    found = index.as_retriever(similarity_top_k=20).retrieve("text")
    assert len(found) == len(TEXTS) and len(model._asked) == 1 + (len(TEXTS) if kind is ByText else len(TEXTS) // 2)


@pytest.mark.parametrize("kind", MODELS)
def test_embedding_without_concurrent_option_stays_sequential(kind: type[ByText]) -> None:
    for options in ({"app": "mine"}, {"concurrent": [create_model(kind)]}, {"concurrent": [kind], "speculate": "off"}):
        model = create_model(kind)
        ingest(model, **options)
        assert model._under_way[1] == 1 and model._asked == (TEXTS if kind is ByText else TEXTS[::2])
    for model in (create_model(OwnWay), create_model(kind, num_workers=1)):
        ingest(model, concurrent=[model])
        assert model._under_way[1] == 1


def test_num_workers_bounds_concurrent_embedding_calls() -> None:
    model = create_model(ByText, num_workers=3, wanted=3)
    ingest(model, concurrent=[model])
    assert model._under_way[1] == 3


@pytest.mark.parametrize("kind", MODELS)
def test_equal_embedding_calls_do_not_overlap(kind: type[ByText]) -> None:
    model = create_model(kind)
    texts = ["same"] * 6 + ["other"] * 2
    assert ingest(model, texts, concurrent=[model]) == ingest(create_model(kind), texts)
    assert Counter(model._asked) == Counter(same=6 if kind is ByText else 3, other=2 if kind is ByText else 1)
    assert model._under_way[1] <= 2


@pytest.mark.parametrize("kind", MODELS)
def test_failing_embedding_raises_and_stops_further_calls(kind: type[ByText]) -> None:
    texts = ["bad", *(f"text {i}" for i in range(40))]
    model = create_model(kind, wanted=TOGETHER)
    model._over = threading.Event()
    with pytest.raises(ValueError, match="this one cannot be embedded"):
        ingest(model, texts, concurrent=[model])
    call_count = len(model._asked)
    assert TOGETHER <= call_count <= 8, "those under way"
    model._over.set()
    settled()
    assert len(model._asked) <= call_count + (8 if kind is ByText else 0), "no batch begins afterwards"


def test_accelerated_pipeline_keeps_the_users_transformations() -> None:
    """A pipeline that uses processes therefore pickles the user's transformations."""
    model = ByText()
    fast: Any = accelerate(IngestionPipeline(transformations=[model]), concurrent=[ByText])
    assert fast.original.transformations == [model]
    assert fast.transformations[0] is model


# ------------------------------------------------------------ the name of the app


def test_ingestion_requests_have_their_app_name(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[str] = []
    call = pool.runtime.call

    def noted(*args: Any, **kwargs: Any) -> Any:
        from teola_plugin.runtime.query_run import current_request_context

        request_context = current_request_context.get()
        apps.append(request_context.app if request_context else "")
        return call(*args, **kwargs)

    monkeypatch.setattr(pool.runtime, "call", noted)
    model = TeolaEmbedding(pool=pool)
    pipeline = accelerate(IngestionPipeline(transformations=[model]), app="nightly")
    pipeline.run(documents=[Document(text="oats")])
    again = accelerate(pipeline, app="daily")
    again.run(documents=[Document(text="ivy")])
    accelerate(VectorStoreIndex([], embed_model=model), app="index").insert_nodes(nodes())
    assert [app for app in apps if app] == ["nightly", "daily", "index"]
    assert type(again).__name__ == "IngestionPipeline"
