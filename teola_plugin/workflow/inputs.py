"""What a workflow is asked with: declared inputs, checked values, JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Hit
from teola_plugin.workflow.values import Kind, documents_of


class _Required(Enum):
    REQUIRED = "required"

    def __repr__(self) -> str:
        return self.name


REQUIRED: Any = _Required.REQUIRED
"""The default of an input that has to be given."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a workflow. Those that are not declared are found by what components read."""

    name: str
    kind: Kind = Kind.TEXT
    doc: str = ""
    default: Any = REQUIRED

    def checked(self, given: Any, workflow: str) -> Any:
        """The value as components take it. Raises `RegistrationError`."""
        try:
            return _checked(self.kind, given)
        except TypeError as error:
            raise RegistrationError(
                f"workflow {workflow!r}: the input {self.name!r} is {given!r:.80}, which is not {self.kind.value} "
                f"({error}).",
                hint=f"see {workflow}'s input_schema()",
            ) from None

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the input."""
        made = dict(_SCHEMAS.get(self.kind, {}))
        made |= {"description": self.doc} if self.doc else {}
        return made if self.default is REQUIRED else made | {"default": self.default}


def bound(inputs: Sequence[Input], given: Mapping[str, Any], workflow: str) -> dict[str, Any]:
    """Return all inputs of a query by name. Raise RegistrationError for a missing, unknown or invalid one."""
    known = {one.name: one for one in inputs}
    if not isinstance(given, Mapping):
        raise RegistrationError(
            f"workflow {workflow!r} was given {type(given).__name__} for its inputs.",
            hint="give a mapping: " + repr({name: "..." for name in known}),
        )
    missing = [name for name, one in known.items() if name not in given and one.default is REQUIRED]
    unknown = [str(name) for name in given if name not in known]
    for what, names in (("lacks the input", missing), ("has no input", unknown)):
        if names:
            raise RegistrationError(
                f"workflow {workflow!r} {what} {names[0]!r}; its inputs are {', '.join(sorted(known)) or 'none'}, "
                f"given were {', '.join(sorted(map(str, given))) or 'none'}.",
                hint=f"see {workflow}'s input_schema()",
            )
    return {name: one.checked(given.get(name, one.default), workflow) for name, one in known.items()}


def kind_of(wanted: Sequence[Sequence[Kind]]) -> Kind:
    """Return the kind of an input that is read in several places: the first one that fits in all of them."""
    named = (kind for kinds in wanted for kind in kinds if kind is not Kind.ANY)
    return next((kind for kind in named if all(kind.fits(kinds) for kinds in wanted)), Kind.ANY)


def _checked(kind: Kind, given: Any) -> Any:
    """The value as components take it. Raises `TypeError`."""
    check: Callable[[Any], Any] | None = _CHECKS.get(kind)
    return given if check is None else check(given)


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"it is a {type(given).__name__}")
    return given


def _texts(given: Any) -> list[str]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"it is a {type(given).__name__}")
    return [_text(one) for one in given]


def _list(given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"it is a {type(given).__name__}")
    return list(given)


def _vector(given: Any) -> tuple[float, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"it is a {type(given).__name__}")
    try:
        return tuple(float(one) for one in given)
    except ValueError as error:
        raise TypeError(str(error)) from None


def _passages(given: Any) -> tuple[Any, ...]:
    if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, Hit) for one in given):
        return tuple(given)
    found = documents_of(given)
    return tuple(Hit(str(place), one.text, one.metadata, 0.0) for place, one in enumerate(found))


def _flag(given: Any) -> bool:
    if not isinstance(given, bool):
        raise TypeError(f"it is a {type(given).__name__}")
    return given


_CHECKS: dict[Kind, Callable[[Any], Any]] = {
    Kind.TEXT: _text,
    Kind.TEXTS: _texts,
    Kind.LIST: _list,
    Kind.DOCUMENTS: documents_of,
    Kind.VECTOR: _vector,
    Kind.PASSAGES: _passages,
    Kind.FLAG: _flag,
}
_DOCUMENT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "metadata": {"type": "object"}},
            "required": ["text"],
        },
    ]
}
_SCHEMAS: dict[Kind, dict[str, Any]] = {
    Kind.TEXT: {"type": "string"},
    Kind.TEXTS: {"type": "array", "items": {"type": "string"}},
    Kind.LIST: {"type": "array"},
    Kind.DOCUMENTS: {"anyOf": [*_DOCUMENT["anyOf"], {"type": "array", "items": _DOCUMENT}]},
    Kind.VECTOR: {"type": "array", "items": {"type": "number"}},
    Kind.VECTORS: {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    Kind.PASSAGES: {"type": "array", "items": _DOCUMENT},
    Kind.FLAG: {"type": "boolean"},
}
