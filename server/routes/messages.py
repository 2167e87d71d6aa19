"""Anthropic's protocol: `/v1/messages`, and the count of a prompt's tokens."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from teola_plugin.server.errors import unsupported
from teola_plugin.server.live_queries import RequestSession
from teola_plugin.server.models.apps import App
from teola_plugin.server.models.base import ChatModel
from teola_plugin.server.routes.answering import (
    begin_session,
    model_of,
    respond,
    respond_written,
    with_documents_read,
)
from teola_plugin.server.wire.messages import MessagesRequest, MessageWriter, TokenCountRequest
from teola_plugin.server.wire.requests import ChatRequest

router = APIRouter(prefix="/v1/messages")


@router.post("")
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a message of Anthropic's protocol with an LLM engine or an app, whole or as a stream of events."""
    writer = MessageWriter(body, request.scope["teola.request_id"])
    model = cast(ChatModel, model_of(request, body.model, "chat", "app"))
    return await respond_written(request, model, body.as_chat(), writer, body.max_tokens, stream=bool(body.stream))


@router.post("/count_tokens")
async def count_tokens(request: Request, body: TokenCountRequest) -> Response:
    """Return the number of tokens of a prompt. The engine reads it, so it is in the prefix cache afterwards."""
    model = cast(ChatModel, model_of(request, body.model, "chat", "app"))
    if isinstance(model, App):
        raise unsupported("model", f"the app {body.model!r} writes its prompts itself.", "ask for an engine")
    chat = await with_documents_read(request, model, body.as_chat())
    session = begin_session(request, model, model.estimate_tokens(chat.characters, 1, 1))
    return await respond(request, session, _count_tokens(model, chat, session))


async def _count_tokens(model: ChatModel, chat: ChatRequest, session: RequestSession) -> dict[str, Any]:
    """Return the number of tokens of a prompt, as the engine reports it after writing one token.

    Raise `HttpError` for a server that does not count tokens.
    """
    usage = (await model.answer(chat, session))[0].usage
    if not usage.prompt:
        raise unsupported("model", f"the server behind {model.name!r} does not count tokens.", "leave the count out")
    return {"input_tokens": usage.prompt}
