"""What the user gives to `teola compare` beside the object: inputs for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import RegistrationError

if TYPE_CHECKING:
    from teola_plugin.adapters.comparison import Entries


@dataclass(frozen=True, slots=True)
class Given:
    """One input, and the line that it comes from."""

    line: int
    value: Any


# ------------------------------------------------------------ inputs


def read(path: str, limit: int | None = None) -> list[Given]:
    """The inputs in a file with one JSON value a line; blank lines are left out. Raises `RegistrationError`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RegistrationError(
            f"cannot read {path}: {error.strerror}.", hint="check the path after --inputs"
        ) from error
    except UnicodeDecodeError as error:
        raise RegistrationError(f"{path} is not UTF-8: {error.reason}.", hint="save it as UTF-8") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RegistrationError(f"{path} holds no inputs.", hint='one JSON value a line, e.g. {"question": "..."}')
    return [Given(number, _parsed(path, number, line)) for number, line in lines[:limit]]


def check(inputs: Sequence[Given], entries: Entries, path: str) -> None:
    """Raises `RegistrationError` for an input that the object cannot take."""
    for given in inputs:
        if wrong := entries.fault_in(given.value):
            raise RegistrationError(
                f"{path}, line {given.line}: no input of a {entries.kind}.", hint=f"{wrong}, one JSON value a line"
            )


def _parsed(path: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RegistrationError(
            f"{path}, line {number}, column {error.colno}: no JSON value: {error.msg}.",
            hint='one JSON value a line; a text needs quotes: "What do lambs eat?"',
        ) from error
