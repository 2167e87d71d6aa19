"""The engine that searches a vector store of the user's, by the store's own code: Chroma, Qdrant, FAISS, any other.

Searches that wait at the same time share a call where the store's client has a search for several queries. A stand-in
for the store runs the store's own methods; only the calls that search go through the engine.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.request_tasks import Inbox, RequestTasks
from teola_plugin.errors import EngineError, EngineUnavailable, RegistrationError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Request, Result
from teola_plugin.shims import (
    async_store_client,
    async_store_client_replaced,
    is_embedded_client,
    store_client,
    with_store_client,
)

__all__ = ["VectorStoreEngine"]
MAX_QUERIES = 64
"""Queries that are searched for in one call, at most."""
_MAX_WAITING = 1024
_STOP_SECONDS = 10.0
_BATCHED_CALLS, _SINGLE_CALLS = 2, 32
"""Calls at a time by default: of stores that search for several queries in a call, and of others."""
_SEARCH_METHODS = (
    "similarity_search",
    "similarity_search_with_score",
    "similarity_search_with_relevance_scores",
    "max_marginal_relevance_search",
)
"""LangChain's sync searches. Those of its async ones that a class does not define call these."""


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The result of a search, or the exception that the store raised."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """Return the result, or raise the store's exception."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True, slots=True)
class BatchedSearch:
    """The search of a client that takes several queries, and the search for one query that it stands for."""

    method: str
    """Name of the client's search for one query."""
    shared_arguments: Callable[[Mapping[str, Any]], Any]
    """Returns the arguments that must be equal in searches of one call; None for a search that has to be alone."""
    search: Callable[[Any, Sequence[Mapping[str, Any]]], Any]
    """Searches with the client for several calls' arguments in one call. Returns the result of each; an awaitable of
    them with an async client."""


@dataclass(frozen=True, slots=True)
class StoreSearch:
    """One search by a store or by its client: the payload of a request to a `VectorStoreEngine`."""

    function: Callable[..., Any]
    """The method that the original calls."""
    args: tuple[Any, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    identity: bytes | None = None
    """All arguments with their types, as bytes; None if they cannot be compared."""
    group: Hashable | None = None
    """Searches of one group can go in one call; None for a search that goes alone."""
    batched: BatchedSearch | None = field(default=None, hash=False)
    client: Any = field(default=None, hash=False)
    context: Context = field(default_factory=copy_context, hash=False, compare=False)
    """The caller's context variables, for the code of the store, of its client and of tracers."""
    loop: asyncio.AbstractEventLoop | None = field(default=None, hash=False, compare=False)
    """The caller's loop, on which a search of an async client is made; None for sync code, which runs on a thread."""

    def run(self) -> SearchOutcome:
        """Make the original's call in the caller's context. Blocks."""
        try:
            return SearchOutcome(self.context.run(self._call))
        except Exception as error:
            return SearchOutcome(error=error)

    async def arun(self) -> SearchOutcome:
        """Make the original's call of an async client in the caller's context. Runs on the caller's loop."""
        return await self.arun_in_context(lambda: self.function(*self.args, **self.arguments))

    async def arun_in_context(self, call: Callable[[], Awaitable[Any]]) -> SearchOutcome:
        """Await what `call` returns in the caller's context; return its result or the exception that it raised."""

        async def await_call() -> Any:
            return await call()

        try:
            return SearchOutcome(await asyncio.get_running_loop().create_task(await_call(), context=self.context))
        except Exception as error:
            return SearchOutcome(error=error)

    def _call(self) -> Any:
        is_inside_search.set(True)  # in a context of this search's own
        return self.function(*self.args, **self.arguments)


is_inside_search: ContextVar[bool] = ContextVar("teola_is_inside_search", default=False)
"""True in the code of a store that an engine runs: searches that it makes of its own would wait for its thread."""

Submit = Callable[[StoreSearch], Any]
"""Sends a search to the engine, waits, and returns the search's result or raises its exception. A coroutine function
for searches of an async client."""


class VectorStoreEngine:
    """A vector store of yours as an engine: `VectorStoreEngine("store", my_store)`, with `bind=[(my_store, "store")]`.

    `my_store` is a `VectorStore` of LangChain or a `BasePydanticVectorStore` of LlamaIndex. Retrievers over it search
    through the engine, with the store's own code, and find what they find without it. Searches that wait at the same
    time go in one call (64 at most) for Chroma and Qdrant in the classes of both frameworks' packages for them;
    subclasses and other stores get one call for each. So do async searches by LlamaIndex's store over an
    `AsyncQdrantClient`: their calls are made on the loop of their callers, with this client.

    Args:
        name: the engine's name in traces. The pool's name for it is the one that `bind=` refers to.
        store: the store. The engine does not close it.
        read_only: True declares that nobody writes to the store while the pool is open. Equal searches of several
            queries that wait at the same time are then made once, and each query gets its own copy of the result.
            Async searches of LlamaIndex stores that have only a sync `query` then leave the caller's loop, and those
            of an embedded `AsyncQdrantClient` share calls.
        max_calls: the calls that run at a time, on threads of the engine, and on each loop of async callers. None: 2
            where searches share calls, else 32.

    Raises:
        RegistrationError: for an object without searches, and for a `max_calls` that is no int of at least 1.
    """

    kinds: frozenset[PrimitiveKind] = frozenset({PrimitiveKind.SEARCHING})

    def __init__(
        self, name: str = "store", store: Any = None, *, read_only: bool = False, max_calls: int | None = None
    ) -> None:
        if not hasattr(store, "similarity_search") and not (hasattr(store, "query") and hasattr(store, "aquery")):
            raise RegistrationError(
                f"a {type(store).__name__} is no vector store of LangChain or LlamaIndex.",
                hint='pass your store: VectorStoreEngine("store", my_store)',
            )
        if max_calls is not None and (isinstance(max_calls, bool) or not isinstance(max_calls, int) or max_calls < 1):
            raise RegistrationError(
                f"max_calls={max_calls!r} is not a number of calls.", hint="pass an int of at least 1, or None"
            )
        self.name, self.store, self.read_only = name, store, read_only
        default = _SINGLE_CALLS if _batched_search(store_client(store)) is None else _BATCHED_CALLS
        self.max_calls = max_calls or default
        self._max_async_calls = max_calls or _BATCHED_CALLS
        self._profile = EngineProfile(
            batching=Batching.CONTINUOUS,
            max_batch=_MAX_WAITING,
            max_efficient_batch=MAX_QUERIES,
            max_requests=_MAX_WAITING,
            dedicated=False,
        )
        self._threads: ThreadPoolExecutor | None = None
        self._tasks = RequestTasks(name)
        self._queues: dict[asyncio.AbstractEventLoop | None, _CallQueue] = {}
        """The searches that wait and run: by the loop of async callers; None for those on threads."""

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    # Stand-ins

    def make_client_stand_in(self, submit: Submit) -> Any:
        """Return a copy of the store whose client's searches go through `submit`, to be shared with others.

        None for a store whose client is not known to search for several queries in a call.
        """
        client = store_client(self.store)
        batched = _batched_search(client)
        if batched is None:
            return None
        return with_store_client(self.store, _ClientStandIn(client, batched, submit, self.read_only))

    @property
    def shares_async_calls(self) -> bool:
        """True if the store's async searches share calls.

        An embedded client searches before its caller lets other tasks write: it keeps its place unless nobody writes.
        """
        client = async_store_client(self.store)
        return _batched_search(client) is not None and (self.read_only or not is_embedded_client(client))

    def async_client_replaced(self, submit: Submit) -> AbstractContextManager[Any]:
        """Yield a copy of the store whose async client's searches go through `submit`. For `shares_async_calls`."""
        client = async_store_client(self.store)
        batched = _batched_search(client)
        assert batched is not None
        stand_in = _ClientStandIn(client, batched, submit, self.read_only, is_async=True)
        return async_store_client_replaced(self.store, stand_in)

    def make_stand_in(self, submit: Submit) -> Any:
        """Return a LangChain store that works as the user's does, and whose searches go through `submit`.

        None if the store's attributes cannot be shared: its searches cannot be told from its other work then.
        """
        stand_in = self.make_client_stand_in(submit)
        if stand_in is not None:
            return stand_in
        try:
            stand_in = object.__new__(_stand_in_class(type(self.store)))  # type: ignore[arg-type]
            object.__setattr__(stand_in, "__dict__", dict(vars(self.store)))
        except (AttributeError, TypeError):
            return None
        stand_in.teola_searches = self.store, submit, self.read_only
        return stand_in

    def search_as_a_whole(self, method: str, function: Callable[..., Any], *args: Any, **arguments: Any) -> StoreSearch:
        """Return the search that calls `function` on the store, for `args` and `arguments`. `method`: its name."""
        identity = _to_bytes((method, args, arguments)) if self.read_only else None
        return StoreSearch(function, (self.store, *args), arguments, identity, identity)

    # Life cycle

    async def start(self) -> None:
        """Start the threads. Idempotent."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.max_calls, thread_name_prefix=f"teola-{self.name}")

    async def stop(self) -> None:
        """Stop the engine, and wait for running searches for 10 s at most. Idempotent. The store stays open."""
        threads, self._threads = self._threads, None
        self._queues.clear()
        self._tasks.cancel_all()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(threads.shutdown, True), _STOP_SECONDS)

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield the outcome of each search when its call ends."""
        async with aclosing(self._tasks.serving(batch, self._outcome)) as results:
            async for result in results:
                yield result

    async def _outcome(self, request: Request, inbox: Inbox) -> SearchOutcome:
        """Return the outcome of a search. Raise `EngineError` for another payload, or if the engine is not started."""
        if request.kind not in self.kinds or not isinstance(request.payload, StoreSearch):
            got = f"{request.kind.value} of {type(request.payload).__name__}"
            raise EngineError(
                f"{self.name}: it does searches of retrievers over its store, not {got}.",
                engine=self.name,
                hint="bind the store: accelerate(app, pool=pool, bind=[(my_store, engine_name)])",
            )
        threads, loop = self._threads, request.payload.loop
        if threads is None:
            raise EngineUnavailable(f"{self.name} is not started.", engine=self.name, hint="start the pool")
        queue = self._queues.get(loop)
        if queue is None:
            max_calls = self.max_calls if loop is None else self._max_async_calls
            queue = self._queues[loop] = _CallQueue(self, loop or threads, max_calls)
        return await queue.outcome(request.payload)

    def forget_queue(self, queue: _CallQueue) -> None:
        """Forget a queue in which no search waits and no call runs: the loop of its callers may end."""
        self._queues = {loop: other for loop, other in self._queues.items() if other is not queue}

    async def cancel(self, request_id: str) -> None:
        self._tasks.cancel(request_id)

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._tasks))

    async def reset(self) -> None:
        """Do nothing: there are no caches."""

    def versions(self) -> Mapping[str, str]:
        return {"store": _class_name(type(self.store))}


_Runner = ThreadPoolExecutor | asyncio.AbstractEventLoop
_Call = asyncio.Future[list[SearchOutcome]]
"""A call under way, with the outcome of each of its searches."""


class _CallQueue:
    """Searches that wait for calls on threads, or on one loop, and the calls under way. Lives on the pool's loop."""

    def __init__(self, engine: VectorStoreEngine, runner: _Runner, max_calls: int) -> None:
        """`runner`: the threads or the loop on which calls are made, at most `max_calls` at a time."""
        self._engine, self._runner, self._max_calls = engine, runner, max_calls
        self._waiting: deque[tuple[StoreSearch, asyncio.Future[SearchOutcome]]] = deque()
        self._running_calls = 0

    async def outcome(self, search: StoreSearch) -> SearchOutcome:
        """Return the outcome of a search. Raise `EngineError` if its call was stopped."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[SearchOutcome] = loop.create_future()
        self._waiting.append((search, outcome))
        loop.call_soon(self._start_calls)  # after all other searches that have arrived by now
        return await outcome

    def _start_calls(self) -> None:
        """Start calls for the waiting searches, oldest first, until `max_calls` run."""
        while self._waiting and self._running_calls < self._max_calls:
            oldest = self._waiting[0][0]
            group: list[tuple[StoreSearch, asyncio.Future[SearchOutcome]]] = []
            remaining: deque[tuple[StoreSearch, asyncio.Future[SearchOutcome]]] = deque()
            for search, outcome in self._waiting:
                if outcome.done():  # cancelled
                    continue
                fits = not group or (search.group is not None and search.group == oldest.group)
                (group if fits and len(group) < MAX_QUERIES else remaining).append((search, outcome))
                oldest = group[0][0]
            self._waiting = remaining
            if not group:
                break
            outcomes = [outcome for _, outcome in group]
            try:
                call = _start_call(self._runner, [search for search, _ in group], self._engine.read_only)
            except RuntimeError:  # the threads, or the callers' loop, have ended
                self._deliver(outcomes, None)
                continue
            self._running_calls += 1
            call.add_done_callback(partial(self._end_call, outcomes))
            for outcome in outcomes if group[0][0].loop is not None else ():
                outcome.add_done_callback(partial(_cancel_unread, outcomes, call))
        if not self._waiting and not self._running_calls:
            self._engine.forget_queue(self)

    def _end_call(self, outcomes: Sequence[asyncio.Future[SearchOutcome]], call: _Call) -> None:
        """Deliver the outcomes of a call, and start others."""
        self._running_calls -= 1
        self._deliver(outcomes, None if call.cancelled() or call.exception() is not None else call.result())
        self._start_calls()

    def _deliver(
        self, outcomes: Sequence[asyncio.Future[SearchOutcome]], results: Sequence[SearchOutcome] | None
    ) -> None:
        """Hand each search its result; an `EngineError` if there is none."""
        for number, outcome in enumerate(outcomes):
            if results is not None and not outcome.done():
                outcome.set_result(results[number])
            elif not outcome.done():  # it may be cancelled
                name = self._engine.name
                outcome.set_exception(EngineError(f"{name}: the search was stopped.", engine=name))


def _cancel_unread(outcomes: Sequence[asyncio.Future[SearchOutcome]], call: _Call, _: object) -> None:
    """Cancel a call if all of its searches were cancelled, as their callers would have cancelled calls of their own."""
    if all(outcome.cancelled() for outcome in outcomes):
        call.cancel()


def _start_call(runner: _Runner, searches: Sequence[StoreSearch], read_only: bool) -> _Call:
    """Start a call of sync code on a thread, or of an async client on the loop of its callers.

    Raise `RuntimeError` if the threads or the loop have ended.
    """
    if isinstance(runner, ThreadPoolExecutor):
        return asyncio.get_running_loop().run_in_executor(runner, run_searches, searches, read_only)
    call = arun_searches(searches, read_only)
    try:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, runner))
    except RuntimeError:
        call.close()
        raise


def run_searches(searches: Sequence[StoreSearch], read_only: bool) -> list[SearchOutcome]:
    """Return the outcomes of searches of one group. Blocks.

    With `read_only`, equal searches are made once, and each gets a copy of the result.
    """
    identities, distinct = _distinct(searches, read_only)
    outcomes = dict(zip(distinct, _run_distinct(list(distinct.values())), strict=True))
    delivered = _delivered(identities, outcomes)
    return [one or search.run() for one, search in zip(delivered, searches, strict=True)]


async def arun_searches(searches: Sequence[StoreSearch], read_only: bool) -> list[SearchOutcome]:
    """Return the outcomes of searches of an async client, as `run_searches` does. Runs on the loop of the callers."""
    identities, distinct = _distinct(searches, read_only)
    outcomes = dict(zip(distinct, await _arun_distinct(list(distinct.values())), strict=True))
    delivered = _delivered(identities, outcomes)
    return [one or await search.arun() for one, search in zip(delivered, searches, strict=True)]


def _distinct(searches: Sequence[StoreSearch], read_only: bool) -> tuple[list[Hashable], dict[Hashable, StoreSearch]]:
    """Return the identity of each search, and the searches to make by their identities."""
    identities: list[Hashable] = [
        number if not read_only or search.identity is None else search.identity
        for number, search in enumerate(searches)
    ]
    return identities, {identity: searches[identities.index(identity)] for identity in identities}


def _delivered(
    identities: Sequence[Hashable], outcomes: Mapping[Hashable, SearchOutcome]
) -> list[SearchOutcome | None]:
    """Return the outcome of each search: for those equal to an earlier one a copy, or None if it cannot be copied."""
    delivered: list[SearchOutcome | None] = [None] * len(identities)
    for number, identity in enumerate(identities):
        with suppress(Exception):  # a result that cannot be copied is not shared
            is_repeated = identity in identities[:number]
            delivered[number] = copy.deepcopy(outcomes[identity]) if is_repeated else outcomes[identity]
    return delivered


def _run_distinct(searches: Sequence[StoreSearch]) -> list[SearchOutcome]:
    """Search in one call where the client can. If that fails, each search is made alone, and gets its own error."""
    first = searches[0]
    if len(searches) > 1 and first.batched is not None:
        with suppress(Exception):
            arguments = [search.arguments for search in searches]
            results = first.context.run(first.batched.search, first.client, arguments)
            return [SearchOutcome(result) for result in results]
    return [search.run() for search in searches]


async def _arun_distinct(searches: Sequence[StoreSearch]) -> list[SearchOutcome]:
    """Search as `_run_distinct` does; searches that are made alone are made at once, as their callers made them."""
    first, batched = searches[0], searches[0].batched
    if len(searches) > 1 and batched is not None:
        arguments = [search.arguments for search in searches]
        outcome = await first.arun_in_context(lambda: batched.search(first.client, arguments))
        if outcome.error is None and len(outcome.value) == len(searches):
            return [SearchOutcome(result) for result in outcome.value]
    return await asyncio.gather(*(search.arun() for search in searches))


# ------------------------------------------------------------ stand-ins


class _ClientStandIn:
    """The client of a store, whose search goes through the engine. All else is the client's own."""

    def __init__(
        self, client: Any, batched: BatchedSearch, submit: Submit, read_only: bool, *, is_async: bool = False
    ) -> None:
        self._original_client = client

        function = getattr(client, batched.method)

        def search(*args: Any, **arguments: Any) -> Any:
            """Search as the client does, in a call that other searches may share. Return an awaitable if it does."""
            loop = asyncio.get_running_loop() if is_async else None
            shared = None if args else batched.shared_arguments(arguments)
            group = None if shared is None else _to_bytes((id(client), id(loop), shared))
            identity = _to_bytes((args, arguments)) if read_only else None
            return submit(StoreSearch(function, args, arguments, identity, group, batched, client, loop=loop))

        vars(self)[batched.method] = search

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original_client, name)


@lru_cache(maxsize=64)
def _stand_in_class(cls: Any) -> Any:
    """Return a subclass of a store's class whose searches are made by the engine, on the user's own store."""
    return type(cls.__name__, (cls,), {name: _engine_search(name) for name in _SEARCH_METHODS if hasattr(cls, name)})


def _engine_search(name: str) -> Callable[..., Any]:
    """Return a method that calls the user's store in a thread of the engine."""

    def search(self: Any, *args: Any, **arguments: Any) -> Any:
        """Search as the store does."""
        store, submit, read_only = self.teola_searches
        identity = _to_bytes((name, args, arguments)) if read_only else None
        return submit(StoreSearch(getattr(store, name), args, arguments, identity, identity))

    return search


def _to_bytes(values: Any) -> bytes | None:
    """Return bytes that are equal only for values that are equal with all their types; None if there are none."""
    try:
        return pickle.dumps(values)
    except Exception:  # e.g. a filter that is a function without a name
        return None


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# ------------------------------------------------------------ searches for several queries in one call


def _batched_search(client: Any) -> BatchedSearch | None:
    """Return the search of a store's client for several queries.

    None for a client of another class or none at all, and for a client whose search somebody has replaced.
    """
    batched = _BATCHED_SEARCHES.get(_class_name(type(client)))
    return None if batched is None or batched.method in vars(client) else batched


def _shared_by_chroma(arguments: Mapping[str, Any]) -> Any:
    """Return all arguments but the vector; None for a search by text or image, or for several vectors."""
    shared = {name: value for name, value in arguments.items() if name != "query_embeddings"}
    has_other_queries = any(shared.get(name) is not None for name in ("query_texts", "query_images", "query_uris"))
    return None if has_other_queries or _chroma_vector(arguments) is None else shared


def _chroma_vector(arguments: Mapping[str, Any]) -> list[Any] | None:
    """Return the vector of a search by one vector, which comes alone or in a list; None for any other search."""
    vectors = arguments.get("query_embeddings")
    if type(vectors) is not list or not vectors:
        return None
    if type(vectors[0]) is float:
        return vectors
    return vectors[0] if len(vectors) == 1 and type(vectors[0]) is list else None


def _search_chroma(collection: Any, searches: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Query a Chroma collection by all vectors at once. Return the result of each query as its own would be."""
    vectors = [_chroma_vector(arguments) for arguments in searches]
    result = collection.query(**{**searches[0], "query_embeddings": vectors})
    return [
        {
            name: rows if rows is None or name == "included" else rows[number : number + 1]
            for name, rows in result.items()
        }
        for number in range(len(searches))
    ]


_QDRANT_FIELDS = {
    "query_filter": "filter",
    "search_params": "params",
    "shard_key_selector": "shard_key",
    "with_vectors": "with_vector",
}
"""Fields of Qdrant's `QueryRequest`, by the names of the arguments of `query_points` that they stand for."""
_QDRANT_SAME = {"limit", "lookup_from", "offset", "prefetch", "query", "score_threshold", "using", "with_payload"}
_QDRANT_SHARED = ("collection_name", "consistency", "timeout")


def _shared_by_qdrant(arguments: Mapping[str, Any]) -> Any:
    """Return the arguments of a batch of queries; None for arguments that batches do not have."""
    if not arguments.keys() <= {*_QDRANT_FIELDS, *_QDRANT_SAME, *_QDRANT_SHARED}:
        return None
    is_plain_vector = isinstance(arguments.get("query"), list)
    return {name: arguments.get(name) for name in _QDRANT_SHARED} if is_plain_vector else None


def _search_qdrant(client: Any, searches: Sequence[Mapping[str, Any]]) -> Any:
    """Send a batch of queries to Qdrant. Return the response to each; an awaitable of them with an async client."""
    query_request = sys.modules["qdrant_client.models"].QueryRequest  # loaded with the client
    defaults = {"limit": 10, "with_payload": True, "with_vectors": False}
    requests = [
        query_request(
            **{
                _QDRANT_FIELDS.get(name, name): value
                for name, value in {**defaults, **arguments}.items()
                if name not in _QDRANT_SHARED
            }
        )
        for arguments in searches
    ]
    shared = {name: searches[0].get(name) for name in _QDRANT_SHARED}
    return client.query_batch_points(requests=requests, **shared)


_BATCHED_SEARCHES = {
    "chromadb.api.models.Collection.Collection": BatchedSearch("query", _shared_by_chroma, _search_chroma),
    "qdrant_client.async_qdrant_client.AsyncQdrantClient": BatchedSearch(
        "query_points", _shared_by_qdrant, _search_qdrant
    ),
    "qdrant_client.qdrant_client.QdrantClient": BatchedSearch("query_points", _shared_by_qdrant, _search_qdrant),
}
"""By the class of the client: subclasses may search otherwise."""
