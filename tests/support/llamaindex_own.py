"""LlamaIndex models of the user's own with a latency.

They record their calls: when, on which thread, with which prompt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import BaseEventHandler

from benchmarks.llamaindex.kits import Kit, Sizes, own_kit
from teola_plugin.engines import profiles

ANSWER_S = 0.06
"""Seconds that the model takes for any prompt."""
PATIENCE_S = 10.0
"""Seconds that a call waits for others before it goes on alone."""


@dataclass
class WatchedKit:
    """A kit of own models, and the calls of its LLM."""

    kit: Kit
    starts: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, name of the thread and prompt of each call."""
    _most_waiting: int = 0
    """The largest number of calls that waited at the same time."""
    _waiting: int = 0
    _calls_together: int = 1
    _calls_alone: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def prompts(self) -> list[str]:
        return [prompt for _, _, prompt in self.starts]

    @property
    def threads(self) -> set[str]:
        return {name for _, name, _ in self.starts}

    def most_at_once(self) -> int:
        """Return the largest number of calls that were under way at the same time."""
        times = [start for start, _, _ in self.starts]
        return max(
            max((sum(start <= other < start + ANSWER_S for other in times) for start in times), default=0),
            self._most_waiting,
        )

    def fresh(self, *, calls_together: int = 1, calls_alone: int = 0) -> None:
        """Forget all calls.

        Args:
            calls_together: no call ends before this many are under way, however late a busy machine starts them.
            calls_alone: the first calls that do not wait, because the others need their answers.
        """
        self.kit.fresh()
        self.starts.clear()
        self._most_waiting, self._calls_together, self._calls_alone = 0, calls_together, calls_alone

    def wait_for_others(self) -> float:
        """Wait for the other calls if so configured. Return the seconds that the answer then takes."""
        with self._changed:
            if self._calls_together > 1 and len(self.starts) > self._calls_alone:
                self._waiting += 1
                self._most_waiting = max(self._most_waiting, self._waiting)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._most_waiting >= self._calls_together, PATIENCE_S)
                self._waiting -= 1
        return ANSWER_S


def create_watched_kit(manager: CallbackManager | None = None) -> WatchedKit:
    """Create a kit of own models whose calls are recorded."""
    watched = WatchedKit(own_kit(profiles.noop(), Sizes(chunks=14, chunk_tokens=30, answer=8), manager))
    slow, record_prompt = watched.kit.llm.slow, watched.kit.ledger.asked  # type: ignore[attr-defined]
    slow.generate, slow.embed, slow.search = (lambda *_: watched.wait_for_others()), (lambda _: 0.002), (lambda: 0.002)

    def record_start(prompt: str) -> None:
        watched.starts.append((time.perf_counter(), threading.current_thread().name, prompt))
        record_prompt(prompt)

    watched.kit.ledger.asked = record_start  # type: ignore[method-assign]
    return watched


# ------------------------------------------------------------ events in their order


@dataclass
class Diary:
    """Names of callback events and instrumentation events in their order, with the threads they came on."""

    events: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)


class DiaryHandler(BaseCallbackHandler):
    """Records LlamaIndex's callback events in a diary."""

    def __init__(self, diary: Diary) -> None:
        super().__init__([], [])
        self._diary = diary

    def on_event_start(self, event_type: Any, payload: Any = None, event_id: str = "", **_: Any) -> str:
        self._diary.note(f"start {event_type.value} {sorted(map(str, payload or ()))}")
        return event_id

    def on_event_end(self, event_type: Any, payload: Any = None, event_id: str = "", **_: Any) -> None:
        self._diary.note(f"end {event_type.value} {sorted(map(str, payload or ()))}")

    def start_trace(self, trace_id: str | None = None) -> None:
        self._diary.note(f"trace {trace_id}")

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None:
        self._diary.note(f"end of trace {trace_id}")


class DiaryEvents(BaseEventHandler):
    """Records LlamaIndex's instrumentation events in a diary."""

    diary: Any

    def handle(self, event: Any, **_: Any) -> None:
        self.diary.note(event.class_name())


def run_with_diary(diary: Diary, run: Callable[[], Any]) -> Any:
    """Return the result of `run`, with all instrumentation events recorded in the diary."""
    root = get_dispatcher()
    before = list(root.event_handlers)
    root.event_handlers = [*before, DiaryEvents(diary=diary)]
    try:
        return run()
    finally:
        root.event_handlers = before


# ------------------------------------------------------------ models with habits


class ChattyLLM(CustomLLM):
    """An LLM whose `complete` calls its own `chat`, so that its events are nested."""

    chats: int = 0

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="chatty")

    def _ask(self, prompt: str) -> str:
        return self.chat([ChatMessage(content=prompt)]).message.content or ""

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:
        return CompletionResponse(text=self._ask(prompt))

    @llm_chat_callback()
    def chat(self, messages: Any, **_: Any) -> ChatResponse:
        self.chats += 1
        return ChatResponse(message=ChatMessage(role="assistant", content=f"said {len(messages[0].content)}"))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> Any:
        raise NotImplementedError
