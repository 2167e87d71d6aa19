"""The smallest app that one line makes faster: three questions on one page, asked one after the other.

No pool and no `bind=`: the user's own model is called, as it is, three times at once.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from teola_plugin import accelerate
from teola_plugin.cli.demo.measure import loop
from teola_plugin.cli.demo.prompts import INSTRUCTION
from teola_plugin.cli.demo.steps import CHUNK

QUESTIONS = {
    "what": "What is this page about?",
    "when": "When does what it describes happen?",
    "otherwise": "What happens otherwise?",
}


@dataclass(frozen=True, slots=True)
class OneLine:
    """The same input, plain and accelerated, in turn. Times in seconds."""

    answer: Any
    plain: tuple[float, ...]
    accelerated: tuple[float, ...]
    answers_equal: bool

    @property
    def plain_s(self) -> float:
        return statistics.median(self.plain)

    @property
    def accelerated_s(self) -> float:
        return statistics.median(self.accelerated)

    def facts(self) -> dict[str, Any]:
        """Its figures as JSON-ready data."""
        return {
            "plain_s": self.plain_s,
            "accelerated_s": self.accelerated_s,
            "speedup": self.plain_s / self.accelerated_s,
            "answers_equal": self.answers_equal,
            "runs": len(self.plain),
        }


def chain(llm: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Input: `{"text": str}`. Output: the same with an answer under each key of `QUESTIONS`."""
    made: Runnable[Any, Any] = RunnablePassthrough()
    for name, question in QUESTIONS.items():
        messages = [("system", INSTRUCTION), ("human", f"Question: {question}\n\nPassage:\n{{text}}\n\nAnswer:")]
        ask = ChatPromptTemplate.from_messages(messages) | llm | StrOutputParser()
        made = made | RunnablePassthrough.assign(**{name: ask})
    return made


def measured(llm: Runnable[Any, Any], documents: list[Document], repeats: int) -> OneLine:
    """After one round that is not counted; the two take turns at being first."""
    plain = chain(llm)
    both = {"plain": plain, "accelerated": accelerate(plain, app="demo")}
    given = {"text": documents[0].page_content[: CHUNK * 4]}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    answers: list[Any] = []
    for repeat in range(repeats + 1):
        for name in both if repeat % 2 else reversed(both):
            begun = time.perf_counter()
            answers.append(loop.run(both[name].ainvoke(given)))
            if repeat:
                seconds[name].append(time.perf_counter() - begun)
    equal = all(answer == answers[0] for answer in answers)
    return OneLine(answers[0], tuple(seconds["plain"]), tuple(seconds["accelerated"]), equal)
