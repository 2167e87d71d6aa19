"""The least time that engines can take whose calls come one after the other, by data dependencies alone.

What is known of a call is its prompt; all of it that stands before the newest text in it, an answer or passages, may
have been prefilled while that text was made. Idle engines, no overhead, prefix caches without block sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.langchain.bounds import Costs
from benchmarks.rag.apps import tokens_of

Call = tuple[str, str]
"""Of an LLM: prompt and answer."""
STEPWISE = ("multi-step", "retry")
"""Patterns of `llamaindex_engines` each of whose calls needs the one before."""


def stepwise(costs: Costs, calls: Sequence[Call], passages: Sequence[str]) -> float:
    """Seconds until the last of the calls is answered. `passages` are those of the collection."""
    now, before, seen = 0.0, "", ""
    for prompt, answer in calls:
        found = _first(prompt, [text for text in passages if text not in seen])
        newest = prompt.rfind(before) if " " in before else -1  # a verdict is not read, but acted upon
        place = newest if newest >= 0 else len(prompt)
        if found < place:  # what is searched with was made by the call before, or is the question
            head = tokens_of(prompt[:found])
            ready = max(costs.dense, costs.prefill(head)) if not before else now + costs.dense
            now, place = ready, found
        elif not before:
            place = 0
        now += costs.write(tokens_of(prompt[place:]), tokens_of(answer))
        before, seen = answer, seen + prompt
    return now


def _first(prompt: str, texts: Sequence[str]) -> int:
    """Where the first of the texts begins; the prompt's end where there is none."""
    return min((prompt.index(text) for text in texts if text in prompt), default=len(prompt))
