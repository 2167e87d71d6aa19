"""Tests of the arguments of tools that are computed before the call, unless code of the user's decides them."""

from __future__ import annotations

import datetime
import functools
from typing import Annotated, Any, Literal

import pydantic
import pytest
from annotated_types import Predicate
from langchain_core.callbacks import Callbacks
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool, Tool, tool
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, field_validator, model_validator
from pydantic.v1 import BaseModel as OldModel

from teola_plugin.adapters.langgraph.agents.tool_inputs import function_arguments, is_plain, needs_runtime_context


class Fields(BaseModel):
    text: str = Field(description="a text", min_length=1, pattern=".*")
    often: Annotated[int, Field(ge=1)] = 1
    kind: Literal["a", "b"] | None = None
    many: list[dict[str, float]] = Field(default_factory=list)
    at: datetime.date | None = None
    any: Any = None


class Validated(Fields):
    @field_validator("text")
    @classmethod
    def check(cls, text: str) -> str:
        return text


class Whole(BaseModel):
    text: str

    @model_validator(mode="before")
    @classmethod
    def check(cls, value: Any) -> Any:
        return value


class Before(BaseModel):
    text: Annotated[str, BeforeValidator(str)]


class After(BaseModel):
    texts: list[Annotated[str, AfterValidator(str)]]


class Predicated(BaseModel):
    text: Annotated[str, Predicate(str.islower)]


class Nested(BaseModel):
    fields: Fields


class Made(BaseModel):
    text: str = Field(default_factory=lambda: "x")


class Own(BaseModel):
    text: str

    def model_post_init(self, context: Any) -> None:
        self.text = self.text.upper()


class Old(OldModel):
    text: str


@tool
def plain(text: str, often: int = 1, kind: Literal["a", "b"] | None = None) -> str:
    """Plain."""
    return text


def test_schemas_with_plain_fields_are_plain() -> None:
    assert all(map(is_plain, [None, {"type": "object"}, Fields, plain.args_schema]))


@pytest.mark.parametrize("schema", [Validated, Whole, Before, After, Predicated, Nested, Made, Own, Old, "no", int])
def test_schemas_with_user_code_are_not_plain(schema: Any) -> None:
    assert not is_plain(schema)


def test_function_arguments_equal_those_of_a_tool_call() -> None:
    assert function_arguments(plain, {"text": "x", "often": "2"}) == ((), {"text": "x", "often": 2, "kind": None})
    with pytest.raises(pydantic.ValidationError):
        function_arguments(plain, {"often": 1})
    validated = StructuredTool(name="t", description="t", func=lambda text: text, args_schema=Validated)
    assert function_arguments(validated, {"text": "x"}) is None
    described = StructuredTool(
        name="t", description="t", func=lambda a: a, args_schema={"type": "object", "properties": {}}
    )
    args = {"a": [1]}
    made = function_arguments(described, args)
    assert made == ((), {"a": [1]}) and made[1] is not args
    single = Tool("single", lambda text: text, "one text")
    assert function_arguments(single, {"__arg1": "x"}) == (("x",), {})


def one(x: int) -> int:
    return x


def with_callbacks(x: int, callbacks: Callbacks = None) -> int:
    return x


def with_config(x: int, where: RunnableConfig) -> int:
    return x


def with_optional(x: int, where: RunnableConfig | None = None) -> int:
    return x


def test_functions_with_config_or_callbacks_need_runtime_context() -> None:
    assert all(map(needs_runtime_context, [with_callbacks, with_config, with_optional, 3]))
    assert not any(map(needs_runtime_context, [one, functools.partial(one, 1), "text".join, lambda *a, **k: 1]))
