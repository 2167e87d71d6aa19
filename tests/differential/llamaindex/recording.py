"""Records everything that a call of LlamaIndex reports, as multisets: callbacks, instrumentation events, spans."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.llms import LLM
from llama_index.core.schema import BaseNode, NodeWithScore
from pydantic import BaseModel

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Made anew for events, and for nodes that are made while a query runs."""
_LEFT_OUT = {"timestamp", "id_", "span_id", "tags", "callback_manager", "relationships", "start_char_idx"}


def plain(value: Any, depth: int = 0) -> str:
    """Return a value as text, without what differs from run to run."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        return _ID.sub("#", repr(str(value)))
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {_ID.sub('#', str(value))}"
    if isinstance(value, LLM | BaseEmbedding | CallbackManager) or depth > 8:
        return type(value).__name__
    if isinstance(value, dict):
        shown = sorted(f"{plain(k, depth + 1)}: {plain(v, depth + 1)}" for k, v in value.items())
        return "{" + ", ".join(shown) + "}"
    if isinstance(value, list | tuple):
        return _listed(value, depth)
    return _object(value, depth)


def _listed(value: Any, depth: int) -> str:
    if len(value) > 8 and isinstance(value[0], float):  # a vector
        return "vector " + hashlib.blake2b(repr(list(value)).encode(), digest_size=6).hexdigest()
    return "[" + ", ".join(plain(one, depth + 1) for one in value) + "]"


def _object(value: Any, depth: int) -> str:
    name = type(value).__name__
    if isinstance(value, NodeWithScore):
        return f"{name}({plain(value.node, depth + 1)}, {value.score!r})"
    if isinstance(value, BaseNode):
        return f"{name}({plain(value.node_id)}, {plain(value.get_content())}, {plain(value.metadata, depth + 1)})"
    if isinstance(value, BaseModel):
        fields = {key: getattr(value, key) for key in type(value).model_fields if key not in _LEFT_OUT}
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        return name
    return f"{name}({', '.join(f'{key}={plain(one, depth + 1)}' for key, one in sorted(fields.items()))})"


class Recorder(BaseCallbackHandler):
    """Records the events since `clear`, each with the names of the events around it."""

    def __init__(self) -> None:
        super().__init__([], [])
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.callbacks: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.spans: Counter[str] = Counter()
        self._names: dict[str, str] = {}

    def on_event_start(
        self, event_type: Any, payload: Any = None, event_id: str = "", parent_id: str = "", **kwargs: Any
    ) -> str:
        with self._lock:
            self._names[event_id] = f"{self._names.get(parent_id, '')}/{event_type.value}"
            self.callbacks[f"start {self._names[event_id]} {plain(payload)}"] += 1
        return event_id

    def on_event_end(self, event_type: Any, payload: Any = None, event_id: str = "", **kwargs: Any) -> None:
        with self._lock:
            self.callbacks[f"end {self._names.get(event_id, event_type.value)} {plain(payload)}"] += 1

    def start_trace(self, trace_id: str | None = None) -> None:
        with self._lock:
            self.callbacks[f"trace {trace_id}"] += 1

    def end_trace(self, trace_id: str | None = None, trace_map: Any = None) -> None:
        with self._lock:
            self.callbacks[f"end of trace {trace_id}"] += 1

    def event(self, event: Any) -> None:
        with self._lock:
            self.events[f"{self._names.get(event.span_id or '', '')} {plain(event)}"] += 1

    def span(self, what: str, id_: str, parent: str | None = None, error: Any = None) -> None:
        with self._lock:
            if what == "enter":
                name = id_.partition("-")[0]
                self._names[id_] = f"{self._names.get(parent or '', '')}/{name}"
            self.spans[f"{what} {self._names.get(id_)} {plain(error) if error else ''}"] += 1


class _Events(BaseEventHandler):
    recorder: Any

    def handle(self, event: Any, **kwargs: Any) -> None:
        try:
            self.recorder.event(event)
        except Exception as error:  # the dispatcher would hide it
            self.recorder.events[f"not recorded: {error!r}"] += 1


class _Spans(BaseSpanHandler[Any]):
    recorder: Any = None

    def new_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, parent_span_id: Any = None, **_: Any
    ) -> None:
        self.recorder.span("enter", id_, parent_span_id)

    def prepare_to_exit_span(
        self, id_: str, bound_args: Any, instance: Any = None, result: Any = None, **_: Any
    ) -> None:
        self.recorder.span("exit", id_)

    def prepare_to_drop_span(self, id_: str, bound_args: Any, instance: Any = None, err: Any = None, **_: Any) -> None:
        self.recorder.span("drop", id_, error=err)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """In the body, record the events of LlamaIndex's dispatcher."""
    root = get_dispatcher()
    handlers, spans = list(root.event_handlers), list(root.span_handlers)
    hearing = _Spans()
    hearing.recorder = recorder
    root.event_handlers, root.span_handlers = [*handlers, _Events(recorder=recorder)], [*spans, hearing]
    try:
        yield
    finally:
        root.event_handlers, root.span_handlers = handlers, spans
