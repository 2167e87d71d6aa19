"""The next prompt of an agent, prefilled as far as it is known while tools run.

It begins as the last one did; then comes the answer, then what each tool call gave, in the order of the calls. Whoever
asks the model next finds that beginning in the engine's cache, if it is what was asked; if not, only idle time is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from teola_plugin.adapters.langchain.listening import ModelCall
from teola_plugin.adapters.next_prompt import KnownBeginning, keeps_prefixes
from teola_plugin.requests.payloads import UNKNOWN, Prompt


class NextPrompt:
    """Of one conversation, from an answer with calls of tools to the next call of the model. Used from any thread."""

    def __init__(self, call: ModelCall, message: AIMessage, takes_time: Callable[[str], bool]) -> None:
        """`takes_time`: whether a tool call that is yet to be made will."""
        self._call, self._answer, self._takes_time = call, message, takes_time
        self._ids = [one["id"] or "" for one in message.tool_calls]
        self._results: dict[str, BaseMessage] = {}
        self._lock = threading.Lock()
        self._over = not keeps_prefixes(call.pool, call.engine)
        self._known = KnownBeginning(call.run, call.pool, call.engine)

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
            self._known.over()

    def _look(self) -> None:
        known = [self._results[one] for one in takewhile(self._results.__contains__, self._ids)]
        left = [one for one in self._ids if one not in self._results]
        if self._over or not any(map(self._takes_time, left)):  # the model is asked at once
            return
        try:
            prompt = self._call.prompt_with([self._answer, *known, ToolMessage(UNKNOWN, tool_call_id="")])
        except Exception:  # the model does not take such a message: the next call will say so
            self._over = True
            return
        self._known.grown(prompt, have=self._call.prompt.flat())
