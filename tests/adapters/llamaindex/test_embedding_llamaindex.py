"""Tests of `TeolaEmbedding`: roles, parallel batches, and the events that LlamaIndex gets."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections import Counter
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.storage.kvstore import SimpleKVStore

from teola_plugin.adapters.llamaindex import TeolaEmbedding
from teola_plugin.engines.fake import FakeEmbedder, embed_words
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText

TEXTS = [f"text number {i}" for i in range(25)]


class Plain(BaseEmbedding):
    """The same vectors, made here, by the framework's own batches; under the same name."""

    model_name: str = "embedder"
    engine: str = "embedder"  # events before llama-index-core 0.14.23 tell all fields

    @classmethod
    def class_name(cls) -> str:
        return "TeolaEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return list(embed_words(query, "query"))

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return list(embed_words(query, "query"))

    def _get_text_embedding(self, text: str) -> list[float]:
        return list(embed_words(text, "document"))

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return list(embed_words(text, "document"))

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [list(embed_words(text, "document")) for text in texts]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._get_text_embeddings(texts)


Plain.__name__ = "TeolaEmbedding"  # spans tell it


@pytest.fixture
def model(pool):
    return TeolaEmbedding(pool=pool)


def calls(model: BaseEmbedding) -> dict[str, Any]:
    return {
        "query": lambda: model.get_query_embedding("a text"),
        "aquery": lambda: asyncio.run(model.aget_query_embedding("a text")),
        "text": lambda: model.get_text_embedding("a text"),
        "atext": lambda: asyncio.run(model.aget_text_embedding("a text")),
        "mean": lambda: model.get_agg_embedding_from_queries(["a text", "another"]),
        "batch": lambda: model.get_text_embedding_batch(TEXTS),
        "abatch": lambda: asyncio.run(model.aget_text_embedding_batch(TEXTS)),
        "one": lambda: model.get_text_embedding_batch(["a text"]),
        "none": lambda: model.get_text_embedding_batch([]),
        "nodes": lambda: [node.embedding for node in model([TextNode(text=text) for text in TEXTS])],
        "anodes": lambda: [n.embedding for n in asyncio.run(model.acall([TextNode(text=text) for text in TEXTS]))],
    }


@pytest.mark.parametrize("way", calls(Plain()))
def test_teola_embedding_gives_values_and_events_of_plain_embedding(model, way):
    """The same values, types, callbacks, events and spans."""

    def observed(one: BaseEmbedding) -> tuple[Any, Counter[str], Counter[str], Counter[str]]:
        recorder = Recorder()
        one.callback_manager = CallbackManager([recorder])
        with recorded(recorder):
            value = calls(one)[way]()
        return value, recorder.callbacks, recorder.events, recorder.spans

    assert observed(model) == observed(Plain())


def test_query_and_document_embeddings_have_their_own_roles(model, payloads):
    assert model.get_query_embedding("x") != model.get_text_embedding("x")
    assert payloads == [model.payload("x", "query"), model.payload("x", "document")]
    assert payloads == [EmbedText("x", "query"), EmbedText("x", "document")]
    assert model.vector_of((1, 2.0)) == [1.0, 2.0]


@pytest.mark.parametrize("way", ["batch", "abatch"])
def test_all_embedding_batches_are_requested_before_the_first_is_used(pool, model, payloads, monkeypatch, way):
    """Before the framework's code wants the first of them."""
    request_counts: list[int] = []
    own = TeolaEmbedding.vectors, TeolaEmbedding.avectors
    monkeypatch.setattr(TeolaEmbedding, "vectors", lambda *a: request_counts.append(len(payloads)) or own[0](*a))
    monkeypatch.setattr(TeolaEmbedding, "avectors", lambda *a: request_counts.append(len(payloads)) or own[1](*a))
    calls(model)[way]()
    assert request_counts == [25, 25, 25]
    assert [payload.text for payload in payloads] == TEXTS


def test_equal_embedding_batches_keep_their_order(model):
    texts = ["a", "b"] * 20
    assert model.get_text_embedding_batch(texts) == Plain().get_text_embedding_batch(texts)


def test_cached_texts_are_not_embedded_again(pool, payloads):
    model = TeolaEmbedding(pool=pool, embeddings_cache=SimpleKVStore())
    first = model.get_text_embedding_batch(TEXTS[:12])
    payloads.clear()
    assert model.get_text_embedding_batch(TEXTS[:14])[:12] == first
    assert [payload.text for payload in payloads] == TEXTS[12:14]


def test_each_embedding_batch_waits_for_the_rate_limiter(pool, payloads):
    limiters = pytest.importorskip(
        "llama_index.core.rate_limiter", reason="models have rate limiters since llama-index-core 0.14.16"
    )
    seen: list[int] = []

    class Limiter(limiters.BaseRateLimiter):
        def acquire(self, num_tokens: int = 0) -> None:
            seen.append(len(payloads))

        async def async_acquire(self, num_tokens: int = 0) -> None: ...

    TeolaEmbedding(pool=pool, rate_limiter=Limiter()).get_text_embedding_batch(TEXTS)
    assert seen == [0, 10, 20]


class _Picky(FakeEmbedder):
    def _value(self, request: Any) -> tuple[float, ...]:
        if "13" in request.payload.text:
            raise ValueError("an unlucky text")
        return super()._value(request)


def test_failing_batch_raises_after_the_first_batch_ended():
    with EnginePool.local([_Picky()]) as pool:
        model = TeolaEmbedding(pool=pool)
        recorder = Recorder()
        model.callback_manager = CallbackManager([recorder])
        with pytest.raises(EngineError, match="unlucky"):
            model.get_text_embedding_batch(TEXTS)
        ends = [event for event in recorder.callbacks if event.startswith("end") and "text number 0" in event]
        assert len(ends) == 1  # the first batch was told as done
        with pytest.raises(EngineError, match="unlucky"):
            asyncio.run(model.aget_text_embedding_batch(TEXTS))
        assert model.get_text_embedding_batch(TEXTS[:12])


def test_embedding_shows_a_progress_bar(model, capsys):
    model.get_text_embedding_batch(TEXTS, show_progress=True)
    assert "Generating embeddings: 100%" in capsys.readouterr().err


async def test_sync_embedding_works_inside_a_running_loop(model):
    assert model.get_query_embedding("x") == await model.aget_query_embedding("x")
    assert model.get_text_embedding_batch(TEXTS) == await model.aget_text_embedding_batch(TEXTS)


def test_embedding_has_name_and_copies_share_the_pool(pool, model):
    assert model.model_name == "embedder"
    named = TeolaEmbedding(pool=pool, model_name="mine")
    assert getattr(named, "to_payload", named.to_dict)()["model_name"] == "mine"
    assert copy.deepcopy(model).pool is pool
    assert model.to_dict() == TeolaEmbedding(pool=pool).to_dict() and "pool" not in model.to_dict()
    with pytest.raises(RegistrationError, match="pickled"):
        pickle.dumps(model)
    with pytest.raises(RegistrationError, match="engine"):
        TeolaEmbedding(pool=pool, engine="embeder")


def test_embedded_text_omits_excluded_metadata(model, payloads):
    node = TextNode(text="body", metadata={"kind": "x", "secret": "y"}, excluded_embed_metadata_keys=["secret"])
    model([node])
    assert payloads[0].text == node.get_content(MetadataMode.EMBED) and "secret" not in payloads[0].text
