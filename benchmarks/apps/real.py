"""The applications on real engines of this machine: the bundled model on vLLM, MiniLM, a cross-encoder, PostgreSQL.

One set of engines for each order of batches and each prefix cache, since a vLLM has one of each; schemes that agree in
both share one. All are up at once, on the same cores, and one query runs at a time.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from benchmarks.apps.pipelines import human
from benchmarks.apps.schemes import Scheme
from examples.apps import agent
from examples.apps.engines import real_pool
from examples.apps.uploads import flowing
from teola_plugin import EnginePool

ASKED = (
    ("What does an expression-less except clause match?", ("try", "exceptions")),
    ("What does the with statement wrap?", ("with", "context-managers")),
    ("What does a break statement skip?", ("for", "while")),
    ("What is the order of the evaluated operands?", ("operator-summary", "booleans")),
)
"""Questions, and the topics of Python's reference that are uploaded with each."""
WEATHER = ("What is the weather in Rome?", "What is the price of the chair?", "What is the weather in Oslo?")
SHORT = 2400
"""Characters of an upload of contextual retrieval, which asks its model about every chunk."""


def given(app: str, number: int) -> dict[str, Any]:
    """The input of one query."""
    from pydoc_data.topics import topics

    if app == "agent":
        return human(WEATHER[number % len(WEATHER)])
    question, parts = ASKED[number % len(ASKED)]
    if app == "search_engine":
        return {"question": question}
    text = "\n\n".join(flowing(topics[part]) for part in parts)
    return {"question": question, "document": text[:SHORT] if app == "contextual_retrieval" else text}


@dataclass
class RealPools:
    """Started as they are asked for; close them."""

    found: dict[tuple[str, bool], EnginePool] = field(default_factory=dict)

    def of(self, scheme: Scheme) -> EnginePool:
        key = scheme.policy, scheme.caching
        if key not in self.found:
            nothing = dict.fromkeys(("llm", "proxy", "reranker", "dsn", "pages"))
            args = argparse.Namespace(app="search_engine", embedder=None, web="texts", **nothing)
            made = real_pool(args, agent.TOOLS, policy=scheme.policy, prefix_caching=scheme.caching)
            self.found[key] = made.start()
        return self.found[key]

    def close(self) -> None:
        for pool in self.found.values():
            pool.close()
