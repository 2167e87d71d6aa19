"""A fake OpenAI-compatible server in a process of its own: hosted latencies, no limit of concurrency, a log."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.public_apps.replies import prompt_tokens, reply, token_count

FIRST_TOKEN_S, PROMPT_TOKEN_S, OUTPUT_TOKEN_S, EMBEDDING_S = 0.100, 0.0001, 0.010, 0.080
DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request that the server received, and how long it took to answer it.

    Attributes:
        path: The path below the host.
        body: The JSON body.
        duration_s: Seconds from the first to the last byte of the answer, by the latencies of this module.
        status: 200, or 429 for a request that was refused.
    """

    path: str
    body: dict[str, Any]
    duration_s: float
    status: int = 200


class RateLimit:
    """Requests and tokens that the server takes in a period: a bucket of each, refilled continuously."""

    def __init__(self, requests: float, tokens: float, period_s: float) -> None:
        self._capacity = {"requests": requests, "tokens": tokens}
        self._left = dict(self._capacity)
        self._period_s, self._refilled = period_s, time.monotonic()

    def take(self, tokens: int) -> float:
        """Take a request of so many tokens, or return after how many seconds it may be sent again."""
        now = time.monotonic()
        needed = {"requests": 1.0, "tokens": float(tokens)}
        waits = [0.0]
        for unit, capacity in self._capacity.items():
            rate = capacity / self._period_s
            self._left[unit] = min(capacity, self._left[unit] + (now - self._refilled) * rate)
            waits.append((needed[unit] - self._left[unit]) / rate)
        self._refilled = now
        if max(waits) <= 0:
            for unit, amount in needed.items():
                self._left[unit] -= amount
        return max(waits)

    def headers(self) -> dict[str, str]:
        """Return the headers by which OpenAI tells what it still takes."""
        headers = {}
        for unit, left in self._left.items():
            missing_s = (self._capacity[unit] - left) * self._period_s / self._capacity[unit]
            headers[f"x-ratelimit-remaining-{unit}"] = str(int(left))
            headers[f"x-ratelimit-reset-{unit}"] = f"{math.ceil(missing_s * 1000)}ms"
        return headers


class FakeServer:
    """The client side of the server: where it is, and what it received."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._root = base_url.removesuffix("/v1")

    def take_log(self) -> list[LoggedRequest]:
        """Return the requests since the last time, in order of arrival."""
        return [LoggedRequest(**entry) for entry in httpx.post(f"{self._root}/take_log").json()]


@contextmanager
def fake_server(
    scale: float = 1.0, *, keeps_connections: bool = True, limit: tuple[float, float, float] | None = None
) -> Iterator[FakeServer]:
    """Run the server until the body ends. All latencies are multiplied by `scale`.

    With `keeps_connections=False` it closes a connection behind each answer, so that clients leave none open. `limit`:
    the requests and tokens that it takes in a period, and the seconds of that; it refuses others with status 429.
    """
    with socket.socket() as listening:
        # Inherited by accepted connections, of which asyncio cannot tell that they are TCP. Without it an answer's body
        # waits 40 ms for the client to acknowledge its headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        command = [sys.executable, "-m", __name__, str(listening.fileno()), str(scale)]
        command += [] if keeps_connections else ["--close-connections"]
        command += [] if limit is None else ["--limit", *map(str, limit)]
        process = subprocess.Popen(command, pass_fds=[listening.fileno()])
        port = listening.getsockname()[1]
    try:
        with httpx.Client(timeout=30) as client:  # connections wait in the socket until the server accepts them
            client.post(f"http://127.0.0.1:{port}/take_log").raise_for_status()
        yield FakeServer(f"http://127.0.0.1:{port}/v1")
    finally:
        process.terminate()
        process.wait()


# ------------------------------------------------------------ the process


class _Server:
    def __init__(self, scale: float, limit: RateLimit | None) -> None:
        self._scale, self._limit = scale, limit
        self._log: list[dict[str, Any]] = []
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/embeddings", self._embed, methods=["POST"]),
            Route("/take_log", self._take_log, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _take_log(self, request: Request) -> Response:
        log, self._log = self._log, []
        return JSONResponse(log)

    def _received(self, request: Request, body: dict[str, Any], duration_s: float, status: int = 200) -> None:
        duration_s *= self._scale
        self._log.append({"path": request.url.path, "body": body, "duration_s": duration_s, "status": status})

    async def _embed(self, request: Request) -> Response:
        body = await request.json()
        self._received(request, body, EMBEDDING_S)
        await asyncio.sleep(EMBEDDING_S * self._scale)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = [{"object": "embedding", "index": n, "embedding": _vector(text)} for n, text in enumerate(texts)]
        usage = {"prompt_tokens": sum(map(token_count, map(str, texts))), "total_tokens": 1}
        return JSONResponse({"object": "list", "data": data, "model": body["model"], "usage": usage})

    async def _chat(self, request: Request) -> Response:
        began = time.monotonic()
        body = await request.json()
        wait_s = 0.0 if self._limit is None else self._limit.take(prompt_tokens(body))
        limit_headers = {} if self._limit is None else self._limit.headers()
        if wait_s > 0:
            self._received(request, body, 0.0, status=429)
            error = {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}
            limit_headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
            return JSONResponse({"error": error}, status_code=429, headers=limit_headers)
        message = reply(body)
        pieces = _pieces(message)
        first_s = FIRST_TOKEN_S + PROMPT_TOKEN_S * prompt_tokens(body)
        self._received(request, body, first_s + OUTPUT_TOKEN_S * len(pieces))
        dues = [began + self._scale * (first_s + OUTPUT_TOKEN_S * (number + 1)) for number in range(len(pieces))]
        usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": len(pieces)}
        usage["total_tokens"] = sum(usage.values())
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        base = {"id": f"chatcmpl-{_digest(body)}", "created": 1_700_000_000, "model": body["model"]}
        if body.get("stream"):
            stream = _stream(base, pieces, dues, reason, usage if body.get("stream_options") else None)
            return StreamingResponse(stream, media_type="text/event-stream", headers=limit_headers)
        await asyncio.sleep(max(0.0, dues[-1] - time.monotonic()))
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        answer = {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
        return JSONResponse(answer, headers=limit_headers)


async def _stream(
    base: dict[str, Any], pieces: list[dict[str, Any]], dues: list[float], reason: str, usage: dict[str, int] | None
) -> AsyncIterator[str]:
    base = {**base, "object": "chat.completion.chunk"}
    for delta, due in zip(pieces, dues, strict=True):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        yield _event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    if usage is not None:
        yield _event({**base, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _pieces(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas in which a message is streamed, one a token."""
    if message.get("tool_calls"):
        (call,) = message["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        head = {"index": 0, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        parts = [{"index": 0, "function": {"arguments": part}} for part in _tokens(arguments)]
        return [
            {"role": "assistant", "content": None, "tool_calls": [head]},
            *({"tool_calls": [part]} for part in parts),
        ]
    return [{"role": "assistant", "content": part} for part in _tokens(message["content"])]


def _tokens(text: str) -> list[str]:
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _vector(text: Any) -> list[float]:
    """Return a vector of length 1 that depends on the text alone, float[DIMENSIONS]."""
    digest = hashlib.blake2b(str(text).encode(), digest_size=DIMENSIONS).digest()
    values = [byte / 255 - 0.5 for byte in digest]
    norm = sum(value * value for value in values) ** 0.5
    return [value / norm for value in values]


def main() -> None:
    """Serve on the socket whose file descriptor is given, until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fd", type=int)
    parser.add_argument("scale", type=float)
    parser.add_argument("--close-connections", action="store_true")
    parser.add_argument("--limit", nargs=3, type=float)
    options = parser.parse_args()
    headers = [("connection", "close")] if options.close_connections else []
    app = _Server(options.scale, RateLimit(*options.limit) if options.limit else None).app
    uvicorn.run(app, fd=options.fd, log_level="error", access_log=False, headers=headers)


if __name__ == "__main__":
    main()
