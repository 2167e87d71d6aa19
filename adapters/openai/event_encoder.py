"""Chunks of an answer as server-sent events for one client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from teola_plugin.engines.openai import wire
from teola_plugin.requests.payloads import Generate

DONE = b"data: [DONE]\n\n"


class EventEncoder:
    """Chunks to the bytes that the server would have sent to this client alone.

    An engine asks for the usage, which comes in a chunk of its own at the end. For a client that did not ask for it,
    that chunk is left out, and what else it says about the answer goes to the last of the others.
    """

    def __init__(self, asked: Generate, body: Mapping[str, Any]) -> None:
        exact = isinstance(asked.prompt, wire.WirePrompt) and asked.prompt.exact
        self._as_is = exact or bool((body.get("stream_options") or {}).get("include_usage"))
        self._held: dict[str, Any] | None = None
        """A chunk that ends a choice: perhaps the last."""

    def encode(self, chunk: str) -> bytes:
        data = json.loads(chunk)
        if self._as_is or "choices" not in data:
            return self.flush() + _event(data)
        data.pop("usage", None)
        if not data["choices"]:
            if self._held is not None:
                self._held = {**data, **self._held}
            return b""
        before = self.flush()
        if data["choices"][0].get("finish_reason"):
            self._held = data
            return before
        return before + _event(data)

    def flush(self) -> bytes:
        held, self._held = self._held, None
        return b"" if held is None else _event(held)


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
