"""An LLM engine of the pool as a model: messages or text in, one or several choices out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.adapters.tool_calls import certain_text, new_id
from teola_plugin.adapters.tool_text import ToolText
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Generation, Prompt, Sampling
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.server.models.base import shown_model
from teola_plugin.server.visits import Visit
from teola_plugin.server.wire.answers import Answer, Delta, Deltas, ToolCall, Usage
from teola_plugin.server.wire.chat import INT64, ChatRequest, CompletionRequest, Generating
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
