"""Tests of which code runs when Pydantic validates a model, read from its core schema."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from teola_plugin.shims.pydantic import is_model_class, model_schema_fields, validated_field


class Color(Enum):
    """Choices."""

    RED = "red"


class Inner(BaseModel):
    """A model inside another."""

    name: str = "a"


class Plain(BaseModel):
    """A model with fields of all kinds that run no code of the user's."""

    text: str
    number: int = 3
    names: list[str] = Field(default_factory=list)
    pair: tuple[int, str] | None = None
    options: dict[str, Any] = {}
    mode: Literal["a", "b"] = "a"
    tagged: Annotated[str, {"kind": "llm"}] = Field(default="q", alias="other")
    color: Color = Color.RED
    inner: Inner | None = None


class WithFieldValidator(BaseModel):
    """A model with a validator of a field."""

    text: str

    @field_validator("text")
    @classmethod
    def change(cls, value: str) -> str:
        """Return another text."""
        return value * 2


class WithModelValidator(BaseModel):
    """A model with a validator of its own."""

    text: str

    @model_validator(mode="before")
    @classmethod
    def change(cls, values: Any) -> Any:
        """Return the same values."""
        return values


class WithPostInit(BaseModel):
    """A model with code behind its validation."""

    text: str

    def model_post_init(self, context: Any, /) -> None:
        """Do nothing."""


class WithPrivate(BaseModel):
    """A model with a private attribute."""

    text: str
    _made: list[int] = PrivateAttr(default_factory=list)


class WithInit(BaseModel):
    """A model with a constructor of its own."""

    text: str

    def __init__(self, text: str) -> None:
        super().__init__(text=text)


class Stranger:
    """A class that is no data."""


OWN_CODE = [
    WithFieldValidator,
    WithModelValidator,
    WithPostInit,
    WithPrivate,
    WithInit,
    create_model("Annotation", text=(Annotated[str, AfterValidator(str.upper)], "a")),
    create_model("Factory", text=(str, Field(default_factory=lambda data: str(data)))),
    create_model("Arbitrary", __config__={"arbitrary_types_allowed": True}, one=(Stranger | None, None)),
    create_model("Unresolved", one=("Later", ...)),
]


def test_pydantic_classes_are_model_classes() -> None:
    assert is_model_class(Plain)
    assert not is_model_class(Stranger)
    assert not is_model_class(Plain(text="a"))


def test_schema_fields_give_plainness_and_defaults() -> None:
    fields = model_schema_fields(Plain)

    assert fields is not None
    assert list(fields) == list(Plain.model_fields)
    assert [name for name, field in fields.items() if not field.is_plain] == ["color", "inner"]
    assert not fields["text"].has_default
    assert fields["number"].default == 3
    assert fields["names"].factory is list


@pytest.mark.parametrize("model", OWN_CODE)
def test_model_with_custom_code_has_no_schema_fields(model: type[BaseModel]) -> None:
    assert model_schema_fields(model) is None


class WithPrivateData(BaseModel):
    """Reads its private attributes in `__getattr__`, as events of LlamaIndex's workflows do."""

    count: int
    _data: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return self._data[name]


def test_validated_field_converts_or_raises_validation_error() -> None:
    assert validated_field(WithPrivateData, "count", "3") == 3
    with pytest.raises(ValidationError):
        validated_field(WithPrivateData, "count", "many")
