"""What the models of the LlamaIndex kits say: what the prompts of llama-index-core ask for, a pure function of them."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable

from benchmarks.rag.apps import WORDS

Rule = Callable[[str, random.Random], str]
PASSAGE, QUERY = 30, 12
"""Words of a hypothetical passage, of a question."""


def answer(prompt: str, words: int) -> str:
    """`words` words, where no rule of `RULES` knows the prompt."""
    rng = random.Random(re.sub(r"request \S+ failed.*", "", prompt))  # an error that the model is told of
    for phrase, rule in RULES.items():
        if phrase in prompt:
            return rule(prompt, rng)
    return said(rng, words)


def said(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def queries(prompt: str, rng: random.Random) -> str:
    """One on each line; with blank lines now and then, one too many, or the asked one again."""
    wanted = int(re.findall(r"Generate (\d+) search quer", prompt)[-1])
    lines = [said(rng, QUERY) for _ in range(wanted)]
    kind = zlib.crc32(prompt.encode()) % 4
    if kind == 1:
        lines = ["", *lines, said(rng, QUERY)]
    if kind == 2:
        lines[-1] = re.findall(r"Query: (.*)", prompt)[-1]
    return "\n".join(lines)


def sub_questions(prompt: str, rng: random.Random) -> str:
    """One for each tool."""
    tools = json.loads(re.findall(r"<Tools>\s*```json\s*(\{.*?\})\s*```", prompt, re.DOTALL)[-1])
    items = [{"sub_question": said(rng, QUERY) + "?", "tool_name": name} for name in tools]
    return "```json\n" + json.dumps({"items": items}, indent=4) + "\n```"


def choice(prompt: str, rng: random.Random) -> str:
    count = int(re.findall(r"\(1 to (\d+)\)", prompt)[-1])
    several = "top choices" in prompt
    chosen = rng.sample(range(1, count + 1), 2 if several and count > 1 else 1)
    return json.dumps([{"choice": number, "reason": said(rng, 3)} for number in sorted(chosen)])


def relevant(prompt: str, rng: random.Random) -> str:
    """Two documents in three, and some that are as relevant as others."""
    shown = prompt.rpartition("try this now")[2]
    count = len(re.findall(r"Document \d+:", shown)) or 2
    kept = [number for number in range(1, count + 1) if rng.random() < 0.67] or [1]
    rng.shuffle(kept)
    return "\n".join(f"Doc: {number}, Relevance: {rng.randint(1, 10)}" for number in kept)


def criticism(prompt: str, rng: random.Random) -> str:
    """A previous bad answer is enough to be pleased with the next."""
    return json.dumps({"passing": "previous bad answer" in prompt, "feedback": said(rng, 6)})


def next_step(prompt: str, rng: random.Random) -> str:
    """Two steps, then it has no more to ask."""
    reasoned = prompt.rpartition("Previous reasoning:")[2]
    return "None" if len(re.findall(r"(?m)^- ", reasoned)) >= 4 else said(rng, QUERY) + "?"


def acts(prompt: str, rng: random.Random) -> str:
    """As ReAct: looks up once, then answers."""
    if "Observation:" in prompt.rpartition("## Current Conversation")[2]:
        return f"Thought: I can answer without using any more tools.\nAnswer: {said(rng, QUERY)}"
    tool = re.findall(r"Tool Name: (\w+)", prompt)[0]
    return f'Thought: I need to use a tool.\nAction: {tool}\nAction Input: {{"input": "{said(rng, QUERY)}"}}'


def verdict(prompt: str, rng: random.Random) -> str:
    return "YES" if "previous bad answer" in prompt else rng.choice(("YES", "NO", "NO"))


def record(prompt: str, rng: random.Random) -> str:
    """By the schema in the prompt: words for texts, a number for everything else."""
    shown = prompt.rpartition("JSON schema to follow:")[2].lstrip()
    if shown.startswith("{{"):  # escaped, in a prompt of messages
        shown = shown.replace("{{", "{").replace("}}", "}")
    schema, _ = json.JSONDecoder().raw_decode(shown)
    fields = schema["properties"].items()
    return json.dumps({key: said(rng, 2) if one.get("type") == "string" else rng.randint(1, 9) for key, one in fields})


def question(prompt: str, rng: random.Random) -> str:
    return said(rng, QUERY) + "?"


def passage(prompt: str, rng: random.Random) -> str:
    return said(rng, PASSAGE)


def cited(prompt: str, rng: random.Random) -> str:
    return f"{said(rng, QUERY)} [1], {said(rng, 3)} [2]."


RULES: dict[str, Rule] = {
    "one on each line": queries,
    "output a list of relevant sub-questions": sub_questions,
    "Using only the choices above": choice,
    "as well as the relevance score": relevant,
    "as well \nas the relevance score": relevant,
    "constructive criticism": criticism,
    "JSON schema to follow": record,
    "Either YES/ NO": verdict,
    "existing YES/NO answer": verdict,
    "Previous reasoning:": next_step,
    "knowledge source": question,
    "Action Input:": acts,
    "standalone question": question,
    "write a passage to answer": passage,
    "cite the appropriate source": cited,
}
"""By a phrase of the prompt, in the order in which they are tried."""
