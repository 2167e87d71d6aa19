"""Turns the results of a graph into plain data that can be compared: without run ids, times and addresses.

Ids are named in the order in which they first appear, so that equal ids keep equal names. Where nodes run in parallel
that order is random, and all ids have the same name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.tracers.log_stream import RunLogPatch
from langgraph.types import PregelTask
from pydantic import BaseModel

_IDS = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # runs, messages, checkpoints, tasks
    r"|(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])"  # interrupts
    r"|call_[0-9a-f]{24}"
)
_VARYING = (
    (re.compile(r"(?<!\d)0{20,}(\d+)\.[\de.+-]+"), r"v\1"),  # versions of channels end in random digits
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:[+-]\d\d:\d\d|Z)?"), "TIME"),
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (re.compile(r"Task-\d+"), "Task"),
    (re.compile(r"(request|query|primitive) [\w#./\[\]-]*\d[\w#./\[\]-]*"), r"\1 #"),
)
_ANY = re.compile("|".join([_IDS.pattern, *(varying.pattern for varying, _ in _VARYING)]))
_RACED = re.compile(r"(?<=[^\W\d]):\d+(?=/|$)")
"""Runs of one name are numbered in the order in which they begin (`astream_log`)."""
_UNCOUNTED = frozenset({"input_token_details", "timestamp"})
"""How much of a prompt was in the cache depends on what was asked before."""


def plain(value: Any) -> Any:
    """Return a value as lists, dictionaries and texts. Other types become their name and their contents."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return value if type(value) is str else f"{type(value).__name__}:{value!s}"
        case BaseException():
            return error(value)
        case RunLogPatch():
            return plain(list(value.ops))
        case BaseMessage() | Document() | BaseModel() if not isinstance(value, Runnable):
            return _fields(value, value.__dict__)
        case Mapping():
            return {str(plain(key)): plain(one) for key, one in value.items() if key not in _UNCOUNTED}
        case PregelTask():
            return _fields(value, {**value._asdict(), "result": unnamed(plain(value.result))})
        case tuple() if hasattr(value, "_fields"):
            return _fields(value, value._asdict())
        case list() | tuple():
            return (type(value).__name__, *map(plain, value))
        case set() | frozenset():
            return ("set", *sorted(repr(plain(one)) for one in value))
        case Runnable():
            return f"a {type(value).__name__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value, {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)})
    if hasattr(type(value), "__slots__") and type(value).__module__.startswith("langgraph"):
        return _fields(value, {name: getattr(value, name, None) for name in type(value).__slots__})
    return f"{type(value).__name__}:{value!r}"


def _fields(value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"": type(value).__name__, **{key: plain(one) for key, one in known.items() if key not in _UNCOUNTED}}


def unnamed(value: Any) -> Any:
    """Return a value without ids of messages, which reducers add while another thread saves the state."""
    match value:
        case dict():
            known = {key: unnamed(one) for key, one in value.items()}
            return {**known, "id": "?"} if str(value.get("")).endswith("Message") else known
        case tuple():
            return tuple(map(unnamed, value))
    return value


def error(found: BaseException) -> Any:
    """Return type, arguments and notes of an error, and the same of its cause."""
    fields: dict[str, Any] = {"": f"error {type(found).__name__}", "args": plain(found.args)}
    if notes := getattr(found, "__notes__", None):
        fields["notes"] = plain(notes)
    if found.__cause__ is not None:
        fields["cause"] = error(found.__cause__)
    if found.__context__ not in (None, found.__cause__) and not isinstance(found, GeneratorExit):
        fields["context"] = (type(found.__context__).__name__, found.__suppress_context__)
    return fields


def _unplaced(known: dict[str, Any]) -> dict[str, Any]:
    """Return an event without what depends on the order of parallel nodes."""
    if str(known.get("path", "")).startswith("/logs/"):
        known["path"] = _RACED.sub("", known["path"])
    if known.get("event") == "on_chain_end" and not known.get("parent_ids", ("list",))[1:]:
        known["data"] = "?"
    known.pop("seq", None)
    return known


def _interrupts(values: tuple[Any, ...]) -> bool:
    return len(values) > 1 and all(isinstance(one, dict) and one.get("") == "Interrupt" for one in values[1:])


@lru_cache(maxsize=1 << 14)
def _varies(text: str) -> bool:
    return _ANY.search(text) is not None


class Names:
    """Plain data with ids by the order in which they were met, the same order throughout one object."""

    def __init__(self, *, raced: bool = False) -> None:
        self._known: dict[str, str] = {}
        self._raced = raced

    def __call__(self, value: Any) -> Any:
        match value:
            case str():
                return self._text(value)
            case dict():
                known = {self._text(key): self(one) for key, one in value.items()}
                return _unplaced(known) if self._raced else known
            case tuple():
                parts = tuple(map(self, value))
                return tuple(sorted(parts, key=repr)) if self._raced and _interrupts(parts) else parts
        return value

    def _text(self, text: str) -> str:
        if not _varies(text):
            return text
        for varying, instead in _VARYING:
            text = varying.sub(instead, text)
        return _IDS.sub(self._named, text)

    def _named(self, found: re.Match[str]) -> str:
        return "#" if self._raced else self._known.setdefault(found[0], f"#{len(self._known)}")
