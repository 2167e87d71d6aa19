"""Tests of snapshots of values: which are copied, which are refused, and that no user code runs."""

from __future__ import annotations

import enum
import threading
from typing import Any, Generic, TypeVar

import pytest
from langchain_core.messages import AIMessage
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from teola_plugin.adapters.snapshots import NotCopied, exactly, snapshot

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"


class Step(BaseModel):
    text: str
    colour: Colour = Colour.RED


class Plan(BaseModel):
    """A schema, as those of structured answers."""

    model_config = ConfigDict(extra="allow")

    steps: list[Step] = Field(default_factory=list)
    _seen: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def refuse_copies(self) -> Plan:
        VALIDATED.append(self)
        return self


class Box(BaseModel, Generic[T]):
    content: T


VALIDATED: list[Any] = []


def test_snapshot_copies_a_user_schema_without_running_its_code() -> None:
    plan = Plan(steps=[Step(text="sow")], note="by hand")  # type: ignore[call-arg]
    plan._seen.append("once")
    VALIDATED.clear()

    copy = snapshot(plan)

    assert not VALIDATED
    assert type(copy) is Plan
    assert copy == plan
    assert copy is not plan
    assert exactly(copy, plan)
    plan.steps[0].text = "mow"
    plan._seen.append("twice")
    assert copy.steps[0].text == "sow"
    assert copy._seen == ["once"]
    assert copy.note == "by hand"
    assert copy.steps[0].colour is Colour.RED
    assert not exactly(copy, plan)


def test_snapshot_copies_message_with_parsed_generic_schema() -> None:
    message = AIMessage("{}", additional_kwargs={"parsed": Box[Step](content=Step(text="sow"))})
    copy = snapshot(message)
    assert exactly(copy, message)
    assert copy.additional_kwargs["parsed"] is not message.additional_kwargs["parsed"]


class WithLock(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    lock: Any = Field(default_factory=threading.Lock)


class OwnCopy(BaseModel):
    def __deepcopy__(self, memo: Any) -> OwnCopy:
        raise AssertionError


class OwnSetter(BaseModel):
    text: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError


class OwnMessage(AIMessage):
    """A subclass of a framework's class may mean anything."""


@pytest.mark.parametrize(
    "value", [WithLock(), OwnCopy(), OwnSetter(), OwnMessage("a"), object()], ids=lambda value: type(value).__name__
)
def test_snapshot_raises_for_values_that_are_not_data(value: Any) -> None:
    with pytest.raises(NotCopied):
        snapshot([value])
    assert not exactly(value, value)
