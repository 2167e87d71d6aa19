"""Records how the bundled model copies: outputs of real vLLM on `benchmarks.draft_prompts`, cut into runs.

A run is a longest piece of an output that stands in what the model was given (extractive fragments: Grusky et al.,
2018, arXiv:1804.11283), in the model's own tokens. What stands nowhere is new. The bundled model was trained to answer
with the words of its passages, so it copies more, and in longer runs, than others.

    python -m benchmarks.rag.record > benchmarks/rag/recorded.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import environment
from benchmarks.draft_cases import TOKENS, Case, ask, copying
from benchmarks.draft_prompts import QUESTIONS, passages
from teola_plugin.engines.model_cache import llm_folder
from teola_plugin.engines.vllm import VllmEngine

Ids = Sequence[int]
KINDS = ("answer", "refine")


def runs(output: Ids, sources: Mapping[str, Ids]) -> list[tuple[str, int, int]]:
    """(source, place in it, tokens) from the first token to the last; a source's name is empty for new tokens."""
    found: list[tuple[str, int, int]] = []
    at = 0
    while at < len(output):
        source, place, length = max(
            ((name, *_longest(output[at:], text)) for name, text in sources.items()), key=lambda one: one[2]
        )
        if length:
            found.append((source, place, length))
        elif found and not found[-1][0]:
            found[-1] = ("", 0, found[-1][2] + 1)
        else:
            found.append(("", 0, 1))
        at += max(1, length)
    return found


def _longest(wanted: Ids, text: Ids) -> tuple[int, int]:
    """The place of the longest beginning of `wanted` in the text, and its length."""
    best = 0, 0
    for place in range(len(text)):
        length = 0
        while length < len(wanted) and place + length < len(text) and wanted[length] == text[place + length]:
            length += 1
        if length > best[1]:
            best = place, length
    return best


async def recorded() -> list[dict[str, Any]]:
    folder = str(llm_folder())
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    engine = VllmEngine("recorded", folder, cores="0", drafts="off")
    await engine.start()
    try:
        cases = await copying(engine)
        asked = [(kind, cases[kind][i]) for i in range(len(QUESTIONS)) for kind in KINDS]
        texts = [(await ask(engine, case, "plain", "recorded")).value.text for _, case in asked]
    finally:
        await engine.stop()

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def row(kind: str, case: Case, text: str, topic: str, question: str) -> dict[str, Any]:
        sources = {"question": ids(question), "passage": ids(passages(topic, question)[kind == "refine"])}
        if case.drafts:
            sources = {"answer": ids(case.drafts[0]), **sources}
        return {"kind": kind, "topic": topic, "question": question, "text": text, "runs": runs(ids(text), sources)}

    questions = [pair for pair in QUESTIONS for _ in KINDS]
    return [row(*one, text, *pair) for one, text, pair in zip(asked, texts, questions, strict=True)]


if __name__ == "__main__":
    result = {"max_tokens": TOKENS, "environment": environment()}
    lines = ",\n    ".join(json.dumps(one) for one in asyncio.run(recorded()))
    head = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items())
    sys.stdout.write(f'{{\n  {head},\n  "outputs": [\n    {lines}\n  ]\n}}\n')
