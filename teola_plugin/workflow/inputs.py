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

    def checked(self, value: Any, workflow: str) -> Any:
        """The value as components take it. Raises `RegistrationError`."""
        try:
            return _checked(self.kind, value)
        except TypeError as error:
            raise RegistrationError(
                f"workflow {workflow!r}: the input {self.name!r} is {value!r:.80}, which is not {self.kind.value} "
                f"({error}).",
                hint=f"see {workflow}'s input_schema()",
            ) from None

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the input."""
        schema = dict(_SCHEMAS.get(self.kind, {}))
        schema |= {"description": self.doc} if self.doc else {}
        return schema if self.default is REQUIRED else schema | {"default": self.default}


def checked_inputs(inputs: Sequence[Input], values: Mapping[str, Any], workflow: str) -> dict[str, Any]:
    """Return all inputs of a query by name. Raise RegistrationError for a missing, unknown or invalid one."""
    declared = {one.name: one for one in inputs}
    if not isinstance(values, Mapping):
        raise RegistrationError(
            f"workflow {workflow!r} was given {type(values).__name__} for its inputs.",
            hint="give a mapping: " + repr({name: "..." for name in declared}),
        )
    missing = [name for name, one in declared.items() if name not in values and one.default is REQUIRED]
    unknown = [str(name) for name in values if name not in declared]
    for problem, names in (("lacks the input", missing), ("has no input", unknown)):
        if names:
            raise RegistrationError(
                f"workflow {workflow!r} {problem} {names[0]!r}; "
                f"its inputs are {', '.join(sorted(declared)) or 'none'}, "
                f"given were {', '.join(sorted(map(str, values))) or 'none'}.",
                hint=f"see {workflow}'s input_schema()",
            )
    return {name: one.checked(values.get(name, one.default), workflow) for name, one in declared.items()}


def kind_of(accepted: Sequence[Sequence[Kind]]) -> Kind:
    """Return the kind of an input that is read in several places: the first one that fits in all of them.

    It is `Kind.ANY` if none fits everywhere, or no place expects a specific kind.
    """
    specific = (kind for kinds in accepted for kind in kinds if kind is not Kind.ANY)
    return next((kind for kind in specific if all(kind.fits(kinds) for kinds in accepted)), Kind.ANY)


def _checked(kind: Kind, value: Any) -> Any:
    """The value as components take it. Raises `TypeError`."""
    check: Callable[[Any], Any] | None = _CHECKS.get(kind)
    return value if check is None else check(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"it is a {type(value).__name__}")
    return value


def _texts(value: Any) -> list[str]:
    """Return a sequence of texts as a list. Raise TypeError for a single text, and for entries that are no text."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"it is a {type(value).__name__}")
    return [_text(one) for one in value]


def _list(value: Any) -> list[Any]:
    """Return any sequence but a text as a new list. Raise TypeError for another value."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"it is a {type(value).__name__}")
    return list(value)


def _vector(value: Any) -> tuple[float, ...]:
    """Return a vector as floats. Raise TypeError for another value."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"it is a {type(value).__name__}")
    try:
        return tuple(float(one) for one in value)
    except ValueError as error:
        raise TypeError(str(error)) from None


def _passages(value: Any) -> tuple[Any, ...]:
    """Return passages as they are, or documents as passages with a score of 0. Raise TypeError for another value."""
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, Hit) for one in value):
        return tuple(value)
    documents = documents_of(value)
    return tuple(Hit(str(position), one.text, one.metadata, 0.0) for position, one in enumerate(documents))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"it is a {type(value).__name__}")
    return value


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
