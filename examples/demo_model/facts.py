"""Facts in a grammar: a subject, a relation and a value; ways to state each and to ask for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo_model.words import name, value, word


@dataclass(frozen=True, slots=True)
class Relation:
    """`{s}` is the subject and `{v}` the value. Questions ask for the value; the first statement answers them."""

    subject: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


def _relation(subject: str, value: str, statements: str, questions: str) -> Relation:
    return Relation(subject, value, tuple(statements.split(" | ")), tuple(questions.split(" | ")))


RELATIONS = tuple(
    _relation(*row)
    for row in (
        (
            "company",
            "year",
            "{s} was founded in {v}. | The company {s} opened its doors in {v}. | {s} has been in business since {v}.",
            "When was {s} founded? | In which year did {s} start? | What is the founding year of {s}? | "
            "Since when has {s} been in business?",
        ),
        (
            "company",
            "place",
            "{s} has its head office in {v}. | The headquarters of {s} are in {v}. | {s} is based in {v}.",
            "Where is {s} based? | In which town is the head office of {s}? | Where are the headquarters of {s}? | "
            "What is the home town of {s}?",
        ),
        (
            "company",
            "person",
            "{s} is led by {v}. | The chief executive of {s} is {v}. | {v} runs {s}.",
            "Who leads {s}? | Who is the chief executive of {s}? | Who runs {s}? | Who is in charge of {s}?",
        ),
        (
            "company",
            "thing",
            "{s} makes {v}. | The main product of {s} is {v}. | {s} is known for its {v}.",
            "What does {s} make? | What is the main product of {s}? | What is {s} known for? | "
            "Which goods come from {s}?",
        ),
        (
            "company",
            "count",
            "{s} employs {v} people. | {v} people work at {s}. | The staff of {s} numbers {v}.",
            "How many people does {s} employ? | How many people work at {s}? | How large is the staff of {s}? | "
            "What is the number of employees of {s}?",
        ),
        (
            "person",
            "place",
            "{s} was born in {v}. | The birthplace of {s} is {v}. | {s} comes from {v}.",
            "Where was {s} born? | What is the birthplace of {s}? | Where does {s} come from? | "
            "In which town was {s} born?",
        ),
        (
            "person",
            "thing",
            "{s} collects {v}. | The hobby of {s} is collecting {v}. | {s} is fond of {v}.",
            "What does {s} collect? | What is the hobby of {s}? | What is {s} fond of? | "
            "Which things does {s} collect?",
        ),
        (
            "person",
            "date",
            "{s} was born on {v}. | The birthday of {s} is {v}. | {s} came into the world on {v}.",
            "When was {s} born? | What is the birthday of {s}? | On which day was {s} born? | "
            "What is the date of birth of {s}?",
        ),
        (
            "person",
            "company",
            "{s} works for {v}. | The employer of {s} is {v}. | {s} has a job at {v}.",
            "Who does {s} work for? | Who is the employer of {s}? | Where does {s} have a job? | "
            "Which company employs {s}?",
        ),
        (
            "product",
            "money",
            "The {s} costs {v}. | The price of the {s} is {v}. | The {s} sells for {v}.",
            "How much does the {s} cost? | What is the price of the {s}? | For how much does the {s} sell? | "
            "What do I pay for the {s}?",
        ),
        (
            "product",
            "weight",
            "The {s} weighs {v}. | The weight of the {s} is {v}. | On a scale, the {s} shows {v}.",
            "How much does the {s} weigh? | What is the weight of the {s}? | How heavy is the {s}? | "
            "What does the {s} weigh?",
        ),
        (
            "product",
            "colour",
            "The {s} comes in {v}. | The colour of the {s} is {v}. | The {s} is painted {v}.",
            "What colour is the {s}? | In which colour does the {s} come? | How is the {s} painted? | "
            "What is the colour of the {s}?",
        ),
        (
            "product",
            "company",
            "The {s} is made by {v}. | The maker of the {s} is {v}. | {v} builds the {s}.",
            "Who makes the {s}? | Who is the maker of the {s}? | Which company builds the {s}? | "
            "By whom is the {s} made?",
        ),
        (
            "place",
            "count",
            "{s} has {v} inhabitants. | The population of {s} is {v}. | {v} people live in {s}.",
            "How many inhabitants does {s} have? | What is the population of {s}? | How many people live in {s}? | "
            "How large is the population of {s}?",
        ),
        (
            "place",
            "person",
            "{s} is governed by {v}. | The mayor of {s} is {v}. | {v} is the mayor of {s}.",
            "Who is the mayor of {s}? | Who governs {s}? | By whom is {s} governed? | Who is at the head of {s}?",
        ),
        (
            "place",
            "length",
            "{s} lies {v} from the coast. | The distance from {s} to the coast is {v}. | "
            "From {s} it is {v} to the sea.",
            "How far is {s} from the coast? | What is the distance from {s} to the coast? | "
            "How far is it from {s} to the sea? | How far does {s} lie from the sea?",
        ),
        (
            "place",
            "time",
            "The market in {s} opens at {v}. | In {s}, the market begins at {v}. | {s} opens its market at {v}.",
            "When does the market in {s} open? | At what time does the market begin in {s}? | "
            "What is the opening time of the market in {s}? | When can I go to the market in {s}?",
        ),
        (
            "team",
            "person",
            "{s} is coached by {v}. | The coach of {s} is {v}. | {v} trains {s}.",
            "Who coaches {s}? | Who is the coach of {s}? | Who trains {s}? | By whom is {s} coached?",
        ),
        (
            "team",
            "place",
            "{s} plays its home games in {v}. | The stadium of {s} is in {v}. | {s} is at home in {v}.",
            "Where does {s} play its home games? | Where is the stadium of {s}? | Where is {s} at home? | "
            "In which town does {s} play?",
        ),
        (
            "species",
            "thing",
            "The {s} feeds on {v}. | The diet of the {s} is {v}. | The {s} is drawn to {v}.",
            "What does the {s} feed on? | What is the diet of the {s}? | What is the {s} drawn to? | "
            "Which food does the {s} take?",
        ),
        (
            "species",
            "place",
            "The {s} lives near {v}. | The habitat of the {s} is around {v}. | The {s} is found in {v}.",
            "Where does the {s} live? | What is the habitat of the {s}? | Where is the {s} found? | "
            "In which region does the {s} live?",
        ),
        (
            "ship",
            "date",
            "The {s} set sail on {v}. | The maiden voyage of the {s} began on {v}. | The {s} left port on {v}.",
            "When did the {s} set sail? | When did the maiden voyage of the {s} begin? | "
            "On which day did the {s} leave port? | What is the sailing date of the {s}?",
        ),
        (
            "ship",
            "person",
            "The {s} was commanded by {v}. | The captain of the {s} was {v}. | {v} commanded the {s}.",
            "Who was the captain of the {s}? | Who commanded the {s}? | By whom was the {s} commanded? | "
            "Who was in command of the {s}?",
        ),
        (
            "ship",
            "thing",
            "The {s} carried {v}. | The cargo of the {s} was {v}. | The {s} was loaded with {v}.",
            "What did the {s} carry? | What was the cargo of the {s}? | What was the {s} loaded with? | "
            "Which goods were on the {s}?",
        ),
    )
)
_BY_SUBJECT = {kind: [r for r in RELATIONS if r.subject == kind] for kind in sorted({r.subject for r in RELATIONS})}


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement about one subject, the questions that it answers, and the answer: in one wording of its relation,
    first the subject, then the value."""

    subject: str
    value: str
    statement: str
    questions: tuple[str, ...]
    answer: str


def fact(rng: random.Random, subject: str, relation: Relation) -> Fact:
    found = value(rng, relation.value)
    return _fact(rng, relation.statements, relation.questions, s=subject, v=found)


def _fact(rng: random.Random, statements: Sequence[str], questions: Sequence[str], **known: str) -> Fact:
    statement = rng.choice(statements).format(**known)
    asked = tuple(question.format(**known) for question in questions)
    return Fact(known["s"], known["v"], statement, asked, statements[0].format(**known))


_MADE_UP = (
    "{s} has the {r} {v}. | The {r} of {s} is {v}. | {v} is the {r} of {s}. | For {s}, the {r} was {v}. | "
    "{v} serves {s} as its {r}. | The {r} that belongs to {s} is called {v}."
).split(" | ")
_MADE_UP_QUESTIONS = (
    "What is the {r} of {s}? | Which {r} does {s} have? | What serves {s} as its {r}? | "
    "What is known about the {r} of {s}?"
).split(" | ")


def made_up_document(rng: random.Random, subjects: int, most: int = 3) -> list[list[Fact]]:
    """As `document`, with relations that nobody has heard of: the same few for all subjects, so that both subject and
    relation have to be looked up, and no sentence can be said from memory."""
    relations = [word(rng) for _ in range(rng.randint(1, most))]
    kinds = ("person", "place", "thing", "count", "company", "date")
    found = []
    for _ in range(subjects):
        subject = name(rng, rng.choice(("person", "company", "place", "ship")))
        chosen = rng.sample(relations, rng.randint(1, len(relations)))
        found.append([_made_up(rng, subject, relation, value(rng, rng.choice(kinds))) for relation in chosen])
    return found


def _made_up(rng: random.Random, subject: str, relation: str, found: str) -> Fact:
    return _fact(rng, _MADE_UP, _MADE_UP_QUESTIONS, s=subject, r=relation, v=found)


def alike_document(rng: random.Random, subjects: int, most: int = 2) -> list[list[Fact]]:
    """As `document`, with the same relations for subjects of one kind, so that only the name tells them apart."""
    kind = rng.choice(list(_BY_SUBJECT))
    relations = rng.sample(_BY_SUBJECT[kind], rng.randint(1, most))
    found = []
    for _ in range(subjects):
        subject = name(rng, kind)
        found.append([fact(rng, subject, relation) for relation in rng.sample(relations, len(relations))])
    return found


def document(rng: random.Random, subjects: int, most: int = 3) -> list[list[Fact]]:
    """Facts about `subjects` things, a paragraph each; often several of one kind, so that only the name tells."""
    kinds = list(_BY_SUBJECT)
    same = rng.choice(kinds)
    found = []
    for _ in range(subjects):
        kind = same if rng.random() < 0.5 else rng.choice(kinds)
        relations = _BY_SUBJECT[kind]
        chosen = rng.sample(relations, min(len(relations), rng.randint(1, most)))
        subject = name(rng, kind)
        found.append([fact(rng, subject, relation) for relation in chosen])
    return found
