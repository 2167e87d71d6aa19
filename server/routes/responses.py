"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from teola_plugin.server.models.base import ChatModel
from teola_plugin.server.routes.answering import begin, model_of, streamed, whole, with_documents_read
from teola_plugin.server.visits import Visit
from teola_plugin.server.wire.chat import ChatRequest
from teola_plugin.server.wire.responses import ResponsesRequest, ResponseWriter

router = APIRouter(prefix="/v1")


@router.post("/responses")
async def responses(request: Request, body: ResponsesRequest) -> Response:
    model = cast(ChatModel, model_of(request, body.model, "chat", "app"))
    chat = await with_documents_read(request, model, body.as_chat())
    visit = begin(request, model, model.tokens(chat.characters, body.max_output_tokens, 1))
    writer = ResponseWriter(body)
    if body.stream:
        return await streamed(request, visit, _events(model, chat, writer, visit), writer.failed)
    return await whole(request, visit, _whole(model, chat, writer, visit))


async def _whole(model: ChatModel, chat: ChatRequest, writer: ResponseWriter, visit: Visit) -> dict[str, Any]:
    return writer.whole((await model.whole(chat, visit))[0])


async def _events(model: ChatModel, chat: ChatRequest, writer: ResponseWriter, visit: Visit) -> AsyncIterator[str]:
    begun = False
    async with aclosing(model.stream(chat, visit)) as deltas:
        async for delta in deltas:
            if not begun:  # not before: a refusal is to be one
                begun = True
                for told in writer.begin():
                    yield told
            for told in writer.of(delta):
                yield told
