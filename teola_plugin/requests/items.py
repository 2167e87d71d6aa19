"""Streaming parsers of lists: each item of a model's output as soon as it is complete.

The items predict what the framework's own parser returns for the complete text; the caller verifies them. An
incomplete item is never returned. (The frameworks' own streaming parsers return some, e.g. `["q one", "q t"]`, or
other items than for the complete text.)
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
    """A parser of one list. `kind` names the way in which the list is written:

    ========  =======================================================================
    json      elements of the first array, even inside an object or a code fence
    lines     lines that are not empty, of the text without the white space around it
    numbered  `1. item`, one a line
    markdown  `- item` or `* item`, one a line
    comma     comma-separated values, quoted where they hold commas
    choices   the numbers of JSON members `"choice": 2`, before what follows them is written
    indices   the same of members `"index": 2`
    ========  =======================================================================

    Raises RegistrationError for another kind. The items do not depend on how the text is split into chunks.
    """

    def __init__(self, kind: str) -> None:
        """Create a reader of the items of a list, in a text that comes in pieces.

        Raise RegistrationError for a `kind` that is none of the known ones.
        """
        if kind not in _READERS:
            raise unknown_name("list kind", kind, list(_READERS))
        self.kind = kind
        self._reader = _READERS[kind]()

    def feed(self, text: str) -> list[Any]:
        """Return the items that `text` completes: strings, or decoded values for the elements of a JSON array."""
        return self._reader.feed(text)

    def finish(self) -> list[Any]:
        """Return the items that the end of the text completes. Call it once, after the last `feed`."""
        return self._reader.finish()


class _Lines:
    """A parser of lines. It holds white space back until more text follows, as the ends of the text are stripped."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[str]:
        """Return the lines that this text completes. An empty line completes none."""
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
    """A parser of the matches of a pattern whose item ends with its line."""

    def __init__(self, pattern: str) -> None:
        """Create a parser of the items that the first group of `pattern` matches.

        It parses numbered and markdown lists. Items that end before `_done`, a position in the text, were returned.
        """
        self._pattern = re.compile(pattern, re.MULTILINE)
        self._text = ""
        self._done = 0

    def feed(self, text: str) -> list[str]:
        self._text += text
        return self._closed(len(self._text)) if "\n" in text else []

    def finish(self) -> list[str]:
        return self._closed(len(self._text) + 1)

    def _closed(self, end: int) -> list[str]:
        """Return the items of the matches that end before `end`: only the last match can still grow."""
        closed: list[str] = []
        for match in self._pattern.finditer(self._text, self._done):
            if match.end() < end:
                closed.append(match.group(1))
                self._done = match.end()
        return closed


class _Comma:
    """A parser of comma-separated values: the state machine of `csv.reader(..., skipinitialspace=True)`."""

    def __init__(self) -> None:
        self._field = ""
        self._state: Callable[[str], list[str]] = self._row

    def feed(self, text: str) -> list[str]:
        return [item for char in text for item in self._state(char)]

    def finish(self) -> list[str]:
        return [] if self._state == self._row else self._close(self._row)

    def _close(self, next_state: Callable[[str], list[str]]) -> list[str]:
        item, self._field, self._state = self._field, "", next_state
        return [item]

    def _row(self, char: str) -> list[str]:
        return [] if char in "\r\n" else self._start(char)

    def _start(self, char: str) -> list[str]:
        """Read the first character of a value, or a space before it."""
        if char == '"':
            self._state = self._quoted
        elif char == " ":
            self._state = self._start
        else:
            return self._bare(char)
        return []

    def _bare(self, char: str) -> list[str]:
        """Read a character outside quotation marks: a comma or the end of the line completes the value."""
        if char in ",\r\n":
            return self._close(self._start if char == "," else self._row)
        self._field += char
        self._state = self._bare
        return []

    def _quoted(self, char: str) -> list[str]:
        """Read a character inside quotation marks, where commas belong to the value."""
        if char == '"':
            self._state = self._quote_seen
        else:
            self._field += char
        return []

    def _quote_seen(self, char: str) -> list[str]:
        """Read the character after a mark inside quotes: a second mark stands for itself, any other ends the quotes."""
        if char != '"':
            return self._bare(char)
        self._field += char
        self._state = self._quoted
        return []


class _Json:
    """A parser of the elements of the first JSON array. It stops at the first text that is not JSON."""

    def __init__(self) -> None:
        self._depth = 0
        """Number of open brackets; within the array, those inside it."""
        self._in_array = self._has_ended = self._quoted = self._escaped = False
        self._raw = ""

    def feed(self, text: str) -> list[Any]:
        return [item for char in text for item in self._take(char)]

    def finish(self) -> list[Any]:
        """Return the last element. A string that is cut off counts up to the cut, as in LangChain's parser."""
        closing = '"' if self._quoted else ""
        return self._decode(closing) if self._in_array and not self._depth and not self._has_ended else []

    def _take(self, char: str) -> list[Any]:
        """Read one character, and return the element that it completes, if any."""
        if self._has_ended:
            return []
        if self._quoted:
            return self._inside_string(char)
        if char == '"':
            self._quoted = self._in_array or self._depth > 0  # quotation marks of the prose before it mean nothing
        return self._inside_array(char) if self._in_array else self._before_array(char)

    def _before_array(self, char: str) -> list[Any]:
        """Look for the bracket that begins the first array. Strings are skipped only inside an object."""
        self._depth += (char == "{") - (char == "}")
        if char == "[":
            self._in_array, self._depth = True, 0
        return []

    def _inside_string(self, char: str) -> list[Any]:
        """Read a character of a string. The mark that ends it completes an element that is a string itself."""
        if self._in_array:
            self._raw += char
        if char == '"' and not self._escaped:
            self._quoted = False
            return self._decode() if self._in_array and not self._depth else []
        self._escaped = char == "\\" and not self._escaped
        return []

    def _inside_array(self, char: str) -> list[Any]:
        """Read a character of the array outside strings. A comma or a closing bracket may complete an element."""
        if not self._depth and char in ",]":
            items = self._decode()
            self._has_ended = self._has_ended or char == "]"
            return items
        self._depth += (char in "[{") - (char in "]}")
        self._raw += char
        return self._decode() if char in "]}" and not self._depth else []

    def _decode(self, closing: str = "") -> list[Any]:
        """Return the element that was read, or none if it is empty. Text that is not JSON ends the parser.

        `closing`: the quotation mark that an element which was cut off lacks.
        """
        raw, self._raw = self._raw.strip() + closing, ""
        if not raw:
            return []
        try:
            return [json.loads(raw, strict=False)]
        except ValueError:
            self._has_ended = True
            return []


class _Choices:
    """A parser of the numbers that follow a key inside brackets. The key may lack quotes, as in YAML.

    A number is complete when another character follows it, so that the reason for a choice need not be awaited.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._depth = 0
        self._quoted = self._escaped = False
        self._word = self._number = ""
        """The last word or string; the digits of a number that is being read."""
        self._expects_number = False
        """True if the key was read, so that a number is expected."""

    def feed(self, text: str) -> list[int]:
        return [item for char in text for item in self._take(char)]

    def finish(self) -> list[int]:
        """Return no items: a number at the end of the text may be cut off."""
        return []

    def _take(self, char: str) -> list[int]:
        """Read one character, and return the number that it completes, if any."""
        if self._quoted:
            return self._inside_string(char)
        if char in "[{":
            self._depth += 1
        return self._outside_string(char) if self._depth else []

    def _inside_string(self, char: str) -> list[int]:
        """Read a character of a string. Where a number is expected, a string of digits is one."""
        if char != '"' or self._escaped:
            self._word += char
            self._escaped = char == "\\" and not self._escaped
            return []
        is_choice, self._expects_number, self._quoted = self._expects_number, False, False
        return [int(self._word)] if is_choice and self._word.isdecimal() else []

    def _outside_string(self, char: str) -> list[int]:
        """Read a character of a key or number outside strings. The one after a number completes it."""
        if self._expects_number:
            if char in "0123456789":
                self._number += char
                return []
            if char.isspace() and not self._number:
                return []
        closed = [int(self._number)] if self._number and (char.isspace() or char in ",}]") else []
        self._quoted = char == '"'
        self._expects_number = (char == ":" and self._word == self._key) or (
            self._expects_number and self._quoted and not self._number
        )
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
