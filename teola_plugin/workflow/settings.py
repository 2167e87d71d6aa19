"""Fields of components: what each reads, which engines it asks, and the settings that a query may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.workflow.prompts import Prompt, as_prompt
from teola_plugin.workflow.values import Kind

Value = TypeVar("Value")
_READS, _ENGINE, _SETTING = "reads", "engine", "setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of a setting: its type, bounds, choices and default."""

    type: str
    """As JSON schema names it: `integer`, `number`, `string`, `boolean`, `array` (of texts), or `prompt`."""
    doc: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    default: Any = None

    def checked(self, value: Any, name: str) -> Any:
        """Return the value in the type that is stored. Raise RegistrationError, which names the setting, if invalid."""
        try:
            converted = _TYPES[self.type](value)
        except (TypeError, ValueError):
            raise self._wrong(value, name) from None
        is_low = self.minimum is not None and converted < self.minimum
        is_high = self.maximum is not None and converted > self.maximum
        if is_low or is_high or (self.choices and converted not in self.choices):
            raise self._wrong(value, name)
        return converted

    def _wrong(self, value: Any, name: str) -> RegistrationError:
        """Return the error for a value that does not fit the setting, with what is expected and the default as an
        example."""
        return RegistrationError(
            f"{name} is {value!r:.80}; expected {self.expected}.", hint=f"e.g. {name}={_plain(self.default)!r}"
        )

    @property
    def expected(self) -> str:
        """The valid values, in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = _WORDS[self.type]
        lower = "" if self.minimum is None else f" of at least {self.minimum:g}"
        upper = "" if self.maximum is None else f"{' and' if lower else ' of'} at most {self.maximum:g}"
        return words + lower + upper

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the setting."""
        schema = dict(_SCHEMAS[self.type])
        schema |= {"enum": list(self.choices)} if self.choices else {}
        schema |= {"minimum": self.minimum} if self.minimum is not None else {}
        schema |= {"maximum": self.maximum} if self.maximum is not None else {}
        schema |= {"description": self.doc} if self.doc else {}
        return schema | {"default": _plain(self.default)}


def _integer(value: Any) -> int:
    """Return an integer as it is. Raise TypeError for another value, also for True and False."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _number(value: Any) -> float:
    """Return a number as a float. Raise TypeError for another value, also for True, False and NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise TypeError
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _array(value: Any) -> tuple[str, ...]:
    """Return a list or tuple of texts as a tuple, which can be hashed. Raise TypeError for another value."""
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return tuple([_string(one) for one in value])


_TYPES: dict[str, Callable[[Any], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "string": _string,
    "array": _array,
    "prompt": as_prompt,
}
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list of texts",
    "prompt": "a prompt: a text with {variables}, or its text and system",
}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "system": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    ]
}
_SCHEMAS: dict[str, dict[str, Any]] = {
    **{name: {"type": name} for name in ("integer", "number", "boolean", "string")},
    "array": {"type": "array", "items": {"type": "string"}},
    "prompt": _PROMPT_SCHEMA,
}


# ------------------------------------------------------------ fields

if TYPE_CHECKING:
    _Kept = TypeVar("_Kept", covariant=True)
    _Given = TypeVar("_Given", contravariant=True)

    class _Field(Generic[_Kept, _Given]):
        """The type of a field for type checkers: assigned as one type, stored as another by `check_settings`."""

        def __get__(self, component: object, cls: Any = None) -> _Kept: ...  # type: ignore[empty-body]

        def __set__(self, component: object, value: _Given) -> None: ...

    PromptField = _Field[Prompt, Prompt | str | Mapping[str, str]]
    TextsField = _Field[tuple[str, ...], tuple[str, ...] | list[str]]
else:
    PromptField, TextsField = Prompt, tuple[str, ...]


def reads(default: str = "", *kinds: Kind) -> str:
    """Declare a field with the name of a value that a component reads: an input, or another component.

    Args:
        default: The name that is read unless another one is given.
        kinds: The kinds that the value may have.
    """
    value: dict[str, Any] = {"default": default} if default else {}
    declared: str = dataclasses.field(**value, metadata={_READS: kinds or (Kind.ANY,)})
    return declared


def on_engine(default: str, *kinds: PrimitiveKind) -> str:
    """Declare a field with the name of an engine of the pool that executes primitives of these kinds."""
    return dataclasses.field(default=default, metadata={_ENGINE: kinds})


@overload
def setting(
    default: Value,
    doc: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Value: ...
@overload
def setting(
    default: Any,
    doc: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    type: str,
) -> Any: ...
def setting(
    default: Any,
    doc: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    type: str = "",
) -> Any:
    """Declare a field that a query's configuration may change.

    Args:
        default: The value of the field, unless another one is given.
        doc: A description for the JSON schema.
        minimum: Smallest valid number.
        maximum: Largest valid number.
        choices: The valid texts; any text if empty.
        type: `integer`, `number`, `string`, `boolean`, `array` (of texts) or `prompt`; by default that of `default`.
    """
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "array", Prompt: "prompt"}
    description = Setting(type or kinds[default.__class__], doc, minimum, maximum, tuple(choices), default)
    return dataclasses.field(default=default, metadata=kept_with(description))


def kept_with(description: Setting) -> dict[str, Any]:
    """Return the `metadata` of a field that is a setting, for fields whose type must stay visible to type checkers."""
    return {_SETTING: description}


def ports_of(component: Any) -> dict[str, tuple[Kind, ...]]:
    """Return the kinds of values that each port of a component accepts."""
    return {f.name: f.metadata[_READS] for f in dataclasses.fields(component) if _READS in f.metadata}


def engines_of(component: Any) -> dict[str, tuple[PrimitiveKind, ...]]:
    """Return the kinds of primitives that the engine in each field executes."""
    return {f.name: f.metadata[_ENGINE] for f in dataclasses.fields(component) if _ENGINE in f.metadata}


def settings_of(component: Any) -> dict[str, Setting]:
    """Return the settings of a component, each with its current value as the default.

    The settings are the dataclass fields that were declared as such, by name.
    """
    descriptions = {f.name: f.metadata[_SETTING] for f in dataclasses.fields(component) if _SETTING in f.metadata}
    return {name: dataclasses.replace(one, default=getattr(component, name)) for name, one in descriptions.items()}


def check_settings(component: Any) -> None:
    """Convert all settings to the types that are stored. Raise RegistrationError for an invalid one."""
    for f in dataclasses.fields(component):
        if _SETTING in f.metadata:
            description: Setting = f.metadata[_SETTING]
            checked = description.checked(getattr(component, f.name), f"{component.name}.{f.name}")
            object.__setattr__(component, f.name, checked)


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON data."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Prompt):
        return {"text": value.text, "system": value.system} if value.system else value.text
    return list(value) if isinstance(value, tuple) else value
