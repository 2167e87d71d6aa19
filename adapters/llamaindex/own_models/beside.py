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
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.llamaindex.engines import AnsweringParts, RetrieverQueryEngineParts
from teola_plugin.shims.llamaindex.own_calls import leaf_of, warm
from teola_plugin.tracer.llamaindex.classes import as_made
from teola_plugin.tracer.llamaindex.trace import CHUNKS, NODES, QUERY_TEXT, TEXTS
from teola_plugin.tracer.symbols import NotUnderstood

logger = logging.getLogger("teola_plugin")
Given = Mapping[str, Any]
Step = Callable[[Ahead], Awaitable[Any]]


class Beside:
    """The plain object's copy, whose calls are looked up in a table, and the steps ahead of it. Close it."""

    def __init__(self, node: Any, step: Step, table: CallTable) -> None:
        self.node = node
        self._table = table
        self._way = Ahead(table)
        self._step = step
        self._lock = threading.Lock()
        self._closed = False
        self._stop: Callable[[], object] = bool
        work = (self._looped,)
        threading.Thread(target=copy_context().run, args=work, name="teola-ahead", daemon=True).start()

    def _looped(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), asyncio.Runner() as runner:
            runner.run(self._stoppable(runner.get_loop()))

    async def _stoppable(self, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self._closed:
                return
            self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        await self._run()

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
    served: Any,
    entry: str,
    given: Given | None,
    threads: ThreadSafety,
    part: Accelerate,
    watched: Callable[[], QueryRun | None] = lambda: None,
) -> Beside | None:
    """The `Beside` of a call of a sync entry; None where nothing can start sooner. `watched`: the query that is told of
    its calls, asked for where there is something to tell.

    Async entries need none: LlamaIndex's own code makes the calls of a list side by side there.
    """
    if given is None:
        return None
    try:
        plan, step = planned(served, entry, given, threads)
    except NotUnderstood as why:
        logger.debug("%s runs as it always did: %s", type(served).__name__, why)
        return None
    if not _pays(plan):
        return None
    table = CallTable(plan.permission, plan.leaves.values(), watched())
    return Beside(_with_leaves(served, plan, part), step, table)


def prepare(served: Any, threads: ThreadSafety) -> None:
    """Makes the classes that calls will need, which takes a while, before the first one."""
    for entry in entries_of(served):
        with contextlib.suppress(Exception):  # calls say what is wrong
            plan, _ = planned(served, entry, {QUERY_TEXT: ""}, threads)
            if _pays(plan):
                for leaf in plan.leaves.values():
                    leaf_of(leaf, call_here, acall_here)
                    warm(leaf)


def entries_of(part: Any) -> tuple[str, ...]:
    """What an engine, a retriever or a synthesizer is asked."""
    if isinstance(part, BaseSynthesizer):
        return ("respond",)
    return ("retrieve",) if isinstance(part, BaseRetriever) else ("query",)


def gains(node: Any, entry: str, threads: ThreadSafety) -> bool:
    """Whether calls of an entry may start sooner, whatever it is called with."""
    try:
        plan, _ = planned(node, entry, {QUERY_TEXT: ""}, threads)
    except NotUnderstood:
        return False
    return _pays(plan)


def _pays(plan: Plan) -> bool:
    """Whether calls that may be made ahead are in one of its lists."""
    return plan.found > 0 and any(map(plan.permission.early, plan.leaves.values()))


def _with_leaves(served: Any, plan: Plan, part: Accelerate) -> Any:
    """A copy of what is known, whose calls are looked up; engines in it that are not known run ahead by themselves."""
    made = {key: leaf_of(leaf, call_here, acall_here) for key, leaf in plan.leaves.items()} | plan.counted

    def change(node: Any) -> Any | None:
        if id(node) in made:
            return made[id(node)]
        if id(node) in plan.known:
            return None
        return part(node) if isinstance(node, PARTS) else node

    return replaced(served, change)


def planned(node: Any, entry: str, given: Given, threads: ThreadSafety) -> tuple[Plan, Step]:
    """What runs ahead of a sync entry. Raises `NotUnderstood`."""
    plan = Plan(Permission(threads))
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
