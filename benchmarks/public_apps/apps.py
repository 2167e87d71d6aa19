"""What an app of this benchmark is, and the least time that the dependencies between its calls allow."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.public_apps.server import LoggedRequest

MODEL = "gpt-4o-mini"
EMBEDDING_MODEL = "text-embedding-3-small"
KEY = "sk-benchmark"
Way = Literal["invoke", "ainvoke", "stream"]


class Calls:
    """The requests of one run of the original, with their durations in seconds."""

    def __init__(self, requests: Sequence[LoggedRequest]) -> None:
        self._requests = [(json.dumps(request.body), request.duration_s) for request in requests]

    def all(self, phrase: str) -> list[float]:
        """Return the durations of the requests with this phrase in their bodies. Raises `ValueError` for none."""
        durations = [duration for body, duration in self._requests if phrase in body]
        if not durations:
            raise ValueError(f"no request contains {phrase!r}")
        return durations

    def one(self, phrase: str) -> float:
        """Return the duration of the only request with this phrase in its body."""
        (duration,) = self.all(phrase)
        return duration

    def longest(self, phrase: str) -> float:
        """Return the longest of the durations of these requests, which do not need each other."""
        return max(self.all(phrase))


@dataclass(frozen=True, slots=True)
class App:
    """An app, an input of it, and a bound of its time.

    Attributes:
        name: The tutorial or template that it follows.
        build: Returns the original app for a server's base URL.
        input: What it is called with.
        bound: Returns the least seconds that the dependencies between the calls of a run allow, written by hand: a call
            waits for the results that it contains, and for the decision whether it is made at all (no speculation).
        kind: How it is called: a LangChain Runnable, a LangGraph graph, a LlamaIndex query engine or a workflow.
        is_concurrent: Whether the original makes calls side by side, so that the order of pieces of a stream varies.
    """

    name: str
    build: Callable[[str], Any]
    input: Any
    bound: Callable[[Calls], float]
    kind: Literal["runnable", "graph", "query_engine", "workflow"] = "graph"
    is_concurrent: bool = False
