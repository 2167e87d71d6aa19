"""The next prompt of an agent, prefilled as far as it is known while tools run.

It begins as the last one did; then comes the answer, then what each tool call gave, in the order of the calls. Whoever
asks the model next finds that beginning in the engine's cache, if it is what was asked; if not, only idle time is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from teola_plugin.adapters.langchain.listening import ModelCall
from teola_plugin.graph import (
    INPUT,
    Attributes,
    EngineProfile,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Ref,
    named,
    on_loop,
)
from teola_plugin.requests.payloads import UNKNOWN, Generate, Prompt
from teola_plugin.runtime.query_run import PartRun

_NAME = "next_prompt"


class NextPrompt:
    """Of one conversation, from an answer with calls of tools to the next call of the model. Used from any thread."""

    def __init__(self, call: ModelCall, message: AIMessage) -> None:
        self._call, self._answer = call, message
        self._ids = [one["id"] for one in message.tool_calls]
        self._results: dict[str | None, BaseMessage] = {}
        self._part: PartRun | None = None
        self._lock = threading.Lock()
        self._over = not _caches(call)
        self._length = 0 if self._over else len(call.prompt.known())
        """Characters that are prefilled, or on their way."""

    def begin(self) -> None:
        """The answer is whole."""
        with self._lock:
            self._look()

    def result(self, message: Any) -> None:
        """A tool call has given this; what is no message of a tool leaves the rest unknown."""
        with self._lock:
            if isinstance(message, ToolMessage):
                self._results[message.tool_call_id] = message
                self._look()

    def continued_by(self, prompt: Prompt) -> bool:
        """Whether a prompt goes on from this answer."""
        said = self._call.prompt.messages
        return len(prompt.messages) > len(said) and prompt.messages[: len(said)] == said

    def close(self) -> None:
        """Nobody needs it any more."""
        with self._lock:
            self._over = True
            self._end()

    def _look(self) -> None:
        known: list[BaseMessage] = []
        for one in self._ids:
            if one not in self._results:
                break
            known.append(self._results[one])
        if self._over or len(known) == len(self._ids):  # the model is asked at once
            return
        try:
            prompt = self._call.prompt_with([self._answer, *known, ToolMessage(UNKNOWN, tool_call_id="")])
        except Exception:  # the model does not take such a message: the next call will say so
            self._over = True
            return
        if self._pays(prompt):
            self._warm(prompt)

    def _pays(self, prompt: Prompt) -> bool:
        """Whether there is enough of it that is new, and not more than the model can read."""
        profile: EngineProfile = self._call.pool.profiles[self._call.engine]
        known, most = prompt.known(), profile.max_request_size
        fits = most is None or PromptPart.literal(known).tokens < most
        return fits and (len(known) - self._length) // 4 >= profile.min_split_tokens

    def _warm(self, prompt: Prompt) -> None:
        self._end()
        self._length = len(prompt.known())
        self._part = self._call.run.part(_prefilling(self._call.engine), {_NAME: _payload}, prompt)

    def _end(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.close()


def _caches(call: ModelCall) -> bool:
    profile = call.pool.profiles.get(call.engine)
    return profile is not None and profile.prefix_caching


def _prefilling(engine: str) -> Graph:
    """A warm-up that waits for a pause of its engine."""
    primitive = Primitive(
        _NAME,
        PrimitiveKind.PARTIAL_PREFILLING,
        engine,
        named(prompt=Ref(INPUT)),
        call=_NAME,
        size=1,
        prompt=(PromptPart.var("prompt"),),
        attributes=Attributes(when="idle"),
    )
    return Graph([primitive], Ref(_NAME))


@on_loop
def _payload(given: Mapping[str, Any]) -> Generate:
    return Generate(given["prompt"])
