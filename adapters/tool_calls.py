"""Calls of tools in what a model writes: read from the whole text, or one by one while it is written.

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
    """Create an id for a call, in the form of OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"


def read(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """Return the text around the calls, and the calls of tools with these names. Without calls, all of it is text."""
    calls_alone = _calls(text, names)
    if calls_alone:
        return "", calls_alone
    around, tagged = _tagged(text)
    calls = [call for part in tagged for call in _calls(part, names)]
    return (around, calls) if calls else (text, [])


def certain_text(text: str) -> str:
    """Return the beginning of an unfinished answer that `read` will not take for a call, whatever follows."""
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
    """Return the calls in a text that is JSON as a whole."""
    try:
        value = json.loads(text.strip())
    except (ValueError, RecursionError):
        return []
    candidates = (_call(one, names) for one in (value if isinstance(value, list) else [value]))
    return [call for call in candidates if call is not None]


def _call(value: Any, names: Collection[str]) -> Call | None:
    """Return a decoded JSON value as a call of one of the named tools; None if it is no such call."""
    if not isinstance(value, dict):
        return None
    args, name = value.get("arguments", value.get("parameters")), value.get("name")
    return Call(name, args) if isinstance(args, dict) and isinstance(name, str) and name in names else None


# ------------------------------------------------------------ while it is written


class CallReader:
    """A reader that returns each call as soon as its JSON closes, however the text is cut into pieces.

    These calls are speculative: only the whole text shows whether it is JSON. If `read` finds calls in the whole text,
    each of them was returned before.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._readers = (_ValueReader(), _TagReader())

    def feed(self, text: str) -> list[Call]:
        """Return the calls that this piece closes.

        `text`: the next piece of what the model writes, in order. Usually there are none; a call is returned once, when
        its JSON is complete and names a known tool.
        """
        closed = (reader.take(char) for char in text for reader in self._readers)
        candidates = (self._decoded(raw) for raw in closed if raw)
        return [call for call in candidates if call is not None]

    def _decoded(self, raw: str) -> Call | None:
        """Return the call that a piece of JSON text holds; None for bad JSON, and for anything that is no call."""
        try:
            return _call(json.loads(raw), self._names)
        except (ValueError, RecursionError):
            return None


class _ValueReader:
    """A reader of a text that is JSON as a whole: white space, then one value."""

    def __init__(self) -> None:
        self._value: _Value | None = None
        self._is_ended = False

    def take(self, char: str) -> str:
        """Return the JSON of the object that this character closes, which may be a call; else an empty text."""
        if self._is_ended:
            return ""
        if self._value is None:
            self._value = _Value.opened_by(char)
            self._is_ended = self._value is None and not char.isspace()
            return ""
        closed = self._value.take(char)
        self._is_ended = self._value.is_closed
        return closed


class _TagReader:
    """A reader of a text with tags: as many values as there are tags."""

    def __init__(self) -> None:
        self._end = ""
        """The last characters of the text, as many as a tag has."""
        self._inside: _ValueReader | None = None

    def take(self, char: str) -> str:
        """Return what `_ValueReader.take` returns, for the value inside a tag."""
        self._end = (self._end + char)[-len(_CLOSE) :]
        if self._inside is None:
            if self._end.endswith(_OPEN):
                self._inside = _ValueReader()
            return ""
        if self._end == _CLOSE:  # wherever it stands, as in `read`
            self._inside = None
            return ""
        return self._inside.take(char)


class _Value:
    """A JSON object or array that is read character by character."""

    def __init__(self, opening: str) -> None:
        self._level = 1 if opening == "[" else 0
        """The number of brackets around the objects that are returned."""
        self._depth = 1
        self._quoted = self._escaped = False
        self._raw = [opening]

    @staticmethod
    def opened_by(char: str) -> _Value | None:
        return _Value(char) if char in "{[" else None

    @property
    def is_closed(self) -> bool:
        return self._depth <= 0

    def take(self, char: str) -> str:
        """Return the JSON of the object that this character closes (the value, or an item of the array); else ""."""
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
