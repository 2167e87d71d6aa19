"""`TeolaEmbeddings`, which an engine of the pool computes, and requests of `OpenAIEmbeddings` that go side by side."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine, to_list
from teola_plugin.adapters.langchain.listening import call_context, composite_rules
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.snapshots import exactly
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText
from teola_plugin.runtime.call_limits import is_inside_prefetch
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.provider_call import CallNotShared, executing
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.provider_limits import MAX_PREFETCHED
from teola_plugin.runtime.threads import daemon_threads
from teola_plugin.shims.langchain import copy_with_one_tokenization
from teola_plugin.shims.langchain_interceptors import interceptors
from teola_plugin.tracer.leaf import EmbeddingLeaf

Role = Literal["query", "document"]


class TeolaEmbeddings(BaseModel, Embeddings):
    """LangChain embeddings on the pool's engine `engine`: `TeolaEmbeddings(pool=pool)`.

    Queries and documents keep their roles, since some models prefix them differently. Vectors are lists of floats of
    the model's width.
    """

    pool: PoolField = Field(exclude=True, repr=False)
    """The `EnginePool`; shared by copies, never serialised."""
    engine: str = "embedder"

    model_config = ConfigDict(extra="forbid")

    def model_post_init(self, context: Any) -> None:
        check_engine(self.pool, self.engine)

    def embed_query(self, text: str) -> list[float]:
        return to_list(self._call([text], "query").result()[0])

    async def aembed_query(self, text: str) -> list[float]:
        return to_list((await self._call([text], "query"))[0])

    def embed_documents(self, texts: Iterable[str]) -> list[list[float]]:
        return [to_list(vector) for vector in self._call(texts, "document").result()]

    async def aembed_documents(self, texts: Iterable[str]) -> list[list[float]]:
        return [to_list(vector) for vector in await self._call(texts, "document")]

    def begin_documents(self, texts: Iterable[str], *, keep_remote: bool = False) -> CallHandle:
        """`embed_documents`, under way. With `keep_remote`, which is for rows in a store of the same pool, the vectors
        may be `RemoteValue`s."""
        return self._call(texts, "document", keep_remote=keep_remote)

    def _call(self, texts: Iterable[str], role: Role, *, keep_remote: bool = False) -> CallHandle:
        """Start one request of the engine for each text, in the query that the caller belongs to, if any.

        `role` says if texts are queries or documents. With `keep_remote`, vectors stay in a shared pool.
        """
        requests = [EmbedText(text, role) for text in texts]
        run, request_context = call_context(self.pool)
        kind = PrimitiveKind.EMBEDDING
        handle: CallHandle = self.pool.call(
            kind, self.engine, requests, keep_remote=keep_remote, run=run, request_context=request_context
        )
        return handle

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> EmbeddingLeaf | None:
        """Return the leaf of a call of `embed_query`: one text in, its vector out."""
        return None if kwargs else EmbeddingLeaf(self.engine, "query", batchable=False, result=to_list)


# ------------------------------------------------------------ the requests of one call of embeddings


_SPLIT = frozenset(
    {
        "langchain_openai.embeddings.azure.AzureOpenAIEmbeddings",
        "langchain_openai.embeddings.base.OpenAIEmbeddings",
    }
)
"""Classes whose `embed_documents` sends batches of texts one after the other, each by `client.create`."""


@dataclass(slots=True)
class _BatchRequest:
    """One request that `embed_documents` makes; see `Invocation`. Its key is its place among the requests."""

    target: Any
    create: Callable[..., Any]
    arguments: Mapping[str, Any]
    position: Hashable

    kind: str = "EMBEDDING"
    streams: bool = False
    is_pure: bool = False

    @property
    def run_id(self) -> None:
        """The id of a run, which embeddings do not have."""

    def key(self) -> Hashable:
        return self.position

    def start(self, record: Callable[[Any], object] | None) -> Any:
        return self.create(**self.arguments)

    def report(self, event: Any) -> Any:
        """Do nothing: clients report no events."""


class _RequestRecorder:
    """A client that notes what it is asked for, and answers with vectors of one number."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def create(self, **arguments: Any) -> dict[str, Any]:
        self.requests.append(arguments)
        inputs = arguments["input"]
        return {"data": [{"embedding": [1.0]} for _ in (inputs if isinstance(inputs, list) else [inputs])]}

    async def acreate(self, **arguments: Any) -> dict[str, Any]:
        return self.create(**arguments)


class BatchRequests:
    """A client that sends the requests of one call of `embed_documents` side by side, in place of the object's own.

    The first request is the original's. At most `MAX_PREFETCHED` are under way, or answered and not yet read. The
    provider's limit holds, and a request that was refused for now is sent again in its place.
    """

    def __init__(self, target: Any, client: Any, requests: Sequence[Mapping[str, Any]], *, on_loop: bool) -> None:
        self._target, self._client, self._requests = target, client, requests
        self._table = ProviderCallTable()
        self._waiting = deque(range(1, len(requests)))
        self._scopes = list[CallScope]()
        self._lock, self._next_position = threading.Lock(), 0
        workers = min(MAX_PREFETCHED, len(requests)) - 1
        self._unread = threading.Semaphore(workers)
        self._unread_on_loop = asyncio.Semaphore(workers)
        self._workers, self._on_loop = workers, on_loop
        self._context = copy_context()
        self._context.run(is_inside_prefetch.set, True)
        self._context.run(executing.set, None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Prefetch while the body runs; drop what it did not claim."""
        tasks: list[asyncio.Task[None]] = []
        if self._on_loop:
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(self._awork(), context=self._context.copy()) for _ in range(self._workers)]
        else:
            daemon_threads().run(lambda: self._context.copy().run(self._work), self._workers)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.clear()
                scopes = list(self._scopes)
            self._unread.release(self._workers)
            for task in tasks:
                task.cancel()
            for scope in scopes:
                scope.drop()
            self._table.close()

    def create(self, **arguments: Any) -> Any:
        """Return the response to the original's next request."""
        response = self._original_scope().result(self._next_request(arguments))
        self._unread.release()
        return response

    async def acreate(self, **arguments: Any) -> Any:
        """`create` for async methods."""
        response = await self._original_scope().aresult(self._next_request(arguments))
        self._unread_on_loop.release()
        return response

    def _original_scope(self) -> CallScope:
        return CallScope(self._table, Caller.ORIGINAL, _unchanged)

    def _next_request(self, arguments: Mapping[str, Any]) -> _BatchRequest:
        position, self._next_position = self._next_position, self._next_position + 1
        is_expected = position < len(self._requests) and exactly(self._requests[position], arguments)
        return _BatchRequest(self._target, self._client.create, arguments, position if is_expected else object())

    def _next_prefetch(self) -> tuple[CallScope, _BatchRequest] | None:
        """Take the next request that nobody has started; None if there is none left."""
        with self._lock:
            if not self._waiting:
                return None
            position = self._waiting.popleft()
            scope = CallScope(self._table, Caller.PLANNER, _unchanged, is_offer=True)
            self._scopes.append(scope)
        return scope, _BatchRequest(self._target, self._client.create, self._requests[position], position)

    def _work(self) -> None:
        """Send requests one after the other, on one of several threads, until none is left or one fails.

        Waits while too many answers are unread. The original meets an error where it claims that request.
        """
        while self._unread.acquire() and (prefetch := self._next_prefetch()) is not None:
            scope, request = prefetch
            try:
                scope.result(request)
            except CallNotShared:  # the original makes it, so that nothing unread is left of it
                self._unread.release()
            except BaseException:  # the original gets it where it claims the request, and goes no further
                return

    async def _awork(self) -> None:
        """Send requests as `_work` does, as a task of the caller's loop."""
        while await self._unread_on_loop.acquire() and (prefetch := self._next_prefetch()) is not None:
            scope, request = prefetch
            try:
                await scope.aresult(request)
            except CallNotShared:
                self._unread_on_loop.release()
            except Exception:
                return


def _unchanged(value: Any) -> Any:
    """Return a response itself: only the original reads it."""
    return value


def split_embedding_call(model: Any, original: Any) -> Callable[..., Any]:
    """Return how a model embeds texts here: by `original`, or by it with a client that sends its requests together."""
    rules = composite_rules.get()
    if rules is None or f"{type(model).__module__}.{type(model).__qualname__}" not in _SPLIT:
        return original  # type: ignore[no-any-return]
    if not interceptors.is_installed or not rules.splits_batches(model):
        return original  # type: ignore[no-any-return]
    return partial(_aembed if inspect.iscoroutinefunction(original) else _embed, original)


def _has_several_batches(model: Any, texts: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    chunk_size = next(iter(arguments), options.get("chunk_size")) or model.chunk_size
    return type(texts) is list and len(texts) > chunk_size


def _embed(original: Any, model: Any, texts: Any, *args: Any, **kwargs: Any) -> Any:
    """Embed texts as the object's own sync method does, with its requests sent side by side.

    The method runs twice on copies: with a client that only notes the requests, then with one that sends them together.
    If that fails before anything is sent, the original runs as it always did.
    """
    if model.client is None or not _has_several_batches(model, texts, args, kwargs):
        return original(model, texts, *args, **kwargs)
    try:
        copied, recorder = copy_with_one_tokenization(model), _RequestRecorder()
        copied.client = recorder
        original(copied, texts, *args, **kwargs)
        copied.client = requests = BatchRequests(model, model.client, recorder.requests, on_loop=False)
    except Exception as error:  # nothing has been sent yet: the original tells what is wrong
        log_fallback(error, model)
        return original(model, texts, *args, **kwargs)
    with requests.running():
        return original(copied, texts, *args, **kwargs)


async def _aembed(original: Any, model: Any, texts: Any, *args: Any, **kwargs: Any) -> Any:
    """Embed texts as `_embed` does, for the object's async method."""
    if not _has_several_batches(model, texts, args, kwargs):
        return await original(model, texts, *args, **kwargs)
    try:
        copied, recorder = copy_with_one_tokenization(model), _RequestRecorder()
        copied.async_client = SimpleNamespace(create=recorder.acreate)
        await original(copied, texts, *args, **kwargs)
        requests = BatchRequests(model, model.async_client, recorder.requests, on_loop=True)
        copied.async_client = SimpleNamespace(create=requests.acreate)
    except Exception as error:
        log_fallback(error, model)
        return await original(model, texts, *args, **kwargs)
    with requests.running():
        return await original(copied, texts, *args, **kwargs)
