"""Tests of `EmbeddingServer` on vLLM's own API server, with the packaged embedding model."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import OpenAIEmbeddings
from support.api_server import MODEL

from teola_plugin.cli.demo.stock import ApiServer, reserved_port
from teola_plugin.engines import EmbeddingServer
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm
from teola_plugin.pool import EnginePool

pytestmark = [pytest.mark.vllm, pytest.mark.models, pytest.mark.long]
FLAGS = (
    *("--runner", "pooling", "--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "256"),
    *("--enforce-eager", "--gpu-memory-utilization", "0.1", "--host", "127.0.0.1"),
)
TEXTS = ["A cat sleeps.", "Tea is brewed at low heat.", "Ünïcode 中文"]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm-embeddings") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", packaged_minilm(), *FLAGS]
    with reserved_port() as port, log.open("wb") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output)
        server = ApiServer(f"http://127.0.0.1:{port}/v1", log, process)
        try:
            server.wait()
            yield server.base_url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_equal_those_of_openai_embeddings(encoding: Any, base_url: str) -> None:
    own = OpenAIEmbeddings(
        base_url=base_url,
        api_key="none",  # type: ignore[arg-type]
        model=MODEL,
        check_embedding_ctx_length=False,
        model_kwargs={"encoding_format": encoding} if encoding == "float" else {},  # the client's default is base64
    )
    expected = own.embed_documents(TEXTS)
    engine = EmbeddingServer(base_url=base_url, encoding=encoding)
    with EnginePool.local([engine]) as pool:
        bound = pool.bound(own, "embedder").embed_documents(TEXTS)
    assert engine.versions()["server"] == "vllm"
    for vector, own_vector in zip(bound, expected, strict=True):
        assert vector == pytest.approx(own_vector, abs=1e-5)


def test_vectors_have_the_dimension_of_the_model(base_url: str) -> None:
    from teola_plugin.langchain import TeolaEmbeddings

    engine = EmbeddingServer(base_url=base_url, model=MODEL)
    with EnginePool.local([engine]) as pool:
        vectors = TeolaEmbeddings(pool=pool).embed_documents(TEXTS)
    assert [len(vector) for vector in vectors] == [384] * 3
    assert engine.dimension == 384
