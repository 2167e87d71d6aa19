"""The base of engines on servers that embed or rerank: one HTTP request carries the inputs of several queries."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.openai.engine import ServerFacts, select_model, served_models, unusable_server
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.openai.http import (
    failed_by_network,
    json_of,
    malformed,
    new_client,
    not_started,
    refusal_error,
    refusal_in,
    root_of,
    send_body,
    text_of,
    unreachable,
)
from teola_plugin.engines.openai.wire import MalformedReply
from teola_plugin.errors import ConfigError, EngineError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Request, Result
from teola_plugin.shims.httpx import retry_after_s

if TYPE_CHECKING:
    import httpx

_REFUSED_FOR_NOW = frozenset({429, 503})
"""Statuses after which fewer requests are sent, and those of the engine's own again."""
_MAY_CONCERN_ONE_INPUT = frozenset({400, 413, 422, 500})
"""Statuses after which the requests in one HTTP request are sent in two halves: llama.cpp answers 500 to long texts."""
_MAX_ATTEMPTS = 4
"""Times that a request of the engine's own is sent to a server that refuses it for now."""
_DEFAULT_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds without requests after such a refusal, where the server names no time, and at most."""


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    """A request that waits for its HTTP request, or for its answer."""

    request: Request
    group: Hashable
    """Requests with equal groups may go in one HTTP request."""
    inputs: int
    """Number of texts (or pairs) in it."""
    inbox: asyncio.Queue[Result]
    queued_at: float
    attempts: int = 0
    sending: asyncio.Task[None] | None = None
    has_ended: bool = False


class BatchingServer:
    """The base of the engines in this module: queues requests, and sends those that wait together as one.

    A request that finds a free connection is sent at once. While all connections are busy, requests wait, and go
    together as soon as one is free, up to `max_inputs` inputs in an HTTP request. If the server refuses requests (429
    or 503), half as many connections are used from then on, after the time that it names; the number grows again with
    its answers.
    """

    kinds: frozenset[PrimitiveKind]
    EXPECTED: ClassVar[str]
    """The name of a good reply, for errors: `list of embeddings`."""
    DEFAULT_MAX_INPUTS: ClassVar[int] = 32
    """Inputs of one HTTP request where neither the user nor the server says how many: TEI's own default."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        dedicated: bool = False,
        max_inputs: int | None = None,
        max_connections: int = 16,
        timeout: float = 600.0,
        headers: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> None:
        for option, value in (("max_inputs", max_inputs), ("max_connections", max_connections)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: {option} is {value!r}.", hint="give a whole number above 0")
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{name}: base_url is {without_credentials(str(base_url))!r}.",
                hint="give the address that clients use, e.g. http://localhost:8000/v1",
            )
        self.name, self.base_url, self.model = name, without_credentials(base_url).rstrip("/"), model
        self.dedicated, self._check = dedicated, check
        self.max_inputs = max_inputs or self.DEFAULT_MAX_INPUTS
        self._user_set_max_inputs = max_inputs is not None
        self._new_client = partial(new_client, base_url, api_key, headers, timeout, max_connections)
        self._max_connections = self._connections = max_connections
        self._profile = EngineProfile(
            batching=Batching.CONTINUOUS,
            max_batch=1 << 20,
            max_efficient_batch=1 << 20,
            max_requests=1 << 20,  # the queue here sees all requests, so that those that wait can go together
            device=self.base_url,
            dedicated=dedicated,
        )
        self._client: httpx.AsyncClient | None = None
        self._versions: dict[str, str] = {"model": model or "unknown", "server": self.base_url}
        self._waiting: deque[_QueuedRequest] = deque()
        self._live: dict[str, _QueuedRequest] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._successes = 0
        self._paused_until = 0.0
        self._is_filling = False

    # For subclasses

    def _fault(self, request: Request) -> str:
        """Describe what is wrong with a request; return "" for one that can be sent."""
        raise NotImplementedError

    def _group(self, payload: Any) -> Hashable:
        """Return what two payloads must have in common to go in one HTTP request."""
        raise NotImplementedError

    def _inputs(self, payload: Any) -> int:
        """Return the number of inputs in a payload."""
        return 1

    async def _fetch(self, client: httpx.AsyncClient, payloads: Sequence[Any]) -> Sequence[Any]:
        """Send one HTTP request for payloads of one group. Return a value for each. Raise EngineError, or of httpx."""
        raise NotImplementedError

    def _adopt_facts(self, entry: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Note what the server says of its model. `entry`: in its list of models; `info`: the answer to TEI's `/info`.

        Both are empty where the server does not have them.
        """

    # Life cycle

    async def start(self) -> None:
        """Find the server and its model. Idempotent.

        Raises:
            EngineUnavailable: There is no server at the address, it does not serve the model, or it does not say which
                model it serves and none was named.
        """
        if self._client is not None:
            return
        client = self._new_client(self.name)
        self._connections, self._paused_until, self._is_filling = self._max_connections, 0.0, False
        try:
            if self._check or self.model is None:
                await self._discover(client)
        except BaseException:
            await client.aclose()
            raise
        self._client = client

    async def _discover(self, client: httpx.AsyncClient) -> None:
        """Ask the server for its models, and TEI's `/info`, and adopt what they say: model, versions, inputs per
        request.

        Raise `EngineUnavailable` if the server cannot be reached, refuses the key, or does not say which model it
        serves.
        """
        try:
            listing = await client.get(f"{self.base_url}/models")
            info_reply = await client.get(f"{root_of(self.base_url)}/info")
        except Exception as error:
            raise unreachable(self.name, self.base_url, error) from error
        if listing.status_code in (401, 403):
            raise unusable_server(self.name, f"{self.base_url}/models answered {listing.status_code}")
        info = json_of(text_of(info_reply)) if info_reply.status_code == 200 else {}
        info = info if "model_id" in info else {}
        entry: Mapping[str, Any] = {}
        if listing.status_code == 200 and "data" in json_of(text_of(listing)):
            models = served_models(self.name, self.base_url, text_of(listing))
            facts = select_model(self.name, self.base_url, self.model, models)
            entry = next(one for one in models if one.get("id") == facts.model)
        elif info:
            facts = ServerFacts(self.model or str(info["model_id"]), versions={"server": "text-embeddings-inference"})
        elif self.model is not None:
            facts = ServerFacts(self.model)
        else:
            reason = f"{self.base_url} does not say which model it serves (/models answered {listing.status_code})"
            raise unusable_server(self.name, reason, "name the model: model=..., and check base_url")
        if info.get("version"):
            facts = replace(facts, versions={**facts.versions, "version": str(info["version"])})
        self.model = facts.model
        self._versions |= {"model": facts.model, **facts.versions}
        batch_limit = info.get("max_client_batch_size")
        if not self._user_set_max_inputs and type(batch_limit) is int and batch_limit > 0:
            self.max_inputs = batch_limit
        self._adopt_facts(entry, info)

    async def stop(self) -> None:
        """Fail the requests in flight, and close the connections. Idempotent. The server goes on."""
        client, self._client = self._client, None
        for queued in list(self._live.values()):
            self._end(queued, not_started(self.name, retryable=True))
        self._waiting.clear()
        sending = list(self._sending)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        if client is not None:
            await client.aclose()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield one end for each request, as they come. A caller that stops reading cancels the others."""
        inbox: asyncio.Queue[Result] = asyncio.Queue()
        queued_requests = []
        for request in batch:
            if (error := self._refusal(request)) is not None:
                inbox.put_nowait(Failed(request.id, error))
                continue
            group, inputs = self._group(request.payload), self._inputs(request.payload)
            queued = _QueuedRequest(request, group, inputs, inbox, time.perf_counter())
            self._live[request.id] = queued
            queued_requests.append(queued)
        self._waiting.extend(queued_requests)
        self._fill_soon()
        try:
            for _ in batch:
                yield await inbox.get()
        finally:
            for queued in queued_requests:
                self._drop(queued)

    def _refusal(self, request: Request) -> EngineError | None:
        """Return the error for a request that cannot be sent: it is invalid, the engine is stopped, or its id is in
        use."""
        if fault := self._fault(request):
            return EngineError(f"{self.name}: {fault}", engine=self.name, hint="see requests/payloads.py")
        if self._client is None:
            return not_started(self.name, retryable=not is_carried(request.payload))
        if request.id in self._live:
            reason = f"{self.name}: request {request.id!r} is already in flight."
            return EngineError(reason, engine=self.name, hint="give every request its own id")
        return None

    async def cancel(self, request_id: str) -> None:
        """End a request now. The HTTP request is closed once all requests in it are cancelled."""
        queued = self._live.get(request_id)
        if queued is not None:
            error = EngineError(f"{self.name}: {request_id} was cancelled.", engine=self.name)
            self._end(queued, error)
            self._drop(queued)

    def _drop(self, queued: _QueuedRequest) -> None:
        """Forget a request; close the HTTP request that it is in if nobody waits for another one in it."""
        queued.has_ended = True
        if self._live.get(queued.request.id) is queued:
            del self._live[queued.request.id]
        task = queued.sending
        if task is not None and not task.done() and not any(one.sending is task for one in self._live.values()):
            task.cancel()

    def _end(self, queued: _QueuedRequest, outcome: Any) -> None:
        """Deliver the outcome of a request, a value or an error, to its caller, with the seconds that it took. At most
        once."""
        if queued.has_ended:
            return
        queued.has_ended = True
        self._live.pop(queued.request.id, None)
        request_id = queued.request.id
        if isinstance(outcome, EngineError):
            queued.inbox.put_nowait(Failed(request_id, outcome))
        else:
            seconds = time.perf_counter() - queued.queued_at
            queued.inbox.put_nowait(Done(request_id, outcome, {"seconds": seconds}))

    def _fill_soon(self) -> None:
        """Send what waits in the loop's next round: what other queries ask for in this round goes with it."""
        if not self._is_filling:
            self._is_filling = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        """Send waiting requests in as few HTTP requests as possible, as long as a connection is free and no pause is
        on."""
        self._is_filling = False
        loop = asyncio.get_running_loop()
        if self._client is None or loop.time() < self._paused_until:
            return
        while self._waiting and len(self._sending) < self._connections:
            batch = self._take_batch()
            if not batch:
                return
            task = loop.create_task(self._send(self._client, batch))
            self._sending.add(task)
            for queued in batch:
                queued.sending = task

    def _take_batch(self) -> list[_QueuedRequest]:
        """Take the first request that waits, and those behind it that can go in the same HTTP request."""
        batch: list[_QueuedRequest] = []
        left: deque[_QueuedRequest] = deque()
        inputs = 0
        for queued in self._waiting:
            if queued.has_ended:
                continue
            fits = not batch or (queued.group == batch[0].group and inputs + queued.inputs <= self.max_inputs)
            if fits:
                batch.append(queued)
                inputs += queued.inputs
            else:
                left.append(queued)
        self._waiting = left
        return batch

    async def _send(self, client: httpx.AsyncClient, batch: list[_QueuedRequest]) -> None:
        """Send a batch as one HTTP request and deliver the outcomes.

        Requests of the engine's own that the server refuses for now go back to the front of the queue, until each has
        been sent `_MAX_ATTEMPTS` times.
        """
        task = asyncio.current_task()
        try:
            outcomes = await self._outcomes(client, batch)
        finally:
            self._sending.discard(task)  # type: ignore[arg-type]
            self._fill_soon()
        for queued, outcome in zip(batch, outcomes, strict=True):
            queued.attempts += 1
            refusal = refusal_in(outcome) if isinstance(outcome, EngineError) else None
            is_refused_for_now = refusal is not None and refusal.status in _REFUSED_FOR_NOW
            if is_refused_for_now and not is_carried(queued.request.payload):
                if queued.attempts < _MAX_ATTEMPTS:
                    queued.sending = None
                    self._waiting.appendleft(queued)
                    continue
                outcome.retryable = False
            self._end(queued, outcome)

    async def _outcomes(self, client: httpx.AsyncClient, batch: Sequence[_QueuedRequest]) -> list[Any]:
        """Return a value or an EngineError for each request. What concerns one of them does not fail the others."""
        try:
            values = list(await self._fetch(client, [queued.request.payload for queued in batch]))
        except EngineError as error:
            refusal = refusal_in(error)
            if refusal is not None and refusal.status in _REFUSED_FOR_NOW:
                self._slow_down(retry_after_s(refusal.headers))
            is_divided = refusal is not None and refusal.status == 200 and is_carried(batch[0].request.payload)
            may_concern_one = is_divided or (refusal is not None and refusal.status in _MAY_CONCERN_ONE_INPUT)
            if len(batch) == 1 or not may_concern_one:
                return [error] * len(batch)
            middle = len(batch) // 2
            return [*await self._outcomes(client, batch[:middle]), *await self._outcomes(client, batch[middle:])]
        except Exception as error:
            retryable = not is_carried(batch[0].request.payload)
            return [failed_by_network(self.name, self.base_url, error, retryable=retryable)] * len(batch)
        self._note_success()
        return values

    def _slow_down(self, pause_s: float | None) -> None:
        """Halve the number of connections, and send nothing for as long as the server says."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self._paused_until:  # requests that were sent together are refused together
            self._connections, self._successes = max(1, self._connections // 2), 0
        pause_s = min(_DEFAULT_PAUSE_S if pause_s is None else pause_s, _LONGEST_PAUSE_S)
        self._paused_until = max(self._paused_until, now + pause_s)
        loop.call_at(self._paused_until + 0.001, self._fill_soon)

    def _note_success(self) -> None:
        """Count a request that succeeded, and allow one more connection after some of them.

        It takes as many successes since the last change as there are connections; `max_connections` is the limit.
        """
        self._successes += 1
        if self._connections < self._max_connections and self._successes >= self._connections:
            self._connections, self._successes = self._connections + 1, 0

    async def post(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any], payload: Any) -> httpx.Response:
        """Send a request, in the name of the client that wrote `payload` if one did. Raise EngineError if refused.

        `path`: below `base_url`, or a whole address.
        """
        url = path if path.startswith(("http://", "https://")) else f"{self.base_url}/{path}"
        response = await send_body(client, url, body, payload)
        if response.status_code != 200:
            headers, retryable = dict(response.headers), not is_carried(payload)
            raise refusal_error(self.name, response.status_code, text_of(response), headers, retryable=retryable)
        return response

    def unusable(self, response: httpx.Response, fault: str) -> EngineError:
        """Return the error for a reply with status 200 that does not answer what was asked for."""
        content, headers = text_of(response), response.headers.multi_items()
        return malformed(self.name, self.base_url, MalformedReply(fault), content, headers, expected=self.EXPECTED)

    # Figures

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    def size(self, request: Request) -> int:
        """Return the number of inputs of a request."""
        return max(1, self._inputs(request.payload))

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._live))

    async def reset(self) -> None:
        """Do nothing: the engine keeps no results."""

    def versions(self) -> Mapping[str, str]:
        """Return the model, the server, and the server's version if it is known."""
        return self._versions


def is_carried(payload: Any) -> bool:
    """Return True for a request that a client wrote, which decides by itself what to do after a failure."""
    return getattr(payload, "envelope", None) is not None
