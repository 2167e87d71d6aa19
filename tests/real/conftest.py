"""One pool of real engines: the session's vLLM, an embedded PostgreSQL, MiniLM, a tiny cross-encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.loop_thread import LoopThread

if TYPE_CHECKING:
    from conftest import SessionLlm


class BorrowedLoop(LoopThread):
    """The loop on which the session's LLM runs. Its owner starts and stops it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        super().__init__()
        self._loop, self._is_open, self._ident = loop, True, ident

    @property
    def ident(self) -> int:
        return self._ident

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Borrowed:
    """An engine that its owner starts and stops, instead of the pools that use it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@pytest.fixture(scope="session")
def real_pool(session_llm: SessionLlm) -> Iterator[EnginePool]:
    thread = session_llm.thread
    engines: dict[str, Any] = {
        "llm": [Borrowed(session_llm.engine)],
        "embedder": [EmbeddingEngine("embedder", cores="1")],
        "reranker": [RerankingEngine("reranker", cores="1")],
        "store": [PgVectorEngine("store")],
    }
    loop = BorrowedLoop(thread.loop, thread._thread.ident or 0)
    with EnginePool(LocalRuntime(engines, loop=loop), engines, ()) as pool:
        yield pool
