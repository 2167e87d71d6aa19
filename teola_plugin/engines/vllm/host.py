"""The process in which vLLM runs: `python -m teola_plugin.engines.vllm.host FD PARENT FOLDER`.

It is separate from the caller for five reasons: vLLM's imports and detokenising do not hold up the caller's event loop;
its environment variables, signal handlers and log lines stay here; scripts need no `__main__` guard; a crash does not
affect the caller; and the process group ends with its parent, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.devices.cards import device_name
from teola_plugin.engines.vllm import args as llm_args
from teola_plugin.engines.vllm import scheduler as llm_scheduler
from teola_plugin.engines.vllm.args import card_count
from teola_plugin.engines.vllm.cache import CachedPrefixes
from teola_plugin.engines.vllm.drafts.options import ENV
from teola_plugin.engines.vllm.drafts.worker import ATTACH, PROPOSER, WORKER
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
from teola_plugin.engines.vllm.process import PARENT, kill_group
from teola_plugin.engines.vllm.runner import PromptTooLong, RequestRunner
from teola_plugin.errors import ConfigError, TeolaError
from teola_plugin.requests.payloads import advice
from teola_plugin.shims.vllm import drafts as drafts_shim
from teola_plugin.shims.vllm import kv_events, processes, stats
from teola_plugin.shims.vllm import llm as shim
from teola_plugin.shims.vllm.llm import Limits
from teola_plugin.shims.vllm.processes import socket_folder

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine

log = logging.getLogger("teola_plugin")
_SEVERAL = ("data_parallel_size", "kv_transfer_config", "kv_events_config")
"""Arguments with which there are several caches, or the user receives the events."""


def endpoint() -> str:
    """Return the address of a socket file in the host's private folder."""
    return f"ipc://{socket_folder()}/kv-events"


def should_publish(tell_cache: bool, engine_args: Mapping[str, Any]) -> bool:
    """Return True if vLLM should publish cache events: with `tell_cache`, if there is one cache to report on.

    There is no single cache with data parallelism or a KV connector; and a user's own `kv_events_config` is left alone.
    """
    caches = engine_args.get("enable_prefix_caching", True)
    return tell_cache and bool(caches) and not any(engine_args.get(name) for name in _SEVERAL)


class CacheEvents:
    """A task that updates `prefixes` by vLLM's events. A message has all events of a step."""

    def __init__(self, limits: Limits) -> None:
        import zmq
        import zmq.asyncio

        self.prefixes = CachedPrefixes(limits.block_size, max_expected=2 * (limits.blocks or 10_000))
        self._read = kv_events.reader(limits.block_size)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint())
        self._number = 0
        self._task = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        """Listen until the host ends, or until a message cannot be read: then the cache counts as empty."""
        try:
            while True:
                _, number, payload = await self._socket.recv_multipart()
                self._apply(int.from_bytes(number, "big"), self._read(payload))
        except Exception:
            log.exception("vLLM's cache events cannot be followed; placement goes on by what was sent")
            self.prefixes.cleared()

    def _apply(self, number: int, events: Iterable[kv_events.KvEvent]) -> None:
        """Update the known prefixes by the cache events of one message; forget all prefixes if messages before it were
        lost."""
        if number != self._number:  # some were lost
            self.prefixes.cleared()
        self._number = number + 1
        for event in events:
            match event:
                case kv_events.Stored():
                    self.prefixes.stored(event.hashes, event.tokens, event.parent, event.salt)
                case kv_events.Removed():
                    self.prefixes.removed(event.hashes)
                case kv_events.Cleared():
                    self.prefixes.cleared()


_WATCH_EVERY = 0.2
_NO_GAUGE = "the share of its cache in use is not known"
_NO_EVENTS = "the content of its cache is not known, placement goes by what was sent"
_NO_DRAFTS = "nothing is drafted"
_NO_PROCESSES = "it starts its processes as it does by itself, which takes longer"


class Host:
    """The host, which passes frames from the link to vLLM, and results back to the link."""

    def __init__(
        self,
        llm: AsyncLLMEngine,
        link: Link,
        gauge: Gauge,
        prefixes: CachedPrefixes | None = None,
        *,
        drafts: bool = False,
    ) -> None:
        self._llm, self._link, self._gauge, self._prefixes = llm, link, gauge, prefixes
        self._runner = RequestRunner(llm, self._send, prefixes, drafts=drafts)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[Delta | RequestAnswer | Refusal] = []
        self._kv_sent = 0.0
        self._kv_tokens_sent: dict[str, int] = {}

    async def serve(self) -> None:
        """Serve frames until the other end or vLLM is gone."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self._receive(await self._link.receive())
        except EOFError:
            watch.cancel()

    def _receive(self, frame: object) -> None:
        """Handle one frame of the engine: start or abort a request, stream its pieces, or answer a question."""
        match frame:
            case Submit():
                self._start_task(frame.id, self._run_submit(frame))
            case Reset():
                self._start_task(frame.id, self._runner.reset(frame))
            case CallProposer():
                self._start_task(frame.id, self._runner.call_proposer(frame))
            case Ping():
                self._send(RequestAnswer(frame.id, not self._llm.errored))
            case Listen():
                self._runner.announce_reader(frame.id)
            case Abort() if frame.id in self._tasks:
                self._tasks[frame.id].cancel()

    async def _run_submit(self, frame: Submit) -> RequestAnswer:
        """Run a request. An error that its payload raises, also while it is read, fails this request only."""
        return await self._runner.run(replace(frame, payload=frame.payload.load()))

    def _start_task(self, wire: int, work: Any) -> None:
        task = self._tasks[wire] = asyncio.create_task(self._run_task(wire, work))
        task.add_done_callback(lambda _: self._tasks.pop(wire))

    async def _run_task(self, wire: int, work: Any) -> None:
        """Send the answer of a request, or the reason of its failure. End the host if vLLM itself has failed."""
        try:
            self._send(await work)
        except PromptTooLong as large:
            self._send(Refusal(wire, str(large), tokens=large.tokens, limit=large.limit))
        except asyncio.CancelledError:
            raise
        except BaseException as bad:  # also the panics of tokenizers, which are no Exceptions
            if self._llm.errored:
                await self._die()
            self._send(Refusal(wire, f"{type(bad).__name__}: {bad}", hint=advice(bad)))

    def _send(self, item: Delta | RequestAnswer | Refusal) -> None:
        """Queue an item for the engine's process; all items of one round of the loop are sent together."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(item)

    def _flush(self, kv_tokens: dict[str, int] | None = None) -> None:
        """Send all results of this turn of the loop in one frame, with the use of the KV cache and events of the prefix
        cache."""
        items, self._outbox = tuple(self._outbox), []
        self._kv_sent = self._gauge.kv_used
        self._link.send(
            Update(items, self._kv_sent, self._prefixes.take() if self._prefixes is not None else (), kv_tokens)
        )

    async def _watch(self) -> None:
        """Report figures of the cache, and end the host when vLLM is dead, also without any request."""
        while not self._llm.errored:
            await asyncio.sleep(_WATCH_EVERY)
            tokens, before = self._runner.kv_tokens(), self._kv_tokens_sent
            if tokens != before or abs(self._gauge.kv_used - self._kv_sent) > 0.001 or self._cache_changed:
                self._kv_tokens_sent = tokens
                self._flush(tokens)
        await self._die()

    @property
    def _cache_changed(self) -> bool:
        return self._prefixes is not None and self._prefixes.changed

    async def _die(self) -> None:
        await self._link.flushed()
        kill_group(os.getpgrp())


class Gauge:
    """The latest share of the KV cache in use."""

    def __init__(self) -> None:
        self.kv_used = 0.0

    def set(self, kv_used: float) -> None:
        self.kv_used = kv_used


def start_llm(setup: Setup, gauge: Gauge) -> tuple[AsyncLLMEngine, Ready]:
    """Start vLLM (15-30 s, mostly imports in three processes).

    Raises `EngineUnavailable`, `ConfigError`, and exceptions of vLLM.
    """
    import torch
    import vllm

    shim.check_needed(setup.name)
    llm_scheduler.check_names(setup.scheduler, setup.name)
    platform, lacking = shim.platform(), dict[str, Sequence[str]]()
    args = _arguments(setup, platform, lacking)
    lacking |= {_NO_GAUGE: stats.lacking(), _NO_PROCESSES: processes.lacking() if platform.cpu else ()}
    llm = _start_engine(setup, args, platform, gauge)
    limits = shim.limits_of(llm)
    return llm, Ready(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        block_size=limits.block_size,
        cache_tokens=limits.blocks * limits.block_size,
        device=_device(platform.device, setup.engine_args),
        versions={
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "model": setup.model,
            "dtype": limits.dtype,
        }
        | ({"gpu": platform.gpu} if platform.gpu else {}),
        tells_cache=lacking.get(_NO_EVENTS) == (),
        drafts=setup.drafts.tokens if setup.drafts is not None and lacking.get(_NO_DRAFTS) == () else 0,
        lacking=tuple(f"{consequence} (no {', '.join(names)})" for consequence, names in lacking.items() if names),
    )


def _device(kind: str, engine_args: Mapping[str, Any]) -> str:
    """Return the name for the profile: the cards, or the cores if they were set."""
    if kind == "cuda":
        return device_name(range(card_count(engine_args)))
    cores = os.environ.get(processes.BIND, "") if kind == "cpu" else ""
    return f"{kind}:{cores}" if cores else kind


def _arguments(setup: Setup, platform: shim.Platform, lacking: dict[str, Sequence[str]]) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`. Features that are not available go into `lacking`."""
    args = llm_args.engine_args(setup.model, setup.engine_args, cpu=platform.cpu)
    if setup.scheduler:
        args.setdefault("scheduler_cls", llm_scheduler.class_name(cpu=platform.cpu, engine_args=args))
    if setup.drafts is not None and (platform.cpu or setup.drafts_on_cuda):
        lacking[_NO_DRAFTS] = drafts_shim.lacking()
        if not lacking[_NO_DRAFTS]:
            args |= drafts_shim.arguments(setup.drafts.tokens, PROPOSER, WORKER)
            os.environ[ENV] = json.dumps(asdict(setup.drafts))
    if should_publish(setup.tell_cache, args):
        lacking[_NO_EVENTS] = kv_events.lacking()
        if not lacking[_NO_EVENTS]:
            args["kv_events_config"] = kv_events.publishing(endpoint())
    return args


def _start_engine(setup: Setup, args: Mapping[str, Any], platform: shim.Platform, gauge: Gauge) -> AsyncLLMEngine:
    """Start vLLM, on the CPU build with all threads on the chosen cores; `gauge` follows the use of its KV cache."""
    loggers = stats.kv_use_loggers(gauge.set)
    with llm_args.pin_cores(setup.engine_args) if platform.cpu else nullcontext(False) as in_one:
        config = shim.engine_config(args)
        if platform.cpu and (not in_one or llm_args.may_fork()):
            processes.fork_the_core()
        return shim.make(config, loggers)


def _keep_from_children(fd: int) -> None:
    """Close the link in forked children. Otherwise its other end would not notice that this process died."""
    os.set_inheritable(fd, False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, fd, inheritable=False))


async def _main(fd: int) -> None:
    """Receive the settings over the socket `fd`, start vLLM, and serve until the engine is gone.

    If vLLM does not start, send the reason to the engine and return.
    """
    _keep_from_children(fd)
    link = await Link.connect(socket.socket(fileno=fd))
    setup = await link.receive()
    gauge = Gauge()
    try:
        llm, ready = start_llm(setup, gauge)
    except Exception as error:
        import traceback

        traceback.print_exc()  # to the log
        link.send(_not_ready(error))
        await link.flushed()
        return
    ready = await _with_drafts(llm, ready)
    events = CacheEvents(shim.limits_of(llm)) if ready.tells_cache else None
    link.send(ready)
    await Host(llm, link, gauge, events.prefixes if events is not None else None, drafts=bool(ready.drafts)).serve()


async def _with_drafts(llm: AsyncLLMEngine, ready: Ready) -> Ready:
    """Attach the model runner to the proposer. Without that nothing is drafted."""
    if not ready.drafts or all(await llm.collective_rpc(ATTACH)):
        return ready
    return replace(ready, drafts=0, lacking=(*ready.lacking, _NO_DRAFTS))


def _not_ready(error: Exception) -> NotReady:
    """Return the frame by which the host reports why vLLM cannot start; `settings` is True for a `ConfigError`."""
    if isinstance(error, TeolaError):
        return NotReady(error.message, error.hint, settings=isinstance(error, ConfigError))
    return NotReady(f"{type(error).__name__}: {error}")


def _end_with_parent(parent: int, folder: Path) -> None:
    """Wait until the parent is gone, then end this process group. The parent holds the other end of our stdin."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpgrp())


def main() -> None:
    """Run the host process, which the module's docstring describes, and kill its process group at the end."""
    fd, folder, parent = int(sys.argv[1]), Path(sys.argv[2]), int(os.environ.pop(PARENT))
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    asyncio.run(_main(fd))
    time.sleep(0.05)  # let the last frame out
    kill_group(os.getpgrp())


if __name__ == "__main__":
    main()
