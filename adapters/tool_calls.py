"""Calls of tools in what a model writes: read from the whole text, or told one by one while it is written.

A call is JSON with `name` and `arguments` (or `parameters`): alone, in a list, or between `<tool_call>` tags, as most
open models write it. Words around the tags are no call.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from typing import Any, NamedTuple

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """One call, as the model writes it."""

    name: str
    args: dict[str, Any]


def new_id() -> str:
    """A name for a call, of the form that OpenAI gives them."""
    return f"call_{uuid.uuid4().hex[:24]}"


def read(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """What is not a call, and the calls of tools with these names. Without any, all of the text is no call."""
    whole = _calls(text, names)
    if whole:
        return "", whole
    around, tagged = _tagged(text)
    calls = [call for part in tagged for call in _calls(part, names)]
    return (around, calls) if calls else (text, [])


def certain_text(text: str) -> str:
    """The beginning of an answer that is being written which `read` will not take for a call, whatever follows."""
    if text.lstrip()[:1] in ("{", "["):
        return ""
    end = text.find(_OPEN)
    if end < 0:
        tail = range(max(0, len(text) - len(_OPEN)), len(text))
        end = next((at for at in tail if _OPEN.startswith(text[at:])), len(text))
    return text[:end].rstrip()  # a call after it takes the spaces before it, too


def _tagged(text: str) -> tuple[str, list[str]]:
    """Return the text around the tags, and the texts between them; the last tag may be left open.

    Blanks before the text stay: whoever reads it while it is written has had them before the first tag comes.
    """
    around, tagged, at = [], [], 0
    while (start := text.find(_OPEN, at)) >= 0:
        around.append(text[at:start])
        begin = start + len(_OPEN)
        end = text.find(_CLOSE, begin)
        tagged.append(text[begin:] if end < 0 else text[begin:end])
        at = len(text) if end < 0 else end + len(_CLOSE)
    return "".join([*around, text[at:]]).rstrip(), tagged


def _calls(text: str, names: Collection[str]) -> list[Call]:
    """Calls in a text that is JSON as a whole."""
    try:
        found = json.loads(text.strip())
    except (ValueError, RecursionError):
        return []
    asked = (_call(one, names) for one in (found if isinstance(found, list) else [found]))
    return [call for call in asked if call is not None]


def _call(value: Any, names: Collection[str]) -> Call | None:
    if not isinstance(value, dict):
        return None
    args, name = value.get("arguments", value.get("parameters")), value.get("name")
    return Call(name, args) if isinstance(args, dict) and isinstance(name, str) and name in names else None


# ------------------------------------------------------------ while it is written


class CallReader:
    """Tells each call as soon as its JSON closes, however the text is cut into pieces.

    What it tells is a guess: only the whole text says whether it is JSON. Where `read` finds calls in the whole text,
    each of them has been told.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._readers = (_Whole(), _Tagged())

    def feed(self, text: str) -> list[Call]:
        """The calls that this piece closes."""
        closed = (reader.take(char) for char in text for reader in self._readers)
        asked = (self._decoded(raw) for raw in closed if raw)
        return [call for call in asked if call is not None]

    def _decoded(self, raw: str) -> Call | None:
        try:
            return _call(json.loads(raw), self._names)
        except (ValueError, RecursionError):
            return None


class _Whole:
    """Of a text that is JSON as a whole: white space, then one value."""

    def __init__(self) -> None:
        self._value: _Value | None = None
        self._over = False

    def take(self, char: str) -> str:
        """The JSON of the object that may be a call and that this character closes; else nothing."""
        if self._over:
            return ""
        if self._value is None:
            self._value = _Value.begun(char)
            self._over = self._value is None and not char.isspace()
            return ""
        closed = self._value.take(char)
        self._over = self._value.over
        return closed


class _Tagged:
    """Of a text with tags: as many values as there are tags."""

    def __init__(self) -> None:
        self._end = ""
        """Of the text, as long as a tag."""
        self._inside: _Whole | None = None

    def take(self, char: str) -> str:
        """As `_Whole.take`."""
        self._end = (self._end + char)[-len(_CLOSE) :]
        if self._inside is None:
            if self._end.endswith(_OPEN):
                self._inside = _Whole()
            return ""
        if self._end == _CLOSE:  # wherever it stands, as in `read`
            self._inside = None
            return ""
        return self._inside.take(char)


class _Value:
    """A JSON object or array, character by character."""

    def __init__(self, opening: str) -> None:
        self._level = 1 if opening == "[" else 0
        """Brackets around the objects that are told."""
        self._depth = 1
        self._quoted = self._escaped = False
        self._raw = [opening]

    @staticmethod
    def begun(char: str) -> _Value | None:
        return _Value(char) if char in "{[" else None

    @property
    def over(self) -> bool:
        return self._depth <= 0

    def take(self, char: str) -> str:
        """The JSON of the object that this character closes: the value, or an item of the array; else nothing."""
        self._raw.append(char)
        if self._quoted:
            self._quoted = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            if self._depth == self._level:
                self._raw = [char]
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return "".join(self._raw) if char == "}" and self._depth == self._level else ""
        return ""
