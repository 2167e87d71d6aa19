"""Draft texts that follow from a request alone: from its schema, its tools, and earlier calls in the conversation.

A text with gaps (`graph.GAP`) is a form of the answer. Draft texts are for engines that verify drafts, and never
affect what the answer is.
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
"""Names under which a request's draft texts, app and tenant are sent to vLLM; to a server in `vllm_xargs`."""
FORGET_ALL, FORGET_TENANT = "teola_forget_all", "teola_forget_tenant"
"""Names of commands, sent in the same way: forget all learned drafts, or those of a tenant."""
MAX_TEXTS = 32
"""Maximum number of draft texts of one request."""
_LINE_END = re.compile(r"\r\n|\r|\n")  # not splitlines(): a call may hold U+2028
_MAX_TOOLS = 8
_MAX_CALLS = 4
"""Maximum number of earlier calls of a conversation, the latest ones."""
_ITEMS = 8
"""Number of items in the form of a list of unknown length."""


def texts_of(payload: object) -> tuple[str, ...]:
    """Return the draft texts of a generation, likeliest first; () for one that samples, which gets no drafts."""
    if not isinstance(payload, Generate) or not payload.sampling.greedy:
        return ()
    schema, tools = payload.sampling.json_schema, payload.prompt.tools
    if not schema and not tools:
        return ()
    earlier = calls_in(payload.prompt.messages) if tools else ()
    return (*earlier, *(forms_of_schema(schema) if schema else forms_of_tools(tools)))[:MAX_TEXTS]


def calls_in(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the tool calls that the model made in this conversation, the latest first.

    Drafts are made of them, since a model often repeats a call. Each is one line of JSON, as models write them.
    """
    answers = [m.content for m in reversed(messages) if m.role == "assistant"]
    lines = (line for content in answers for line in reversed(_LINE_END.split(content)))
    calls = dict.fromkeys(line for line in lines if line.startswith('{"name": ') and line.endswith("}"))
    return tuple(calls)[:_MAX_CALLS]


@lru_cache(maxsize=256)
def forms_of_tools(tools: str) -> tuple[str, ...]:
    """Return the forms of a call of each tool, for tools described as OpenAI does, in JSON.

    Open models write calls bare, or between tags and after other words (see `adapters.tool_calls`).
    """
    try:
        described = json.loads(tools)
    except ValueError:
        return ()
    calls = [call for tool in (described if isinstance(described, list) else [])[:_MAX_TOOLS] for call in _calls(tool)]
    tagged = [f"{GAP}<tool_call>\n{call.rstrip(GAP)}\n</tool_call>{GAP}" for call in calls]
    return (*tagged, *(call if GAP in call else call + GAP for call in calls))[:MAX_TEXTS]


def _calls(tool: Any) -> Iterator[str]:
    """Yield the JSON text of a call of a tool, once for each key under which models write arguments.

    `GAP` stands for what the model fills in; a gap at the end of the arguments is left out. Yield nothing for a tool
    that is not described as OpenAI does.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return
    arguments = next(iter(forms(function.get("parameters"))), "{}" if not function.get("parameters") else f"{{{GAP}}}")
    name = json.dumps(function["name"], ensure_ascii=False)
    for key in ("arguments", "parameters"):
        yield f'{{"name": {name}, "{key}": {arguments.rstrip(GAP)}}}'


def forms_of_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the forms of an answer that must begin with one of the labels."""
    return tuple(label + GAP for label in dict.fromkeys(labels) if label)[:MAX_TEXTS]


def forms_of_list(kind: str) -> tuple[str, ...]:
    """Return the texts before and between the items of a list of this kind (see `requests.items`)."""
    numbered = ["".join(f"{i}{mark} {GAP}\n" for i in range(1, _ITEMS + 1)) for mark in (".", ")")]
    bullets = [f"{mark} {GAP}\n" * _ITEMS for mark in ("-", "*")]
    forms_by_kind = {
        "numbered": numbered[:1],
        "markdown": bullets,
        "lines": [*numbered, bullets[0]],
        "choices": [_choices(indent) for indent in (4, None)],
    }
    return tuple(forms_by_kind.get(kind, ()))


def forms_of_questions() -> tuple[str, ...]:
    """Return the forms of an answer to LlamaIndex's question generators: in a code fence, or bare."""
    one = {"sub_question": GAP, "tool_name": GAP}
    indented = json.dumps({"items": [one] * _ITEMS}, indent=4, ensure_ascii=False)
    compact = json.dumps({"items": [one] * _ITEMS}, ensure_ascii=False)
    return (f"```json\n{indented}\n```", indented, compact)


def _choices(indent: int | None) -> str:
    """Return the form of an answer to LlamaIndex's selectors: a list, with its first item."""
    one = json.dumps([{"choice": 0, "reason": GAP}], indent=indent, ensure_ascii=False)
    return one.replace("0", GAP, 1)
