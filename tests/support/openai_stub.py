"""A small server that speaks OpenAI's protocol. It echoes requests as answers and records them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "echo"


@dataclass
class OpenAIStub:
    """The server, its recorded requests, and how it answers."""

    base_url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of each request, except those by which an engine inspects the server."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Headers of each recorded request."""
    kind: str = "stub"
    """The owner of the model as the server's list of models names it."""
    go: threading.Event = field(default_factory=threading.Event)
    """Answers that contain the word `slowly` wait until this is set."""
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Returns the assistant's message for the body of a chat request, or a dictionary with the `status` of an error.

    If None, the server echoes the request.
    """
    joins: bool = True
    """True if a stream adds up to the whole answer. If False, the whole answer has one more field."""

    @property
    def generations(self) -> list[dict[str, Any]]:
        """Return the bodies of the requests for answers, without those that only warm up a prefix."""
        return [body for _, body in self.requests if body.get("max_tokens") != 1]


@contextmanager
def openai_stub(
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None, *, joins: bool = True
) -> Iterator[OpenAIStub]:
    """Run the server until the body ends. `answer` and `joins`: see `OpenAIStub`."""
    stub = OpenAIStub(answer=answer, joins=joins)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stub.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub
    finally:
        stub.go.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: OpenAIStub  # HTTP/1.0: no connection is kept, so that clients that are forgotten leave none open

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": self.stub.kind}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/tokenize"):
            return self._json(200, {"tokens": list(range(len(json.dumps(body)))), "count": 1, "max_model_len": 4096})
        self.stub.requests.append((self.path, body))
        self.stub.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.path.endswith("/embeddings"):
            return self._json(200, {"data": [{"embedding": [float(len(text)), 1.0]} for text in body["input"]]})
        chat = self.path.partition("?")[0].endswith("/chat/completions")
        if chat and self.stub.answer is not None:
            return self._send_message(body, self.stub.answer(body))
        text = _echo(body) if chat else f"completed: {body['prompt']}"
        if "slowly" in text:
            self.stub.go.wait(5)
        if "refuse" in text:
            return self._json(400, {"error": {"message": "it refuses", "type": "BadRequestError", "code": 400}})
        if "status " in text:
            status = int(text.partition("status ")[2].split()[0])
            return self._json(status, {"error": {"message": f"it says {status}", "type": "Fault", "code": status}})
        if "too long" in text:
            message = "This model's maximum context length is 5 tokens."
            return self._json(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
        if "nonsense" in text:
            return self._send(200, "application/json", b"<html>")
        completion = _chat({"role": "assistant", "content": text}) if chat else _completion(text)
        if not body.get("stream"):
            return self._send_completion(completion)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._stream(list(_chunks(text, completion, chat=chat, usage=usage)))

    def _send_message(self, body: dict[str, Any], message: dict[str, Any]) -> None:
        if "status" in message:
            return self._json(message["status"], {"error": {"message": "it refuses", "type": "Fault", "code": 1}})
        completion = _chat({"role": "assistant", **message})
        if not body.get("stream"):
            return self._send_completion(completion)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        calls = message.get("tool_calls")
        chunks = list(_chunks(message.get("content") or "", completion, chat=True, usage=usage))
        if calls:
            delta = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
            choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
            chunks.insert(1, {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]})
        self._stream(chunks)

    def _send_completion(self, completion: dict[str, Any]) -> None:
        self._json(200, completion if self.stub.joins else {**completion, "service_tier": "default"})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _stream(self, chunks: list[Any]) -> None:
        events = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
        self._send(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _echo(body: dict[str, Any]) -> str:
    parts = [f"{m['role']} {m['content']}" for m in body["messages"]]
    return f"{body.get('temperature')} {body.get('max_tokens')} | " + " | ".join(parts)


def _usage(text: str) -> dict[str, int]:
    return {"prompt_tokens": 5, "completion_tokens": len(text.split()), "total_tokens": 5 + len(text.split())}


_HEAD = {"id": "id-1", "created": 1, "model": MODEL}


def _chat(message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = _usage(message.get("content") or "")
    return {**_HEAD, "object": "chat.completion", "choices": [choice], "usage": usage}


def _completion(text: str) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
    return {**_HEAD, "object": "text_completion", "choices": [choice], "usage": _usage(text)}


def _chunks(text: str, completion: dict[str, Any], *, chat: bool, usage: bool) -> Iterator[dict[str, Any]]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    words = [word + " " for word in text.split(" ")]
    words[-1] = words[-1][:-1]
    for i, word in enumerate(words):
        content = {"delta": {"content": word, **({"role": "assistant"} if i == 0 else {})}} if chat else {"text": word}
        reason = "stop" if i == len(words) - 1 else None
        yield {**_HEAD, "object": kind, "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, **content}]}
    if usage:
        yield {**_HEAD, "object": kind, "choices": [], "usage": completion["usage"]}
