"""A server for tests that speaks the protocols of two providers and keeps the bodies of its requests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


class ProviderServer:
    """A server that speaks OpenAI's and Anthropic's protocol, and keeps the bodies of its requests.

    It answers none before `awaited_requests` have come. After 10 s it answers "alone", so that the answer differs.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.awaited_requests = 1
        arrival = threading.Condition()

        def keep(body: dict[str, Any]) -> bool:
            """Keep a body. Return True if the awaited requests have come."""
            with arrival:
                self.bodies.append(body)
                arrival.notify_all()
                return arrival.wait_for(lambda: len(self.bodies) >= self.awaited_requests, timeout=10)

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                content = body["messages"][-1]["content"]
                text = content if isinstance(content, str) else str(content[-1].get("text"))
                answer = f"answer to {len(text)} characters" if keep(body) else "alone"
                is_anthropic = self.path.endswith("/messages")
                self.send_response(200)
                streamed = body.get("stream")
                if streamed:
                    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
                    choice = {"index": 0, "delta": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
                    data = f"data: {json.dumps(chunk | {'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()
                else:
                    data = json.dumps(_anthropic(answer) if is_anthropic else _openai(answer)).encode()
                self.send_header("content-type", "text/event-stream" if streamed else "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def received(self) -> list[dict[str, Any]]:
        """Return the bodies since the last call."""
        bodies = list(self.bodies)
        self.bodies.clear()
        return bodies

    def chat_openai(self, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(base_url=f"{self.url}/v1", api_key=SecretStr("key"), model="gpt-5-mini", **options)

    def chat_anthropic(self, **options: Any) -> Any:
        anthropic = pytest.importorskip("langchain_anthropic")
        return anthropic.ChatAnthropic(base_url=self.url, api_key="key", model="claude-x", max_tokens=9, **options)


def _openai(answer: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def _anthropic(answer: str) -> dict[str, Any]:
    answer_fields = {"content": [{"type": "text", "text": answer}], "stop_reason": "end_turn", "model": "m"}
    return {"id": "m", "type": "message", "role": "assistant", "usage": {"input_tokens": 1, "output_tokens": 1}} | (
        answer_fields
    )
