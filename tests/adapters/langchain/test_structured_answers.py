"""Tests of calls whose inputs are computed of structured answers, which are objects of the user's own classes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import CommaSeparatedListOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import BaseModel, ConfigDict, field_serializer
from support.hosted_model import HostedModel

from teola_plugin import accelerate

ITEMS = ["a", "b", "c"]


class Urgency(Enum):
    """How soon an answer is needed."""

    LOW = "low"
    HIGH = "high"


class Label(BaseModel):
    """The answer to a classification."""

    category: str
    score: int
    urgency: Urgency = Urgency.LOW

    @property
    def shown(self) -> str:
        """The category in capitals."""
        return self.category.upper()


class Spelled(Label):
    """An answer that is printed and compared by code of the user's."""

    def __str__(self) -> str:
        SPELLINGS.append(self.category)
        return self.category

    def __lt__(self, other: Any) -> bool:
        return self.score < int(other.score)


SPELLINGS: list[str] = []


class Classifier(HostedModel):
    """A model that answers a classification by an object."""

    def _end(self, prompt: str) -> ChatResult:
        result = super()._end(prompt)
        if not prompt.startswith("classify"):
            return result
        item = prompt.split()[-1]
        text = f'{{"category": "kind {item}", "score": {ord(item) % 98}, "urgency": "high"}}'
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


Use = Callable[[Any, list[str], list[Any]], list[str]]


def zipped(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    replies = []
    for item, label in zip(items, labels, strict=True):
        replies.append(model.invoke(f"reply to {item} as {label.category}").content)
    return replies


def zipped_in_a_comprehension(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [model.invoke(f"reply to {item} as {label.shown}").content for item, label in zip(items, labels)]  # noqa: B905


def numbered(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    replies = []
    for number, label in enumerate(labels, 1):
        replies.append(model.invoke(f"reply {number}: {label.category}").content)
    return replies


def sliced(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [model.invoke(f"reply as {label.category}").content for label in labels[:2]]


def reverse(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [model.invoke(f"reply as {label.category}").content for label in list(reversed(labels))]


def ranked(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [
        model.invoke(f"reply as {label.category}").content for label in sorted(labels, key=lambda label: -label.score)
    ]


def best(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    label = max(labels, key=lambda label: label.score)
    return [model.invoke(f"reply as {label.category}").content, model.invoke(f"check {label.score}").content]


def filtered(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    important = [label for label in labels if label.score > 0]
    return [model.invoke(f"reply as {label.category}").content for label in important]


def by_category(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    scores = {label.category: label.score for label in labels}
    return [model.invoke(f"reply to {item}: {scores[f'kind {item}']}").content for item in items]


def printed(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [model.invoke(f"reply to {label}").content for label in labels]


def if_any(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    text = f"{len(labels)} labels" if len(labels) > 0 else "no labels"
    return [model.invoke(f"reply to {text} of {item}").content for item in items]


def ordered(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [model.invoke(f"reply as {label.category}").content for label in sorted(labels)]


def build(use: Use, model: Any, kind: type[Label] = Label) -> Runnable[Any, Any]:
    """Return a chain that classifies each item, and then uses the labels."""
    classify = ChatPromptTemplate.from_template("classify {item}") | model | PydanticOutputParser(pydantic_object=kind)

    def run(inputs: dict[str, Any]) -> list[str]:
        labels = [classify.invoke({"item": item}) for item in inputs["items"]]
        return use(model, inputs["items"], labels)

    return RunnableLambda(run)


class Watched(Classifier):
    """Notes how many calls that are no classifications are under way at most."""

    most_replies: int = 0
    running_replies: int = 0

    def _begin(self, messages: Any) -> str:
        prompt = super()._begin(messages)
        if not prompt.startswith("classify"):
            self.running_replies += 1
            self.most_replies = max(self.most_replies, self.running_replies)
        return prompt

    def _end(self, prompt: str) -> ChatResult:
        if not prompt.startswith("classify"):
            self.running_replies -= 1
        return super()._end(prompt)


def compare(use: Use, kind: type[Label] = Label, **options: Any) -> Watched:
    """Check that the accelerated chain answers and asks as the original does. Return its model."""
    original, model = Watched(**options), Watched(**options)
    expected, result = [], []
    for app, outcomes in ((build(use, original, kind), expected), (accelerate(build(use, model, kind)), result)):
        try:
            outcomes.append(app.invoke({"items": ITEMS}))
        except ValueError as error:
            outcomes.append(str(error))
    assert result == expected
    if not options:
        assert model.prompts == original.prompts
        assert original.most_replies == 1
    return model


GAINING = (
    *(zipped, zipped_in_a_comprehension, numbered, sliced, reverse, ranked, best, filtered, by_category, printed),
    if_any,
)


@pytest.mark.parametrize("use", GAINING)
def test_calls_with_parts_of_structured_answers_overlap(use: Use) -> None:
    assert compare(use).most_replies >= 2


@pytest.mark.parametrize("use", [zipped, numbered, sliced, reverse])
def test_lists_of_objects_with_own_code_are_taken_apart(use: Use) -> None:
    SPELLINGS.clear()
    assert compare(use, Spelled).most_replies >= 2
    assert SPELLINGS == []


@pytest.mark.parametrize("use", [printed, ordered])
def test_own_code_of_structured_answers_runs_as_often_as_in_the_original(use: Use) -> None:
    SPELLINGS.clear()
    assert compare(use, Spelled).most_replies == 1
    assert len(SPELLINGS) == (6 if use is printed else 0)


@pytest.mark.parametrize("use", [zipped, ranked, filtered])
def test_error_of_a_call_with_parts_of_structured_answers_is_the_originals(use: Use) -> None:
    compare(use, fails_on="kind b")


def test_field_that_is_missing_raises_the_originals_error() -> None:
    def missing(model: Any, items: list[str], labels: list[Any]) -> list[str]:
        ranked_labels = sorted(labels, key=lambda label: label.rank)
        return [model.invoke(f"reply as {label.category}").content for label in ranked_labels]

    with pytest.raises(AttributeError, match="rank"):
        accelerate(build(missing, Classifier())).invoke({"items": ITEMS})


# ------------------------------------------------------------ methods of the framework


class Serialized(Label):
    """An answer with a serializer of the user's."""

    @field_serializer("category")
    def write(self, category: str) -> str:
        SPELLINGS.append(category)
        return category.upper()


class Described(Label):
    """An answer whose schema is described by code of the user's."""

    model_config = ConfigDict(json_schema_extra=lambda schema: SPELLINGS.append("schema"))


def dumped(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [model.invoke(f"reply to {label.model_dump()}").content for label in labels]


def dumped_as_json(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    replies = []
    for label in labels:
        replies.append(model.invoke("reply to " + label.model_dump_json(indent=2, exclude={"score"})).content)
        replies.append(model.invoke("check " + label.model_dump_json(indent=2)).content)
    return replies


def dumped_indented(model: Any, items: list[str], labels: list[Any]) -> list[str]:
    return [model.invoke(f"reply to {label.model_dump_json(indent=2)}").content for label in labels]


@pytest.mark.parametrize("use", [dumped, dumped_indented])
def test_calls_with_dumps_of_structured_answers_overlap(use: Use) -> None:
    assert compare(use).most_replies >= 2


def test_dumps_with_other_options_send_the_originals_requests() -> None:
    compare(dumped_as_json)


@pytest.mark.parametrize("use", [dumped, dumped_indented])
def test_serializers_of_the_users_run_as_often_as_in_the_original(use: Use) -> None:
    SPELLINGS.clear()
    assert compare(use, Serialized).most_replies == 1
    assert len(SPELLINGS) == 6


def build_parser(model: Any, parser: Any) -> Runnable[Any, Any]:
    """Return a chain whose function describes the format of an answer, and parses it."""

    def run(inputs: dict[str, Any]) -> list[str]:
        text = model.invoke(f"classify by {parser.get_format_instructions()} {inputs['items'][0]}").content
        label = parser.parse(text)
        return [model.invoke(f"reply to {item}: {label}").content for item in inputs["items"]]

    return RunnableLambda(run)


@pytest.mark.parametrize(
    ("make_parser", "most_replies"),
    [
        (lambda: PydanticOutputParser(pydantic_object=Label), 3),
        (JsonOutputParser, 3),
        (CommaSeparatedListOutputParser, 3),
        (lambda: PydanticOutputParser(pydantic_object=Described), 1),
    ],
)
def test_calls_behind_parsers_in_functions_overlap(make_parser: Any, most_replies: int) -> None:
    original, model = Watched(), Watched()
    SPELLINGS.clear()
    expected = build_parser(original, make_parser()).invoke({"items": ITEMS})
    schemas = len(SPELLINGS)
    fast = accelerate(build_parser(model, make_parser()))

    assert fast.invoke({"items": ITEMS}) == expected

    assert model.prompts == original.prompts
    assert model.most_replies == most_replies
    assert len(SPELLINGS) == 2 * schemas


def test_text_that_a_parser_refuses_raises_the_originals_error() -> None:
    class Broken(Classifier):
        def _end(self, prompt: str) -> ChatResult:
            super()._end(prompt)
            return ChatResult(generations=[ChatGeneration(message=AIMessage("no object"))])

    errors = []
    for change in (lambda app: app, accelerate):
        with pytest.raises(OutputParserException) as caught:
            change(build_parser(Broken(), JsonOutputParser())).invoke({"items": ITEMS})
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
