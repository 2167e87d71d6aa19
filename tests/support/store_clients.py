"""Records the searches that clients of embedded vector stores receive, and runs queries that meet there."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import VectorStoreEngine
from teola_plugin.engines.fake import embed_words

WORDS = ("lambda", "class", "import", "with", "raise", "yield", "while", "return")
TEXTS = [f"All of {one} and of {other}." for one in WORDS for other in WORDS]
IDS = [str(uuid.UUID(int=number)) for number in range(len(TEXTS))]
METADATA = [{"word": text.split()[2], "number": number} for number, text in enumerate(TEXTS)]
QUERIES = [f"what of {word}?" for word in WORDS]


def vector_of(text: str) -> list[float]:
    """Return the vector of a text's words, with a little noise by text: stores order equal scores as it comes."""
    noise = Random(text)
    return [one + noise.uniform(-0.02, 0.02) for one in embed_words(text)]


class Score(float):
    """A score that equals those of single precision: products of embedded Qdrant depend on where its arrays lie."""

    def __eq__(self, score: object) -> bool:
        return isinstance(score, float) and math.isclose(self, score, abs_tol=1e-6)

    __hash__ = float.__hash__


class ClientLog:
    """The searches that the lowest client of a store receives. Each waits for `release` first."""

    def __init__(self, client: Any) -> None:
        """`client`: a collection of Chroma, or a client of Qdrant."""
        self.calls: list[int] = []
        """Number of queries in each call."""
        self.release = threading.Event()
        self.release.set()
        self._inside = threading.local()
        server = client._client
        if hasattr(server, "_query"):
            server._query = self._logged(server._query, "query_embeddings")
        else:
            server.query_points = self._logged(server.query_points, "")
            server.query_batch_points = self._logged(server.query_batch_points, "requests")

    def _logged(self, search: Callable[..., Any], queries: str) -> Callable[..., Any]:
        def logged(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "call", False):  # Qdrant's local client makes single searches of a batch
                return search(*args, **kwargs)
            self._inside.call = True
            try:
                self.calls.append(len(kwargs[queries]) if queries else 1)
                self.release.wait(10)
                return search(*args, **kwargs)
            finally:
                self._inside.call = False

        return logged


def run_together(call: Callable[[Any], Any], log: ClientLog, queries: list[Any]) -> list[Any]:
    """Run queries on threads, with the store's first call held up until all of them wait. Return their results."""
    log.release.clear()
    with ThreadPoolExecutor(len(queries)) as threads:
        running = [threads.submit(call, query) for query in queries]
        threading.Event().wait(0.5)
        log.release.set()
        return [one.exception(30) or one.result() for one in running]


@contextmanager
def closed_pools() -> Iterator[list[EnginePool]]:
    """Yield a list, and close the pools that the body adds to it."""
    pools: list[EnginePool] = []
    try:
        yield pools
    finally:
        for pool in pools:
            pool.close()


def serve_store(store: Any, app: Any, pools: list[EnginePool], **options: Any) -> Any:
    """Return the app with its store on an engine of a new pool, which is added to `pools`. `options`: of the engine."""
    pools.append(EnginePool.local(store=VectorStoreEngine("store", store, **options)).start())
    return accelerate(app, pool=pools[-1], bind=[(store, "store")])
