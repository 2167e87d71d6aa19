"""Engines of the pool as models: LLMs, engines that embed or rerank, and engines that are OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from teola_plugin.adapters.calls import to_list
from teola_plugin.adapters.tool_calls import certain_text, new_id
from teola_plugin.adapters.tool_text import ToolText
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
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.server.live_queries import Visit
from teola_plugin.server.models.base import shown_model
from teola_plugin.server.wire.answers import Answer, Delta, Deltas, ToolCall, Usage
from teola_plugin.server.wire.requests import INT64, ChatRequest, CompletionRequest, Generating, StreamOptions
from teola_plugin.server.wire.sampling import check_known, messages_of, sampling_of, schema_of, tools_of

CONTEXT = 4096
"""Tokens of an answer where neither the client nor the engine says how long it may be."""
_KNOWN = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "ignore_eos"),
        *("messages", "prompt", "tools", "tool_choice", "response_format"),
    }
)


@dataclass(frozen=True, slots=True)
class TextEngine:
    """See `TextModel`."""

    pool: EnginePool
    name: str
    kind: str = "chat"

    def told(self) -> dict[str, Any]:
        profile = self.pool.engine(self.name).profile
        return {"root": shown_model(self.pool, self.name) or self.name, "max_model_len": profile.max_request_size}

    def tokens(self, text: int, answer: int | None, n: int) -> int:
        return text // 4 + n * (answer or 256)

    # ------------------------------------------------------------ chat

    async def whole(self, body: ChatRequest, visit: Visit) -> list[Answer]:
        asked, tools = self._chat(body, visit)
        return await self._wholes(asked, tools, visit)

    async def stream(self, body: ChatRequest, visit: Visit) -> Deltas:
        asked, tools = self._chat(body, visit)
        async with aclosing(self._streams(asked, tools, visit)) as deltas:
            async for delta in deltas:
                yield delta

    def _chat(self, body: ChatRequest, visit: Visit) -> tuple[list[Generate], ToolText | None]:
        check_known(body.given(), _KNOWN, self.name)
        tools = tools_of(body)
        schema = tools.schema if tools is not None and tools.schema else schema_of(body.response_format)
        most = self._most(body.max_completion_tokens or body.max_tokens, visit)
        prompt = Prompt(messages_of(body.messages, self.name), tools=tools.definitions if tools else "")
        return _several(prompt, sampling_of(body, most, schema), body), tools

    def _most(self, wanted: int | None, visit: Visit) -> int:
        limit = self.pool.engine(self.name).profile.max_request_size or CONTEXT
        return visit.caller.tokens(wanted or limit)

    # ------------------------------------------------------------ completions

    async def complete(self, body: CompletionRequest, prompts: list[str], visit: Visit) -> list[Answer]:
        return await self._wholes(self._completions(body, prompts, visit), None, visit)

    async def stream_completion(self, body: CompletionRequest, prompts: list[str], visit: Visit) -> Deltas:
        async with aclosing(self._streams(self._completions(body, prompts, visit), None, visit)) as deltas:
            async for delta in deltas:
                yield delta

    def _completions(self, body: CompletionRequest, prompts: list[str], visit: Visit) -> list[Generate]:
        check_known(body.given(), _KNOWN, self.name)
        sampling = sampling_of(body, self._most(body.max_tokens or 16, visit))  # 16 is the protocol's own default
        return [one for text in prompts for one in _several(Prompt(text=text), sampling, body)]

    # ------------------------------------------------------------ asking the engine

    async def _wholes(self, asked: Sequence[Generate], tools: ToolText | None, visit: Visit) -> list[Answer]:
        with visit.placed() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, asked, run=run)
        answers = [_answer(value, tools) for value in await handle]
        visit.cost(sum(one.usage.total for one in answers))
        return answers

    async def _streams(self, asked: Sequence[Generate], tools: ToolText | None, visit: Visit) -> Deltas:
        with visit.placed() as run:
            handles = [
                self.pool.call(PrimitiveKind.PREFILLING, self.name, [one], stream=True, run=run) for one in asked
            ]
        news: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(_read(i, handle, tools, news)) for i, handle in enumerate(handles)]
        left = len(tasks)
        try:
            while left:
                delta = await news.get()
                if isinstance(delta, BaseException):
                    raise delta
                if delta.end is not None:
                    left -= 1
                    visit.cost(delta.end.usage.total)
                yield delta
        finally:
            for task, handle in zip(tasks, handles, strict=True):
                handle.cancel()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _several(prompt: Prompt, sampling: Sampling, body: Generating) -> list[Generate]:
    """As many as were asked for, each drawn from a seed of its own if there is one."""
    first = sampling.seed
    seeds = [None if first is None else (first + i + INT64) % (2 * INT64) - INT64 for i in range(body.n or 1)]
    return [Generate(prompt, replace(sampling, seed=seed)) for seed in seeds]


async def _read(
    index: int, handle: CallHandle, tools: ToolText | None, news: asyncio.Queue[Delta | BaseException]
) -> None:
    """Tells of one choice. Text that may turn out to be a call of a tool is held back."""
    text, sent = "", 0
    try:
        async for piece in handle.pieces:
            text += piece.text
            certain = text if tools is None else certain_text(text)
            if len(certain) > sent:
                news.put_nowait(Delta(index, certain[sent:]))
                sent = len(certain)
        answer = _answer((await handle)[0], tools)
        if len(answer.text) > sent:
            news.put_nowait(Delta(index, answer.text[sent:]))
        news.put_nowait(Delta(index, end=answer))
    except Exception as error:
        news.put_nowait(error)


def _answer(value: Generation, tools: ToolText | None) -> Answer:
    usage = Usage(value.prompt_tokens, value.completion_tokens, value.cached_tokens)
    rest, calls = (value.text, []) if tools is None else tools.read(value.text)
    if not calls:
        return Answer(value.text, value.finish_reason, usage)
    made = tuple(ToolCall(new_id(), call.name, json.dumps(call.args)) for call in calls)
    return Answer(rest, "tool_calls", usage, made)


@dataclass(frozen=True, slots=True)
class VectorEngine:
    """`kind`: embedding or reranking."""

    pool: EnginePool
    name: str
    kind: str

    def told(self) -> dict[str, Any]:
        return {"root": shown_model(self.pool, self.name) or self.name}

    def tokens(self, text: int, answer: int | None, n: int) -> int:
        return text // 4

    async def embed(self, texts: Sequence[str], role: Literal["query", "document"], visit: Visit) -> list[list[float]]:
        with visit.placed() as run:
            asked = [EmbedText(text, role) for text in texts]
            handle = self.pool.call(PrimitiveKind.EMBEDDING, self.name, asked, run=run)
        return [to_list(vector) for vector in await handle]

    async def scores(self, query: str, texts: Sequence[str], visit: Visit) -> list[float]:
        with visit.placed() as run:
            asked = [ScorePair(query, text) for text in texts]
            handle = self.pool.call(PrimitiveKind.RERANKING, self.name, asked, run=run)
        return [float(score) for score in await handle]


@dataclass(frozen=True, slots=True)
class CarriedEngine(TextEngine):
    """Chats are carried: tools, logprobs and what else its server knows. Completions are the engine's own."""

    async def response(self, body: ChatRequest, visit: Visit) -> dict[str, Any]:
        """Return the server's answer, under the name of this model. Raise TeolaError, also for a malformed one."""
        with visit.placed() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, [self._asked(body, visit, False)], run=run)
        reply = self._parse((await handle)[0], check_completion)
        visit.cost(_usage(reply).total)
        return reply

    async def chunks(self, body: ChatRequest, visit: Visit) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server's chunks. Raise TeolaError, also for a malformed one and for a stream without a choice."""
        asked, hides_usage = self._asked(body, visit, True), not body.tells_usage
        with visit.placed() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, [asked], stream=True, run=run)
        before_choices: list[dict[str, Any]] = []  # not sent before there is a choice, so that a refusal has its status
        has_choices = False
        async with aclosing(self._parsed_chunks(handle)) as chunks:
            async for chunk in chunks:
                has_choices = has_choices or bool(chunk.get("choices"))
                before_choices.append(chunk)
                for one in before_choices if has_choices else ():
                    if one.get("usage"):
                        visit.cost(_usage(one).total)
                    if one.get("choices") or not hides_usage:
                        yield {key: value for key, value in one.items() if key != "usage" or not hides_usage}
                if has_choices:
                    before_choices.clear()
        if not has_choices:
            raise self._malformed(MalformedReply("no chunk of the stream has a choice"), "", ())

    async def _parsed_chunks(self, handle: CallHandle) -> AsyncGenerator[dict[str, Any], None]:
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

    def _asked(self, body: ChatRequest, visit: Visit, stream: bool) -> Generate:
        given = {**body.given(), "model": self._model(), "stream": stream}
        if stream:  # always: what it costs has to be known
            given["stream_options"] = {**given.get("stream_options", {}), "include_usage": True}
        else:
            given.pop("stream_options", None)
        if visit.caller.key.max_output_tokens is not None:
            name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
            given[name] = visit.caller.tokens(given.get(name) or 1 << 24)
        prompt = WirePrompt.of(given, exact=True)
        return Generate(prompt, prompt.sampling)

    def _model(self) -> str:
        return self.pool.versions()[self.name].get("model") or self.name

    # ------------------------------------------------------------ for whoever reads answers

    async def whole(self, body: ChatRequest, visit: Visit) -> list[Answer]:
        reply = await self.response(body, visit)
        return [_choice_answer(choice, _usage(reply)) for choice in reply["choices"]]

    async def stream(self, body: ChatRequest, visit: Visit) -> Deltas:
        """Calls of tools are told at the end."""
        joined: dict[int, _Joined] = {}
        usage = Usage()
        told = body.model_copy(update={"stream_options": StreamOptions(include_usage=True)})
        async with aclosing(self.chunks(told, visit)) as chunks:
            async for chunk in chunks:
                usage = _usage(chunk) if chunk.get("usage") else usage
                for choice in chunk.get("choices") or ():
                    index = choice.get("index") or 0
                    text = joined.setdefault(index, _Joined()).add(choice)
                    if text:
                        yield Delta(index, text)
        for index, one in joined.items():
            yield Delta(index, end=one.answer(usage))


class _Joined:
    """The chunks of one choice."""

    def __init__(self) -> None:
        self._text, self._finish = "", "stop"
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        self._finish = choice.get("finish_reason") or self._finish
        for call in delta.get("tool_calls") or ():
            kept = self._calls.setdefault(call.get("index") or 0, {"id": "", "name": "", "arguments": ""})
            function = call.get("function") or {}
            kept["id"] = kept["id"] or call.get("id") or ""
            kept["name"] = kept["name"] or function.get("name") or ""
            kept["arguments"] += function.get("arguments") or ""
        text = content_text(delta.get("content"))
        self._text += text
        return text

    def answer(self, usage: Usage) -> Answer:
        calls = tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in self._calls.values())
        return Answer(self._text, self._finish, usage, calls)


def _usage(told: dict[str, Any]) -> Usage:
    usage = told.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached)


def _choice_answer(choice: dict[str, Any], usage: Usage) -> Answer:
    message = choice.get("message") or {}
    functions = [(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or ()]
    calls = tuple(ToolCall(id or "", f.get("name") or "", f.get("arguments") or "") for id, f in functions)
    text = content_text(message.get("content")) or content_text(choice.get("text"))
    return Answer(text, choice.get("finish_reason") or "stop", usage, calls)
