"""A small server that speaks the JSON of SearXNG, Brave and Tavily, in the forms that their documentation shows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

KEY = "tvly-secret-7431"
PAGES = [
    ("https://farm.test/oats", "Oats", "Oats are sown in spring; farmers&#x27; lambs eat them."),
    ("https://farm.test/ivy", "Ivy", "Ivy climbs walls."),
    ("https://farm.test/hay", "Hay", "Hay is cut in June."),
]


@dataclass
class SearchStub:
    """The server, its recorded requests, and the statuses of its next replies."""

    url: str = ""
    requests: list[tuple[str, str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    """Method, path, parameters or body, and headers of each request."""
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Status and headers of the next replies; 200 if the list is empty.

    Status 0 closes the connection without a reply.
    """
    go: threading.Event = field(default_factory=threading.Event)
    """Searches that contain the word `slowly` wait until this is set."""
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def search_stub() -> Iterator[SearchStub]:
    """Run the server until the body ends."""
    stub = SearchStub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        stub.go.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: SearchStub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self._answer(parts.path, dict(parse_qsl(parts.query)))

    def do_POST(self) -> None:
        self._answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, path: str, parameters: dict[str, Any]) -> None:
        stub = self.stub
        with stub.lock:
            stub.requests.append((self.command, path, parameters, {k.lower(): v for k, v in self.headers.items()}))
            status, headers = stub.statuses.pop(0) if stub.statuses else (200, {})
            stub.at_once += 1
            stub.most_at_once = max(stub.most_at_once, stub.at_once)
        try:
            if "slowly" in (parameters.get("q") or parameters.get("query") or ""):
                stub.go.wait(5)
            if status == 0:
                self.close_connection = True
                return
            self._send(status, headers, *self._content(path, parameters, status))
        finally:
            with stub.lock:
                stub.at_once -= 1

    def _content(self, path: str, parameters: dict[str, Any], status: int) -> tuple[str, str]:
        if status != 200:
            return "application/json", json.dumps(_refusal(path, self.command, status, dict(self.headers)))
        query = parameters.get("q") or parameters["query"]
        if query == "nonsense":
            return "text/html", "<html>"
        if path == "/res/v1/web/search":
            return "application/json", json.dumps(_brave(query, int(parameters["count"])))
        results = _tavily(query, parameters["max_results"]) if self.command == "POST" else _searxng(query)
        return "application/json", json.dumps(results)

    def _send(self, status: int, headers: dict[str, str], kind: str, content: str) -> None:
        body = content.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the caller has left
            pass


def _brave(query: str, count: int) -> dict[str, Any]:
    results = [
        {
            "title": title,
            "url": url,
            "is_source_local": False,
            "description": text,
            "page_age": "2026-03-01T00:00:00",
            "language": "en",
            "type": "search_result",
            "subtype": "generic",
        }
        for url, title, text in PAGES[:count]
    ]
    reply: dict[str, Any] = {"query": {"original": query, "more_results_available": True}, "type": "search"}
    return reply if query == "nothing" else {**reply, "web": {"type": "search", "results": results}}


def _tavily(query: str, count: int) -> dict[str, Any]:
    results = [
        {"url": url, "title": title, "content": text, "score": 0.9 - n / 10, "raw_content": None}
        for n, (url, title, text) in enumerate(PAGES[:count])
    ]
    return {
        "query": query,
        "follow_up_questions": None,
        "answer": None,
        "images": [],
        "results": [] if query == "nothing" else results,
        "response_time": 0.94,
        "request_id": "123e4567",
    }


def _searxng(query: str) -> dict[str, Any]:
    results = [
        {
            "url": url,
            "title": title,
            "content": text,
            "engine": "duckduckgo",
            "engines": ["duckduckgo"],
            "positions": [n + 1],
            "score": 1.0 / (n + 1),
            "category": "general",
            "publishedDate": None,
        }
        for n, (url, title, text) in enumerate(PAGES)
    ]
    return {
        "query": query,
        "number_of_results": 0,
        "results": [] if query == "nothing" else results,
        "answers": [],
        "corrections": [],
        "infoboxes": [],
        "suggestions": [],
        "unresponsive_engines": [["brave", "timeout"]],
    }


def _refusal(path: str, method: str, status: int, headers: dict[str, str]) -> dict[str, Any]:
    """Return an error reply of Brave or Tavily. It repeats the key, so that a test can search for it."""
    if path == "/res/v1/web/search":
        key = headers.get("X-Subscription-Token", "")
        error = {"status": status, "code": "RATE_LIMITED", "detail": f"token {key} refused", "id": "1", "meta": {}}
        return {"type": "ErrorResponse", "error": error, "time": 1}
    return {"detail": {"error": f"Refused with {status}: {headers.get('Authorization', '')}"}}
