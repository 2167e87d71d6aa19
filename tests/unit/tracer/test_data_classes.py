"""Tests of data classes whose objects are created without user code."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, computed_field, field_validator

from teola_plugin.graph import UnfitValue
from teola_plugin.tracer.functions.pure_expressions import read_field
from teola_plugin.tracer.purity.data_classes import data_class_of, size_of_data, writes_itself
from teola_plugin.tracer.purity.purity import MAX_PROPERTY_SIZE, analyze_purity, is_plain


@dataclass(kw_only=True)
class Settings:
    """Settings with defaults of all kinds."""

    name: str
    count: int = 3
    tags: list[str] = field(default_factory=list)
    fixed: str = field(default="a", init=False)
    client: Any = dataclasses


@dataclass(frozen=True, slots=True)
class Frozen(ABC):  # noqa: B024 (its metaclass is what counts)
    """Settings that cannot be changed."""

    name: str = "a"


class Inherited(Settings):
    """A class below a dataclass, without fields of its own."""


class Model(BaseModel):
    """Settings of pydantic."""

    name: str = "a"
    count: int = 3


@dataclass
class PostInit:
    """A class with code behind its constructor."""

    name: str = "a"

    def __post_init__(self) -> None:
        """Change the name."""
        self.name += "b"


@dataclass
class Init:
    """A class with a constructor of its own."""

    name: str = "a"

    def __init__(self) -> None:
        self.name = "b"


@dataclass
class Setter:
    """A class that decides what is set."""

    name: str = "a"

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, f"{value}b")


@dataclass
class Getter:
    """A class that decides what is read."""

    name: str = "a"

    def __getattribute__(self, name: str) -> Any:
        return f"{object.__getattribute__(self, name)}b"


@dataclass
class Maker:
    """A class that decides what is made."""

    name: str = "a"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)


@dataclass
class Variable:
    """A class whose constructor takes what is no field."""

    seed: InitVar[int] = 3
    name: str = "a"


class Meta(type):
    """A metaclass."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@dataclass
class OfMeta(metaclass=Meta):
    """A class whose metaclass makes its objects."""

    name: str = "a"


class Descriptor:
    """A descriptor that is a field."""

    def __get__(self, instance: Any, owner: Any) -> str:
        return "a"

    def __set__(self, instance: Any, value: Any) -> None: ...


@dataclass
class Described:
    """A class whose field is a descriptor."""

    name: Any = Descriptor()


def test_dataclass_has_the_fields_that_hold_data() -> None:
    data_class = data_class_of(Settings)

    assert data_class is not None
    assert not data_class.converts
    assert list(data_class.default_sizes) == ["name", "count", "tags", "fixed"]
    assert not data_class.fields["fixed"].is_argument


@pytest.mark.parametrize("kind", [Frozen, Inherited, Model])
def test_other_data_classes_have_fields(kind: type) -> None:
    data_class = data_class_of(kind)

    assert data_class is not None
    assert "name" in data_class.fields


OWN_CODE = [PostInit, Init, Setter, Getter, Maker, Variable, OfMeta, Described]


@pytest.mark.parametrize("kind", [*OWN_CODE, str, Descriptor, Settings(name="a"), len])
def test_class_with_code_of_its_own_is_no_data_class(kind: Any) -> None:
    assert data_class_of(kind) is None


@pytest.mark.parametrize(
    ("value", "size"), [("abc", 4), (3, 3), (None, 1), (["a", "b"], 5), ({"a": [1]}, 6), (object(), 1)]
)
def test_size_counts_items_and_characters(value: Any, size: int) -> None:
    assert size_of_data(value) == size


PURE: list[Callable[[Any], Any]] = [
    lambda values: Settings(name=values["a"]).name,
    lambda values: Settings(**values).name.upper(),
    lambda values: Model(**{k: v for k, v in values.items() if v}).count,
    lambda values: [Frozen(one).name for one in values],
]
IMPURE: list[Callable[[Any], Any]] = [
    lambda values: Settings(**values),
    lambda values: str(Settings(**values)),
    lambda values: Settings(**values).client,
    lambda values: Settings(**values).other,
    lambda values: PostInit(**values).name,
    lambda values: isinstance(values, Settings),
    lambda values: dict(**values),
    lambda values: Settings(*values).name,
]


@pytest.mark.parametrize("function", PURE)
def test_fields_of_data_classes_are_pure(function: Any) -> None:
    assert analyze_purity(function) is not None


@pytest.mark.parametrize("function", IMPURE)
def test_impure_uses_of_data_classes_are_not_pure(function: Any) -> None:
    assert analyze_purity(function) is None


# ------------------------------------------------------------ properties


printed: list[str] = []


class Editor(BaseModel):
    """A person, described by properties."""

    name: str
    roles: list[str] = []
    friend: Any = None

    @property
    def persona(self) -> str:
        """The name and the roles."""
        return f"{self.name}: {', '.join(self.roles)}"

    @property
    def noted(self) -> str:
        """The name, which is written down."""
        printed.append(self.name)
        return self.name

    @property
    def of_friend(self) -> str:
        """The name of another object."""
        return str(self.friend.name)


@dataclass
class Point:
    """A point with a property."""

    x: int

    @property
    def doubled(self) -> int:
        """Twice the value."""
        return self.x * 2


class Size(str, Enum):  # noqa: UP042 (as older apps have it)
    """An enum whose members are texts, one of which has the name of a method."""

    title = "title"
    LARGE = "large"


class Spelled(Enum):
    """An enum with a text of its own."""

    A = 1

    def __str__(self) -> str:
        return "a"


class Answer(BaseModel, frozen=True):
    """A model with a method, a class variable, a private attribute, an enum and another model."""

    limit: ClassVar[int] = 3
    size: Size = Size.LARGE
    inner: Answer | None = None
    _note: str = "private"

    @field_validator("size")
    @classmethod
    def check(cls, size: Size) -> Size:
        return size

    def describe(self) -> str:
        return f"{self.size}"


class Printed(Answer):
    """Inherits all but its text."""

    def __repr__(self) -> str:
        return "printed"


class Formatted(BaseModel):
    """Has a method of the name of a text's method."""

    x: int = 1

    def format(self) -> str:
        return ""


class Computed(BaseModel):
    """Prints a property."""

    x: int = 1

    @computed_field
    @property
    def y(self) -> int:
        return self.x


class Noting(BaseModel):
    """Notes what is read of it."""

    x: int = 1

    def __getattribute__(self, name: str) -> Any:
        printed.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("value", [Size.title, Size.LARGE, Answer(), Answer(inner=Answer()), [Answer()], Point])
def test_models_and_enums_without_own_code_are_plain(value: Any) -> None:
    assert is_plain(value) is not (value is Point)


@pytest.mark.parametrize(
    "value",
    [
        *(Spelled.A, Printed(), Answer(inner=Printed()), Formatted(), Computed(), Noting.model_construct()),
        *(Answer.model_construct(size=Spelled.A), Answer.model_construct(size=object()), Point(1)),
    ],
)
def test_models_and_enums_with_own_code_are_not_plain(value: Any) -> None:
    printed.clear()
    assert not is_plain(value)
    assert printed == []


def test_existing_models_are_not_plain_where_they_could_change() -> None:
    assert not is_plain([Answer()], may_hold_models=False)
    assert is_plain([Size.LARGE], may_hold_models=False)


def test_pure_properties_of_data_classes_are_read() -> None:
    assert read_field(Editor(name="Ada", roles=["chair", "editor"]), "persona") == "Ada: chair, editor"
    assert read_field(Point(3), "doubled") == 6


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Editor(name="Ada"), "noted"),
        (Editor(name="Ada", friend=Point(1)), "of_friend"),
        (Editor.model_construct(name=Point(1)), "persona"),
        (Editor.model_construct(name="Ada", roles=[Point(1)]), "persona"),
        (Editor(name="a" * MAX_PROPERTY_SIZE), "persona"),
    ],
)
def test_impure_properties_of_data_classes_are_not_read(value: Any, name: str) -> None:
    with pytest.raises(UnfitValue):
        read_field(value, name)

    assert printed == []


class Member(BaseModel):
    """A model that is part of another."""

    size: Size = Size.LARGE


class Group(BaseModel):
    """A model of all kinds of fields."""

    name: str = Field("a", description="a name", min_length=1)
    members: list[Member] = []
    kind: Literal["a", "b"] | None = None


class Serialized(BaseModel):
    """Writes a field by code of the user's."""

    x: Annotated[int, PlainSerializer(lambda x: str(x))] = 1


class Extended(BaseModel):
    """Has a description that code of the user's changes."""

    x: int = Field(1, json_schema_extra=lambda schema: None)


class Configured(BaseModel):
    """Has a configuration with code of the user's."""

    model_config = ConfigDict(json_schema_extra=lambda schema: None)


class Dumping(BaseModel):
    """Overrides a method of pydantic's."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {}


class Describing(BaseModel):
    """Describes its schema by code of the user's."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        return handler(schema)


class Outer(BaseModel):
    """Holds a model with code of the user's."""

    inner: list[Describing] = []


def test_models_without_own_code_write_themselves() -> None:
    assert [kind for kind in (Member, Group, Answer) if not writes_itself(kind)] == [Answer]  # it has a validator


@pytest.mark.parametrize("kind", [Serialized, Extended, Configured, Dumping, Describing, Outer, Point, Size, dict])
def test_models_with_own_code_may_write_anything(kind: Any) -> None:
    assert not writes_itself(kind)
