"""A callback handler that records the events of a call."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

from differential.graphs.plain import plain
from langgraph.callbacks import GraphCallbackHandler


class Recorder(GraphCallbackHandler):
    """Events in the order in which they come: what, names up to the root, tags, metadata, inputs or outputs.

    As plain data at once: later steps may change what was given.
    """

    run_inline = True

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._above: dict[UUID, tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def _begin(
        self, what: str, name: Any, given: Any, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        with self._lock:
            above = self._above.get(parent_run_id, ("?",)) if parent_run_id else ()
            self._above[run_id] = path = (*above, str(name))
            metadata = dict(more.get("metadata") or {})
            metadata.pop("tags", None)  # LangGraph's own handler for messages puts them there, before or after this one
            self.events.append(plain((what, path, tuple(more.get("tags") or ()), metadata, given)))

    def _end(self, what: str, given: Any, run_id: UUID, **_: Any) -> None:
        with self._lock:
            self.events.append(plain((what, self._above.get(run_id, ("?",)), given)))

    def on_chain_start(self, serialized: Any, inputs: Any, **more: Any) -> None:
        self._begin("chain start", more.pop("name", None), inputs, **more)

    def on_chat_model_start(self, serialized: Any, messages: Any, **more: Any) -> None:
        self._begin("model start", more.pop("name", None), messages, **more)

    def on_retriever_start(self, serialized: Any, query: Any, **more: Any) -> None:
        self._begin("retriever start", more.pop("name", None), query, **more)

    def on_tool_start(self, serialized: Any, given: Any, **more: Any) -> None:
        self._begin("tool start", more.pop("name", None) or (serialized or {}).get("name"), given, **more)

    def on_llm_new_token(self, token: str, **more: Any) -> None:
        self._end("token", token, **more)

    def on_custom_event(self, name: str, data: Any, **more: Any) -> None:
        self._end("custom " + name, data, **more)

    def on_chain_end(self, outputs: Any, **more: Any) -> None:
        self._end("chain end", outputs, **more)

    def on_llm_end(self, response: Any, **more: Any) -> None:
        self._end("model end", [[g.message for g in gs] for gs in response.generations], **more)

    def on_retriever_end(self, documents: Any, **more: Any) -> None:
        self._end("retriever end", documents, **more)

    def on_tool_end(self, output: Any, **more: Any) -> None:
        self._end("tool end", output, **more)

    def on_chain_error(self, error: Any, **more: Any) -> None:
        self._end("chain error", error, **more)

    def on_llm_error(self, error: Any, **more: Any) -> None:
        self._end("model error", error, **more)

    def on_retriever_error(self, error: Any, **more: Any) -> None:
        self._end("retriever error", error, **more)

    def on_tool_error(self, error: Any, **more: Any) -> None:
        self._end("tool error", error, **more)

    def on_interrupt(self, event: Any) -> None:
        with self._lock:
            self.events.append(plain(("interrupt", event.status, event.checkpoint_ns, event.interrupts)))

    def on_resume(self, event: Any) -> None:
        with self._lock:
            self.events.append(plain(("resume", event.status, event.checkpoint_ns)))
