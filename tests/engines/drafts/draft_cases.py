"""Requests of every kind, at random from a seed, for an engine with drafts and one without."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pydoc_data.topics import topics

from teola_plugin.graph import GAP
from teola_plugin.requests.draft_texts import forms_of_list, texts_of
from teola_plugin.requests.payloads import Generate, Message, Prompt, Sampling

_TEXTS = [" ".join(text.split()) for _, text in sorted(topics.items()) if len(text) > 800]
SCHEMAS = (
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a", "n"]},
    {"enum": ["yes", "no", "neither"]},
)
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
)
_ASKED = (
    "What is this about?",
    "Which statement is meant?",
    "Repeat the first sentence.",
    "List three words, one a line.",
)


@dataclass(frozen=True)
class DraftCase:
    asked: Generate
    drafts: tuple[str, ...] = ()
    true_draft: str = ""
    """What becomes of the answer without drafts: `right`, `cut`, `longer`, `changed`; empty for none of it."""
    cancelled_after: float = 0.0
    """Seconds; 0 stands for never."""
    gaps: bool = False
    """Whether parts of that answer go along, too, with gaps between."""


def cases(seed: int, count: int) -> Iterator[DraftCase]:
    rng = random.Random(seed)
    for _ in range(count):
        yield _case(rng)


def _case(rng: random.Random) -> DraftCase:
    text = rng.choice(_TEXTS)
    start = rng.randrange(max(1, len(text) - 600))
    passage = text[start : start + rng.choice((40, 200, 600))]
    asked = f"Context:\n{passage}\n\nQuestion: {rng.choice(_ASKED)}"
    tools = TOOLS if rng.random() < 0.1 else ""
    prompt = Prompt(messages=(Message("user", asked),), tools=tools) if rng.random() < 0.8 else Prompt(text=asked)
    drafts = rng.choice(((), (), (passage[:300],), ("nothing of this is ever said",), ("<|im_end|></s>", passage)))
    true = rng.choice(("", "", "right", "cut", "longer", "changed"))
    cancelled = rng.choice((0.0,) * 9 + (0.02,))
    made = Generate(prompt, _sampling(rng))
    forms = rng.choice(((), (), texts_of(made) or forms_of_list("lines"), forms_of_list("numbered")))
    return DraftCase(made, (*drafts, *forms), true, cancelled, gaps=rng.random() < 0.2)


def _sampling(rng: random.Random) -> Sampling:
    made = Sampling(max_tokens=rng.choice((1, 2, 7, 24, 60)))
    kind = rng.random()
    if kind < 0.15:
        made = replace(made, temperature=0.7, top_p=0.9, seed=rng.randrange(1000))
    elif kind < 0.2:
        made = replace(made, temperature=0.7, top_k=5)
    if rng.random() < 0.15:
        made = replace(made, json_schema=json.dumps(rng.choice(SCHEMAS)))
    if rng.random() < 0.2:
        made = replace(made, stop=tuple(rng.sample((".", "the", "\n", "exception", "a s"), 2)))
    return replace(made, ignore_eos=True) if rng.random() < 0.1 and not made.json_schema else made


def drafts_of_case(case: DraftCase, answer: str) -> tuple[str, ...]:
    """What goes along with the request, with the answer that it has without."""
    middle = len(answer) // 2
    true = {
        "": (),
        "right": (answer,),
        "cut": (answer[:middle],),
        "longer": (answer + " and then some more of it",),
        "changed": (answer[:middle] + " quite another word " + answer[middle + 5 :],),
    }
    parts = GAP + answer[:9] + GAP + answer[middle : middle + 20] + GAP, answer[:12] + GAP + answer[20:] + GAP
    return (*true[case.true_draft], *case.drafts, *(parts if case.gaps else ()))


def batches(given: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    """Cut into batches of 1 to 16."""
    rng, at = random.Random(seed), 0
    while at < len(given):
        size = rng.randint(1, 16)
        yield given[at : at + size]
        at += size
