"""Tests of `engines="auto"` on vLLM's own API server and MiniLM: the original's answers, and no more requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import pytest
from support.api_server import MODEL, ApiServer

from benchmarks.stock import langchain_apps, llamaindex_apps
from teola_plugin import accelerate
from teola_plugin.cli.demo.documents import join_lines
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.models,
    # The clients that plain objects keep for ever close their sockets when they are forgotten.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]
TEXTS = [part for part in join_lines(topics["try"]).split("\n\n") if len(part) > 80][:12]
ASKED = "vllm:request_success_total"


_loop = asyncio.Runner()
"""One loop for all: the package `openai` keeps connections between calls."""


@pytest.fixture(scope="module")
def chains(vllm_api: ApiServer) -> langchain_apps.Models:
    return langchain_apps.models(vllm_api.base_url, MODEL, packaged_minilm(), TEXTS)


@pytest.fixture(scope="module")
def engines(vllm_api: ApiServer) -> Iterator[llamaindex_apps.Models]:
    made = llamaindex_apps.models(vllm_api.base_url, MODEL, packaged_minilm(), TEXTS)
    yield made
    made.llm._get_client().close()
    _loop.run(made.llm._get_aclient().close())


def counted(server: ApiServer, call: Any) -> tuple[Any, float]:
    """Return the result of a call, and the number of requests that the server answered for it."""
    before = server.metric(ASKED)
    value = call()
    return value, server.metric(ASKED) - before


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("name", langchain_apps.APPS)
def test_served_langchain_chains_equal_the_original(vllm_api: ApiServer, chains: Any, name: str, way: str) -> None:
    plain, given = langchain_apps.APPS[name](chains), {"question": langchain_apps.QUESTION}

    def ask(chain: Any) -> tuple[Any, float]:
        run = chain.invoke if way == "sync" else lambda x: _loop.run(chain.ainvoke(x))
        return counted(vllm_api, lambda: run(given))

    wanted, request_count = ask(plain)
    bare, served = accelerate(plain), accelerate(plain, engines="auto")
    assert len(served.serving.bound) == 2 and not served.serving.left, served.explain()
    assert ask(bare) == ask(served) == (wanted, request_count)
    own = accelerate(plain, engines="dedicated")
    assert len(own.serving.bound) == 2 and ask(own)[0] == wanted


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("name", llamaindex_apps.APPS)
def test_served_llamaindex_engines_equal_the_original(vllm_api: ApiServer, engines: Any, name: str, way: str) -> None:
    plain = llamaindex_apps.APPS[name](engines)

    def ask(engine: Any) -> tuple[Any, float]:
        run = engine.query if way == "sync" else lambda x: _loop.run(engine.aquery(x))
        found, request_count = counted(vllm_api, lambda: run(llamaindex_apps.QUESTION))
        return (str(found), [node.text for node in found.source_nodes]), request_count

    wanted, request_count = ask(plain)
    bare, served = accelerate(plain), accelerate(plain, engines="auto")
    assert "OpenAIServer(base_url=" in served.explain() and "EmbeddingEngine(model=" in served.explain()
    assert ask(bare) == ask(served) == (wanted, request_count)
    assert ask(accelerate(plain, engines="dedicated"))[0] == wanted
