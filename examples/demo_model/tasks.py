"""The six skills as examples for training: instructions in many wordings, and the one right output."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from examples.demo_model import facts, prose
from examples.demo_model.words import name, value, word
from teola_plugin.adapters import demo_app as prompts

UNKNOWN = "The passage does not say."


@dataclass(frozen=True, slots=True)
class Example:
    """One exchange. `skill` names the generator."""

    skill: str
    system: str
    user: str
    answer: str
    key: str = ""
    """The words of the answer that have to be looked up."""


ANSWER_SYSTEMS = (
    prompts.INSTRUCTION,
    prompts.INSTRUCTION,
    prompts.INSTRUCTION,
    "Answer the question with the given context only.",
    "You are a helpful assistant. Use the following pieces of context to answer the question.",
    "",
)
ANSWER_USERS = (
    "Question: {question}\n\nPassage:\n{context}\n\nAnswer:",
    "Question: {question}\n\nPassage:\n{context}\n\nAnswer:",
    "Passage:\n{context}\n\nQuestion: {question}\n\nAnswer:",
    "Context:\n{context}\n\nQuestion: {question}",
    "Answer the question based only on the following context:\n{context}\n\nQuestion: {question}\n",
)
REFINE_SYSTEMS = (prompts.INSTRUCTION + prompts.REFINE_INSTRUCTION,) * 3 + (
    "Refine the existing answer with the new context, if it helps. Otherwise repeat the existing answer.",
)
REFINE_USERS = (
    "Question: {question}\n\nPassage:\n{context}\n\nEarlier answer: {previous}\n\nBetter answer:",
    "Question: {question}\n\nPassage:\n{context}\n\nEarlier answer: {previous}\n\nBetter answer:",
    "Question: {question}\n\nExisting answer: {previous}\n\nNew context:\n{context}\n\nRefined answer:",
)
COMBINE_SYSTEM = "You get a question and several partial answers. Write one answer that puts together what they say."
COMBINE_USER = "Question: {question}\n\nPartial answers:\n{answers}\n\nAnswer:"
EXPAND_LINES = (
    "Write {n} different versions of the question, one a line.",
    "Rewrite the question in {n} other ways. Put each on a line of its own.",
    "Generate {n} search queries for the question, one per line.",
)
EXPAND_LIST = (
    "Write {n} different versions of the question, as a JSON list of strings.",
    "Rewrite the question in {n} other ways. Answer with a JSON list and nothing else.",
)
JUDGE_SYSTEM = "Say whether the message can be answered without a search in the documents. Answer yes or no."
SITUATE_SYSTEM = "Give one line that situates the chunk within the document, to improve search. Nothing else."
TOOL_SYSTEM = "Call the tool that fits the request. Answer with a JSON object with name and arguments."


def qa_facts(rng: random.Random, subjects: int | None = None) -> Example:
    """A question about generated facts in one passage or in several numbered ones."""
    return _about("qa_facts", rng, facts.document(rng, subjects or rng.choice((1, 2, 3, 4, 4, 5, 6))))


def qa_made_up(rng: random.Random) -> Example:
    """The same for relations that nobody has heard of."""
    return _about("qa_made_up", rng, facts.made_up_document(rng, rng.choice((1, 2, 3, 4, 5))))


def qa_alike(rng: random.Random) -> Example:
    """The same for subjects that differ in their names only."""
    return _about("qa_alike", rng, facts.alike_document(rng, rng.choice((2, 3, 4, 5, 6))))


def qa_missing(rng: random.Random) -> Example:
    """A question that nothing answers: about somebody who is not there, or about something else."""
    document = rng.choice((facts.document, facts.document, facts.alike_document))
    paragraphs = document(rng, rng.choice((2, 3, 4, 4, 5, 6)))
    about = rng.choice(paragraphs)
    asked = rng.choice(about)
    if rng.random() < 0.5:
        paragraphs.remove(about)
    paragraphs = [[f for f in paragraph if f is not asked] for paragraph in paragraphs]
    return _asked("qa_missing", rng, asked, paragraphs, known=False)


def _about(skill: str, rng: random.Random, paragraphs: list[list[facts.Fact]]) -> Example:
    asked = rng.choice(rng.choice(paragraphs))
    known = rng.random() >= 0.08
    if not known:
        paragraphs = [[f for f in paragraph if f.statement != asked.statement] for paragraph in paragraphs]
    return _asked(skill, rng, asked, paragraphs, known)


def _asked(
    skill: str, rng: random.Random, asked: facts.Fact, paragraphs: list[list[facts.Fact]], known: bool
) -> Example:
    """The answer says it in one wording, whatever the passage's is."""
    texts = [" ".join(f.statement for f in paragraph) for paragraph in paragraphs if paragraph]
    context = numbered(texts) if rng.random() < 0.4 else rng.choice((" ", "\n\n")).join(texts)
    said, key = (asked.answer, asked.value) if known else (UNKNOWN, "")
    return _answering(skill, rng, rng.choice(asked.questions), context or "Nothing.", said, key)


def qa_prose(rng: random.Random, length: int | None = None) -> Example:
    """A question about one sentence of real prose."""
    length = length or rng.choice((250, 500, 1000, 1000))
    found = prose.passage(rng, length)
    if rng.random() < 0.02:
        return _answering("qa_prose", rng, found.question, prose.foreign_passage(rng, found, length), UNKNOWN)
    context = found.text
    if length <= 500 and rng.random() < 0.4:
        texts = [found.text, *(prose.other_passage(rng, found, length) for _ in range(rng.randint(1, 2)))]
        rng.shuffle(texts)
        context = numbered(texts)
    return _answering("qa_prose", rng, found.question, context, found.sentence)


def _answering(skill: str, rng: random.Random, question: str, context: str, answer: str, key: str = "") -> Example:
    user = rng.choice(ANSWER_USERS).format(question=question, context=context)
    return Example(skill, rng.choice(ANSWER_SYSTEMS), user, answer, key)


def refine(rng: random.Random) -> Example:
    """An earlier answer and one more passage: the better of what both offer."""
    found = prose.passage(rng, rng.choice((300, 600, 1000)))
    other = prose.other_passage(rng, found, rng.choice((300, 600, 1000)))
    right, wrong = found.sentence, rng.choice(prose.sentences(other) or [UNKNOWN])
    context, previous = rng.choice(
        ((other, right), (other, right), (found.text, UNKNOWN), (found.text, wrong), (found.text, right))
    )
    if rng.random() < 0.1:
        context, previous, right = other, UNKNOWN, UNKNOWN
    user = rng.choice(REFINE_USERS).format(question=found.question, context=context, previous=previous)
    return Example("refine", rng.choice(REFINE_SYSTEMS), user, right)


def combine(rng: random.Random) -> Example:
    """Partial answers, some of which say nothing."""
    paragraph = facts.document(rng, 1)[0]
    known = [f.statement for f in paragraph][: rng.randint(1, 2)]
    answers = known + [UNKNOWN] * rng.randint(0, 2)
    rng.shuffle(answers)
    said = " ".join(a for a in answers if a != UNKNOWN)
    user = COMBINE_USER.format(question=rng.choice(paragraph[0].questions), answers=numbered(answers))
    return Example("combine", COMBINE_SYSTEM, user, said)


def any_question(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(facts.document(rng, 1, 1)[0][0].questions)
    return prose.passage(rng, 250).question


def expand(rng: random.Random) -> Example:
    """A question in n other wordings, in the order of `WORDINGS`."""
    question, n = any_question(rng), rng.choice((2, 3, 3, 3, 4, 5))
    made = reworded(question, n)
    as_list = rng.random() < 0.6
    answer = _json(made) if as_list else "\n".join(made)
    if as_list and rng.random() < 0.6:
        return Example(
            "expand", prompts.EXPAND_INSTRUCTION.format(n=n), f"Question: {question}", _json(reworded(question, n))
        )
    instruction = rng.choice(EXPAND_LIST if as_list else EXPAND_LINES).format(n=n)
    return Example("expand", "", f"{instruction}\n\nQuestion: {question}", answer)


WORDINGS = (
    "Where does it say {}?",
    "Explain {}.",
    "Which passage tells {}?",
    "I want to know {}.",
    "Can you tell me {}?",
)


def reworded(question: str, n: int) -> list[str]:
    """n questions for the same facts."""
    body = question.rstrip("?").replace('"', "")  # which a small model forgets to escape
    body = body[0].lower() + body[1:]
    return [wording.format(body) for wording in WORDINGS[:n]]


def judge(rng: random.Random) -> Example:
    """Small talk and sums need no search; facts do."""
    a, b, who = rng.randint(2, 99), rng.randint(2, 99), name(rng, "person").split()[0]
    talk = (
        "Hello!", f"Hello, I am {who}.", "Good morning, how are you?", "Thank you very much!", "Thanks, that helps.",
        f"What is {a} plus {b}?", f"How much is {a} times {b}?", "Goodbye!", "Who are you?", "Can you help me?",
        f"Nice to meet you, {who}.", "Please say that again.", "What can you do?", f"Is {a} more than {b}?",
        f"Write the word {word(rng)} backwards.", f"Say hello to {who}.", "Tell me a joke.", "Are you a robot?",
    )  # fmt: skip
    needless = rng.random() < 0.5
    message = rng.choice(talk) if needless else any_question(rng)
    return Example("judge", JUDGE_SYSTEM, f"Message: {message}", "yes" if needless else "no")


def situate(rng: random.Random) -> Example:
    """One line that says where a chunk belongs."""
    title = f"{rng.choice(('Report', 'Guide', 'Notes', 'Handbook'))} on {word(rng)}"
    paragraphs = facts.document(rng, rng.randint(2, 4))
    at = rng.randrange(len(paragraphs))
    texts = [" ".join(f.statement for f in paragraph) for paragraph in paragraphs]
    user = f"Document: {title}\n\n" + "\n\n".join(texts) + f"\n\nChunk:\n{texts[at]}"
    return Example("situate", SITUATE_SYSTEM, user, f"From the {title}: about {paragraphs[at][0].subject}.")


_TOOLS = (
    (
        "weather",
        "city",
        "place",
        ("What is the weather in {v}?", "Will it rain in {v} today?", "How warm is it in {v}?"),
    ),
    ("open_file", "path", "file", ("Open the file {v}.", "Show me {v}, please.", "What is in {v}?")),
    ("send_mail", "to", "person", ("Write a mail to {v}.", "Send {v} a message.", "Tell {v} that I am late.")),
    ("price", "product", "product", ("How much is the {v}?", "What does a {v} cost?", "Find the price of the {v}.")),
    ("book_train", "to", "place", ("I need a train to {v}.", "Book a seat to {v}.", "Get me a ticket to {v}.")),
    ("stock", "company", "company", ("How are the shares of {v}?", "Show the stock price of {v}.", "Is {v} up today?")),
    ("scores", "team", "team", ("Did {v} win?", "What is the score of {v}?", "When does {v} play next?")),
    ("set_alarm", "time", "time", ("Wake me at {v}.", "Set an alarm for {v}.", "Ring at {v}, please.")),
    ("pay", "amount", "money", ("Pay {v}.", "Send {v} to my landlord.", "Transfer {v} now.")),
    ("calendar", "date", "date", ("What is on {v}?", "Am I free on {v}?", "Show my meetings of {v}.")),
)


def tool_call(rng: random.Random) -> Example:
    """The one of the listed tools that fits, with its argument."""
    listed = rng.sample(_TOOLS, rng.randint(2, 5))
    called, key, kind, requests = rng.choice(listed)
    found = value(rng, kind)
    tools = json.dumps([{"name": tool, "arguments": [argument]} for tool, argument, _, _ in listed])
    answer = _json({"name": called, "arguments": {key: found}})
    return Example(
        "tool_call", TOOL_SYSTEM, f"Tools: {tools}\n\nRequest: {rng.choice(requests).format(v=found)}", answer
    )


def _json(value: Any) -> str:
    """Without blanks, as engines write it that hold the model to a schema."""
    return json.dumps(value, separators=(",", ":"))


def numbered(texts: list[str]) -> str:
    return "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))


MIX: tuple[tuple[Callable[[random.Random], Example], float], ...] = (
    (qa_facts, 0.31),
    (qa_alike, 0.05),
    (qa_made_up, 0.02),
    (qa_missing, 0.04),
    (qa_prose, 0.41),
    (refine, 0.05),
    (expand, 0.05),
    (combine, 0.02),
    (judge, 0.015),
    (situate, 0.015),
    (tool_call, 0.02),
)


def examples(seed: int) -> Iterator[Example]:
    """Without end, and always the same for a seed."""
    rng = random.Random(seed)
    makers, weights = zip(*MIX, strict=True)
    while True:
        yield rng.choices(makers, weights)[0](rng)
