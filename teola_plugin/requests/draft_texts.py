"""What the answer to a request may repeat, as the request itself tells: its schema, its tools, calls made before.

Texts with gaps (`graph.GAP`) are forms of the answer. They are for engines that verify drafts, and never decide what an
answer is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from teola_plugin.graph import GAP
from teola_plugin.requests.json_forms import forms, forms_of_schema
from teola_plugin.requests.payloads import Generate, Message

KEY, APP, TENANT = "teola_drafts", "teola_app", "teola_tenant"
"""Names under which a request's texts, its app and its tenant travel to vLLM: to a server in `vllm_xargs`."""
FORGET_ALL, FORGET_TENANT = "teola_forget_all", "teola_forget_tenant"
"""There, too: what was learned is to be forgotten, all of it or a tenant's."""
MOST = 32
"""Texts of one request."""
_LINE_END = re.compile(r"\r\n|\r|\n")  # not splitlines(): a call may hold U+2028
_TOOLS = 8
_CALLS = 4
"""Earlier calls of a conversation, the last ones."""
_ITEMS = 8
"""Of a list whose length nobody knows."""


def texts_of(payload: object) -> tuple[str, ...]:
    """Of a request for a generation; nothing for one that samples, for which nothing is drafted."""
    if not isinstance(payload, Generate) or not payload.sampling.greedy:
        return ()
    schema, tools = payload.sampling.json_schema, payload.prompt.tools
    if not schema and not tools:
        return ()
    earlier = calls_in(payload.prompt.messages) if tools else ()
    return (*earlier, *(forms_of_schema(schema) if schema else forms_of_tools(tools)))[:MOST]


def calls_in(messages: Sequence[Message]) -> tuple[str, ...]:
    """Calls of tools that the model has made in this conversation, the last one first."""
    answers = [m.content for m in reversed(messages) if m.role == "assistant"]
    lines = (line for content in answers for line in reversed(_LINE_END.split(content)))
    calls = dict.fromkeys(line for line in lines if line.startswith('{"name": ') and line.endswith("}"))
    return tuple(calls)[:_CALLS]


@lru_cache(maxsize=256)
def forms_of_tools(tools: str) -> tuple[str, ...]:
    """Of JSON text of tools, as OpenAI describes them: a call of each, in the forms in which open models write calls
    (see `adapters.tool_calls`): bare, and between tags, maybe behind other words."""
    try:
        described = json.loads(tools)
    except ValueError:
        return ()
    calls = [call for tool in (described if isinstance(described, list) else [])[:_TOOLS] for call in _calls(tool)]
    tagged = [f"{GAP}<tool_call>\n{call.rstrip(GAP)}\n</tool_call>{GAP}" for call in calls]
    return (*tagged, *(call if GAP in call else call + GAP for call in calls))[:MOST]


def _calls(tool: Any) -> Iterator[str]:
    """JSON of a call of a tool, once for each key under which models write arguments."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return
    arguments = next(iter(forms(function.get("parameters"))), "{}" if not function.get("parameters") else f"{{{GAP}}}")
    name = json.dumps(function["name"], ensure_ascii=False)
    for key in ("arguments", "parameters"):
        yield f'{{"name": {name}, "{key}": {arguments.rstrip(GAP)}}}'


def forms_of_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Of answers of which only these are understood."""
    return tuple(label + GAP for label in dict.fromkeys(labels) if label)[:MOST]


def forms_of_list(kind: str) -> tuple[str, ...]:
    """What stands before and between the items of a list that is spelled so (see `requests.items`)."""
    numbered = ["".join(f"{i}{mark} {GAP}\n" for i in range(1, _ITEMS + 1)) for mark in (".", ")")]
    bullets = [f"{mark} {GAP}\n" * _ITEMS for mark in ("-", "*")]
    found = {
        "numbered": numbered[:1],
        "markdown": bullets,
        "lines": [*numbered, bullets[0]],
        "choices": [_choices(indent) for indent in (4, None)],
    }
    return tuple(found.get(kind, ()))


def forms_of_questions() -> tuple[str, ...]:
    """As LlamaIndex's question generators ask for them, and as its example shows them: fenced, or bare."""
    one = {"sub_question": GAP, "tool_name": GAP}
    shown = json.dumps({"items": [one] * _ITEMS}, indent=4, ensure_ascii=False)
    compact = json.dumps({"items": [one] * _ITEMS}, ensure_ascii=False)
    return (f"```json\n{shown}\n```", shown, compact)


def _choices(indent: int | None) -> str:
    """As LlamaIndex's selectors ask for them: a list, of which the first is here."""
    one = json.dumps([{"choice": 0, "reason": GAP}], indent=indent, ensure_ascii=False)
    return one.replace("0", GAP, 1)
