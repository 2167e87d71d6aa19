"""Calls of tools in what a model writes.

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
    """The text around the tags, and what stands between them; the last one may be left open."""
    around, tagged, at = [], [], 0
    while (start := text.find(_OPEN, at)) >= 0:
        around.append(text[at:start])
        begin = start + len(_OPEN)
        end = text.find(_CLOSE, begin)
        tagged.append(text[begin:] if end < 0 else text[begin:end])
        at = len(text) if end < 0 else end + len(_CLOSE)
    return "".join([*around, text[at:]]).strip(), tagged


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
