"""A pool of small engines, and LlamaIndex objects on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.llamaindex_engines import Library, library, own_loop, reply, settings
from support.scripted_llm import ScriptedLLM

from teola_plugin.engines.fake import FakeEmbedder, FakeReranker, FakeStore
from teola_plugin.pool import EnginePool


@pytest.fixture(scope="module")
def stock() -> Iterator[Library]:
    llm = ScriptedLLM()
    llm.answer = reply
    served = {"llm": llm, "embedder": FakeEmbedder(), "reranker": FakeReranker(), "store": FakeStore()}
    with own_loop(), EnginePool.local(served) as pool:
        made = library(pool, "private")
        with settings(made.llm):
            yield made
