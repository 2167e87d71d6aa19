"""A web search and tools that take as long as a profile says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.fake.base import NO_FAULTS, BatchedFake, Faults
from teola_plugin.engines.fake.engines import bag_of_words
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import CallTool, Chunk, Hit, SearchText
from teola_plugin.requests.request import Request

Answer = Callable[[str, int], Iterable[Hit]]
"""(query, k) -> hits, best first."""


class FakeWebSearch(BatchedFake):
    """Finds the documents that share words with the query, in the order of those words' weights.

    `documents` are texts or chunks. `answer` gives other hits: a pure function of query and k. The default profile
    takes no time; see `profiles.web_search`.
    """

    kinds = frozenset({PrimitiveKind.SEARCHING})

    def __init__(
        self,
        name: str = "web",
        profile: EngineProfile | None = None,
        documents: Iterable[str | Chunk] = (),
        answer: Answer | None = None,
        *,
        faults: Faults = NO_FAULTS,
    ) -> None:
        super().__init__(name, profile or profiles.web_search(0.0), faults)
        self._documents = [
            one if isinstance(one, Chunk) else Chunk(f"text:{n}", one) for n, one in enumerate(documents)
        ]
        self._answer = answer

    def _value(self, request: Request) -> tuple[Hit, ...]:
        asked = request.payload
        if not isinstance(asked, SearchText):
            raise TypeError(f"it searches by SearchText, not {type(asked).__name__}")
        if self._answer is not None:
            return tuple(self._answer(asked.query, asked.k))[: asked.k]
        scored = [(_shared(asked.query, chunk.text), chunk) for chunk in self._documents]
        best = sorted((one for one in scored if one[0]), key=lambda one: -one[0])[: asked.k]
        return tuple(
            Hit(chunk.id, chunk.text, {"source": chunk.id, "title": "", **chunk.metadata}, score)
            for score, chunk in best
        )


class FakeTools(BatchedFake):
    """Functions that are called when their time in the profile is over. `read_only` names those that change nothing."""

    kinds = frozenset({PrimitiveKind.TOOL})

    def __init__(
        self,
        name: str = "tools",
        tools: Mapping[str, Callable[..., Any]] | None = None,
        profile: EngineProfile | None = None,
        *,
        faults: Faults = NO_FAULTS,
    ) -> None:
        super().__init__(name, profile or profiles.tools(0.0), faults)
        self._tools = dict(tools or {})

    def _value(self, request: Request) -> CallTool:
        asked = request.payload
        if not isinstance(asked, CallTool) or asked.tool not in self._tools:
            raise ValueError(f"{asked!r} is no call of {', '.join(self._tools)}")
        return asked

    def _commit(self, request: Request, value: CallTool) -> Any:
        return self._tools[value.tool](**value.arguments)


def _shared(query: str, text: str) -> float:
    words, there = bag_of_words(query), bag_of_words(text)
    return sum(weight for word, weight in words.items() if word in there) / math.sqrt(len(there) or 1)
