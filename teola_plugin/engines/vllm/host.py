"""The process in which vLLM runs: `python -m teola_plugin.engines.vllm.host FD PARENT FOLDER`.

Apart from the caller for five reasons: vLLM's imports and detokenising do not hold up the caller's event loop; its
environment variables, signal handlers and log lines stay here; scripts need no `__main__` guard; a crash takes nothing
along; and the process group ends with its parent, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.devices.cards import device_name
from teola_plugin.engines.vllm import args as llm_args
from teola_plugin.engines.vllm import cores as llm_cores
from teola_plugin.engines.vllm import events as llm_events
from teola_plugin.engines.vllm import scheduler as llm_scheduler
from teola_plugin.engines.vllm.cache import HeldPrefixes
from teola_plugin.engines.vllm.link import (
    Abort,
    Answer,
    Delta,
    Link,
    News,
    NotReady,
    Ping,
    Ready,
    Refusal,
    Reset,
    Setup,
    Submit,
)
from teola_plugin.engines.vllm.memory import card_count
from teola_plugin.engines.vllm.process import PARENT, kill_group
from teola_plugin.engines.vllm.work import LlmWork, TooLarge
from teola_plugin.requests.bad_input import advice

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_WATCH_EVERY = 0.2


class Host:
    """Carries frames from the link to vLLM and what comes back to the link."""

    def __init__(self, llm: AsyncLLM, link: Link, gauge: Gauge, held: HeldPrefixes | None = None) -> None:
        self._llm, self._link, self._gauge, self._held = llm, link, gauge, held
        self._work = LlmWork(llm, self._say, held)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[Delta | Answer | Refusal] = []
        self._kv_said = 0.0

    async def serve(self) -> None:
        """Until the other end or vLLM is gone."""
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self._take(await self._link.receive())
        except EOFError:
            watch.cancel()

    def _take(self, frame: object) -> None:
        match frame:
            case Submit():
                self._start(frame.id, self._do(frame))
            case Reset():
                self._start(frame.id, self._work.reset(frame))
            case Ping():
                self._say(Answer(frame.id, not self._llm.errored))
            case Abort() if frame.id in self._tasks:
                self._tasks[frame.id].cancel()

    async def _do(self, frame: Submit) -> Answer:
        """What a payload raises, also while it is read, is that request's alone."""
        return await self._work.do(replace(frame, payload=frame.payload.open()))

    def _start(self, wire: int, work: Any) -> None:
        task = self._tasks[wire] = asyncio.create_task(self._run(wire, work))
        task.add_done_callback(lambda _: self._tasks.pop(wire))

    async def _run(self, wire: int, work: Any) -> None:
        try:
            self._say(await work)
        except TooLarge as large:
            self._say(Refusal(wire, str(large), tokens=large.tokens, limit=large.limit))
        except asyncio.CancelledError:
            raise
        except BaseException as bad:  # also the panics of tokenizers, which are no Exceptions
            if self._llm.errored:
                await self._die()
            self._say(Refusal(wire, f"{type(bad).__name__}: {bad}", hint=advice(bad)))

    def _say(self, item: Delta | Answer | Refusal) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(item)

    def _flush(self) -> None:
        items, self._outbox = tuple(self._outbox), []
        self._kv_said = self._gauge.kv_used
        self._link.send(News(items, self._kv_said, self._held.take() if self._held is not None else ()))

    async def _watch(self) -> None:
        """Ends the host when vLLM is dead, also when no request is there to notice; keeps what is known of the cache
        fresh."""
        while not self._llm.errored:
            await asyncio.sleep(_WATCH_EVERY)
            if abs(self._gauge.kv_used - self._kv_said) > 0.001 or (self._held is not None and self._held.changed):
                self._flush()
        await self._die()

    async def _die(self) -> None:
        await self._link.flushed()
        kill_group(os.getpgrp())


class Gauge:
    """The latest share of the KV cache in use. vLLM makes its logger itself, hence the factory."""

    def __init__(self) -> None:
        self.kv_used = 0.0

    def factory(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        gauge = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def log_engine_initialized(self) -> None: ...

            def record(self, scheduler_stats: Any = None, *rest: Any, **more: Any) -> None:
                if scheduler_stats is not None:
                    gauge.kv_used = float(scheduler_stats.kv_cache_usage)

        return Logger


def start_llm(setup: Setup, gauge: Gauge) -> tuple[AsyncLLM, Ready]:
    """Starts vLLM (15-30 s, mostly imports in three processes)."""
    import torch
    import vllm
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    cpu = current_platform.is_cpu()
    args = llm_args.engine_args(setup.model, setup.engine_args, cpu=cpu)
    if setup.scheduler:
        args.setdefault("scheduler_cls", llm_scheduler.class_name(cpu=cpu, engine_args=args))
    if llm_events.wanted(setup.tell_cache, args):
        args["kv_events_config"] = llm_events.publishing()
    if isinstance(args["structured_outputs_config"], dict):  # the one config that vLLM does not convert by itself
        args["structured_outputs_config"] = StructuredOutputsConfig(**args["structured_outputs_config"])
    with llm_cores.starting(setup.engine_args) if cpu else nullcontext(False) as in_one:
        config = AsyncEngineArgs(**args).create_engine_config(UsageContext.ENGINE_CONTEXT)
        if cpu and (not in_one or llm_cores.may_fork()):
            _fork_the_core()
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[gauge.factory()], disable_log_stats=True)
    return llm, Ready(
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        block_size=config.cache_config.block_size,
        cache_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        device=_device(current_platform.device_type, setup.engine_args),
        versions={
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "model": setup.model,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
        }
        | ({"gpu": current_platform.get_device_name()} if current_platform.is_cuda() else {}),
    )


def _device(kind: str, engine_args: Mapping[str, Any]) -> str:
    """The name for the profile: the cards, or the cores where they were given."""
    if kind == "cuda":
        return device_name(range(card_count(engine_args)))
    cores = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "") if kind == "cpu" else ""
    return f"{kind}:{cores}" if cores else str(kind)


def _fork_the_core() -> None:
    """Let the EngineCore be forked from this process, which has imported vLLM already; 6 s less to wait for.

    On CUDA vLLM does so by itself. For CPUs it starts all processes afresh, but only the worker below the core needs
    that (preloaded libraries, OpenMP's variables), so the core is told to do it.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    os.register_at_fork(after_in_child=lambda: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn"))


def _keep_from_children(fd: int) -> None:
    """A forked child must not hold the link open, or its other end would not notice that this process died."""
    os.set_inheritable(fd, False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nowhere, fd, inheritable=False))


async def _main(fd: int) -> None:
    _keep_from_children(fd)
    link = await Link.over(socket.socket(fileno=fd))
    setup = await link.receive()
    gauge = Gauge()
    try:
        llm, ready = start_llm(setup, gauge)
    except Exception as failed:
        import traceback

        traceback.print_exc()  # to the log
        link.send(NotReady(f"{type(failed).__name__}: {failed}"))
        await link.flushed()
        return
    events = llm_events.CacheEvents(llm.vllm_config) if llm_events.wanted(setup.tell_cache, setup.engine_args) else None
    link.send(ready)
    await Host(llm, link, gauge, events.held if events is not None else None).serve()


def _end_with_parent(parent: int, folder: Path) -> None:
    """Blocks until the parent is gone, then ends this process group. The parent holds the other end of our stdin."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpgrp())


def main() -> None:
    fd, folder, parent = int(sys.argv[1]), Path(sys.argv[2]), int(os.environ.pop(PARENT))
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    asyncio.run(_main(fd))
    time.sleep(0.05)  # let the last frame out
    kill_group(os.getpgrp())


if __name__ == "__main__":
    main()
