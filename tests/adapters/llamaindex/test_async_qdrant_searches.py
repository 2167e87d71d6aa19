"""Async searches of LlamaIndex's store over an `AsyncQdrantClient`: the same nodes, in fewer requests to the server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import NodeWithScore, TextNode
from support.store_clients import IDS, METADATA, QUERIES, TEXTS, Score, vector_of

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import VectorStoreEngine

qdrant_client = pytest.importorskip("qdrant_client")
stores = pytest.importorskip("llama_index.vector_stores.qdrant")
LATENCY_S = 0.05
TOO_MANY = 99
"""The server refuses searches for so many points."""


class Words(BaseEmbedding):
    def _get_query_embedding(self, query: str) -> list[float]:
        return vector_of(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return vector_of(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return vector_of(text)


class QdrantServer:
    """A server that speaks Qdrant's protocol for reading, and answers as Qdrant's embedded client does."""

    def __init__(self) -> None:
        self.client = qdrant_client.QdrantClient(":memory:")
        self.paths: list[str] = []
        self.queries: list[dict[str, Any]] = []
        """The body of each query, also of those in batches."""
        self.batches: list[int] = []
        """Number of queries in each request that searches."""
        self.release = threading.Event()
        self.release.set()
        self.lock = threading.Lock()
        storage = StorageContext.from_defaults(
            vector_store=stores.QdrantVectorStore("farm", client=self.client, index_doc_id=False)
        )
        rows = zip(TEXTS, METADATA, IDS, strict=True)
        nodes = [TextNode(id_=id, text=text, metadata=metadata) for text, metadata, id in rows]
        VectorStoreIndex(nodes, storage_context=storage, embed_model=Words())

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Return the status and the result of a request."""
        path = path.partition("?")[0]
        self.paths.append(path)
        if body is None:
            return 200, self.client.get_collection("farm").model_dump(mode="json")
        queries = body["searches"] if path.endswith("/batch") else [body]
        self.queries += queries
        self.batches.append(len(queries))
        self.release.wait(10)
        threading.Event().wait(LATENCY_S)
        if any(query["limit"] == TOO_MANY for query in queries):
            return 400, None
        with self.lock:
            requests = [qdrant_client.models.QueryRequest(**query) for query in queries]
            responses = self.client.query_batch_points("farm", requests=requests)
        points = [json.loads(response.model_dump_json()) for response in responses]
        return 200, points if path.endswith("/batch") else points[0]


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    running = QdrantServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            self.reply(*running.answer(self.path, None))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*running.answer(self.path, body))

        def reply(self, status: int, result: Any) -> None:
            error = {"error": "too many"} if status != 200 else "ok"
            content = json.dumps({"result": result, "status": error, "time": 0.0}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    running.url = f"http://127.0.0.1:{http.server_address[1]}"
    yield running
    running.release.set()
    http.shutdown()
    http.server_close()
    thread.join()


class UnpooledTransport(httpx.AsyncBaseTransport):
    """Opens a connection for each request, so that loops on several threads may share a client."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async with httpx.AsyncHTTPTransport() as transport:
            response = await transport.handle_async_request(request)
            await response.aread()
            return response


def remote_store(server: QdrantServer, **options: Any) -> Any:
    client = qdrant_client.AsyncQdrantClient(url=server.url, check_compatibility=False, **options)
    return stores.QdrantVectorStore("farm", aclient=client, index_doc_id=False)


def retriever_over(store: Any, **options: Any) -> Any:
    return VectorStoreIndex.from_vector_store(store, embed_model=Words()).as_retriever(**options)


def engine_pool(store: Any, **options: Any) -> EnginePool:
    return EnginePool.local(store=VectorStoreEngine("store", store, **options))


def described(nodes: list[NodeWithScore]) -> list[tuple[Any, ...]]:
    return [(one.node.node_id, one.node.get_content(), one.node.metadata, Score(one.score or 0.0)) for one in nodes]


async def search_together(retriever: Any, queries: list[str] = QUERIES) -> list[Any]:
    results = await asyncio.gather(*(retriever.aretrieve(query) for query in queries), return_exceptions=True)
    return [one if isinstance(one, BaseException) else described(one) for one in results]


def as_counter(queries: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps({k: v for k, v in query.items() if v is not None}, sort_keys=True) for query in queries)


Run = Callable[[QdrantServer], Any]


def test_concurrent_searches_share_requests_and_find_the_same(server: QdrantServer) -> None:
    async def original() -> Any:
        return await search_together(retriever_over(remote_store(server)))

    async def accelerated() -> Any:
        store = remote_store(server)
        with engine_pool(store, max_calls=1) as pool:
            return await search_together(accelerate(retriever_over(store), pool=pool, bind=[(store, "store")]))

    expected = asyncio.run(original())
    original_queries, original_batches = list(server.queries), list(server.batches)
    server.queries.clear()
    server.batches.clear()

    assert asyncio.run(accelerated()) == expected

    assert all(expected)
    assert original_batches == [1] * len(QUERIES)
    assert as_counter(server.queries) == as_counter(original_queries)
    assert len(server.batches) < len(QUERIES) / 2


def test_searches_are_traced_on_the_engine(server: QdrantServer) -> None:
    async def run() -> Any:
        store = remote_store(server)
        with engine_pool(store) as pool:
            fast = accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])
            await fast.aretrieve(QUERIES[0])
            return fast.last_trace()

    assert [span.engine for span in asyncio.run(run()).spans] == ["store"]


def test_client_of_the_store_stays_in_its_place(server: QdrantServer) -> None:
    async def run() -> bool:
        store = remote_store(server)
        client = store._aclient
        with engine_pool(store) as pool:
            fast = accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])
            await search_together(fast)
        return store._aclient is client

    assert asyncio.run(run())


def test_collection_is_read_as_often_as_by_the_original(server: QdrantServer) -> None:
    async def run(wrap: Callable[[Any, Any], Any]) -> list[str]:
        store = remote_store(server)
        server.paths.clear()
        with engine_pool(store) as pool:
            retriever = wrap(retriever_over(store), dict(pool=pool, bind=[(store, "store")]))
            for query in QUERIES[:3]:
                await retriever.aretrieve(query)
        return list(server.paths)

    expected = asyncio.run(run(lambda retriever, options: retriever))

    assert asyncio.run(run(lambda retriever, options: accelerate(retriever, **options))) == expected
    assert expected.count("/collections/farm") == 1


def test_failing_search_fails_alone_with_its_error(server: QdrantServer) -> None:
    async def run(wrap: Callable[[Any, Any], Any]) -> list[Any]:
        store = remote_store(server)
        with engine_pool(store, max_calls=1) as pool:
            options = dict(pool=pool, bind=[(store, "store")])
            good = wrap(retriever_over(store), options)
            bad = wrap(retriever_over(store, similarity_top_k=TOO_MANY), options)
            searches = [bad.aretrieve(QUERIES[0]), *(good.aretrieve(query) for query in QUERIES[1:])]
            return await asyncio.gather(*searches, return_exceptions=True)

    bad, *good = asyncio.run(run(lambda retriever, options: retriever))
    fast_bad, *fast_good = asyncio.run(run(lambda retriever, options: accelerate(retriever, **options)))

    assert type(fast_bad) is type(bad)
    assert str(fast_bad) == str(bad)
    assert list(map(described, fast_good)) == list(map(described, good))


def test_cancelled_searches_end_their_request_and_later_ones_succeed(server: QdrantServer) -> None:
    async def run() -> tuple[list[Any], int]:
        store = remote_store(server)
        with engine_pool(store, max_calls=1) as pool:
            fast = accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])
            await fast.aretrieve(QUERIES[0])
            server.release.clear()
            waiting = [asyncio.ensure_future(fast.aretrieve(query)) for query in QUERIES]
            await asyncio.sleep(0.3)
            for task in waiting:
                task.cancel()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            found = await asyncio.wait_for(asyncio.ensure_future(read_after(fast)), 10)
            await asyncio.sleep(0.1)
            return found, len(asyncio.all_tasks())

    async def read_after(fast: Any) -> list[Any]:
        server.release.set()
        return described(await fast.aretrieve(QUERIES[1]))

    async def original() -> Any:
        return described(await retriever_over(remote_store(server)).aretrieve(QUERIES[1]))

    found, tasks = asyncio.run(run())

    assert found == asyncio.run(original())
    assert tasks == 1


def test_loop_that_ends_does_not_hold_up_other_loops(server: QdrantServer) -> None:
    store = remote_store(server)
    expected = asyncio.run(search_together(retriever_over(remote_store(server))))

    async def give_up(fast: Any) -> None:
        for query in QUERIES:
            asyncio.ensure_future(fast.aretrieve(query))  # noqa: RUF006
        await asyncio.sleep(0.1)

    with engine_pool(store, max_calls=1) as pool:
        server.release.clear()
        asyncio.run(give_up(accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])))
        server.release.set()
        store._aclient = remote_store(server)._aclient  # httpx's connections belong to a loop
        fast = accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])
        assert asyncio.run(asyncio.wait_for(search_together(fast), 20)) == expected


def test_loops_side_by_side_search_with_their_own_calls(server: QdrantServer) -> None:
    store = remote_store(server, transport=UnpooledTransport())
    expected = asyncio.run(search_together(retriever_over(remote_store(server))))

    with engine_pool(store, max_calls=2) as pool:
        fast = accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])
        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(lambda _: asyncio.run(search_together(fast)), range(2)))

    assert outcomes == [expected, expected]


def test_search_on_a_closed_pool_is_made_by_the_client(server: QdrantServer) -> None:
    async def run() -> Any:
        store = remote_store(server)
        pool = engine_pool(store).start()
        fast = accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])
        pool.close()
        return await search_together(fast)

    assert asyncio.run(run()) == asyncio.run(search_together(retriever_over(remote_store(server))))


def test_client_whose_search_was_replaced_is_called_by_its_store(server: QdrantServer) -> None:
    async def run() -> int:
        store, calls = remote_store(server), list[Any]()
        search = store._aclient.query_points

        async def replaced(**kwargs: Any) -> Any:
            calls.append(kwargs)
            return await search(**kwargs)

        store._aclient.query_points = replaced
        with engine_pool(store) as pool:
            await search_together(accelerate(retriever_over(store), pool=pool, bind=[(store, "store")]))
        return len(calls)

    assert asyncio.run(run()) == len(QUERIES)
    assert server.batches == [1] * len(QUERIES)


@pytest.mark.parametrize("read_only", [False, True])
def test_embedded_client_shares_calls_only_if_nobody_writes(read_only: bool, server: QdrantServer) -> None:
    async def run() -> tuple[Any, Any, list[int]]:
        client, batches = qdrant_client.AsyncQdrantClient(":memory:"), list[int]()
        store = stores.QdrantVectorStore("farm", aclient=client, index_doc_id=False)
        index = VectorStoreIndex.from_vector_store(store, embed_model=Words(), use_async=True)
        rows = zip(TEXTS, METADATA, IDS, strict=True)
        await index.ainsert_nodes([TextNode(id_=id, text=text, metadata=meta) for text, meta, id in rows])
        expected = await search_together(index.as_retriever())
        search = client._client.query_batch_points

        async def logged(*args: Any, **kwargs: Any) -> Any:
            batches.append(len(kwargs["requests"]))
            return await search(*args, **kwargs)

        client._client.query_batch_points = logged
        with engine_pool(store, read_only=read_only, max_calls=1) as pool:
            fast = accelerate(index.as_retriever(), pool=pool, bind=[(store, "store")])
            return expected, await search_together(fast), batches

    expected, found, batches = asyncio.run(run())

    assert found == expected
    assert bool(batches) is read_only


def test_equal_searches_of_a_read_only_store_are_made_once(server: QdrantServer) -> None:
    async def run() -> list[Any]:
        store = remote_store(server)
        with engine_pool(store, read_only=True, max_calls=1) as pool:
            fast = accelerate(retriever_over(store), pool=pool, bind=[(store, "store")])
            return await asyncio.gather(*(fast.aretrieve(QUERIES[0]) for _ in range(6)))

    results = asyncio.run(run())

    assert len(server.queries) <= 2
    assert all(described(nodes) == described(results[0]) for nodes in results)
    assert len({id(nodes[0].node) for nodes in results}) == 6
