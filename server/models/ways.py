"""How objects of each framework are asked: what of a chat they take, how they answer, whole and in pieces.

No framework is imported: they are known by what they can be asked. Graphs have a file of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from teola_plugin.server.errors import bad_request
from teola_plugin.server.models.app_inputs import answer_of, last_text, roles_and_texts, text_in, usage_in
from teola_plugin.server.models.asked import Asked, Pieces, Way
from teola_plugin.server.models.graphs import GRAPH
from teola_plugin.server.settings import AppSettings
from teola_plugin.server.wire.answers import Answer
from teola_plugin.server.wire.chat import ChatRequest


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
    schema: Mapping[str, Any] = fast.get_input_jsonschema()
    schema = schema.get("$defs", {}).get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    keys = [str(key) for key in schema.get("required") or schema.get("properties") or () if key != settings.documents]
    if schema.get("type") == "object" and len(keys) == 1:
        return {keys[0]: roles_and_texts(body) if keys[0] in _MESSAGES else last_text(body)}
    if schema.get("type") == "object" and keys:
        raise bad_request(
            f"the app {body.model!r} takes {', '.join(sorted(keys))}, which messages do not say.",
            "give them as JSON in metadata.inputs",
            param="metadata",
        )
    return roles_and_texts(body) if "anyOf" in schema else last_text(body)


_MESSAGES = ("messages", "chat_history", "history")


async def _runnable_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    """Text where the app streams text or messages; else what its chunks add up to."""
    whole: Any = None
    streams = True
    async with aclosing(fast.astream(asked.value)) as chunks:
        async for chunk in chunks:
            if streams and (isinstance(chunk, str) or hasattr(chunk, "content")):
                yield text_in(chunk)
            else:
                streams = False
                whole = chunk if whole is None else whole + chunk
    if not streams:
        yield answer_of(whole, settings.output)


async def _runnable_whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    return answer_of(await fast.ainvoke(asked.value), settings.output)


RUNNABLE = Way(_runnable_given, _runnable_whole, _runnable_stream)


# ------------------------------------------------------------ LlamaIndex


def _text_given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    return last_text(body)


async def _query_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    response = await fast.aquery(asked.value)
    tokens = getattr(response, "async_response_gen", None)
    if tokens is None:
        answer = answer_of(response, settings.output)
        yield answer.text
        yield answer
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


QUERY_ENGINE = Way(_text_given, _query_whole, _query_stream)


def _history_given(fast: Any, body: ChatRequest, settings: AppSettings) -> Any:
    return roles_and_texts(body)


def _chat_arguments(asked: Any) -> dict[str, Any]:
    from teola_plugin.adapters.llamaindex.history import chat_messages

    if isinstance(asked, str):
        return {"message": asked, "chat_history": []}
    *before, (_, last) = asked
    return {"message": last, "chat_history": chat_messages(before)}


async def _chat_whole(fast: Any, asked: Asked, settings: AppSettings) -> Answer:
    return answer_of(await fast.achat(**_chat_arguments(asked.value)), settings.output)


async def _chat_stream(fast: Any, asked: Asked, settings: AppSettings) -> Pieces:
    response = await fast.astream_chat(**_chat_arguments(asked.value))
    text = ""
    async for token in response.async_response_gen():
        text += token
        yield token
    yield Answer(text, more=answer_of(response).more)


CHAT_ENGINE = Way(_history_given, _chat_whole, _chat_stream, alone=True)


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
    answer = await _workflow_whole(fast, asked, settings)
    yield answer.text
    yield answer


WORKFLOW = Way(_workflow_given, _workflow_whole, _workflow_stream)


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
    async for text in stream:
        yield text
    yield _deployment_answer(await stream, settings)


def _deployment_answer(result: Any, settings: AppSettings) -> Answer:
    """Its queries are their own: what they took stands in their traces."""
    answer, trace = answer_of(result, settings.output), result.trace
    return answer if trace is None else replace(answer, usage=usage_in(trace))


DEPLOYMENT = Way(_deployment_given, _deployment_whole, _deployment_stream)
"""What `workflow.deploy(pool)` gives."""
