"""Random requests of every kind from a seed, for one engine with drafts and one without."""

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
CALL = {
    "type": "object",
    "properties": {"name": {"const": "look_up"}, "arguments": {"type": "object", "properties": {}}},
    "required": ["name", "arguments"],
}
"""What a call of the tool looks like: answers of requests with tools are held to it half of the time."""
_ASKED = (
    "What is this about?",
    "Which statement is meant?",
    "Repeat the first sentence.",
    "List three words, one a line.",
)
_SYSTEM = "You answer questions about a context that you get, in few words, and with those of the context alone. " * 2
"""Long enough for blocks of the prefix cache that prompts share."""
_SPECIAL = "<|end|>\n<|assistant|>\n<s><pad>"
"""Special tokens of the models that come along, as text: drafts hold their ids."""


@dataclass(frozen=True)
class DraftCase:
    payload: Generate
    drafts: tuple[str, ...] = ()
    true_draft: str = ""
    """What becomes of the answer without drafts: `right`, `cut`, `longer`, `changed`, `special`, `gaps`; or none."""
    cancelled_after: float = 0.0
    """Seconds; 0 stands for never."""

    @property
    def kinds(self) -> Iterator[str]:
        """What of the contract it is a case of."""
        sampling = self.payload.sampling
        yield "greedy" if sampling.greedy else "sampled" if sampling.seed is None else "sampled with a seed"
        for kind, given in (
            ("stop strings", sampling.stop),
            ("a schema", sampling.json_schema),
            ("tools", self.payload.prompt.tools),
            ("beyond the end token", sampling.ignore_eos),
            ("wrong drafts", self.drafts),
        ):
            if given:
                yield kind
        if self.true_draft:
            yield f"its answer as a draft, {self.true_draft}"


def cases(seed: int, count: int) -> Iterator[DraftCase]:
    rng = random.Random(seed)
    for _ in range(count):
        yield _case(rng)


def _case(rng: random.Random) -> DraftCase:
    text = rng.choice(_TEXTS[:4] if rng.random() < 0.3 else _TEXTS)
    start = 0 if rng.random() < 0.3 else rng.randrange(max(1, len(text) - 600))
    passage = text[start : start + rng.choice((40, 200, 600))]
    user_text = f"Context:\n{passage}\n\nQuestion: {rng.choice(_ASKED)}"
    tools = TOOLS if rng.random() < 0.15 else ""
    prompt = Prompt(text=user_text)
    if tools or rng.random() < 0.8:
        system = (Message("system", _SYSTEM),) if rng.random() < 0.5 else ()
        prompt = Prompt(messages=(*system, Message("user", user_text)), tools=tools)
    made = Generate(prompt, _sampling(rng, tools))
    forms = texts_of(made) or forms_of_list("lines")
    wrong = ((passage[:300],), ("nothing of this is ever said",), (f"{_SPECIAL}</s>", passage), forms, forms[::-1])
    drafts = rng.choice(((), (), *wrong))
    true = rng.choice(("", "", "right", "cut", "longer", "changed", "special", "gaps"))
    cancelled = rng.choice((0.0,) * 9 + (0.02,))
    return DraftCase(made, drafts, true, cancelled)


def _sampling(rng: random.Random, tools: str) -> Sampling:
    made = Sampling(max_tokens=rng.choice((1, 2, 7, 24, 60, 100)))
    kind = rng.random()
    if kind < 0.15:
        made = replace(made, temperature=0.7, top_p=0.9, seed=rng.randrange(1000))
    elif kind < 0.25:
        made = replace(made, temperature=0.7, top_k=5)
    if tools and rng.random() < 0.5:
        made = replace(made, json_schema=json.dumps(CALL))
    elif rng.random() < 0.15:
        made = replace(made, json_schema=json.dumps(rng.choice(SCHEMAS)))
    if rng.random() < 0.2:
        made = replace(made, stop=tuple(rng.sample((".", "the", "\n", "exception", "a s"), 2)))
    if rng.random() < 0.15 and not made.json_schema:
        made = replace(made, ignore_eos=True, max_tokens=rng.choice((7, 60, 200)))
    return made


def drafts_of_case(case: DraftCase, answer: str) -> tuple[str, ...]:
    """Return the draft texts of the request, made from its answer without drafts."""
    middle = len(answer) // 2
    true = {
        "": (),
        "right": (answer,),
        "cut": (answer[:middle],),
        "longer": (answer + " and then some more of it",),
        "gaps": (GAP + answer[:9] + GAP + answer[middle : middle + 20] + GAP, answer[:12] + GAP + answer[20:] + GAP),
        "changed": (answer[:middle] + " quite another word " + answer[middle + 5 :],),
        "special": (answer + _SPECIAL + answer,),
    }
    return (*true[case.true_draft], *case.drafts)


def batches(given: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    """Divide requests into batches of 1 to 16."""
    rng, at = random.Random(seed), 0
    while at < len(given):
        size = rng.choice((1, rng.randint(2, 8), rng.randint(9, 16), 16))
        yield given[at : at + size]
        at += size
