"""An engine that is an OpenAI-compatible server itself: requests and answers go through as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

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
from teola_plugin.requests.payloads import Generate
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.server.models.text_engine import TextEngine
from teola_plugin.server.visits import Visit
from teola_plugin.server.wire.answers import Answer, Delta, Deltas, ToolCall, Usage
from teola_plugin.server.wire.chat import ChatRequest, StreamOptions


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
        return [_answer(choice, _usage(reply)) for choice in reply["choices"]]

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


def _answer(choice: dict[str, Any], usage: Usage) -> Answer:
    message = choice.get("message") or {}
    functions = [(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or ()]
    calls = tuple(ToolCall(id or "", f.get("name") or "", f.get("arguments") or "") for id, f in functions)
    text = content_text(message.get("content")) or content_text(choice.get("text"))
    return Answer(text, choice.get("finish_reason") or "stop", usage, calls)
