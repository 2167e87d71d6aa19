"""A small server that embeds and reranks as OpenAI, vLLM, TEI, llama.cpp and Cohere do, and records requests."""

from __future__ import annotations

import base64
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from teola_plugin.engines import RerankingServer
from teola_plugin.pool import EnginePool

MODEL = "tiny-embedder"
DIMENSIONS = 8
Reply = tuple[int, dict[str, str], Any]
"""Status, headers and JSON of a reply."""


def vector_of(value: Any, dimensions: int = DIMENSIONS) -> list[float]:
    """Return the vector of a text or a token list: of length 1, float32 values, float[dimensions]."""
    digest = blake2b(json.dumps(value).encode(), digest_size=DIMENSIONS).digest()[:dimensions]
    values = [byte - 127.5 for byte in digest]
    norm = math.sqrt(sum(one * one for one in values))
    return list(struct.unpack(f"<{dimensions}f", struct.pack(f"<{dimensions}f", *(one / norm for one in values))))


def score_of(query: str, text: str) -> float:
    """Return the score of a text for a query, 0 to 1."""
    return blake2b(f"{query}\n{text}".encode(), digest_size=1).digest()[0] / 255


@dataclass
class EmbeddingStub:
    """The server, and the requests for embeddings and scores that it received."""

    url: str = ""
    """The address in front of `/v1`."""
    kind: Literal["openai", "vllm", "tei", "llama.cpp", "cohere"] = "openai"
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of each request."""
    headers: list[dict[str, str]] = field(default_factory=list)
    replace: Callable[[str, dict[str, Any]], Reply | None] = lambda path, body: None
    """Returns another reply to a request; None for the usual one."""
    delay_s: float = 0.0
    most_at_once: int = 0
    running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def inputs(self) -> list[Any]:
        """The inputs of each request for embeddings, in order of arrival."""
        return [body["input"] for path, body in self.log if path.endswith("/embeddings")]


@contextmanager
def embedding_stub(kind: Any = "openai", delay_s: float = 0.0) -> Iterator[EmbeddingStub]:
    """Run the server until the body ends."""
    stub = EmbeddingStub(kind=kind, delay_s=delay_s)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that hung up
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def reranking_pool(stub: EmbeddingStub) -> Iterator[EnginePool]:
    """Run a pool whose engine `reranker` sends requests to the server in Cohere's form."""
    with EnginePool.local([RerankingServer(base_url=f"{stub.url}/v2", model="m", api_key="mine")]) as pool:
        yield pool


class _Handler(BaseHTTPRequestHandler):
    stub: EmbeddingStub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        kind = self.stub.kind
        if self.path == "/info" and kind == "tei":
            info = {"model_id": MODEL, "model_type": {"embedding": {}}, "max_client_batch_size": 4, "version": "1.8.0"}
            return self._send((200, {}, info))
        if self.path.endswith("/models") and kind in ("openai", "vllm", "llama.cpp"):
            meta = {"meta": {"n_embd": DIMENSIONS}} if kind == "llama.cpp" else {}
            model = {"id": MODEL, "object": "model", "owned_by": kind, **meta}
            return self._send((200, {}, {"object": "list", "data": [model]}))
        self._send((404, {}, {"error": {"message": "not found"}}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub = self.stub
        path = self.path.partition("?")[0]
        with stub.lock:
            stub.log.append((self.path, body))
            stub.headers.append({name.lower(): value for name, value in self.headers.items()})
            stub.running += 1
            stub.most_at_once = max(stub.most_at_once, stub.running)
        time.sleep(stub.delay_s)
        try:
            reply = stub.replace(path, body) or self._reply(path, body)
        finally:
            with stub.lock:
                stub.running -= 1
        self._send(reply)

    def _reply(self, path: str, body: dict[str, Any]) -> Reply:
        if path.endswith("/embeddings"):
            return embeddings_reply(body)
        if path == "/rerank" and self.stub.kind == "tei":
            scores = [score_of(body["query"], text) for text in body["texts"]]
            order = sorted(range(len(scores)), key=lambda one: -scores[one])
            return 200, {}, [{"index": one, "score": scores[one]} for one in order]
        if path.endswith("/rerank"):
            scores = [score_of(body["query"], text) for text in body["documents"]]
            order = sorted(range(len(scores)), key=lambda one: -scores[one])[: body.get("top_n")]
            results = [{"index": one, "relevance_score": scores[one]} for one in order]
            return 200, {}, {"id": "1", "results": results, "meta": {}}
        if path in ("/", "/embed"):
            return 200, {}, [vector_of(text) for text in body["inputs"]]
        return 404, {}, {"error": {"message": "not found"}}

    def _send(self, reply: Reply) -> None:
        status, headers, value = reply
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-type": "application/json", "content-length": str(len(content)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)


def embeddings_reply(body: dict[str, Any]) -> Reply:
    """Return OpenAI's reply to a request for embeddings."""
    values = body["input"]
    is_list = isinstance(values, list) and not (values and isinstance(values[0], int))
    inputs = values if is_list else [values]
    if any(isinstance(one, str) and "refuse" in one for one in inputs):
        return 400, {}, {"error": {"message": "it refuses", "type": "BadRequestError", "code": 400}}
    data = []
    for number, one in enumerate(inputs):
        vector: Any = vector_of(one, body.get("dimensions") or DIMENSIONS)
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": number, "embedding": vector})
    usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
    return 200, {}, {"object": "list", "data": data, "model": body["model"], "usage": usage}
