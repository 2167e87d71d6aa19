"""A server of OpenAI's protocol that sends replies set by the test, byte by byte. Also valid replies and mutations."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hypothesis import strategies as st

MODEL = "m"
JSON, EVENT_STREAM = "application/json", "text/event-stream"


@dataclass
class FixedReplies:
    """The reply that the server sends to every request, and the server's address."""

    base_url: str = ""
    status: int = 200
    content: bytes = b""
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    models: bytes = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
    stays_open: bool = False
    """If True, the connection stays open after the content, and the reply has no content length."""
    released: threading.Event = field(default_factory=threading.Event)

    def reply_with(self, reply: Any, content_type: str = JSON, **headers: str) -> None:
        """Set the next replies: bytes, text, or a value that is written as JSON."""
        text = reply if isinstance(reply, str | bytes) else json.dumps(reply)
        self.content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        self.content_type, self.headers = content_type, headers

    def stream(self, *chunks: Any, end: str = "data: [DONE]\n\n", **headers: str) -> None:
        """Set the next replies to a stream of these chunks: texts, or values that are written as JSON."""
        written = (chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks)
        self.reply_with("".join(f"data: {one}\n\n" for one in written) + end, EVENT_STREAM, **headers)


@contextmanager
def fixed_replies() -> Iterator[FixedReplies]:
    """Run the server until the body ends."""
    replies = FixedReplies()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            self._send(200, replies.models, JSON, {})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(replies.status, replies.content, replies.content_type, replies.headers)
            if replies.stays_open:
                replies.released.wait(10)

        def _send(self, status: int, content: bytes, content_type: str, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if not replies.stays_open:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    replies.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield replies
    finally:
        replies.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


# ------------------------------------------------------------ replies

_CALL = {"id": "call-1", "type": "function", "function": {"name": "feed", "arguments": "{}"}}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}
_ABOUT = {"id": "c-1", "created": 1, "model": MODEL}
COMPLETION: dict[str, Any] = {
    **_ABOUT,
    "object": "chat.completion",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "oats and hay"}}],
    "usage": USAGE,
}
TOOL_COMPLETION: dict[str, Any] = {
    **COMPLETION,
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        }
    ],
}


def chunk(delta: Any, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chunk of a streamed chat completion."""
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return {**_ABOUT, "object": "chat.completion.chunk", "choices": choices, **fields}


CHUNKS: list[dict[str, Any]] = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "oats "}),
    chunk({"content": "and hay"}),
    chunk({"tool_calls": [{"index": 0, **_CALL}]}),
    chunk({}, "stop"),
    {**chunk({}), "choices": [], "usage": USAGE},
]


# ------------------------------------------------------------ mutations

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["\ud800", "\u2028", "", "stop"]),
)
JSON_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


@st.composite
def mutations(draw: st.DrawFn, right: Any) -> Any:
    """Draw a copy of a value in which one or two parts are replaced or left out."""
    mutated = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 2))):
        paths = list(_paths(mutated)) if isinstance(mutated, dict | list) else []
        path = draw(st.sampled_from([(), *paths]))
        if not path:
            return draw(JSON_VALUES)
        holder = mutated
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.booleans()):
            holder[path[-1]] = draw(JSON_VALUES)
        else:
            del holder[path[-1]]
    return mutated
