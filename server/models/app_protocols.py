"""How apps of each framework are called: their input for a chat, and their answers, whole and in pieces.

No framework is imported: apps are recognized by the methods that they have. Graphs have a file of their own.
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
    AppProtocol,
    AppRequest,
    Pieces,
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


def protocol_of(fast: Any) -> AppProtocol | None:
    """Return how to call the app, by the methods that it has; None for no app."""
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


def _runnable_input(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """Return a dict with the text under the app's key; messages for chains on messages and models; else the text."""
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
    """Return the JSON schema of a Runnable's input, with a reference to a definition resolved.

    Only the outermost `$ref` is resolved, which pydantic writes for some models; properties may still hold references.
    """
    schema: Mapping[str, Any] = fast.get_input_jsonschema()
    definition = str(schema.get("$ref", "")).rpartition("/")[2]
    resolved: Mapping[str, Any] = schema.get("$defs", {}).get(definition, schema)
    return resolved


_MESSAGES = ("messages", "chat_history", "history")


async def _runnable_stream(fast: Any, request: AppRequest, settings: AppSettings) -> Pieces:
    """Yield text where the app streams text or messages; else the answer that its chunks add up to."""
    if not _can_stream_text(fast):
        yield await _runnable_answer(fast, request, settings)
        return
    total: Any = None
    text_only = True
    async with aclosing(fast.astream(request.value)) as chunks:
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


async def _runnable_answer(fast: Any, request: AppRequest, settings: AppSettings) -> Answer:
    return answer_of(await fast.ainvoke(request.value), settings.output)


def _runnable_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    """Raise `HttpError` for inputs in `metadata` that do not fit the schema of a Runnable's input."""
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


RUNNABLE = AppProtocol(_runnable_input, _runnable_answer, _runnable_stream, _runnable_check)


# ------------------------------------------------------------ LlamaIndex


async def _query_stream(fast: Any, request: AppRequest, settings: AppSettings) -> Pieces:
    """Yield the answer of a query engine of LlamaIndex: its tokens, if it streams, and then the whole."""
    response = await fast.aquery(request.value)
    tokens = getattr(response, "async_response_gen", None)
    if tokens is None:
        yield answer_of(response, settings.output)
        return
    text = ""
    async for token in tokens():
        text += token
        yield token
    yield Answer(text, more=answer_of(response).more)


async def _query_answer(fast: Any, request: AppRequest, settings: AppSettings) -> Answer:
    """Return the whole answer of a query engine of LlamaIndex, also of an engine that is built to stream."""
    response = await fast.aquery(request.value)
    read = getattr(response, "get_response", None)  # of one that streams
    if read is None or not hasattr(response, "async_response_gen"):
        return answer_of(response, settings.output)
    return answer_of(await read(), settings.output)


def _query_input(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """Return the text of the last message. Raise `HttpError` for none: LlamaIndex has no vector for it.

    It is the input of a query engine, which answers one question at a time; the history of the chat is not used.
    """
    text = last_text(body)
    if not text:
        raise bad_request(f"the app {body.model!r} takes a text.", "send one", param="messages")
    return text


def _query_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    if not isinstance(inputs, str) or not inputs:
        raise _wrong_inputs("a query engine takes a text")


QUERY_ENGINE = AppProtocol(_query_input, _query_answer, _query_stream, _query_check)


def _chat_input(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    return roles_and_texts(body)


def _chat_arguments(messages: Any) -> dict[str, Any]:
    """Return the arguments for a chat engine or agent of LlamaIndex: the last message, and the history before it.

    `messages`: one text, or pairs of role and text.
    """
    if isinstance(messages, str):
        return {"message": messages, "chat_history": []}
    *history, (_, last) = messages
    return {"message": last, "chat_history": chat_history(history)}


async def _chat_answer(fast: Any, request: AppRequest, settings: AppSettings) -> Answer:
    return answer_of(await fast.achat(**_chat_arguments(request.value)), settings.output)


async def _chat_stream(fast: Any, request: AppRequest, settings: AppSettings) -> Pieces:
    """Yield the tokens of a chat engine's answer, then the whole answer with its sources."""
    response = await fast.astream_chat(**_chat_arguments(request.value))
    text = ""
    async for token in response.async_response_gen():
        text += token
        yield token
    yield Answer(text, more=answer_of(response).more)


def _chat_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    """Raise `HttpError` for inputs in `metadata` that are neither a text nor pairs of role and text."""
    pairs = [("user", inputs)] if isinstance(inputs, str) else inputs
    is_pairs = isinstance(pairs, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    if not is_pairs or not pairs or not all(role in _ROLES and isinstance(text, str) for role, text in pairs):
        raise _wrong_inputs("a chat engine takes a text, or pairs of role and text")


_ROLES = get_args(Role)
CHAT_ENGINE = AppProtocol(_chat_input, _chat_answer, _chat_stream, _chat_check, one_at_a_time=True)


def _workflow_input(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """Return the arguments with which a workflow of LlamaIndex runs for a chat.

    The text of the last message goes under the key that the settings name, or under `input`; an agent gets the message
    and the history.
    """
    if settings.input:
        return {settings.input: last_text(body)}
    if not hasattr(fast, "agents") and not hasattr(fast, "tools"):
        return {"input": last_text(body)}
    arguments = _chat_arguments(roles_and_texts(body))
    return {"user_msg": arguments["message"], "chat_history": arguments["chat_history"]}


async def _workflow_answer(fast: Any, request: AppRequest, settings: AppSettings) -> Answer:
    arguments = request.value if isinstance(request.value, Mapping) else {"input": request.value}
    return answer_of(await fast.run(**arguments), settings.output)


async def _workflow_stream(fast: Any, request: AppRequest, settings: AppSettings) -> Pieces:
    yield await _workflow_answer(fast, request, settings)


def _workflow_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    """Raise `HttpError` for inputs that name arguments of the workflow's `run` itself.

    These are `ctx`, `start_event` and `memory`, through which a client would set the state of the run.
    """
    reserved = {"ctx", "start_event", "memory"} & set(inputs if isinstance(inputs, Mapping) else ())
    if reserved:
        raise _wrong_inputs(f"{min(reserved)!r} is no input of a client's")


WORKFLOW = AppProtocol(_workflow_input, _workflow_answer, _workflow_stream, _workflow_check)


# ------------------------------------------------------------ workflows of our own


def _deployment_input(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    """Return the text of the last message as the only required input."""
    required = [settings.input] if settings.input else _required_inputs(fast, settings)
    if len(required) != 1:
        raise bad_request(
            f"the app {body.model!r} takes {', '.join(required) or 'no text'}, which messages do not say.",
            "give them as JSON in metadata.inputs",
            param="metadata",
        )
    return {required[0]: last_text(body)}


def _required_inputs(fast: Any, settings: AppSettings) -> list[str]:
    """Return the names of the required inputs, without those for documents."""
    from teola_plugin.workflow.values import Kind

    document_inputs = {one.name for one in fast.workflow.inputs if one.kind is Kind.DOCUMENTS}
    documents = {settings.documents} if settings.documents else document_inputs
    return [name for name in fast.workflow.input_schema()["required"] if name not in documents]


async def _deployment_answer(fast: Any, request: AppRequest, settings: AppSettings) -> Answer:
    """Run a deployed workflow and return its whole answer, with sources and tokens.

    The id of the query that it begins in the pool is reported before the answer is awaited, so that the live query
    knows it also if the workflow fails.
    """
    running = fast.astream(request.value, request.config)
    request.on_query_begin(running.running.id)
    return _result_answer(await running, settings)


async def _deployment_stream(fast: Any, request: AppRequest, settings: AppSettings) -> Pieces:
    """Yield the answer of a deployed workflow as its model writes it, then the whole answer with sources and tokens.

    Text is streamed only if the workflow streams the output that the settings choose.
    """
    stream = fast.astream(request.value, request.config)
    request.on_query_begin(stream.running.id)
    if settings.output in ("", stream.running.output):
        first = ""
        count = 0
        async for text in stream:
            if not count and stream.running.done:
                first = text  # a value that no model wrote comes whole, in Python's form; the answer has its JSON
            else:
                yield first + text
                first = ""
            count += 1
    yield _result_answer(await stream, settings)


def _result_answer(result: Any, settings: AppSettings) -> Answer:
    """Return the answer of a deployment, with the tokens of its query's trace.

    A result without a trace leaves the answer's usage at zero.
    """
    answer, trace = answer_of(result, settings.output), result.trace
    return answer if trace is None else replace(answer, usage=usage_in(trace))


def _deployment_check(fast: Any, inputs: Any, settings: AppSettings) -> None:
    if not isinstance(inputs, Mapping):
        raise _wrong_inputs("a workflow takes an object")


DEPLOYMENT = AppProtocol(_deployment_input, _deployment_answer, _deployment_stream, _deployment_check)
"""For what `workflow.deploy(pool)` returns."""


def is_pure(fast: Any, config: Any) -> bool:
    """Return True if a query of this deployment, with these settings, may be run again.

    Its primitives must not write, and must not run the user's code. False if that cannot be known.
    """
    if not hasattr(fast, "workflow"):
        return False
    try:
        return _is_pure_graph(fast.plan(None, config).graph)
    except TeolaError:  # invalid settings, which the query itself will report
        return False


def _is_pure_graph(graph: Graph) -> bool:
    subgraphs = (one.graph for p in graph for one in (p.fragment, p.otherwise) if one is not None)
    return all(p.pure for p in graph) and all(map(_is_pure_graph, subgraphs))
