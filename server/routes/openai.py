"""`/v1/models`, chat completions, responses, completions, embeddings and reranking."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from teola_plugin.server.errors import bad_request
from teola_plugin.server.live_queries import RequestSession
from teola_plugin.server.models.apps import App
from teola_plugin.server.models.base import ChatModel, Model, TextModel
from teola_plugin.server.models.engines import CarriedEngine, VectorEngine
from teola_plugin.server.routes.answering import (
    begin_session,
    model_of,
    respond,
    respond_stream,
    respond_written,
    service_of,
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
from teola_plugin.server.wire.messages import model_info, model_page, speaks_anthropic
from teola_plugin.server.wire.requests import ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest
from teola_plugin.server.wire.responses import ResponsesRequest, ResponseWriter

router = APIRouter(prefix="/v1")
_STARTED = int(time.time())


@router.get("/models")
def list_models(request: Request) -> dict[str, Any]:
    """Return the engines and apps that the key may ask, in Anthropic's form if the request has `anthropic-version`."""
    service = service_of(request)
    caller = service.caller(request.headers)
    models = [model for name, model in service.models.items() if caller.may_ask(name)]
    if speaks_anthropic(request.url.path, request.headers):
        return model_page([model_info(model.name, _STARTED, model.details()) for model in models])
    return {"object": "list", "data": [_model(model) for model in models]}


@router.get("/models/{name:path}")
def get_model(request: Request, name: str) -> dict[str, Any]:
    """Return one engine or app; for an app also the schemas of its inputs and settings."""
    served_model = model_of(request, name, "chat", "app", "embedding", "reranking")
    if speaks_anthropic(request.url.path, request.headers):
        return model_info(served_model.name, _STARTED, served_model.details())
    return _model(served_model) | (served_model.input_schemas() if isinstance(served_model, App) else {})


def _model(model: Any) -> dict[str, Any]:
    base = {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "teola", "kind": model.kind}
    return base | {key: value for key, value in model.details().items() if value not in (None, "")}


# ------------------------------------------------------------ chat


@router.post("/chat/completions")
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a chat with an LLM engine or an app, whole or as a stream of chunks.

    It supports `n`, tools, JSON schemas, and usage with cached tokens.
    """
    model = cast(ChatModel, model_of(request, body.model, "chat", "app"))
    body = await with_documents_read(request, model, body)
    answer = body.max_completion_tokens or body.max_tokens
    session = begin_session(request, model, model.estimate_tokens(body.characters, answer, body.n or 1))
    if isinstance(model, CarriedEngine):
        if body.stream:
            return await respond_stream(request, session, _carried_events(model, body, session))
        return await respond(request, session, model.response(body, session))
    if body.stream:
        return await respond_stream(request, session, _chat_events(model, body, session))
    return await respond(request, session, _chat(model, body, session))


async def _chat(model: ChatModel, body: ChatRequest, session: RequestSession) -> dict[str, Any]:
    return chat_completion(await model.answer(body, session), body.model)


async def _chat_events(model: ChatModel, body: ChatRequest, session: RequestSession) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed chat, ending with `[DONE]`."""
    chunks = ChatChunks(body.model, body.includes_usage)
    async for delta in model.stream(body, session):
        for chunk in chunks.chunks_of(delta):
            yield event(chunk)
    for chunk in chunks.end():
        yield event(chunk)
    yield DONE


async def _carried_events(model: CarriedEngine, body: ChatRequest, session: RequestSession) -> AsyncIterator[str]:
    """Yield a carried engine's chunks as server-sent events, ending with `[DONE]`.

    They are the chunks of the server behind the engine, unchanged but for the model's name and an unwanted usage.
    """
    async for chunk in model.chunks(body, session):
        yield event(chunk)
    yield DONE


# ------------------------------------------------------------ completions


@router.post("/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts of plain text with an LLM engine, whole or as a stream of chunks."""
    model = cast(TextModel, model_of(request, body.model, "chat"))
    prompts = await _texts(request, model, body.model, body.prompt, "prompt")
    count = len(prompts) * (body.n or 1)
    session = begin_session(request, model, model.estimate_tokens(sum(map(len, prompts)), body.max_tokens or 16, count))
    if body.stream:
        return await respond_stream(request, session, _completion_events(model, body, prompts, session))
    return await respond(request, session, _completion(model, body, prompts, session))


async def _completion(
    model: TextModel, body: CompletionRequest, prompts: list[str], session: RequestSession
) -> dict[str, Any]:
    return completion(await model.complete(body, prompts, session), body.model, body.n or 1)


async def _completion_events(
    model: TextModel, body: CompletionRequest, prompts: list[str], session: RequestSession
) -> AsyncIterator[str]:
    """Yield the server-sent events of streamed completions, ending with `[DONE]`."""
    chunks = CompletionChunks(body.model, body.includes_usage, body.n or 1)
    async for delta in model.stream_completion(body, prompts, session):
        for chunk in chunks.chunks_of(delta):
            yield event(chunk)
    for chunk in chunks.end():
        yield event(chunk)
    yield DONE


async def _texts(
    request: Request, model: Model, requested_name: str, input: str | Sequence[Any], param: str
) -> list[str]:
    """Return the texts of an input that may be token ids. Raise `HttpError`.

    Token ids are decoded by the encoding that the settings name for the model, under the name that the client used or
    its own. `param` names the field in errors.
    """
    names = list(dict.fromkeys((requested_name, model.name)))
    return await service_of(request).token_ids.texts(input, param, names)


# ------------------------------------------------------------ vectors


@router.post("/embeddings")
async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Return the vectors of one or more texts, as numbers or in base64.

    `input_type: query` is for models that tell questions from documents.
    """
    model = cast(VectorEngine, model_of(request, body.model, "embedding"))
    texts = await _texts(request, model, body.model, body.input, "input")
    _check_batch(request, texts, "input")
    session = begin_session(request, model, model.estimate_tokens(sum(map(len, texts)), None, 1))
    return await respond(request, session, _embed(model, body, texts, session))


async def _embed(
    model: VectorEngine, body: EmbeddingRequest, texts: list[str], session: RequestSession
) -> dict[str, Any]:
    """Return the body of a reply with the vectors of texts, as numbers or in base64. Charge the session.

    Raise `HttpError` if the request wants another number of dimensions than the model gives.
    """
    vectors = await model.embed(texts, body.input_type, session)
    if body.dimensions is not None and body.dimensions != len(vectors[0]):
        raise bad_request(
            f"vectors of the model {body.model!r} have {len(vectors[0])} dimensions.",
            "leave dimensions out",
            param="dimensions",
            code="unsupported",
        )
    tokens = _estimate_usage(session, texts)
    is_base64 = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(array("f", vector).tobytes()).decode() if is_base64 else vector,
        }
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": body.model, "usage": tokens}


def _estimate_usage(session: RequestSession, texts: Sequence[str]) -> dict[str, int]:
    """Charge the session for texts: engines do not count their tokens, so four characters count as one.

    Return the estimate in OpenAI's form of usage. Each text costs at least one token.
    """
    tokens = sum(max(1, len(text) // 4) for text in texts)
    session.add_cost(tokens)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Return documents with their scores for a query, the most relevant first. It needs a reranking engine."""
    model = cast(VectorEngine, model_of(request, body.model, "reranking"))
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    _check_batch(request, texts, "documents")
    session = begin_session(request, model, model.estimate_tokens(sum(map(len, texts)), None, 1))
    return await respond(request, session, _rerank(model, body, texts, session))


async def _rerank(
    model: VectorEngine, body: RerankRequest, texts: list[str], session: RequestSession
) -> dict[str, Any]:
    """Return the body of a reply with the scores of texts, best first, at most `top_n` of them. Charge the session."""
    scores = await model.scores(body.query, texts, session)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    for one in results if body.return_documents else ():
        one["document"] = {"text": texts[one["index"]]}
    return {
        "id": new_id("rerank"),
        "model": body.model,
        "results": results,
        "usage": {"total_tokens": _estimate_usage(session, texts)["total_tokens"]},
    }


def _check_batch(request: Request, texts: Sequence[str], param: str) -> None:
    """Raise `HttpError` if a request holds more texts than the settings allow."""
    max_batch = service_of(request).settings.max_batch
    if len(texts) > max_batch:
        raise bad_request(
            f"{param} holds {len(texts)} texts; {max_batch} are taken at a time.", "send less", param=param
        )


# ------------------------------------------------------------ responses


@router.post("/responses")
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Answer a request of OpenAI's Responses protocol with an LLM engine or an app, whole or as a stream of events.

    It supports tools and JSON schemas. Answers are not kept, so `previous_response_id` is refused.
    """
    model = cast(ChatModel, model_of(request, body.model, "chat", "app"))
    writer = ResponseWriter(body)
    return await respond_written(
        request, model, body.as_chat(), writer, body.max_output_tokens, stream=bool(body.stream)
    )
