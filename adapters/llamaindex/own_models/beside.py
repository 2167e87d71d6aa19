"""One call of an accelerated object with models of the user's own: what runs, and what runs ahead of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import copy_context
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode

from teola_plugin.adapters.llamaindex.own_models.ahead import Ahead, Plan, Question
from teola_plugin.adapters.llamaindex.own_models.call_table import CallTable, acall_here, call_here
from teola_plugin.adapters.llamaindex.own_models.calls import Failed
from teola_plugin.adapters.llamaindex.own_models.engines import finding, querying
from teola_plugin.adapters.llamaindex.own_models.permission import Permission
from teola_plugin.adapters.llamaindex.own_models.retrievers import retrieving
from teola_plugin.adapters.llamaindex.own_models.synthesizers import responding
from teola_plugin.adapters.llamaindex.substitution import PARTS, Accelerate, replaced
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.shims.llamaindex.engines import AnsweringParts, RetrieverQueryEngineParts
from teola_plugin.shims.llamaindex.own_calls import leaf_of
from teola_plugin.tracer.llamaindex.classes import as_made
from teola_plugin.tracer.llamaindex.trace import CHUNKS, NODES, QUERY_TEXT, TEXTS
from teola_plugin.tracer.symbols import NotUnderstood

logger = logging.getLogger("teola_plugin")
Given = Mapping[str, Any]
Step = Callable[[Ahead], Awaitable[Any]]


class Beside:
    """The plain object's copy, whose calls are looked up in a table, and the steps ahead of it. Close it."""

    def __init__(self, node: Any, step: Step, table: CallTable, *, is_async: bool) -> None:
        self.node = node
        self._table = table
        self._way = Ahead(table, is_async)
        self._step = step
        self._lock = threading.Lock()
        self._closed = False
        self._stop: Callable[[], object] = bool
        if is_async:
            task = asyncio.get_running_loop().create_task(self._run(), context=copy_context())
            self._stop = task.cancel
        else:
            context = copy_context()
            threading.Thread(target=context.run, args=(self._looped,), name="teola-ahead", daemon=True).start()

    def _looped(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            task = loop.create_task(self._run())
            with self._lock:
                if self._closed:
                    task.cancel()
                self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        finally:
            loop.close()

    async def _run(self) -> None:
        """What goes wrong here concerns nobody: the plain object goes its way."""
        try:
            await self._step(self._way)
        except (NotUnderstood, Failed, asyncio.CancelledError) as why:
            logger.debug("what runs ahead has ended: %s", why)
        except Exception:
            logger.warning("what runs ahead of a query has failed; the query goes on without it", exc_info=True)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """The plain object's calls in the body are looked up; an exception ends what runs ahead."""
        try:
            with self._table.in_force():
                yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._table.close()
            with contextlib.suppress(RuntimeError):  # its loop is over
                self._stop()


def beside(
    served: Any, entry: str, given: Given | None, threads: ThreadSafety, part: Accelerate, *, is_async: bool
) -> Beside | None:
    """The call's `Beside`; None where nothing can start sooner."""
    if given is None:
        return None
    try:
        plan, step = planned(served, entry, given, is_async=is_async)
    except NotUnderstood as why:
        logger.debug("%s runs as it always did: %s", type(served).__name__, why)
        return None
    permission = Permission(threads, is_async)
    if not plan.gains or not any(permission.early(leaf) for leaf in plan.leaves.values()):
        return None
    table = CallTable(permission, plan.leaves.values(), asyncio.get_running_loop() if is_async else None)
    return Beside(_with_leaves(served, plan, part), step, table, is_async=is_async)


def entries_of(part: Any) -> tuple[str, ...]:
    """What an engine, a retriever or a synthesizer is asked."""
    if isinstance(part, BaseSynthesizer):
        return ("respond",)
    return ("retrieve",) if isinstance(part, BaseRetriever) else ("query",)


def gains(node: Any, entry: str, threads: ThreadSafety, *, is_async: bool) -> bool:
    """Whether calls of an entry may start sooner, whatever it is called with."""
    try:
        plan, _ = planned(node, entry, {QUERY_TEXT: ""}, is_async=is_async)
    except NotUnderstood:
        return False
    return plan.gains and any(map(Permission(threads, is_async).early, plan.leaves.values()))


def _with_leaves(served: Any, plan: Plan, part: Accelerate) -> Any:
    """A copy of what is known, over objects that look their calls up; engines in it that are not known by themselves."""
    made = {key: leaf_of(leaf, call_here, acall_here) for key, leaf in plan.leaves.items()}

    def change(node: Any) -> Any | None:
        if id(node) in made:
            return made[id(node)]
        if id(node) in plan.known:
            return None
        return part(node) if isinstance(node, PARTS) else node

    return replaced(served, change)


def planned(node: Any, entry: str, given: Given, *, is_async: bool) -> tuple[Plan, Step]:
    """What runs ahead of an entry. Raises `NotUnderstood`."""
    plan = Plan(is_async=is_async)
    text = given[QUERY_TEXT]
    question = Question(text, tuple(given.get(TEXTS, ())))
    with as_made():
        if entry == "query" and isinstance(node, BaseQueryEngine):
            query = querying(plan, node)
            return plan, lambda ahead: query(ahead, question)
        if entry == "retrieve":
            find = retrieving(plan, node) if isinstance(node, BaseRetriever) else _finding(plan, node)
            return plan, lambda ahead: find(ahead, question)
        if entry in ("synthesize", "respond"):
            respond = responding(plan, _synthesizer(plan, node))
            chunks = given.get(CHUNKS) or [_content(one) for one in given.get(NODES, ())]
            return plan, lambda ahead: respond(ahead, text, chunks)
    raise NotUnderstood(f"{type(node).__name__} is not known")


def _finding(plan: Plan, engine: Any) -> Any:
    made = finding(plan, RetrieverQueryEngineParts.of(engine))
    plan.known[id(engine)] = engine
    return made


def _synthesizer(plan: Plan, node: Any) -> BaseSynthesizer:
    if isinstance(node, BaseSynthesizer):
        return node
    found = AnsweringParts.of(node).response_synthesizer
    if found is None:
        raise NotUnderstood(f"{type(node).__name__} has no synthesizer of its own")
    plan.known[id(node)] = node
    return found


def _content(node: Any) -> str:
    content: str = node.node.get_content(metadata_mode=MetadataMode.LLM)
    return content
