"""Tests of prompts as token ids: accepted if their encoding is known, refused otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import llama_index.core
import pytest
import tiktoken
from support.service import RunningServer, running_server

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM
from teola_plugin.errors import ConfigError
from teola_plugin.pool import EnginePool

TEXTS = ["Cows eat grass.", "", "Schafe mögen Klee 🐑"]
NAMED = "text-embedding-3-small"


@pytest.fixture(scope="module", autouse=True)
def encodings() -> Iterator[None]:
    """Use the files of tiktoken that come with LlamaIndex, so that nothing is downloaded."""
    folder = Path(llama_index.core.__file__).parent / "_static" / "tiktoken_cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engines = [FakeEmbedder("embedder"), FakeEmbedder("other"), FakeEmbedder(NAMED), FakeLLM("llm")]
    with running_server(
        EnginePool.local(engines), token_ids={"embedder": "cl100k_base", "llm": "cl100k_base"}
    ) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def vectors(http: httpx.Client, model: str, input: Any) -> list[list[float]]:
    reply = http.post("/v1/embeddings", json={"model": model, "input": input})
    assert reply.status_code == 200, reply.text
    return [one["embedding"] for one in reply.json()["data"]]


@pytest.mark.parametrize("model", ["embedder", NAMED])
def test_token_ids_embed_as_their_text(http: httpx.Client, model: str) -> None:
    encoding = tiktoken.get_encoding("cl100k_base")
    texts = [text for text in TEXTS if text]
    expected = vectors(http, model, texts)
    assert vectors(http, model, [encoding.encode(text) for text in texts]) == expected
    assert vectors(http, model, encoding.encode(texts[0])) == expected[:1]


def test_langchain_embeddings_work_with_base_url_and_model(
    server: RunningServer, http: httpx.Client, monkeypatch: Any
) -> None:
    from langchain_openai import OpenAIEmbeddings

    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for model in ("embedder", NAMED):
        embeddings = OpenAIEmbeddings(base_url=server.base, model=model)
        for vector, expected in zip(embeddings.embed_documents(TEXTS), vectors(http, model, TEXTS), strict=True):
            assert vector == pytest.approx(expected)
        assert embeddings.embed_query(TEXTS[0]) == pytest.approx(vectors(http, model, TEXTS[0])[0])


def test_prompt_of_token_ids_is_decoded(server: RunningServer) -> None:
    with server.openai() as client:
        ids = tiktoken.get_encoding("cl100k_base").encode("one two")
        options: dict[str, Any] = {"model": "llm", "max_tokens": 20, "temperature": 0}
        expected = client.completions.create(prompt="one two", **options).choices[0].text
        assert [one.text for one in client.completions.create(prompt=[ids, ids], **options).choices] == [
            expected,
            expected,
        ]


@pytest.mark.parametrize(
    ("model", "value", "message"),
    [
        ("other", [1, 2], "token_ids: {other: cl100k_base}"),
        ("embedder", [10**7], "cl100k_base does not have"),
        ("embedder", [-1], "cl100k_base does not have"),
        ("embedder", [[]], "input is empty"),
        ("embedder", [], "input is empty"),
    ],
)
def test_unsupported_token_ids_get_400(http: httpx.Client, model: str, value: Any, message: str) -> None:
    reply = http.post("/v1/embeddings", json={"model": model, "input": value})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_unavailable_encoding_gets_503(http: httpx.Client, monkeypatch: Any) -> None:
    def fails(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", fails)
    reply = http.post("/v1/embeddings", json={"model": "embedder", "input": [1]})
    assert reply.status_code == 503
    assert "TIKTOKEN_CACHE_DIR" in reply.json()["error"]["message"]


@pytest.mark.parametrize("setting", [{"embeder": "cl100k_base"}, {"llm": "cl100"}])
def test_invalid_token_id_settings_raise(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"server\.token_ids.*Next: "), running_server(token_ids=setting):
        pass
