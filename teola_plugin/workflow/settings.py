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
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    default: Any = None

    def checked(self, given: Any, what: str) -> Any:
        """The value as it is kept. Raises `RegistrationError`, which names `what`."""
        try:
            made = _TYPES[self.type](given)
        except (TypeError, ValueError):
            raise self._wrong(given, what) from None
        low, high = self.least is not None and made < self.least, self.most is not None and made > self.most
        if low or high or (self.choices and made not in self.choices):
            raise self._wrong(given, what)
        return made

    def _wrong(self, given: Any, what: str) -> RegistrationError:
        return RegistrationError(
            f"{what} is {given!r:.80}; expected {self.wanted}.", hint=f"e.g. {what}={_plain(self.default)!r}"
        )

    @property
    def wanted(self) -> str:
        """In words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = _WORDS[self.type]
        least = "" if self.least is None else f" of at least {self.least:g}"
        most = "" if self.most is None else f"{' and' if least else ' of'} at most {self.most:g}"
        return words + least + most

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the setting."""
        made = dict(_SCHEMAS[self.type])
        made |= {"enum": list(self.choices)} if self.choices else {}
        made |= {"minimum": self.least} if self.least is not None else {}
        made |= {"maximum": self.most} if self.most is not None else {}
        made |= {"description": self.doc} if self.doc else {}
        return made | {"default": _plain(self.default)}


def _integer(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError
    return given


def _number(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given != given:
        raise TypeError
    return float(given)


def _boolean(given: Any) -> bool:
    if not isinstance(given, bool):
        raise TypeError
    return given


def _string(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError
    return given


def _array(given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)):
        raise TypeError
    return tuple([_string(one) for one in given])


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

        def __set__(self, component: object, given: _Given) -> None: ...

    PromptField = _Field[Prompt, Prompt | str | Mapping[str, str]]
    TextsField = _Field[tuple[str, ...], tuple[str, ...] | list[str]]
else:
    PromptField, TextsField = Prompt, tuple[str, ...]


def reads(default: str = "", *kinds: Kind) -> str:
    """A field with the name of the value that a component reads: an input of the workflow, or another component.

    `kinds`: what it may be. With a `default`, that name is read unless another one is given.
    """
    value: dict[str, Any] = {"default": default} if default else {}
    made: str = dataclasses.field(**value, metadata={_READS: kinds or (Kind.ANY,)})
    return made


def on_engine(default: str, *kinds: PrimitiveKind) -> str:
    """A field with the name of an engine of the pool, which has to do primitives of these kinds."""
    return dataclasses.field(default=default, metadata={_ENGINE: kinds})


@overload
def setting(
    default: Value,
    doc: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
) -> Value: ...
@overload
def setting(
    default: Any,
    doc: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    type: str,
) -> Any: ...
def setting(
    default: Any,
    doc: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    type: str = "",
) -> Any:
    """A field that a query's configuration may change. Its type is that of the default, unless one is given:
    `integer`, `number`, `string`, `boolean`, `array` (of texts) or `prompt`."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "array", Prompt: "prompt"}
    said = Setting(type or kinds[default.__class__], doc, least, most, tuple(choices), default)
    return dataclasses.field(default=default, metadata=kept_with(said))


def kept_with(said: Setting) -> dict[str, Any]:
    """`metadata` of a field that is a setting, for fields that type checkers have to see as they are."""
    return {_SETTING: said}


def ports_of(component: Any) -> dict[str, tuple[Kind, ...]]:
    """The fields that say what is read, and the kinds that each takes."""
    return {f.name: f.metadata[_READS] for f in dataclasses.fields(component) if _READS in f.metadata}


def engines_of(component: Any) -> dict[str, tuple[PrimitiveKind, ...]]:
    """The fields that name engines, and the kinds of primitives that each has to do."""
    return {f.name: f.metadata[_ENGINE] for f in dataclasses.fields(component) if _ENGINE in f.metadata}


def settings_of(component: Any) -> dict[str, Setting]:
    """The settings of a component, each with the value that it has now as its default."""
    found = {f.name: f.metadata[_SETTING] for f in dataclasses.fields(component) if _SETTING in f.metadata}
    return {name: dataclasses.replace(one, default=getattr(component, name)) for name, one in found.items()}


def check_settings(component: Any) -> None:
    """Settings become what they are kept as. Raises `RegistrationError`."""
    for f in dataclasses.fields(component):
        if _SETTING in f.metadata:
            said: Setting = f.metadata[_SETTING]
            made = said.checked(getattr(component, f.name), f"{component.name}.{f.name}")
            object.__setattr__(component, f.name, made)


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON data."""
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Prompt):
        return {"text": value.text, "system": value.system} if value.system else value.text
    return list(value) if isinstance(value, tuple) else value
