"""`/v1/models`, chat completions, responses, completions, embeddings and reranking."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from teola_plugin.server.errors import bad_request
from teola_plugin.server.live_queries import Visit
from teola_plugin.server.models.apps import App
from teola_plugin.server.models.base import ChatModel, Model, TextModel
from teola_plugin.server.models.engines import CarriedEngine, VectorEngine
from teola_plugin.server.routes.answering import (
    begin,
    model_of,
    service_of,
    streamed,
    whole,
    with_documents_read,
)
from teola_plugin.server.wire.answers import (
    DONE,
    ChatChunks,
    CompletionChunks,
    chat_completion,
    completion,
    event,
    new_id,
)
from teola_plugin.server.wire.requests import ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest
from teola_plugin.server.wire.responses import ResponsesRequest, ResponseWriter

router = APIRouter(prefix="/v1")
_STARTED = int(time.time())


@router.get("/models")
def models(request: Request) -> dict[str, Any]:
    """Those that the key may ask."""
    service = service_of(request)
    caller = service.caller(request.headers)
    return {"object": "list", "data": [_model(m) for n, m in service.models.items() if caller.may_ask(n)]}


@router.get("/models/{name:path}")
def model(request: Request, name: str) -> dict[str, Any]:
    """Of an app, also what it takes."""
    found = model_of(request, name, "chat", "app", "embedding", "reranking")
    return _model(found) | (found.form() if isinstance(found, App) else {})


def _model(model: Any) -> dict[str, Any]:
    about = {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "teola", "kind": model.kind}
    return about | {key: value for key, value in model.told().items() if value not in (None, "")}


# ------------------------------------------------------------ chat


@router.post("/chat/completions")
async def chat(request: Request, body: ChatRequest) -> Response:
    model = cast(ChatModel, model_of(request, body.model, "chat", "app"))
    body = await with_documents_read(request, model, body)
    answer = body.max_completion_tokens or body.max_tokens
    visit = begin(request, model, model.tokens(body.characters, answer, body.n or 1))
    if isinstance(model, CarriedEngine):
        if body.stream:
            return await streamed(request, visit, _carried(model, body, visit))
        return await whole(request, visit, model.response(body, visit))
    if body.stream:
        return await streamed(request, visit, _chat_events(model, body, visit))
    return await whole(request, visit, _chat(model, body, visit))


async def _chat(model: ChatModel, body: ChatRequest, visit: Visit) -> dict[str, Any]:
    return chat_completion(await model.whole(body, visit), body.model)


async def _chat_events(model: ChatModel, body: ChatRequest, visit: Visit) -> AsyncIterator[str]:
    chunks = ChatChunks(body.model, body.tells_usage)
    async for delta in model.stream(body, visit):
        for chunk in chunks.of(delta):
            yield event(chunk)
    for chunk in chunks.end():
        yield event(chunk)
    yield DONE


async def _carried(model: CarriedEngine, body: ChatRequest, visit: Visit) -> AsyncIterator[str]:
    async for chunk in model.chunks(body, visit):
        yield event(chunk)
    yield DONE


# ------------------------------------------------------------ completions


@router.post("/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    model = cast(TextModel, model_of(request, body.model, "chat"))
    prompts = await _texts(request, model, body.model, body.prompt, "prompt")
    count = len(prompts) * (body.n or 1)
    visit = begin(request, model, model.tokens(sum(map(len, prompts)), body.max_tokens or 16, count))
    if body.stream:
        return await streamed(request, visit, _completion_events(model, body, prompts, visit))
    return await whole(request, visit, _completion(model, body, prompts, visit))


async def _completion(model: TextModel, body: CompletionRequest, prompts: list[str], visit: Visit) -> dict[str, Any]:
    return completion(await model.complete(body, prompts, visit), body.model, body.n or 1)


async def _completion_events(
    model: TextModel, body: CompletionRequest, prompts: list[str], visit: Visit
) -> AsyncIterator[str]:
    chunks = CompletionChunks(body.model, body.tells_usage, body.n or 1)
    async for delta in model.stream_completion(body, prompts, visit):
        for chunk in chunks.of(delta):
            yield event(chunk)
    for chunk in chunks.end():
        yield event(chunk)
    yield DONE


async def _texts(request: Request, model: Model, asked: str, given: str | Sequence[Any], param: str) -> list[str]:
    """Raises `HttpError`."""
    names = list(dict.fromkeys((asked, model.name)))
    return await service_of(request).token_ids.texts(given, param, names)


# ------------------------------------------------------------ vectors


@router.post("/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    model = cast(VectorEngine, model_of(request, body.model, "embedding"))
    texts = await _texts(request, model, body.model, body.input, "input")
    _not_too_many(request, texts, "input")
    visit = begin(request, model, model.tokens(sum(map(len, texts)), None, 1))
    return await whole(request, visit, _embedded(model, body, texts, visit))


async def _embedded(model: VectorEngine, body: EmbeddingRequest, texts: list[str], visit: Visit) -> dict[str, Any]:
    vectors = await model.embed(texts, body.input_type, visit)
    if body.dimensions is not None and body.dimensions != len(vectors[0]):
        raise bad_request(
            f"vectors of the model {body.model!r} have {len(vectors[0])} dimensions.",
            "leave dimensions out",
            param="dimensions",
            code="unsupported",
        )
    tokens = _estimated(visit, texts)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": body.model, "usage": tokens}


def _encoded(vector: list[float], how: str | None) -> list[float] | str:
    return base64.b64encode(array("f", vector).tobytes()).decode() if how == "base64" else vector


def _estimated(visit: Visit, texts: Sequence[str]) -> dict[str, int]:
    """Engines do not tell how many tokens texts had: four characters count as one."""
    tokens = sum(max(1, len(text) // 4) for text in texts)
    visit.cost(tokens)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    model = cast(VectorEngine, model_of(request, body.model, "reranking"))
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    _not_too_many(request, texts, "documents")
    visit = begin(request, model, model.tokens(sum(map(len, texts)), None, 1))
    return await whole(request, visit, _ranked(model, body, texts, visit))


async def _ranked(model: VectorEngine, body: RerankRequest, texts: list[str], visit: Visit) -> dict[str, Any]:
    scores = await model.scores(body.query, texts, visit)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    shown: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    for one in shown if body.return_documents else ():
        one["document"] = {"text": texts[one["index"]]}
    return {
        "id": new_id("rerank"),
        "model": body.model,
        "results": shown,
        "usage": {"total_tokens": _estimated(visit, texts)["total_tokens"]},
    }


def _not_too_many(request: Request, texts: Sequence[str], param: str) -> None:
    most = service_of(request).settings.max_batch
    if len(texts) > most:
        raise bad_request(f"{param} holds {len(texts)} texts; {most} are taken at a time.", "send less", param=param)


# ------------------------------------------------------------ responses


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
