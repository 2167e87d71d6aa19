"""Real prose that is on every machine with Python, its sentences, and questions made of them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from examples.demo_model.handwritten import HELD_OUT
from teola_plugin.cli.demo.documents import join_lines

_MODULES = (
    "argparse asyncio base64 bisect collections contextlib copy csv datetime decimal difflib enum fractions functools "
    "glob gzip hashlib heapq inspect io itertools json logging math mimetypes operator os pathlib pickle pprint queue "
    "random re secrets shelve shutil socket sqlite3 statistics string subprocess tempfile textwrap threading timeit "
    "tokenize traceback typing unittest urllib.parse uuid weakref zipfile"
).split()
_COMMON = set(
    "a about above after again all also an and any are as at be because been before being below between both but by "
    "can cannot could did do does each either for from had has have how if in into is it its itself just like may "
    "might more most must no none nor not of on once one only or other otherwise over same see should since so some "
    "such than that the their them then there these they this those to two under until up used uses using was what "
    "when where whether which while who why will with within without would you your".split()
)


@cache
def documents() -> dict[str, str]:
    """Flowing text by name: Python's reference and the help texts of its modules."""
    import importlib
    import pydoc
    from pydoc_data.topics import topics

    found = {name: join_lines(text) for name, text in sorted(topics.items())}
    for module in _MODULES:
        held = importlib.import_module(module)
        texts = [held.__doc__ or ""]
        for key in sorted(vars(held)):
            texts.append(pydoc.getdoc(vars(held)[key]) if not key.startswith("_") else "")
        found[module] = join_lines("\n\n".join(text for text in texts if len(text) > 80))
    return {key: text for key, text in found.items() if len(text) > 400}


def topic(name: str) -> str:
    """One chapter of Python's reference."""
    from pydoc_data.topics import topics

    return join_lines(topics[name])


def sentences(text: str) -> list[str]:
    """Sentences of ordinary length, as they stand in the flowing text."""
    found = []
    for paragraph in text.split("\n\n"):
        for sentence in re.split(r"(?<=[.?!:])\s+(?=[A-Z\"“*])", paragraph):
            if 40 <= len(sentence) <= 300 and sentence[-1] == "." and sentence[:1].isupper() and "::=" not in sentence:
                found.append(sentence)
    return found


@cache
def sentences_of(name: str) -> list[str]:
    """Sentences of one of the `documents`."""
    return sentences(documents()[name])


def content_words(text: str) -> list[str]:
    """Words that say something, in order, each once."""
    words = re.findall(r"[A-Za-z_][\w.]*[\w]", text)
    return list(dict.fromkeys(w for w in words if w.lower() not in _COMMON))


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document, a sentence in it, and a question that this sentence answers."""

    source: str
    text: str
    sentence: str
    question: str


def passage(rng: random.Random, length: int) -> Passage:
    """A passage of about `length` characters from anywhere, with a question about one of its sentences."""
    names = list(documents())
    while True:
        source = rng.choice(names)
        text = documents()[source]
        found = sentences_of(source)
        if not found:
            continue
        sentence = rng.choice(found)
        asked = question(rng, sentence)
        if asked is None or asked in HELD_OUT:
            continue
        at = text.find(sentence)
        start = max(0, at - rng.randint(0, max(0, length - len(sentence))))
        start = text.rfind(" ", 0, start) + 1
        cut = text[start : max(start + length, at + len(sentence))].strip()
        return Passage(source, cut, sentence, blurred(rng, asked, cut) if rng.random() < 0.35 else asked)


def blurred(rng: random.Random, asked: str, text: str) -> str:
    """The question with one word that another sentence of the passage may hold, as people ask who do not quote."""
    stray = rng.choice(content_words(text) or ["it"])
    own = content_words(asked.rstrip("?"))[1:]
    if len(own) > 1 and rng.random() < 0.5:
        return asked.replace(rng.choice(own), stray, 1)
    return f"{asked.rstrip('?')} {rng.choice(('of a', 'in a', 'for', 'with the', 'by'))} {stray}?"


def foreign_passage(rng: random.Random, like: Passage, length: int) -> str:
    """A passage of another document."""
    return _cut(rng, rng.choice([name for name in documents() if name != like.source]), length)


def _cut(rng: random.Random, source: str, length: int) -> str:
    text = documents()[source]
    start = rng.randint(0, max(0, len(text) - length))
    return text[start : start + length].strip()


def other_passage(rng: random.Random, like: Passage, length: int) -> str:
    """A passage that does not hold the sentence: from the same document where it is long enough."""
    names = list(documents())
    for _ in range(20):
        source = like.source if rng.random() < 0.5 else rng.choice(names)
        cut = _cut(rng, source, length)
        if like.sentence[:40] not in cut and like.sentence[-40:] not in cut and len(cut) > 100:
            return cut
    return "This passage is about something else."


_SAYS = re.compile(
    r"^((?:The|A|An|This|These|Some|All)\b.{2,60}?|\"[^\"]+\"|[A-Z][a-z]+(?: [a-z]+){0,3}(?<=s)) "
    r"(is|are|was|can be|may be|must be|cannot be|has|have|cannot|can|must) (.+)$"
)
_ACTS = re.compile(r"^((?:The|A|An|This)\b.{2,50}?|\"[^\"]+\") ([a-z]{3,}s) (.+)$")
_LED_IN = re.compile(
    r"^(?:Note that|(In|For|With) ([^,]{4,60}),|(?:Unlike|Like|As) [^,]{1,60},|[A-Z][a-z]+ly,) (\S.{20,})$"
)
_NO_SUBJECT = {"This", "Returns", "Raises"}
_IF = re.compile(r"^(If|When|Whenever|Unless) ([^,]{8,110}), (.+)\.$")
_LATER_IF = re.compile(r"^(.{10,140}?),? (if|when|whenever|unless|only if) ([^,]{8,140})\.$")


def question(rng: random.Random, sentence: str) -> str | None:
    """A question that the sentence answers; None where none comes to mind."""
    made = [q for q in (_conditional(rng, sentence), _of_subject(rng, sentence), _of_words(rng, sentence)) if q]
    if not made:
        return None
    return made[0] if rng.random() < 0.6 else rng.choice(made)


def _conditional(rng: random.Random, sentence: str) -> str | None:
    if found := _IF.match(sentence):
        condition = found[2]
        asks = ["What happens if {}?", "What happens when {}?", "What if {}?", "What does Python do when {}?"]
        if found[1] == "Unless":
            return None
        return rng.choice(asks).format(condition)
    if found := _LATER_IF.match(sentence):
        return _when(rng, found[1])
    return None


def _when(rng: random.Random, claim: str) -> str | None:
    if found := _SAYS.match(claim):
        subject, verb, rest = lowered(found[1]), found[2], found[3]
        if verb in ("is", "are", "was"):
            return f"{rng.choice(('When', 'When', 'In which case', 'Under which condition'))} {verb} {subject} {rest}?"
        if " be" in verb:
            return f"When {verb.split()[0]} {subject} be {rest}?"
    if found := _ACTS.match(claim):
        return f"When does {lowered(found[1])} {_base(found[2])} {found[3]}?"
    return None


def _of_subject(rng: random.Random, sentence: str) -> str | None:
    if found := _LED_IN.match(sentence):
        made = _of_subject(rng, found[3][0].upper() + found[3][1:])
        place = f" {found[1].lower()} {found[2]}?" if found[1] and rng.random() < 0.7 else "?"
        return made and made.rstrip("?") + place
    body = sentence[:-1]
    found = _SAYS.match(body)
    if found and found[1] not in _NO_SUBJECT:
        subject, verb, rest = lowered(found[1]), found[2], found[3]
        words = rest.split()
        if verb in ("is", "are", "was"):
            if len(words) > 3 and rng.random() < 0.5:
                asked = rng.choice(("How", "Why", "Where", "When", "By what"))
                return f"{asked} {verb} {subject} {words[0]}?"
            return f"{rng.choice(('What', 'What exactly'))} {verb} {subject}?"
        if " be" in verb:
            return f"{rng.choice(('What', 'How', 'When', 'Where'))} {verb.split()[0]} {subject} be {words[0]}?"
        if verb == "cannot":
            return f"What can {subject} not {words[0]}?"
        if verb in ("can", "must"):
            return f"{rng.choice(('What', 'How', 'When', 'Where'))} {verb} {subject} {words[0]}?"
        if verb == "have" and len(words) > 2 and rng.random() < 0.4:
            return f"Which {words[-1]} do {subject} have?"
        return f"What {'does' if verb == 'has' else 'do'} {subject} have?"
    if found := _ACTS.match(body):
        subject, act = lowered(found[1]), _base(found[2])
        words = content_words(found[3])
        if words and rng.random() < 0.4:
            return f"{rng.choice(('When', 'How', 'Why', 'Where'))} does {subject} {act} {rng.choice(words)}?"
        return f"What does {subject} {act}?" if rng.random() < 0.6 else f"What does {subject} do?"
    return None


def _of_words(rng: random.Random, sentence: str) -> str | None:
    words = content_words(sentence)
    if len(words) < 4:
        return None
    count = rng.randint(2, min(4, len(words)))
    at = sorted(rng.sample(range(len(words)), count))
    chosen = [words[i] for i in at]
    first, rest = chosen[0], " ".join(chosen[1:])
    forms = (
        "What does it say about {first} and {rest}?",
        "How do {first} and {rest} belong together?",
        "What is the rule for {first} {rest}?",
        "How does {first} work with {rest}?",
        "Which {first} is meant by {rest}?",
        "What should I know about {rest} of {first}?",
        "When do {first} {rest} matter?",
        "Can I use {first} for {rest}?",
        "How do I {first} {rest}?",
        "Is {first} {rest}?",
        "Why {first} {rest}?",
    )
    return rng.choice(forms).format(first=first, rest=rest)


def lowered(text: str) -> str:
    """Without the capital of a sentence's start."""
    first = text.split(" ", 1)[0]
    return text[0].lower() + text[1:] if (first.isalpha() and first[1:].islower()) or first == "A" else text


def _base(verb: str) -> str:
    """The infinitive of a third person: raises, tries, does."""
    if verb.endswith("ies"):
        return verb[:-3] + "y"
    if verb.endswith(("sses", "shes", "ches", "xes", "zes", "oes")):
        return verb[:-2]
    return verb[:-1]
