"""How objects of each framework are asked: what of a chat they take, how they answer, whole and in pieces.

No framework is imported: they are known by what they can be asked. Graphs have a file of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, get_args

from teola_plugin.adapters.app_frameworks import chat_history
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Graph
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.models.app_inputs import (
    Asked,
    Pieces,
    Way,
    answer_of,
    check_messages,
    framework_messages,
    is_text,
    last_text,
    roles_and_texts,
    text_in,
    usage_in,
)
from teola_plugin.server.models.graphs import GRAPH
from teola_plugin.server.settings import AppSettings
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.requests import ChatRequest, Role


def way_of(fast: Any) -> Way | None:
    """By what it can be asked, without its framework being imported."""
    if hasattr(fast, "arun") and hasattr(fast, "workflow"):
        return DEPLOYMENT
    if hasattr(fast, "ainvoke"):
        return GRAPH if hasattr(fast, "get_graph") and hasattr(fast, "channels") else RUNNABLE
    if hasattr(fast, "astream_chat"):
        return CHAT_ENGINE
    if hasattr(fast, "aquery"):
        return QUERY_ENGINE
    return WORKFLOW if hasattr(fast, "run") else None


# ------------------------------------------------------------ LangChain


def _runnable_given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """A dict with the text under the app's key; for chains on messages and models these; else the text."""
    if settings.input:
        return {settings.input: last_text(body)}
    schema = _input_schema(fast)
    keys = [str(key) for key in schema.get("required") or schema.get("properties") or () if key != settings.documents]
    if schema.get("type") == "object" and len(keys) == 1:
        return {keys[0]: framework_messages(body) if keys[0] in _MESSAGES else last_text(body)}
    if schema.get("type") == "object" and keys:
        raise bad_request(
            f"the app {body.model!r} takes {', '.join(sorted(keys))}, which messages do not say.",
            "give them as JSON in metadata.inputs",
            param="metadata",
        )
    return framework_messages(body) if "anyOf" in schema else last_text(body)


def _input_schema(fast: Any) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = fast.get_input_jsonschema()
    definition = str(schema.get("$ref", "")).rpartition("/")[2]
    resolved: Mapping[str, Any] = schema.get("$defs", {}).get(definition, schema)
    return resolved


_MESSAGES = ("messages", "chat_history", "history")


async def _runnable_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    """Yield text where the app streams text or messages; else the answer that its chunks add up to."""
    if not _can_stream_text(fast):
        yield await _runnable_whole(fast, asked, settings)
        return
    total: Any = None
    text_only = True
    async with aclosing(fast.astream(asked.value)) as chunks:
        async for chunk in chunks:
            text_only = text_only and is_text(chunk)
            if text_only:
                yield text_in(chunk)
            total = "" if text_only else _sum(total, chunk)
    if total is None or not text_only:
        yield answer_of(total, settings.output)


def _sum(total: Any, chunk: Any) -> Any:
    """Return what LangChain makes of the chunks of a stream: their sum, or the last where they have none."""
    if total is None:
        return chunk
    try:
        return total + chunk
    except TypeError:
        return chunk


_NO_TEXT = ("object", "array", "integer", "number", "boolean", "null")


def _can_stream_text(fast: Any) -> bool:
    """Return True if chunks of the app may be pieces of a text: it declares none of JSON's other types as its output.

    Parsers of JSON send their whole value so far in each chunk, whatever it is.
    """
    if any(hasattr(step, "diff") for step in _last_steps(fast)):
        return False
    try:
        schema: Mapping[str, Any] = fast.get_output_jsonschema()
    except Exception:  # pydantic has no schema for every class of a user's
        return True
    definition = str(schema.get("$ref", "")).rpartition("/")[2]
    schema = schema.get("$defs", {}).get(definition, schema)
    is_message = "response_metadata" in schema.get("properties", {})
    return is_message or schema.get("type") not in _NO_TEXT


def _last_steps(runnable: Any) -> Iterator[Any]:
    """Yield the parts of a Runnable whose output may be its own: behind bindings, sequences, branches and fallbacks."""
    inner = [getattr(runnable, name, None) for name in ("bound", "last", "default", "runnable")]
    inner += [*getattr(runnable, "fallbacks", ()), *(branch[1] for branch in getattr(runnable, "branches", ()))]
    parts = [part for part in inner if hasattr(part, "ainvoke")]
    for part in parts:
        yield from _last_steps(part)
    if not parts:
        yield runnable


async def _runnable_whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    return answer_of(await fast.ainvoke(asked.value), settings.output)


def _runnable_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    schema = _input_schema(fast)
    if schema.get("type") == "string" and not isinstance(inputs, str):
        raise _wrong_inputs("the app takes a text")
    if schema.get("type") == "object" and not isinstance(inputs, Mapping):
        raise _wrong_inputs("the app takes an object")
    missing = [key for key in schema.get("required", ()) if isinstance(inputs, Mapping) and key not in inputs]
    if missing := [key for key in missing if key != settings.documents]:
        raise _wrong_inputs(f"{missing[0]!r} is missing")
    if "anyOf" in schema and not isinstance(inputs, str):  # a model, which takes a text or messages
        if not isinstance(inputs, list):
            raise _wrong_inputs("the app takes a text or messages")
        check_messages(inputs)


def _wrong_inputs(reason: str) -> HttpError:
    return bad_request(f"metadata.inputs: {reason}.", "see GET /v1/models, and the app's own input", param="metadata")


RUNNABLE = Way(_runnable_given, _runnable_whole, _runnable_stream, _runnable_check)


# ------------------------------------------------------------ LlamaIndex


async def _query_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    response = await fast.aquery(asked.value)
    tokens = getattr(response, "async_response_gen", None)
    if tokens is None:
        yield answer_of(response, settings.output)
        return
    text = ""
    async for token in tokens():
        text += token
        yield token
    yield Answer(text, more=answer_of(response).more)


async def _query_whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    response = await fast.aquery(asked.value)
    read = getattr(response, "get_response", None)  # of one that streams
    if read is None or not hasattr(response, "async_response_gen"):
        return answer_of(response, settings.output)
    return answer_of(await read(), settings.output)


def _query_given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """Return the text of the last message. Raise `HttpError` for none: LlamaIndex has no vector for it."""
    text = last_text(body)
    if not text:
        raise bad_request(f"the app {body.model!r} takes a text.", "send one", param="messages")
    return text


def _query_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    if not isinstance(inputs, str) or not inputs:
        raise _wrong_inputs("a query engine takes a text")


QUERY_ENGINE = Way(_query_given, _query_whole, _query_stream, _query_check)


def _history_given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    return roles_and_texts(body)


def _chat_arguments(asked: Any) -> dict[str, Any]:
    if isinstance(asked, str):
        return {"message": asked, "chat_history": []}
    *before, (_, last) = asked
    return {"message": last, "chat_history": chat_history(before)}


async def _chat_whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    return answer_of(await fast.achat(**_chat_arguments(asked.value)), settings.output)


async def _chat_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    response = await fast.astream_chat(**_chat_arguments(asked.value))
    text = ""
    async for token in response.async_response_gen():
        text += token
        yield token
    yield Answer(text, more=answer_of(response).more)


def _chat_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    pairs = [("user", inputs)] if isinstance(inputs, str) else inputs
    is_pairs = isinstance(pairs, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    if not is_pairs or not pairs or not all(role in _ROLES and isinstance(text, str) for role, text in pairs):
        raise _wrong_inputs("a chat engine takes a text, or pairs of role and text")


_ROLES = get_args(Role)
CHAT_ENGINE = Way(_history_given, _chat_whole, _chat_stream, _chat_check, alone=True)


def _workflow_given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    if settings.input:
        return {settings.input: last_text(body)}
    if not hasattr(fast, "agents") and not hasattr(fast, "tools"):
        return {"input": last_text(body)}
    found = _chat_arguments(roles_and_texts(body))
    return {"user_msg": found["message"], "chat_history": found["chat_history"]}


async def _workflow_whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    given = asked.value if isinstance(asked.value, Mapping) else {"input": asked.value}
    return answer_of(await fast.run(**given), settings.output)


async def _workflow_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    yield await _workflow_whole(fast, asked, settings)


def _workflow_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    reserved = {"ctx", "start_event", "memory"} & set(inputs if isinstance(inputs, Mapping) else ())
    if reserved:
        raise _wrong_inputs(f"{min(reserved)!r} is no input of a client's")


WORKFLOW = Way(_workflow_given, _workflow_whole, _workflow_stream, _workflow_check)


# ------------------------------------------------------------ workflows of our own


def _deployment_given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """The text of the last message for the only input that has to be given."""
    required = [settings.input] if settings.input else _texts(fast, settings)
    if len(required) != 1:
        raise bad_request(
            f"the app {body.model!r} takes {', '.join(required) or 'no text'}, which messages do not say.",
            "give them as JSON in metadata.inputs",
            param="metadata",
        )
    return {required[0]: last_text(body)}


def _texts(fast: Any, settings: AppSettings) -> list[str]:
    """What has to be given, but for documents."""
    from teola_plugin.workflow.values import Kind

    found = {one.name for one in fast.workflow.inputs if one.kind is Kind.DOCUMENTS}
    documents = {settings.documents} if settings.documents else found
    return [name for name in fast.workflow.input_schema()["required"] if name not in documents]


async def _deployment_whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    running = fast.astream(asked.value, asked.config)
    asked.began(running.running.id)
    return _deployment_answer(await running, settings)


async def _deployment_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    stream = fast.astream(asked.value, asked.config)
    asked.began(stream.running.id)
    if settings.output in ("", stream.running.output):
        first = ""
        count = 0
        async for text in stream:
            if not count and stream.running.done:
                first = text  # of a value that no model wrote it is all, as Python spells it: the answer has its JSON
            else:
                yield first + text
                first = ""
            count += 1
    yield _deployment_answer(await stream, settings)


def _deployment_answer(result: Any, settings: AppSettings) -> Answer:
    """Its queries are their own: what they took stands in their traces."""
    answer, trace = answer_of(result, settings.output), result.trace
    return answer if trace is None else replace(answer, usage=usage_in(trace))


def _deployment_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    if not isinstance(inputs, Mapping):
        raise _wrong_inputs("a workflow takes an object")


DEPLOYMENT = Way(_deployment_given, _deployment_whole, _deployment_stream, _deployment_check)
"""What `workflow.deploy(pool)` gives."""


def pure(fast: Any, config: Any) -> bool:
    """Whether a query of a deployment, with these settings, is made of primitives that may be done again: none writes,
    and none runs code of the user's. False for what cannot be told."""
    if not hasattr(fast, "workflow"):
        return False
    try:
        return _pure(fast.plan(None, config).graph)
    except TeolaError:  # settings without sense: the query will say so
        return False


def _pure(graph: Graph) -> bool:
    held = (one.graph for p in graph for one in (p.fragment, p.otherwise) if one is not None)
    return all(p.pure for p in graph) and all(map(_pure, held))
