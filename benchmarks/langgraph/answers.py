"""What the model of the graphs says: a pure function of the prompt.

Structured output goes by the names of the schema's fields, tool calls by the tools that it is told of and by the
results that are there; all else is words: as many as the answer has tokens, unless the prompt asks for something short.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.rag.apps import WORDS
from teola_plugin.requests.payloads import Prompt, Sampling

QUESTION, TOPIC = 16, 3
"""Words of a question that is written, of a topic."""
STEPS = 3
AT_ONCE = "Make all calls that you need at once."
"""In a system prompt: several calls in one answer. Otherwise one is made, looked at, then the next."""
SEARCHES = 3
"""Calls of a single tool, where they are made at once."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a query is. `documents`: passages for each search, topics to write of; `tokens`: those of an answer."""

    documents: int
    tokens: int


def said(prompt: Prompt, sampling: Sampling, size: Size) -> str:
    rng = random.Random(prompt.flat())
    if sampling.json_schema:
        fields = json.loads(sampling.json_schema)["properties"]
        return json.dumps({name: FIELDS[name](prompt, rng, size) for name in fields})
    if prompt.tools and (calls := tool_calls(prompt, rng)):
        return "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    last = prompt.messages[-1].content
    if "JSON list" in last:
        return json.dumps([words(rng, QUESTION) for _ in range(STEPS)])
    return words(rng, QUESTION if "improved question" in last else size.tokens)


def words(rng: random.Random, count: int) -> str:
    """One token each."""
    return " ".join(rng.choices(WORDS, k=count))


def tool_calls(prompt: Prompt, rng: random.Random) -> list[dict[str, Any]]:
    """The calls of this turn; none when all results are there."""
    tools = [tool["function"] for tool in json.loads(prompt.tools)]
    results = sum(message.role == "tool" for message in prompt.messages)
    if AT_ONCE not in prompt.messages[0].content:
        chosen = tools[results : results + 1]
    else:
        chosen = [] if results else tools if len(tools) > 1 else tools * SEARCHES
    return [
        {"name": tool["name"], "arguments": dict.fromkeys(tool["parameters"]["properties"], words(rng, QUESTION // 2))}
        for tool in chosen
    ]


# ------------------------------------------------------------ structured output

Field = Callable[[Prompt, random.Random, Size], Any]


def _verdict(prompt: Prompt, rng: random.Random, size: Size) -> str:
    """Two documents in three are relevant; answers are grounded, and they answer the question."""
    text = prompt.messages[-1].content
    return "no" if "Retrieved document" in text and zlib.crc32(text.encode()) % 3 == 0 else "yes"


def _next(prompt: Prompt, rng: random.Random, size: Size) -> str:
    """Of a supervisor: the researcher, then the writer, then nobody."""
    spoken = sum(message.role == "user" for message in prompt.messages) - 1
    return ("researcher", "writer", "FINISH")[min(spoken, 2)]


FIELDS: dict[str, Field] = {
    "binary_score": _verdict,
    "datasource": lambda prompt, rng, size: "vectorstore",
    "subjects": lambda prompt, rng, size: [words(rng, TOPIC) for _ in range(size.documents)],
    "joke": lambda prompt, rng, size: words(rng, size.tokens),
    "id": lambda prompt, rng, size: rng.randrange(size.documents),
    "next": _next,
}
