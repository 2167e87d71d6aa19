"""Lists read while they are written: the items of a model's output as soon as each one is closed.

The items are a prediction of what the framework's own parser returns for the whole text; the caller verifies them.
A half item is never given: the frameworks' own streaming parsers do give some (`["q one", "q t"]`), or other items
than for the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from teola_plugin.errors import unknown_name


class _Reader(Protocol):
    def feed(self, text: str) -> list[Any]: ...

    def finish(self) -> list[Any]: ...


class ItemStream:
    """Items of one list. `kind` says how it is spelled:

    ========  =======================================================================
    json      elements of the first array, even inside an object or a code fence
    lines     lines that are not empty, of the text without the white space around it
    numbered  `1. item`, one a line
    markdown  `- item` or `* item`, one a line
    comma     comma-separated values, quoted where they hold commas
    choices   the numbers of JSON members `"choice": 2`, before what follows them is written
    indices   the same of members `"index": 2`
    ========  =======================================================================

    Raises `RegistrationError` for another kind. Every chunking of a text gives the same items.
    """

    def __init__(self, kind: str) -> None:
        if kind not in _READERS:
            raise unknown_name("list kind", kind, list(_READERS))
        self.kind = kind
        self._reader = _READERS[kind]()

    def feed(self, text: str) -> list[Any]:
        """Items that `text` closes: strings, or decoded values for the elements of a JSON array."""
        return self._reader.feed(text)

    def finish(self) -> list[Any]:
        """What the end of the text closes. Call it once, then no more `feed`."""
        return self._reader.finish()


class _Lines:
    """Holds white space back until something follows it, since the text's own ends are stripped."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[str]:
        self._text = self._text + text if self._text else text.lstrip()
        solid = self._text.rstrip()
        space = self._text[len(solid) :]
        if space.startswith("\n"):  # nothing to strip: the line is closed whatever follows
            closed, self._text = solid.split("\n"), space
        else:
            *closed, last = solid.split("\n")
            self._text = last + space
        return [line for line in closed if line]

    def finish(self) -> list[str]:
        return [line for line in self._text.rstrip().split("\n") if line]


class _Pattern:
    """All matches of a pattern whose item runs to the end of its line."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.MULTILINE)
        self._text = ""
        self._done = 0

    def feed(self, text: str) -> list[str]:
        self._text += text
        return self._closed(len(self._text)) if "\n" in text else []

    def finish(self) -> list[str]:
        return self._closed(len(self._text) + 1)

    def _closed(self, end: int) -> list[str]:
        """Items of the matches that end before `end`: only the last match can still grow."""
        closed: list[str] = []
        for match in self._pattern.finditer(self._text, self._done):
            if match.end() < end:
                closed.append(match.group(1))
                self._done = match.end()
        return closed


class _Comma:
    """The state machine of `csv.reader(..., skipinitialspace=True)`, field by field."""

    def __init__(self) -> None:
        self._field = ""
        self._state: Callable[[str], list[str]] = self._row

    def feed(self, text: str) -> list[str]:
        return [item for char in text for item in self._state(char)]

    def finish(self) -> list[str]:
        return [] if self._state == self._row else self._close(self._row)

    def _close(self, then: Callable[[str], list[str]]) -> list[str]:
        item, self._field, self._state = self._field, "", then
        return [item]

    def _row(self, char: str) -> list[str]:
        return [] if char in "\r\n" else self._start(char)

    def _start(self, char: str) -> list[str]:
        if char == '"':
            self._state = self._quoted
        elif char == " ":
            self._state = self._start
        else:
            return self._bare(char)
        return []

    def _bare(self, char: str) -> list[str]:
        if char in ",\r\n":
            return self._close(self._start if char == "," else self._row)
        self._field += char
        self._state = self._bare
        return []

    def _quoted(self, char: str) -> list[str]:
        if char == '"':
            self._state = self._quote_seen
        else:
            self._field += char
        return []

    def _quote_seen(self, char: str) -> list[str]:
        if char != '"':
            return self._bare(char)
        self._field += char
        self._state = self._quoted
        return []


class _Json:
    """Finds the first array and decodes its elements one by one; stops at the first thing that is no JSON."""

    def __init__(self) -> None:
        self._depth = 0
        """Brackets open around this place; within the array, counted from the array."""
        self._in_array = self._over = self._quoted = self._escaped = False
        self._raw = ""

    def feed(self, text: str) -> list[Any]:
        return [item for char in text for item in self._take(char)]

    def finish(self) -> list[Any]:
        """A cut-off string counts up to where it was cut, as LangChain's parser has it."""
        closing = '"' if self._quoted else ""
        return self._decode(closing) if self._in_array and not self._depth and not self._over else []

    def _take(self, char: str) -> list[Any]:
        if self._over:
            return []
        if self._quoted:
            return self._inside_string(char)
        if char == '"':
            self._quoted = self._in_array or self._depth > 0  # quotation marks of the prose before it mean nothing
        return self._inside_array(char) if self._in_array else self._before_array(char)

    def _before_array(self, char: str) -> list[Any]:
        self._depth += (char == "{") - (char == "}")
        if char == "[":
            self._in_array, self._depth = True, 0
        return []

    def _inside_string(self, char: str) -> list[Any]:
        if self._in_array:
            self._raw += char
        if char == '"' and not self._escaped:
            self._quoted = False
            return self._decode() if self._in_array and not self._depth else []
        self._escaped = char == "\\" and not self._escaped
        return []

    def _inside_array(self, char: str) -> list[Any]:
        if not self._depth and char in ",]":
            items = self._decode()
            self._over = self._over or char == "]"
            return items
        self._depth += (char in "[{") - (char in "]}")
        self._raw += char
        return self._decode() if char in "]}" and not self._depth else []

    def _decode(self, closing: str = "") -> list[Any]:
        raw, self._raw = self._raw.strip() + closing, ""
        if not raw:
            return []
        try:
            return [json.loads(raw, strict=False)]
        except ValueError:
            self._over = True
            return []


class _Choices:
    """Numbers behind a key, wherever in brackets it stands; it may lack its quotes, as YAML has it.

    A number is closed by what follows it, so that the reason for a choice need not be waited for.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._depth = 0
        self._quoted = self._escaped = False
        self._word = self._number = ""
        """The last word or string; the digits of a number that is being read."""
        self._wanted = False
        """Whether a number is to come."""

    def feed(self, text: str) -> list[int]:
        return [item for char in text for item in self._take(char)]

    def finish(self) -> list[int]:
        """A number that nothing closes is no choice: the text is cut off."""
        return []

    def _take(self, char: str) -> list[int]:
        if self._quoted:
            return self._inside_string(char)
        if char in "[{":
            self._depth += 1
        return self._outside_string(char) if self._depth else []

    def _inside_string(self, char: str) -> list[int]:
        if char != '"' or self._escaped:
            self._word += char
            self._escaped = char == "\\" and not self._escaped
            return []
        wanted, self._wanted, self._quoted = self._wanted, False, False
        return [int(self._word)] if wanted and self._word.isdecimal() else []

    def _outside_string(self, char: str) -> list[int]:
        if self._wanted:
            if char in "0123456789":
                self._number += char
                return []
            if char.isspace() and not self._number:
                return []
        closed = [int(self._number)] if self._number and (char.isspace() or char in ",}]") else []
        self._quoted = char == '"'
        self._wanted = (char == ":" and self._word == self._key) or (self._wanted and self._quoted and not self._number)
        self._number = ""
        if not char.isspace():
            self._word = self._word + char if char.isalnum() or char == "_" else ""
        self._depth -= char in "}]"
        return closed


_READERS: dict[str, Callable[[], _Reader]] = {
    "json": _Json,
    "lines": _Lines,
    "numbered": lambda: _Pattern(r"\d+\.\s([^\n]+)"),
    "markdown": lambda: _Pattern(r"^\s*[-*]\s([^\n]+)$"),
    "comma": _Comma,
    "choices": lambda: _Choices("choice"),
    "indices": lambda: _Choices("index"),
}
