"""What clients say of a submitted query, checked, and what its answer is kept as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teola_plugin.server.errors import bad_request
from teola_plugin.server.models.apps import CONFIG, App, no_settings
from teola_plugin.server.models.base import Model
from teola_plugin.server.queries.records import Record
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.chat import ChatRequest


def check_asked(model: Model, body: ChatRequest) -> None:
    """Raises `HttpError`, `RegistrationError` for what is known to be wrong before anything runs."""
    if isinstance(model, App):
        model.check(body)
    elif (body.metadata or {}).get(CONFIG) is not None:
        raise no_settings(model.name)


def check_told(record: Record, value: Any) -> None:
    """Raises `HttpError` for what does not answer what the graph has asked."""
    asked = [str(one["id"]) for one in (record.waiting or {}).get("interrupts", ())]
    if not asked and value is not None:
        hint = "send no value"
        raise bad_request("the graph has not asked anything: it waits for leave to go on.", hint, param="value")
    if asked and value is None:
        raise bad_request("the graph has asked something, and null is no answer.", "send a value", param="value")
    if len(asked) > 1 and not (isinstance(value, Mapping) and value and value.keys() <= set(asked)):
        hint = "send an object of values by the ids of its interrupts"
        raise bad_request(f"the graph has asked {len(asked)} things at once.", hint, param="value")


def told_of(answer: Answer) -> dict[str, Any]:
    calls = {"tool_calls": [call.told() for call in answer.calls]} if answer.calls else {}
    about = {"text": answer.text, "finish_reason": answer.finish, "usage": answer.usage.told()}
    return {**about, **calls, **answer.more}
