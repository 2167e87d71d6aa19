"""What the two sentence-transformers engines share: one model on one worker thread, batches of requests in."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from teola_plugin.engines.base import Done, EngineLoad, Failed, Request, Result
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind


class TorchEngine(ABC):
    """One torch model on a thread of its own, so that it never holds up an event loop.

    `device`: as torch names it (`cpu`, `cuda:0`). `cores`: processors for the worker thread, e.g. `"1"` or `"2-3"`;
    the number of torch threads follows it, and is process-wide.
    """

    kinds: frozenset[PrimitiveKind]
    _kind: PrimitiveKind

    def __init__(self, name: str, model: str, *, device: str | None = None, cores: str | None = None) -> None:
        self.name = name
        self.model_name = model
        self.device = device
        self.cores = _core_list(cores)
        self._profile = EngineProfile(
            batching=Batching.STATIC,
            max_efficient_batch=64,
            device=device if device and device != "cpu" else f"cpu:{cores}" if cores else "",
        )
        self._model: Any = None
        self._worker: ThreadPoolExecutor | None = None
        self._cancelled: set[str] = set()
        self._running = 0

    # What differs between the two

    @abstractmethod
    def _load(self) -> Any:
        """The model, loaded; runs on the worker thread."""

    @abstractmethod
    def _check(self, request: Request) -> str:
        """What is wrong with the request's payload; empty when it is fine."""

    @abstractmethod
    def _compute(self, payloads: Sequence[Any]) -> Sequence[Any]:
        """One value per payload; runs on the worker thread."""

    @abstractmethod
    def _sample(self, size: int) -> list[Any]:
        """Payloads to measure with."""

    # The Engine protocol

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    @profile.setter
    def profile(self, profile: EngineProfile) -> None:
        self._profile = profile

    async def start(self) -> None:
        """Load the model. Raises `EngineUnavailable` without the libraries or the model."""
        if self._worker is not None:
            return
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"teola-{self.name}")
        try:
            self._model = await self._on_worker(self._prepare)
        except ImportError as error:
            await self.stop()
            raise EngineUnavailable(
                f"engine {self.name!r} needs a library that is not installed: {error}.",
                engine=self.name,
                hint="pip install 'teola-plugin[embed]' and a build of torch for this machine",
            ) from error
        except Exception as error:
            await self.stop()
            raise EngineUnavailable(
                f"engine {self.name!r} could not load the model {self.model_name!r}: {error}",
                engine=self.name,
                hint="check the path; a hub id needs a network connection or a filled cache",
            ) from error

    def _prepare(self) -> Any:
        import torch

        if self.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)  # this thread, and those that torch starts from it
            torch.set_num_threads(len(self.cores))
        return self._load()

    async def stop(self) -> None:
        worker, self._worker, self._model = self._worker, None, None
        if worker is not None:
            await asyncio.get_running_loop().run_in_executor(None, worker.shutdown)

    async def _on_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._worker is None:
            raise EngineUnavailable(f"engine {self.name!r} is not running.", engine=self.name, hint="start its pool")
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """See `Engine.execute`. The whole batch is computed at once."""
        good = []
        for request in batch:
            wrong = self._check(request)
            if wrong:
                yield Failed(request.id, EngineError(wrong, engine=self.name, hint="check the inputs of the primitive"))
            else:
                good.append(request)
        if not good:
            return
        self._running += len(good)
        try:
            values = await self._on_worker(self._compute, [r.payload for r in good])
        except Exception as error:
            for request in good:
                yield Failed(request.id, self._failure(error))
            return
        finally:
            self._running -= len(good)
        for request, value in zip(good, values, strict=True):
            if request.id in self._cancelled:
                self._cancelled.discard(request.id)
                yield Failed(request.id, EngineError("the request was cancelled.", engine=self.name))
            else:
                yield Done(request.id, value)

    def _failure(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        return EngineError(f"engine {self.name!r} failed: {error!r}", engine=self.name, hint="see the cause in the log")

    async def cancel(self, request_id: str) -> None:
        """A batch runs as one: a running request is computed all the same, and its value is dropped."""
        if self._running:
            self._cancelled.add(request_id)

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(self._running)

    async def reset(self) -> None:
        """Nothing is kept between requests."""

    def versions(self) -> Mapping[str, str]:
        from importlib.metadata import version

        return {
            "sentence-transformers": version("sentence-transformers"),
            "torch": version("torch"),
            "model": os.path.basename(os.path.dirname(self.model_name)) + "/" + os.path.basename(self.model_name),
        }

    async def measure(self) -> EngineProfile:
        """Double the batch until throughput stops growing (by 10 %); a few seconds at most. Sets `profile`."""
        points: list[tuple[int, float]] = []
        size, best = 1, 0.0
        begun = time.perf_counter()
        await self._on_worker(self._compute, self._sample(1))
        while size <= 256 and time.perf_counter() - begun < 2.5:
            seconds = min([await self._timed(size) for _ in range(2)])
            points.append((size, seconds))
            if size / seconds < best * 1.1:
                break
            best = max(best, size / seconds)
            size *= 2
        efficient = max(points, key=lambda point: point[0] / point[1])[0]
        self._profile = replace(
            self._profile, curves={self._kind: Curve(tuple(points))}, max_efficient_batch=max(32, efficient)
        )
        return self._profile

    async def _timed(self, size: int) -> float:
        begun = time.perf_counter()
        await self._on_worker(self._compute, self._sample(size))
        return time.perf_counter() - begun


def _core_list(cores: str | None) -> set[int]:
    found: set[int] = set()
    for part in (cores or "").split(","):
        first, _, last = part.partition("-")
        if first.strip():
            found |= set(range(int(first), int(last or first) + 1))
    return found
