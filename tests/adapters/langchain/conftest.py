"""A pool of small fake engines, and the fixtures that create pool-backed LangChain objects on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.scripted_llm import ScriptedLLM

from teola_plugin.pool import EnginePool


@pytest.fixture(scope="module")
def shared_llm() -> ScriptedLLM:
    return ScriptedLLM()


@pytest.fixture(scope="module")
def llm_pool(shared_llm: ScriptedLLM) -> Iterator[EnginePool]:
    with EnginePool.local(llm=shared_llm) as pool:
        yield pool


@pytest.fixture
def llm(shared_llm: ScriptedLLM) -> ScriptedLLM:
    """Return the engine behind `ChatTeola`, reset for the test."""
    shared_llm.__init__()  # type: ignore[misc]
    return shared_llm


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    """Create a pool of a fake embedder, reranker and store."""
    from teola_plugin.engines.fake import FakeEmbedder, FakeReranker, FakeStore

    with EnginePool.local(embedder=FakeEmbedder(), reranker=FakeReranker(), store=FakeStore()) as pool:
        yield pool


@pytest.fixture(scope="module")
def fakes() -> Iterator[EnginePool]:
    """Create a pool of all fake engines."""
    from teola_plugin.engines.fake import fake_engines

    with EnginePool.local(fake_engines()) as pool:
        yield pool
