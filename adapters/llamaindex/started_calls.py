"""A call that has started: the live query, and what runs beside it, until its answer has been read to the end."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, ExitStack, aclosing, closing
from typing import Any, NamedTuple, Protocol

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse

from teola_plugin.adapters.calls import Deadline, astreamed_in, interrupting, streamed_in
from teola_plugin.adapters.planned_queries import ending, failing
from teola_plugin.adapters.routing import RoutingRules, arouted_items, routed_items
from teola_plugin.graph import RequestContext
from teola_plugin.runtime.prefetch_gate import GatedQuery
from teola_plugin.runtime.query_run import QueryRun, SubplanRun
from teola_plugin.shims.llamaindex.engines import history_writer
from teola_plugin.shims.stack_levels import hide_from_stack_levels


class JoinedRun:
    """A call without a graph of its own: its provider calls belong to the query that is live already."""

    def __init__(self, query_run: QueryRun) -> None:
        self.query_run = query_run
        self.trace = query_run.trace

    def close(self) -> None: ...

    cancel = close


Run = QueryRun | SubplanRun | JoinedRun


class Prefetching(Protocol):
    """Prefetched calls of the user's own models, for one call of the original."""

    def in_force(self) -> AbstractContextManager[None]:
        """Let the original's calls in the body claim prefetched results. An exception ends the prefetching."""
        ...

    def close(self) -> None:
        """End the prefetching with the call."""
        ...


class StartedCall(NamedTuple):
    """A call with its live query and the object that answers it; without a query, the original with its context."""

    run: Run | None
    target: Any
    """The object whose method is called."""
    request_context: RequestContext | None
    """That of the original's requests where there is no query; None for the one around the call."""
    deadline: Deadline | None
    prefetcher: Prefetching | None = None
    """Prefetches calls of the user's own models: without engines, or where the pool's graph starts nothing."""
    rules: RoutingRules | None = None
    """Which engines do the work of which models, also for answers that are read later."""
    gated: GatedQuery | None = None
    """Says whether the call prefetches; None inside one that does, and where nothing can be prefetched."""

    @property
    def query_run(self) -> QueryRun | None:
        return None if self.run is None else self.run.query_run

    def check(self) -> None:
        """Raise `QueryTimeout` if the deadline has passed."""
        if self.deadline is not None:
            self.deadline.check()

    def close(self) -> None:
        """End the query and the prefetching of a call that has its answer."""
        if self.run is not None:
            self.run.close()
        if self.prefetcher is not None:
            self.prefetcher.close()
        if self.gated is not None:
            self.gated.close()

    def failing(self) -> AbstractContextManager[None]:
        return self._in_all(lambda prefetcher: prefetcher.in_force(), failing, lambda gated: gated.in_force())

    def ending(self) -> AbstractContextManager[Any]:
        return self._in_all(closing, ending, closing)

    def _in_all(
        self,
        enter_prefetcher: Callable[[Prefetching], Any],
        enter_run: Callable[[Run], Any],
        enter_gated: Callable[[GatedQuery], Any],
    ) -> AbstractContextManager[Any]:
        """Enter the contexts of the query, of its prefetching and of its gate, as far as the call has them."""
        stack = ExitStack()
        if self.run is not None:
            stack.enter_context(enter_run(self.run))
        if self.prefetcher is not None:
            stack.enter_context(enter_prefetcher(self.prefetcher))
        if self.gated is not None:
            stack.enter_context(enter_gated(self.gated))
        return stack


# ------------------------------------------------------------ answers that are read later


def close_after(call: StartedCall, answer: Any) -> Any:
    """Close the query now, or with the last piece of a streamed answer. Return the answer."""
    if isinstance(answer, StreamingAgentChatResponse):
        _close_with_history(call, answer)
        return answer
    if isinstance(answer, StreamingResponse) and isinstance(answer.response_gen, Generator):
        answer.response_gen = _stream_in_query(call, answer.response_gen)
    elif isinstance(answer, AsyncStreamingResponse) and isinstance(answer.response_gen, AsyncGenerator):
        answer.response_gen = _astream_in_query(call, answer.response_gen)
    elif isinstance(answer, Generator):
        answer = _stream_in_query(call, answer)
    elif isinstance(answer, AsyncGenerator):
        answer = _astream_in_query(call, answer)
    else:
        call.close()
        return answer
    pieces = getattr(answer, "response_gen", answer)
    weakref.finalize(pieces, call.close).atexit = False  # the answer may never be read
    return answer


def _close_with_history(call: StartedCall, answer: StreamingAgentChatResponse) -> None:
    """Close the query when the answer is in the chat history, which a thread or a task writes.

    Before llama-index-core 0.14.17 the caller does so with some engines, by reading the answer.
    """
    writer = history_writer(answer)
    weakref.finalize(answer, call.close).atexit = False  # a loop may be gone before its tasks
    if isinstance(writer, asyncio.Task):
        writer.add_done_callback(lambda _: call.close())
    elif writer is not None:
        threading.Thread(target=_close_after_thread, args=(call, writer), name="teola-chat-end", daemon=True).start()
    elif not answer.is_writing_to_memory and isinstance(answer.chat_stream, Generator):
        answer.chat_stream = _stream_in_query(call, answer.chat_stream)
    elif not answer.is_writing_to_memory and isinstance(answer.achat_stream, AsyncGenerator):
        answer.achat_stream = _astream_in_query(call, answer.achat_stream)
    else:
        call.close()


def _close_after_thread(call: StartedCall, thread: threading.Thread) -> None:
    thread.join()
    call.close()


def _stream_in_query(call: StartedCall, pieces: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Yield a streamed answer inside its query, which ends with it. Raise `QueryTimeout` past the deadline."""
    with call.ending():
        for piece in routed_items(call.rules, streamed_in(call.query_run, call.request_context, pieces)):
            call.check()
            yield piece
        call.check()


async def _astream_in_query(call: StartedCall, pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield a streamed answer as `_stream_in_query` does, in a loop; the deadline interrupts a late piece."""
    with call.ending():
        items = arouted_items(call.rules, astreamed_in(call.query_run, call.request_context, pieces))
        async with aclosing(items) as pieces_in_query:  # type: ignore[type-var]
            while True:
                async with interrupting(call.deadline):
                    piece = await anext(pieces_in_query, _END)
                if piece is _END:
                    return
                yield piece


_END: Any = object()


hide_from_stack_levels(globals())
