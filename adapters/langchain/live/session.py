"""One accelerated call: the live query beside the plain object, and the callback handler that ties the two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables.config import RunnableConfig, ensure_config, merge_configs

from teola_plugin.adapters.early_work import ending
from teola_plugin.runtime.context import current_run
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.langchain import inline_callback
from teola_plugin.tracer.langchain.trace import PathTracker, RunPath


class SessionHandler(BaseCallbackHandler):
    """Inherited by every run of the call. Tells the live query what user code computed; changes nothing.

    Pool-backed objects find the query through `teola_run` wherever the framework hands callbacks on.
    """

    def __init__(self, run: QueryRun | PartRun, watched: Mapping[RunPath, str]) -> None:
        self.teola_run = run.whole
        self._run = run
        self._watched = watched
        self._tracker = PathTracker()
        unwatched = not watched
        self._ignored = unwatched

    @property
    def ignore_chain(self) -> bool:
        return self._ignored

    ignore_llm = ignore_chat_model = ignore_retriever = ignore_agent = ignore_chain  # type: ignore[assignment]

    @property
    def ignore_retry(self) -> bool:
        return True

    @property
    def ignore_custom_event(self) -> bool:
        return True

    @inline_callback
    def _start(
        self,
        serialized: Any,
        given: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        **_: Any,
    ) -> None:
        self._tracker.add_run(run_id, parent_run_id, tags)

    on_chain_start = on_llm_start = on_chat_model_start = on_retriever_start = on_tool_start = _start  # type: ignore[assignment]

    @inline_callback
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        self._observe(run_id, outputs)

    @inline_callback
    def on_retriever_end(self, documents: Any, *, run_id: UUID, **_: Any) -> None:
        self._observe(run_id, documents)

    @inline_callback
    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        self._observe(run_id, output)

    @inline_callback
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        generation = response.generations[0][0]
        self._observe(run_id, generation.message if isinstance(generation, ChatGeneration) else generation.text)

    def _observe(self, run_id: UUID, value: Any) -> None:
        path = self._tracker.path(run_id)
        component = self._watched.get(path) if path is not None else None
        if component is not None:
            self._run.observe(component, value)


def joined_config(config: RunnableConfig | None, handler: SessionHandler) -> RunnableConfig:
    """`config` (or the ambient one) with the session's handler added to its callbacks."""
    full = ensure_config(config)
    merged = merge_configs({"callbacks": full.get("callbacks")}, {"callbacks": [handler]})
    full["callbacks"] = merged["callbacks"]  # alone: merging whole configs would sort the tags
    return full


@contextlib.contextmanager
def live(run: QueryRun | PartRun) -> Iterator[None]:
    """The body runs as part of the query: closed when it has its answer, cancelled when it is given up."""
    token = current_run.set(run.whole)
    try:
        with ending(run):
            yield
    finally:
        with contextlib.suppress(ValueError):  # a generator may be closed in another context than it began in
            current_run.reset(token)
