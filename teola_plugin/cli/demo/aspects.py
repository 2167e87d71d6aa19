"""The smallest app that one line makes faster: three questions on one page, asked one after the other.

No pool and no `bind=`: the user's own model is called, as it is, three times at once.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from teola_plugin import accelerate
from teola_plugin.adapters.demo_app import CHUNK, three_questions
from teola_plugin.cli.demo.measure import compared_facts, loop


@dataclass(frozen=True, slots=True)
class OneLine:
    """The same input, plain and accelerated, in turn. Times in seconds."""

    answer: Any
    plain: tuple[float, ...]
    accelerated: tuple[float, ...]
    answers_equal: bool
    shipped: tuple[float, ...] = ()
    """Plain, on a server without drafts; where there is one beside."""

    @property
    def plain_s(self) -> float:
        return statistics.median(self.plain)

    @property
    def accelerated_s(self) -> float:
        return statistics.median(self.accelerated)

    def facts(self) -> dict[str, Any]:
        """Return its figures as JSON data."""
        return {
            **compared_facts(self.plain_s, self.accelerated_s, self.shipped),
            "answers_equal": self.answers_equal,
            "runs": len(self.plain),
        }


def measured(llm: Any, documents: list[Any], repeats: int, shipped: Any | None = None) -> OneLine:
    """After one round that is not counted; all take turns at being first. `shipped`: the model on a server without
    drafts."""
    plain = three_questions(llm)
    every = {"plain": plain, "accelerated": accelerate(plain, app="demo")}
    if shipped is not None:
        every["shipped"] = three_questions(shipped)
    given = {"text": documents[0].page_content[: CHUNK * 4]}
    seconds: dict[str, list[float]] = {name: [] for name in every}
    answers: list[Any] = []
    for repeat in range(repeats + 1):
        for name in every if repeat % 2 else reversed(every):
            begun = time.perf_counter()
            answers.append(loop.run(every[name].ainvoke(given)))
            if repeat:
                seconds[name].append(time.perf_counter() - begun)
    equal = all(answer == answers[0] for answer in answers)
    found = {name: tuple(seconds.get(name, ())) for name in ("plain", "accelerated", "shipped")}
    return OneLine(answers[0], found["plain"], found["accelerated"], equal, found["shipped"])
