"""Engines of the pool as models: LLMs, engines that embed or rerank, and engines that are OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from teola_plugin.adapters.calls import to_list
from teola_plugin.adapters.sampling import ToolText
from teola_plugin.adapters.tool_calls import certain_text, new_id
from teola_plugin.engines.openai.http import malformed
from teola_plugin.engines.openai.wire import (
    Headers,
    MalformedReply,
    WireGeneration,
    WirePiece,
    WirePrompt,
    check_chunk,
    check_completion,
    chunks_of,
    content_text,
    parse_object,
)
from teola_plugin.errors import EngineError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, Generate, Generation, Prompt, Sampling, ScorePair
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.server.live_queries import RequestSession
from teola_plugin.server.models.base import shown_model
from teola_plugin.server.wire.answers import Answer, Delta, Deltas, ToolCall, Usage
from teola_plugin.server.wire.requests import INT64, ChatRequest, CompletionRequest, Generating, StreamOptions
from teola_plugin.server.wire.sampling import check_known, messages_of, sampling_of, schema_of, tools_of

DEFAULT_MAX_TOKENS = 4096
"""Largest number of tokens of an answer if neither the client nor the engine sets one."""
_KNOWN = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "ignore_eos"),
        *("messages", "prompt", "tools", "tool_choice", "response_format"),
    }
)


@dataclass(frozen=True, slots=True)
class TextEngine:
    """An LLM engine of the pool as a `TextModel`: messages or text in, one or several choices out."""

    pool: EnginePool
    name: str
    kind: str = "chat"

    def details(self) -> dict[str, Any]:
        profile = self.pool.engine(self.name).profile
        return {"root": shown_model(self.pool, self.name) or self.name, "max_model_len": profile.max_request_size}

    def estimate_tokens(self, characters: int, max_answer_tokens: int | None, n: int) -> int:
        return characters // 4 + n * (max_answer_tokens or 256)

    # ------------------------------------------------------------ chat

    async def answer(self, body: ChatRequest, session: RequestSession) -> list[Answer]:
        requests, tools = self._chat_requests(body, session)
        return await self._answers(requests, tools, session)

    async def stream(self, body: ChatRequest, session: RequestSession) -> Deltas:
        """Yield the engine's answers to a chat in pieces; the last delta of each choice holds the whole of it.

        Deltas of several choices come interleaved, told apart by their index. Raise `HttpError` for what the engine
        does not support, before the first delta. Requests are cancelled if the caller stops reading.
        """
        requests, tools = self._chat_requests(body, session)
        async with aclosing(self._stream_answers(requests, tools, session)) as deltas:
            async for delta in deltas:
                yield delta

    def _chat_requests(self, body: ChatRequest, session: RequestSession) -> tuple[list[Generate], ToolText | None]:
        """Return one request to the engine for each choice of a chat, and the tools that its text may call.

        Raise `HttpError` for parameters, messages, schemas and tools that the engine does not support.
        """
        check_known(body.sent_fields(), _KNOWN, self.name)
        tools = tools_of(body)
        schema = tools.schema if tools is not None and tools.schema else schema_of(body.response_format)
        max_tokens = self._max_tokens(body.max_completion_tokens or body.max_tokens, session)
        prompt = Prompt(messages_of(body.messages, self.name), tools=tools.definitions if tools else "")
        return _requests_for(prompt, sampling_of(body, max_tokens, schema), body), tools

    def _max_tokens(self, requested: int | None, session: RequestSession) -> int:
        limit = self.pool.engine(self.name).profile.max_request_size or DEFAULT_MAX_TOKENS
        return session.caller.max_tokens(requested or limit)

    # ------------------------------------------------------------ completions

    async def complete(self, body: CompletionRequest, prompts: list[str], session: RequestSession) -> list[Answer]:
        return await self._answers(self._completion_requests(body, prompts, session), None, session)

    async def stream_completion(self, body: CompletionRequest, prompts: list[str], session: RequestSession) -> Deltas:
        """Yield the engine's continuations of the prompts, piece by piece, as `stream` does for a chat."""
        async with aclosing(
            self._stream_answers(self._completion_requests(body, prompts, session), None, session)
        ) as deltas:
            async for delta in deltas:
                yield delta

    def _completion_requests(
        self, body: CompletionRequest, prompts: list[str], session: RequestSession
    ) -> list[Generate]:
        """Return the requests to the engine for `n` continuations of each prompt.

        Raise `HttpError` for parameters that the engine does not support.
        """
        check_known(body.sent_fields(), _KNOWN, self.name)
        sampling = sampling_of(
            body, self._max_tokens(body.max_tokens or 16, session)
        )  # 16 is the protocol's own default
        return [one for text in prompts for one in _requests_for(Prompt(text=text), sampling, body)]

    # ------------------------------------------------------------ asking the engine

    async def _answers(
        self, requests: Sequence[Generate], tools: ToolText | None, session: RequestSession
    ) -> list[Answer]:
        """Send requests to the engine as one call. Charge the session, and return the answers once all are whole."""
        with session.at_call_position() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, requests, run=run)
        answers = [_answer(value, tools) for value in await handle]
        session.add_cost(sum(one.usage.total for one in answers))
        return answers

    async def _stream_answers(
        self, requests: Sequence[Generate], tools: ToolText | None, session: RequestSession
    ) -> Deltas:
        """Send each request to the engine as a call of its own, and yield the deltas of all of them as they come.

        Requests that still run are cancelled if the caller stops reading or one of them fails. The session is charged
        as each choice ends.
        """
        with session.at_call_position() as run:
            handles = [
                self.pool.call(PrimitiveKind.PREFILLING, self.name, [request], stream=True, run=run)
                for request in requests
            ]
        news: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(_read_choice(i, handle, tools, news)) for i, handle in enumerate(handles)]
        running = len(tasks)
        try:
            while running:
                delta = await news.get()
                if isinstance(delta, BaseException):
                    raise delta
                if delta.end is not None:
                    running -= 1
                    session.add_cost(delta.end.usage.total)
                yield delta
        finally:
            for task, handle in zip(tasks, handles, strict=True):
                handle.cancel()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _requests_for(prompt: Prompt, sampling: Sampling, body: Generating) -> list[Generate]:
    """Return `n` requests for the prompt, each with a seed of its own if the client gave one.

    The seeds follow the client's one by one, and stay within signed 64 bits. With equal seeds all choices would be the
    same.
    """
    first = sampling.seed
    seeds = [None if first is None else (first + i + INT64) % (2 * INT64) - INT64 for i in range(body.n or 1)]
    return [Generate(prompt, replace(sampling, seed=seed)) for seed in seeds]


async def _read_choice(
    index: int, handle: CallHandle, tools: ToolText | None, news: asyncio.Queue[Delta | BaseException]
) -> None:
    """Put the deltas of one choice into `news`. Text that may turn out to be a tool call is held back."""
    text, sent_length = "", 0
    try:
        async for piece in handle.pieces:
            text += piece.text
            certain = text if tools is None else certain_text(text)
            if len(certain) > sent_length:
                news.put_nowait(Delta(index, certain[sent_length:]))
                sent_length = len(certain)
        answer = _answer((await handle)[0], tools)
        if len(answer.text) > sent_length:
            news.put_nowait(Delta(index, answer.text[sent_length:]))
        news.put_nowait(Delta(index, end=answer))
    except Exception as error:
        news.put_nowait(error)


def _answer(value: Generation, tools: ToolText | None) -> Answer:
    """Return a generation of an engine as an answer, with the tool calls that its text makes."""
    usage = Usage(value.prompt_tokens, value.completion_tokens, value.cached_tokens)
    rest, calls = (value.text, []) if tools is None else tools.read(value.text)
    if not calls:
        return Answer(value.text, value.finish_reason, usage, stop_sequence=value.stop_sequence)
    tool_calls = tuple(ToolCall(new_id(), call.name, json.dumps(call.args)) for call in calls)
    return Answer(rest, "tool_calls", usage, tool_calls)


@dataclass(frozen=True, slots=True)
class VectorEngine:
    """An engine of the pool that embeds or reranks. `kind`: embedding or reranking."""

    pool: EnginePool
    name: str
    kind: str

    def details(self) -> dict[str, Any]:
        return {"root": shown_model(self.pool, self.name) or self.name}

    def estimate_tokens(self, characters: int, max_answer_tokens: int | None, n: int) -> int:
        return characters // 4

    async def embed(
        self, texts: Sequence[str], role: Literal["query", "document"], session: RequestSession
    ) -> list[list[float]]:
        """Return the vectors of texts, in their order. `role`: some models embed a query otherwise than a document."""
        with session.at_call_position() as run:
            requests = [EmbedText(text, role) for text in texts]
            handle = self.pool.call(PrimitiveKind.EMBEDDING, self.name, requests, run=run)
        return [to_list(vector) for vector in await handle]

    async def scores(self, query: str, texts: Sequence[str], session: RequestSession) -> list[float]:
        """Return how relevant each text is to the query, in the order of the texts.

        The scale is that of the engine's model; higher is more relevant. All pairs are one call of the engine.
        """
        with session.at_call_position() as run:
            pairs = [ScorePair(query, text) for text in texts]
            handle = self.pool.call(PrimitiveKind.RERANKING, self.name, pairs, run=run)
        return [float(score) for score in await handle]


@dataclass(frozen=True, slots=True)
class CarriedEngine(TextEngine):
    """An engine that is an OpenAI-compatible server. Chats go through as they are: tools, logprobs and whatever else
    the server knows. Completions are the engine's own."""

    async def response(self, body: ChatRequest, session: RequestSession) -> dict[str, Any]:
        """Return the server's answer, under the name of this model. Raise TeolaError, also for a malformed one."""
        with session.at_call_position() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, [self._request(body, session, False)], run=run)
        reply = self._parse((await handle)[0], check_completion)
        session.add_cost(_usage(reply).total)
        return reply

    async def chunks(self, body: ChatRequest, session: RequestSession) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server's chunks. Raise TeolaError, also for a malformed one and for a stream without a choice."""
        request, hides_usage = self._request(body, session, True), not body.includes_usage
        with session.at_call_position() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, [request], stream=True, run=run)
        before_choices: list[dict[str, Any]] = []  # not sent before there is a choice, so that a refusal has its status
        has_choices = False
        async with aclosing(self._parsed_chunks(handle)) as chunks:
            async for chunk in chunks:
                has_choices = has_choices or bool(chunk.get("choices"))
                before_choices.append(chunk)
                for one in before_choices if has_choices else ():
                    if one.get("usage"):
                        session.add_cost(_usage(one).total)
                    if one.get("choices") or not hides_usage:
                        yield {key: value for key, value in one.items() if key != "usage" or not hides_usage}
                if has_choices:
                    before_choices.clear()
        if not has_choices:
            raise self._malformed(MalformedReply("no chunk of the stream has a choice"), "", ())

    async def _parsed_chunks(self, handle: CallHandle) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of the server's stream as JSON objects, or the chunks that a whole reply amounts to.

        The request is cancelled if the caller stops reading. Raise `EngineError` for a malformed chunk.
        """
        has_pieces = False
        try:
            async for piece in handle.pieces:
                if isinstance(piece, WirePiece) and piece.chunk:
                    has_pieces = True
                    yield self._parse(piece, check_chunk)
            value = (await handle)[0]
            for chunk in chunks_of(value.response) if not has_pieces and isinstance(value, WireGeneration) else ():
                yield self._parse(WirePiece("", "", 0, chunk, value.headers), check_chunk)
        finally:
            handle.cancel()

    def _parse(self, reply: WireGeneration | WirePiece, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """Return a reply or a chunk of it, under the name of this model. Raise EngineError for a malformed one."""
        content = reply.response if isinstance(reply, WireGeneration) else reply.chunk
        try:
            data = parse_object(content, standard=True)
            check(data)
        except MalformedReply as error:
            raise self._malformed(error, content, reply.headers) from error
        return {**data, "model": self.name}

    def _malformed(self, fault: MalformedReply, content: str, headers: Headers) -> EngineError:
        engine: Any = self.pool.engine(self.name)
        return malformed(self.name, getattr(engine, "base_url", None) or "its server", fault, content, headers)

    def _request(self, body: ChatRequest, session: RequestSession, stream: bool) -> Generate:
        """Return the request that carries a chat to the server, unchanged but for the model's name, usage and limit of
        tokens.

        A stream always includes the usage, because the session counts the tokens.
        """
        name = self.pool.versions()[self.name].get("model") or self.name
        fields = {**body.sent_fields(), "model": name, "stream": stream}
        if stream:  # always, because the session counts the tokens
            fields["stream_options"] = {**fields.get("stream_options", {}), "include_usage": True}
        else:
            fields.pop("stream_options", None)
        if session.caller.key.max_output_tokens is not None:
            limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
            fields[limit] = session.caller.max_tokens(fields.get(limit) or 1 << 24)
        prompt = WirePrompt.of(fields, exact=True)
        return Generate(prompt, prompt.sampling)

    # ------------------------------------------------------------ answers as every model gives them

    async def answer(self, body: ChatRequest, session: RequestSession) -> list[Answer]:
        reply = await self.response(body, session)
        return [_choice_answer(choice, _usage(reply)) for choice in reply["choices"]]

    async def stream(self, body: ChatRequest, session: RequestSession) -> Deltas:
        """Yield deltas of text, then the whole answer of each choice, which has the tool calls."""
        joined: dict[int, _JoinedChunks] = {}
        usage = Usage()
        with_usage = body.model_copy(update={"stream_options": StreamOptions(include_usage=True)})
        async with aclosing(self.chunks(with_usage, session)) as chunks:
            async for chunk in chunks:
                usage = _usage(chunk) if chunk.get("usage") else usage
                for choice in chunk.get("choices") or ():
                    index = choice.get("index") or 0
                    text = joined.setdefault(index, _JoinedChunks()).add(choice)
                    if text:
                        yield Delta(index, text)
        for index, one in joined.items():
            yield Delta(index, end=one.answer(usage))


class _JoinedChunks:
    """The chunks of one choice, joined."""

    def __init__(self) -> None:
        self._text, self._finish, self._stop_sequence = "", "stop", ""
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, choice: dict[str, Any]) -> str:
        """Add one chunk of the choice. Return the text that it adds; parts of tool calls are joined for the end."""
        delta = choice.get("delta") or {}
        self._finish = choice.get("finish_reason") or self._finish
        self._stop_sequence = _stop_sequence(choice) or self._stop_sequence
        for call in delta.get("tool_calls") or ():
            tool_call = self._calls.setdefault(call.get("index") or 0, {"id": "", "name": "", "arguments": ""})
            function = call.get("function") or {}
            tool_call["id"] = tool_call["id"] or call.get("id") or ""
            tool_call["name"] = tool_call["name"] or function.get("name") or ""
            tool_call["arguments"] += function.get("arguments") or ""
        text = content_text(delta.get("content"))
        self._text += text
        return text

    def answer(self, usage: Usage) -> Answer:
        calls = tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in self._calls.values())
        return Answer(self._text, self._finish, usage, calls, stop_sequence=self._stop_sequence)


def _usage(reply: dict[str, Any]) -> Usage:
    """Return the token counts in a reply or chunk of OpenAI's form.

    Counts that the server leaves out are 0; cached tokens are among those of the prompt.
    """
    usage = reply.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached)


def _choice_answer(choice: dict[str, Any], usage: Usage) -> Answer:
    """Return a choice of a server's whole reply as an answer."""
    message = choice.get("message") or {}
    functions = [(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or ()]
    calls = tuple(ToolCall(id or "", f.get("name") or "", f.get("arguments") or "") for id, f in functions)
    text = content_text(message.get("content")) or content_text(choice.get("text"))
    finish = choice.get("finish_reason") or "stop"
    return Answer(text, finish, usage, calls, stop_sequence=_stop_sequence(choice))


def _stop_sequence(choice: dict[str, Any]) -> str:
    """Return the stop string at which a choice ends, which vLLM reports beside the reason; empty for none."""
    reason = choice.get("stop_reason")
    return reason if isinstance(reason, str) else ""
