"""Answers of LangChain as plain data, see `adapters/checking/comparison.py`."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage

from teola_plugin.adapters.checking import comparison
from teola_plugin.adapters.checking.comparison import Fields, difference, failure

__all__ = ["difference", "failure", "snapshot"]


def snapshot(value: Any, depth: int = 60) -> Any:
    """Plain data that stands for the value; later changes of the value do not reach it.

    Of a message, what differs from call to call is left out: ids, token counts, what the provider says of the response.
    """
    return comparison.snapshot(value, depth, _fields_of_known_class)


def _fields_of_known_class(value: Any) -> Fields | None:
    return _message(value) if isinstance(value, BaseMessage) else None


def _message(message: BaseMessage) -> Fields:
    yield "content", message.content
    yield "name", message.name
    for name in ("status", "artifact"):
        yield name, getattr(message, name, None)
    for name in ("tool_calls", "invalid_tool_calls"):
        calls = getattr(message, name, ())
        yield name, [{"name": call.get("name"), "args": call.get("args")} for call in calls]
