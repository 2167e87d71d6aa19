"""Tests of engines that use a model which the user has loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm
from teola_plugin.engines.sentence_transformers.loaded_models import model_name_of, same_model
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, ScorePair

pytestmark = pytest.mark.models
TEXTS = [f"lambs eat grass, and {number} other things" for number in range(40)]


@pytest.fixture(scope="module")
def model() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(packaged_minilm(), device="cpu")


@pytest.fixture(scope="module")
def encoder() -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(reranker_folder()), device="cpu")


def embedded(engine: EmbeddingEngine, role: Any) -> np.ndarray:
    with EnginePool.local({"embedder": engine}) as pool:
        payloads = [EmbedText(text, role) for text in TEXTS]
        return np.asarray(pool.call(PrimitiveKind.EMBEDDING, "embedder", payloads).result())


def test_vectors_equal_those_of_the_loaded_model(model: Any) -> None:
    assert np.allclose(embedded(EmbeddingEngine(model=model), "query"), model.encode(TEXTS), atol=1e-5)
    engine = EmbeddingEngine(model=model, prompts={"query": "query: ", "document": ""}, normalize=True)
    assert np.allclose(embedded(engine, "query"), model.encode(TEXTS, prompt="query: "), atol=1e-5)
    assert np.allclose(embedded(engine, "document"), model.encode(TEXTS), atol=1e-5)


def test_scores_equal_those_of_the_loaded_model(encoder: Any) -> None:
    pairs = [("what do lambs eat?", text) for text in TEXTS]
    with EnginePool.local({"reranker": RerankingEngine(model=encoder, dedicated=False)}) as pool:
        assert not pool.profiles["reranker"].curves, "it is not measured"
        found = pool.call(PrimitiveKind.RERANKING, "reranker", [ScorePair(*pair) for pair in pairs]).result()
    assert np.allclose(found, encoder.predict(pairs), atol=1e-5)


def test_loaded_model_is_not_changed(model: Any) -> None:
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    engine = EmbeddingEngine(model=model, dedicated=False)
    embedded(engine, "query")
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert engine.loaded_model is model and not engine.profile.dedicated and not engine.profile.curves
    assert embedded(engine, "query").shape == (40, 384), "it starts again"


def test_loaded_models_are_named_by_their_source(model: Any, encoder: Any) -> None:
    assert Path(model_name_of(model)) == Path(packaged_minilm())
    assert model_name_of("sentence-transformers/any") == "sentence-transformers/any"
    assert EmbeddingEngine(model=model).model_name == model_name_of(model)


def test_same_model_compares_weights_and_settings(model: Any, encoder: Any) -> None:
    from sentence_transformers import SentenceTransformer

    other = SentenceTransformer(packaged_minilm(), device="cpu")
    assert same_model(model, model) and same_model(model, other) and not same_model(model, encoder)
    other.max_seq_length = 100
    assert not same_model(model, other)
    other.max_seq_length = model.max_seq_length
    next(other.parameters()).data[0] += 1.0
    assert not same_model(model, other)
