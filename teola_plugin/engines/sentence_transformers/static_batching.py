"""The base of the embedding and the reranking engine: a batch is computed as one, in the engine's torch thread.

An engine computes on the device that its user chose, else on the card with most room, else on the CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.devices.assignment import assign_devices, parse_cores
from teola_plugin.engines.devices.budget import Demand, Grant
from teola_plugin.engines.devices.cards import GIB, device_name, gpu_version, release, weight_bytes
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.sentence_transformers.loaded_models import model_name_of
from teola_plugin.engines.sentence_transformers.torch_worker import TorchWorker
from teola_plugin.errors import ConfigError, EngineError, EngineUnavailable, extra, package_of
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.graph.device import normalize
from teola_plugin.requests.payloads import Done, Failed, Request, Result, advice

Outcome = Any | Exception
_PACKAGES = ("torch", "transformers", "sentence-transformers", "huggingface-hub")
"""The packages of the extra `embed`."""


class TorchModel(Protocol):
    """A loaded model, which runs in the torch thread."""

    def compute(self, payloads: Sequence[Any]) -> Sequence[Any]:
        """Return one value per payload, in order. May raise for the whole batch."""
        ...

    def close(self) -> None:
        """Release all resources but memory."""
        ...


class StaticBatchingEngine:
    """Base of the engines that compute a batch as one. A request that makes the model raise fails alone."""

    kinds: frozenset[PrimitiveKind]
    takes: type[Any]
    """The class of its payloads."""

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        device: str | None = None,
        cores: str | Iterable[int] | None = None,
        max_batch: int = 256,
        gpu_memory_utilization: float | None = None,
        dedicated: bool = True,
    ) -> None:
        self.loaded_model = None if isinstance(model, str) else model
        """A model that the user has loaded, with whose weights the engine computes; None otherwise."""
        self.name, self.model_name, self.cores = name, model_name_of(model), parse_cores(cores)
        self._chosen_device = chosen_device(
            device if self.loaded_model is None else str(self.loaded_model.device), self.cores
        )
        self._share = gpu_memory_utilization
        self.device = "" if self._chosen_device.startswith("cuda") else self._chosen_device
        self._profile = EngineProfile(
            batching=Batching.STATIC,
            max_batch=max_batch,
            max_efficient_batch=min(32, max_batch),
            max_requests=max_batch,
            device=profile_device(self.device, self.cores),
            dedicated=dedicated,
        )
        self._worker: TorchWorker | None = None
        self._loaded: TorchModel | None = None
        self._changing = LoopLock()
        self._live: dict[str, asyncio.Queue[Result]] = {}

    @property
    def profile(self) -> EngineProfile:
        """The engine's profile. It has no curves until `measure` or `adopt` was called."""
        return self._profile

    @property
    def measurable(self) -> bool:
        """True if measurements may send requests that no query asked for."""
        return self._profile.dedicated

    def adopt(self, profile: EngineProfile) -> None:
        """Take a profile that was measured before."""
        self._profile = profile

    @property
    def model(self) -> Any:
        """The loaded model of sentence-transformers, for reading only; None before the start."""
        return getattr(self._loaded, "model", None)

    sized_by_text = True
    """Short texts take less than a slot: see `text_size`."""

    # For subclasses

    def _load(self) -> TorchModel:
        """Load the model; runs in the torch thread."""
        raise NotImplementedError

    def _fault(self, payload: Any) -> str:
        """Describe the error in a payload of the right class; return "" for a valid one."""
        raise NotImplementedError

    def _sample(self, number: int) -> Any:
        """Return a payload for measuring, of a usual length; see `sample_chunk`."""
        raise NotImplementedError

    # Life cycle

    def demand(self) -> Demand:
        """See `engines.devices.assignment`. Raises `ConfigError`."""
        if self.loaded_model is not None:  # its weights are where they are
            return Demand(self.name, self._chosen_device)
        return demand_of(self.name, self.model_name, self._chosen_device, self._share)

    def grant(self, grant: Grant) -> None:
        self.device = grant.device
        self._profile = replace(self._profile, device=profile_device(grant.device, self.cores))

    async def start(self) -> None:
        """Load the model on the granted device, or for an engine that starts alone, the one with most room.

        Idempotent. Raises `EngineUnavailable`, or `ConfigError` if its device does not exist.
        """
        async with self._changing:
            if self._loaded is not None:
                return
            worker = TorchWorker(self.name, self.cores)
            try:
                if not self.device:
                    await worker.run(assign_devices, [self])
                self._loaded = await self._load_in(worker)
            finally:
                if self._loaded is None:
                    await worker.close()
            self._worker = worker

    async def _load_in(self, worker: TorchWorker) -> TorchModel:
        """Load the model in the torch thread. Raise `EngineUnavailable` if that fails."""
        try:
            return await worker.run(self._load)
        except ModuleNotFoundError as error:
            package = package_of(error.name or "")
            if package not in _PACKAGES:  # one that the model asks for
                raise self._unavailable(f"{self.model_name!r} could not be loaded: {error}") from error
            message = f"{self.name}: {package} is not installed."
            raise EngineUnavailable(message, engine=self.name, hint=extra("embed")) from error
        except Exception as error:
            raise self._unavailable(f"{self.model_name!r} could not be loaded: {error}") from error

    async def stop(self) -> None:
        """Stop the engine. Idempotent. Requests in flight fail at once.

        The thread ends after the batch that it computes, and is left behind if that takes too long.
        """
        async with self._changing:
            for request_id in list(self._live):
                self._deliver(Failed(request_id, self._unavailable("it was stopped.")))
            worker, loaded, self._worker, self._loaded = self._worker, self._loaded, None, None
            if worker is not None and loaded is not None and await worker.close():
                loaded.close()
                del loaded
                release(self.device)

    async def restart(self) -> None:
        """Load the model again."""
        await self.stop()
        await self.start()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield one `Done` or `Failed` per request, in any order."""
        inbox: asyncio.Queue[Result] = asyncio.Queue()
        good = [request for request in batch if self._admit(request, inbox)]
        work = asyncio.create_task(self._compute(good)) if good else None
        try:
            for _ in batch:
                yield await inbox.get()
        finally:
            for request in good:
                if self._live.get(request.id) is inbox:
                    del self._live[request.id]
            if work is not None and not work.done():
                work.cancel()

    def _admit(self, request: Request, inbox: asyncio.Queue[Result]) -> bool:
        """Return True if a request may be computed, and register it; otherwise put its failure into `inbox`."""
        fault = self._refusal(request)
        if fault is not None:
            inbox.put_nowait(Failed(request.id, fault))
            return False
        self._live[request.id] = inbox
        return True

    def _refusal(self, request: Request) -> EngineError | None:
        """Return the error for a request that cannot be computed: it is invalid, the engine is stopped, or its id is in
        use."""
        if request.kind not in self.kinds or not isinstance(request.payload, self.takes):
            kinds = ", ".join(sorted(kind.value for kind in self.kinds))
            got = f"{request.kind.value} of {type(request.payload).__name__}"
            return self._error(f"it does {kinds} of {self.takes.__name__}, not {got}.", "see requests/payloads.py")
        if fault := self._fault(request.payload):
            return self._error(fault, "give plain text; text.encode('utf-8', 'replace').decode() mends a broken one")
        if self._loaded is None:
            return self._unavailable("it is not running.")
        if request.id in self._live:
            return self._error(f"request {request.id!r} is already in flight.", "give every request its own id")
        return None

    async def _compute(self, requests: Sequence[Request]) -> None:
        """Compute a batch in the torch thread, and deliver a result for each of its requests whatever happens."""
        try:
            if self._worker is None:
                raise self._unavailable("it is not running.")
            outcomes = await self._worker.run(self._outcomes, requests)
        except asyncio.CancelledError:
            outcomes = [self._unavailable("it was stopped.")] * len(requests)
        except Exception as error:
            outcomes = [error] * len(requests)
        except BaseException as error:  # a model that calls sys.exit() is broken; other engines go on
            outcomes = [self._unavailable(f"its model raised {error!r}.")] * len(requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome is not None:
                self._deliver(self._result(request, outcome))

    def _outcomes(self, requests: Sequence[Request]) -> list[Outcome]:
        """Return a value or an exception per request, None for a cancelled one. Runs in the torch thread."""
        live = [at for at, request in enumerate(requests) if request.id in self._live]
        values = _compute_isolated(self._loaded, [requests[at].payload for at in live]) if self._loaded else []
        outcomes: list[Outcome] = [None] * len(requests)
        for at, value in zip(live, values, strict=False):
            outcomes[at] = value
        return outcomes

    def _result(self, request: Request, outcome: Outcome) -> Result:
        """Return the end of a request for the value or exception that the model gave."""
        if isinstance(outcome, EngineError):
            return Failed(request.id, outcome)
        if isinstance(outcome, Exception):
            description = f"{type(outcome).__name__}: {outcome}"
            return Failed(request.id, self._error(f"the model raised {description}", advice(outcome)))
        return Done(request.id, outcome)

    def _deliver(self, result: Result) -> None:
        """Hand a result to the batch that its request came with; drop it if the request has ended or was cancelled."""
        inbox = self._live.pop(result.request_id, None)
        if inbox is not None:
            inbox.put_nowait(result)

    async def cancel(self, request_id: str) -> None:
        """End a request now. A batch that is being computed goes on for the others."""
        self._deliver(Failed(request_id, self._error("the request was cancelled.", "")))

    def size(self, request: Request) -> float:
        """Return the slots of a request: 1 for a text as long as the samples or longer, less for short ones."""
        return text_size(request.payload)

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._live))

    async def reset(self) -> None:
        """Do nothing: this engine caches no results."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries, the model, and the GPU if it is one."""
        from importlib.metadata import version

        versions = {name: version(name) for name in ("sentence-transformers", "torch")}
        return versions | {"model": self.model_name} | gpu_version(self.device)

    def _error(self, message: str, hint: str) -> EngineError:
        return EngineError(f"{self.name}: {message}", engine=self.name, hint=hint)

    def _unavailable(self, message: str) -> EngineUnavailable:
        hint = "start the engine, and check that the model's folder or name is right and its extra is installed"
        return EngineUnavailable(f"{self.name}: {message}", engine=self.name, retryable=True, hint=hint)

    # Measuring

    async def measure(self, budget: float = 2.0) -> EngineProfile:
        """Measure seconds by batch size, doubling the batch until throughput stops growing. Return the profile.

        Aims at `budget` seconds on an idle engine. Raises `EngineUnavailable` when the engine is not running.
        """
        if self._worker is None or self._loaded is None:
            raise self._unavailable("it is not running.")
        max_batch = self._profile.max_batch
        points = await self._worker.run(timings, self._loaded.compute, self._sample, max_batch, budget)
        curves = {kind: Curve(tuple(points)) for kind in self.kinds}
        self._profile = replace(self._profile, curves=curves, max_efficient_batch=efficient_batch(points, max_batch))
        return self._profile


def _compute_isolated(model: TorchModel, payloads: Sequence[Any]) -> list[Outcome]:
    """Return the values, with an exception for each payload that the model rejects, found by halving the batch."""
    if not payloads:
        return []
    try:
        return list(model.compute(payloads))
    except Exception as error:
        if len(payloads) == 1:
            return [error]
        middle = len(payloads) // 2
        return _compute_isolated(model, payloads[:middle]) + _compute_isolated(model, payloads[middle:])


WORK_BYTES = 2 * GIB
"""Bytes of a CUDA context and the largest forward pass: 32 texts of 512 tokens in a model of BERT's large size."""
UNKNOWN_WEIGHT_BYTES = 2 * GIB
"""Bytes of the weights of a model that has not been downloaded."""


def chosen_device(device: str | None, cores: Sequence[int]) -> str:
    """Return the device that the user chose, "" if none. Choosing cores chooses the CPU."""
    return normalize(device) if device else "cpu" if cores else ""


def demand_of(engine: str, model: str, device: str, share: float | None) -> Demand:
    """Return the memory that an engine with that model needs on its card. Raise ConfigError for an invalid share."""
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"{engine}: gpu_memory_utilization is {share:g}.",
            hint="give a share of the card, above 0 and up to 1",
        )
    if device and not device.startswith("cuda"):
        return Demand(engine, device)
    weights = weight_bytes(model)
    if weights is None:
        return Demand(engine, device, share=share, work=WORK_BYTES + UNKNOWN_WEIGHT_BYTES)
    return Demand(engine, device, share=share, needs=weights, work=WORK_BYTES)


def profile_device(device: str, cores: Sequence[int]) -> str:
    """Return the name for a profile. Engines with different names do not overlap; "" for an unpinned CPU engine."""
    if device == "cpu":
        return f"cpu:{','.join(map(str, cores))}" if cores else ""
    grant = Grant(device)
    return device_name(grant.indices) if grant.indices else device


_SMALLEST_STAGE = 4
"""Minimum efficient batch. A CPU is fastest with one or two long texts, but every stage costs a call."""

Points = list[tuple[int, float]]
"""(size, seconds), ascending."""


def timings(
    compute: Callable[[Sequence[Any]], object], sample: Callable[[int], Any], max_size: int, budget: float
) -> Points:
    """Measure batches of 1, 2, 4, ... up to `max_size` samples, for about `budget` seconds."""
    deadline = time.perf_counter() + budget
    compute([sample(0)])  # the first batch pays for what starts lazily
    points: Points = []
    size = 1
    while size <= max_size:
        repeats = 3 if not points or 2 * points[-1][1] < budget / 20 else 1
        seconds = min(_measure_seconds(compute, [sample(n) for n in range(size)]) for _ in range(repeats))
        points.append((size, seconds))
        if _has_stalled(points) or time.perf_counter() + 2 * seconds > deadline:
            break
        size *= 2
    return points


def efficient_batch(points: Sequence[tuple[int, float]], max_size: int) -> int:
    """Return the smallest size with about the best throughput.

    `points` are pairs of a batch size and its seconds, by size. About the best is within 10 % of the least seconds per
    payload. The size is 4 at least, unless `max_size` is smaller.
    """
    best = min(points, key=lambda point: point[1] / point[0])
    efficient = next(size for size, seconds in points if seconds / size <= 1.1 * best[1] / best[0])
    return min(max(efficient, _SMALLEST_STAGE), max_size)


def _has_stalled(points: Sequence[tuple[int, float]]) -> bool:
    """Return True if the last two doublings together raised throughput by less than a tenth: one may be noise."""
    if len(points) < 3:
        return False
    (few, before), (many, after) = points[-3], points[-1]
    return many / after < 1.1 * few / before


def _measure_seconds(compute: Callable[[Sequence[Any]], object], payloads: Sequence[Any]) -> float:
    start = time.perf_counter()
    compute(payloads)
    return time.perf_counter() - start


_MIN_SIZE = 1 / 16
"""Slots of the shortest text: every text costs something."""


def text_size(payload: Any) -> float:
    """Return the slots of an `EmbedText` or a `ScorePair`: 1 for a text as long as the samples or longer."""
    characters = len(getattr(payload, "text", "")) + len(getattr(payload, "query", ""))
    return min(1.0, max(_MIN_SIZE, characters / len(sample_chunk(0))))


def sample_chunk(number: int) -> str:
    """Return a text of about 250 tokens, a usual chunk. Shorter texts would overrate larger batches."""
    line = "A function that ends without a return statement gives None to the one who called it, and line {} says so. "
    return "".join(line.format(number + at) for at in range(10))
