"""An engine that is an OpenAI-compatible server itself: requests and answers go through as they are."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.openai.wire import WireGeneration, WirePiece, WirePrompt, chunks_of
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Generate
from teola_plugin.server.models.text_engine import TextEngine
from teola_plugin.server.visits import Visit
from teola_plugin.server.wire.answers import Answer, Delta, Deltas, ToolCall, Usage
from teola_plugin.server.wire.chat import ChatRequest, StreamOptions


@dataclass(frozen=True, slots=True)
class CarriedEngine(TextEngine):
    """Chats are carried: tools, logprobs and what else its server knows. Completions are the engine's own."""

    async def response(self, body: ChatRequest, visit: Visit) -> dict[str, Any]:
        """The server's answer, under the name that was asked for. Raises `TeolaError`."""
        with visit.placed() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, [self._asked(body, visit, False)], run=run)
        told: dict[str, Any] = {**json.loads((await handle)[0].response), "model": self.name}
        visit.cost(_usage(told).total)
        return told

    async def chunks(self, body: ChatRequest, visit: Visit) -> AsyncGenerator[dict[str, Any], None]:
        """The server's chunks."""
        asked, hidden = self._asked(body, visit, True), not body.tells_usage
        with visit.placed() as run:
            handle = self.pool.call(PrimitiveKind.PREFILLING, self.name, [asked], stream=True, run=run)
        read = False
        try:
            async for piece in handle.pieces:
                read = True
                for told in self._told(piece.chunk if isinstance(piece, WirePiece) else "", visit, hidden):
                    yield told
            value = (await handle)[0]
            for chunk in chunks_of(value.response) if not read and isinstance(value, WireGeneration) else ():
                for told in self._told(chunk, visit, hidden):
                    yield told
        finally:
            handle.cancel()

    def _told(self, chunk: str, visit: Visit, hidden: bool) -> list[dict[str, Any]]:
        """As the client gets it: without a usage that it has not asked for."""
        if not chunk:
            return []
        told = {**json.loads(chunk), "model": self.name}
        if told.get("usage"):
            visit.cost(_usage(told).total)
        if hidden and not told.get("choices"):
            return []
        if hidden:
            told.pop("usage", None)
        return [told]

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
        told = await self.response(body, visit)
        return [_answer(choice, _usage(told)) for choice in told["choices"]]

    async def stream(self, body: ChatRequest, visit: Visit) -> Deltas:
        """Calls of tools are told at the end."""
        joined: dict[int, _Joined] = {}
        usage = Usage()
        told = body.model_copy(update={"stream_options": StreamOptions(include_usage=True)})
        async with aclosing(self.chunks(told, visit)) as chunks:
            async for chunk in chunks:
                usage = _usage(chunk) if chunk.get("usage") else usage
                for choice in chunk.get("choices") or ():
                    one = joined.setdefault(int(choice.get("index", 0)), _Joined())
                    text = one.add(choice)
                    if text:
                        yield Delta(int(choice.get("index", 0)), text)
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
            kept = self._calls.setdefault(int(call.get("index", 0)), {"id": "", "name": "", "arguments": ""})
            function = call.get("function") or {}
            kept["id"] = kept["id"] or call.get("id") or ""
            kept["name"] = kept["name"] or function.get("name") or ""
            kept["arguments"] += function.get("arguments") or ""
        text = str(delta.get("content") or "")
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
    calls = tuple(
        ToolCall(str(c.get("id", "")), str(c["function"]["name"]), str(c["function"].get("arguments", "")))
        for c in message.get("tool_calls") or ()
    )
    return Answer(str(message.get("content") or ""), choice.get("finish_reason") or "stop", usage, calls)
