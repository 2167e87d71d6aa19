"""Answers of a server that take a while, for tests of how many requests are under way at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any


class SlowAnswers:
    """Answers requests after a latency, and notes how many are under way at most.

    Args:
        latency_s: how long an answer takes, in seconds.
    """

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        time.sleep(self.latency_s)
        with self._lock:
            self._running -= 1
        return self.reply(body)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, in the form that `openai_stub` takes."""
        return {"content": f"answer to {body['messages'][-1]['content']}"}
