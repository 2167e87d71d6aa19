"""What `benchmarks.drafts` asks its engines, and how one request is timed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from benchmarks.draft_prompts import HELD_OUT, NOTHING_TO_COPY, QUESTIONS, passages
from teola_plugin.adapters.demo_app import INSTRUCTION, REFINE_INSTRUCTION
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Generate, Generation, Message, Prompt, Request, Sampling

TOKENS = 64
"""Of an answer at most, as in the demo."""
ANSWER = Sampling(max_tokens=TOKENS)
FRESH = Sampling(max_tokens=96, ignore_eos=True)
"""Of a text that copies nothing: there are no fewer tokens."""
CONTROL = "control"
"""The way of a second engine without drafts: how far two equal ones are apart."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Case:
    prompt: Prompt
    sampling: Sampling = ANSWER
    drafts: tuple[str, ...] = ()
    """What the graph knows that the answer may repeat."""


@dataclass(frozen=True, slots=True)
class Answered:
    value: Generation
    seconds: float
    decoding: float
    """Seconds behind the first token; 0 where there is no other."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The same model: without drafts, with them, and once more without."""

    plain: VllmEngine
    drafting: VllmEngine
    control: VllmEngine

    def of(self, way: str) -> VllmEngine:
        return {"plain": self.plain, CONTROL: self.control}.get(way, self.drafting)


async def ask(engine: VllmEngine, case: Case, way: str, tenant: str = "") -> Answered:
    """Each request is a tenant's of its own, so that none finds what another has written, unless one is given."""
    name, drafts = f"drafts-{next(_numbers)}", () if way in ("plain", CONTROL, "lookup") else case.drafts
    asked = Generate(case.prompt, case.sampling)
    request = Request(name, PrimitiveKind.PREFILLING, asked, tenant=tenant or name, app=way, drafts=drafts)
    async with aclosing(engine.execute([request])) as results:
        async for result in results:
            if isinstance(result, Failed):
                raise result.error
            if isinstance(result, Done):
                seconds, value = result.stats["seconds"], result.value
                behind = seconds - result.stats["first_token_s"] if value.completion_tokens > 1 else 0.0
                return Answered(value, seconds, behind)
    raise AssertionError("execute ended without a result")


async def copying(plain: VllmEngine) -> Mapping[str, Sequence[Case]]:
    """Answers from a passage and refinements of those with another one, over texts of the first set and of the second;
    refinements hold what the engine without drafts has answered."""
    found: dict[str, list[Case]] = {}
    for mark, questions in (("", QUESTIONS), ("held out ", HELD_OUT)):
        for topic, question in questions:
            first, second = passages(topic, question)
            asked = f"Question: {question}\n\nPassage:\n"
            answer = Case(_chat(INSTRUCTION, f"{asked}{first}\n\nAnswer:"))
            before = (await ask(plain, answer, "plain")).value.text
            again = _chat(
                INSTRUCTION + REFINE_INSTRUCTION,
                f"{asked}{second}\n\nEarlier answer: {before}\n\nBetter answer:",
            )
            found.setdefault(f"{mark}answer", []).append(answer)
            found.setdefault(f"{mark}refine", []).append(Case(again, drafts=(before,)))
    return found


async def fresh(plain: VllmEngine) -> Mapping[str, Sequence[Case]]:
    """For a model that copies nothing: prompts without a passage and with one; the same with a text that misleads, as
    what the graph would know of it: its own words, two by two, in another order."""
    prompts = [_chat("You are a friend.", text) for text in NOTHING_TO_COPY]
    prompts += [_chat(INSTRUCTION, f"{asked[1]}\n\n{passages(*asked)[0]}") for asked in QUESTIONS[::5]]
    cases = [Case(prompt, FRESH) for prompt in prompts]
    texts = [(await ask(plain, case, "plain")).value.text for case in cases]
    return {
        "nothing to copy": cases,
        "misled": [replace(case, drafts=(_misleading(text),)) for case, text in zip(cases, texts, strict=True)],
        "half known": [
            replace(case, drafts=(text,) if i % 2 else ())
            for i, (case, text) in enumerate(zip(cases, texts, strict=True))
        ],
    }


def _misleading(text: str) -> str:
    words = text.split(" ")
    pairs = [" ".join(words[i : i + 2]) for i in range(len(words) - 1)]
    random.Random(0).shuffle(pairs)
    return " ".join(pairs)


def _chat(system: str, human: str) -> Prompt:
    return Prompt(messages=(Message("system", system), Message("user", human)))
