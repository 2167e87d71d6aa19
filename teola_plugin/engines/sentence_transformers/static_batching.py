"""What the embedding and the reranking engine share: a batch is computed as one, in the engine's torch thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.cores import parse_cores
from teola_plugin.engines.devices.budget import Demand, Grant
from teola_plugin.engines.devices.cards import gpu_version, release
from teola_plugin.engines.devices.place import place
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.sentence_transformers.computing_device import demand_of, profile_device, said_device
from teola_plugin.engines.sentence_transformers.loaded_models import model_name_of
from teola_plugin.engines.sentence_transformers.text_sizes import text_size
from teola_plugin.engines.sentence_transformers.timings import efficient_batch, timings
from teola_plugin.engines.sentence_transformers.torch_worker import TorchWorker
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.bad_input import advice
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Result

Outcome = Any | Exception


class Model(Protocol):
    """A loaded model: what runs in the torch thread."""

    def compute(self, payloads: Sequence[Any]) -> Sequence[Any]:
        """One value per payload, in order. May raise for the whole batch."""
        ...

    def close(self) -> None:
        """Give back what it holds beside memory."""
        ...


class StaticBatchingEngine:
    """Base of the engines that compute a batch as one. A request that makes the model raise fails alone."""

    kinds: frozenset[PrimitiveKind]
    takes: type[Any]
    """The class of the payloads."""

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
        self.given = None if isinstance(model, str) else model
        """A model that somebody else has loaded; the engine computes with its weights."""
        self.name, self.model_name, self.cores = name, model_name_of(model), parse_cores(cores)
        self._said = said_device(device if self.given is None else str(self.given.device), self.cores)
        self._share = gpu_memory_utilization
        self.device = "" if self._said.startswith("cuda") else self._said
        self._profile = EngineProfile(
            batching=Batching.STATIC,
            max_batch=max_batch,
            max_efficient_batch=min(32, max_batch),
            max_requests=max_batch,
            device=profile_device(self.device, self.cores),
            dedicated=dedicated,
        )
        self._worker: TorchWorker | None = None
        self._loaded: Model | None = None
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
        """The model of sentence-transformers that is loaded; None before the start. To be read, not to be run."""
        return getattr(self._loaded, "model", None)

    sized_by_text = True
    """Short texts take less than a slot: see `text_size`."""

    # What subclasses give

    def _load(self) -> Model:
        """Load the model; runs in the torch thread."""
        raise NotImplementedError

    def _fault(self, payload: Any) -> str:
        """Describe the error in a payload of the right class; return "" for a valid one."""
        raise NotImplementedError

    def _sample(self, number: int) -> Any:
        """A payload for measuring, as long as most are; see `sample_chunk`."""
        raise NotImplementedError

    # Life cycle

    def demand(self) -> Demand:
        """See `engines.devices.place`. Raises `ConfigError`."""
        if self.given is not None:  # its weights are where they are
            return Demand(self.name, self._said)
        return demand_of(self.name, self.model_name, self._said, self._share)

    def grant(self, given: Grant) -> None:
        self.device = given.device
        self._profile = replace(self._profile, device=profile_device(given.device, self.cores))

    async def start(self) -> None:
        """Idempotent; loads the model, on the device that was granted or, for an engine that starts alone, the one with
        most room. Raises `EngineUnavailable`; `ConfigError` where its device is not there."""
        async with self._changing:
            if self._loaded is not None:
                return
            worker = TorchWorker(self.name, self.cores)
            try:
                if not self.device:
                    await worker.run(place, [self])
                self._loaded = await self._load_in(worker)
            finally:
                if self._loaded is None:
                    await worker.close()
            self._worker = worker

    async def _load_in(self, worker: TorchWorker) -> Model:
        try:
            return await worker.run(self._load)
        except Exception as error:
            raise self._unavailable(f"{self.model_name!r} could not be loaded: {error}") from error

    async def stop(self) -> None:
        """Idempotent. Requests in flight fail at once; the thread ends after the batch that it computes, and is left
        behind if that takes too long."""
        async with self._changing:
            for request_id in list(self._live):
                self._end(Failed(request_id, self._unavailable("it was stopped.")))
            worker, loaded, self._worker, self._loaded = self._worker, self._loaded, None, None
            if worker is not None and loaded is not None and await worker.close():
                loaded.close()
                del loaded
                release(self.device)

    async def restart(self) -> None:
        """The model loaded anew."""
        await self.stop()
        await self.start()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """One `Done` or `Failed` per request, in any order."""
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
        fault = self._refusal(request)
        if fault is not None:
            inbox.put_nowait(Failed(request.id, fault))
            return False
        self._live[request.id] = inbox
        return True

    def _refusal(self, request: Request) -> EngineError | None:
        if request.kind not in self.kinds or not isinstance(request.payload, self.takes):
            wanted = ", ".join(sorted(kind.value for kind in self.kinds))
            got = f"{request.kind.value} of {type(request.payload).__name__}"
            return self._error(f"it does {wanted} of {self.takes.__name__}, not {got}.", "see requests/payloads.py")
        if fault := self._fault(request.payload):
            return self._error(fault, "give plain text; text.encode('utf-8', 'replace').decode() mends a broken one")
        if self._loaded is None:
            return self._unavailable("it is not running.")
        if request.id in self._live:
            return self._error(f"request {request.id!r} is already in flight.", "give every request its own id")
        return None

    async def _compute(self, requests: Sequence[Request]) -> None:
        try:
            if self._worker is None:
                raise self._unavailable("it is not running.")
            outcomes = await self._worker.run(self._outcomes, requests)
        except asyncio.CancelledError:
            outcomes = [self._unavailable("it was stopped.")] * len(requests)
        except Exception as error:
            outcomes = [error] * len(requests)
        except BaseException as error:  # a model that calls sys.exit() is broken, and takes nobody along
            outcomes = [self._unavailable(f"its model raised {error!r}.")] * len(requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome is not None:
                self._end(self._result(request, outcome))

    def _outcomes(self, requests: Sequence[Request]) -> list[Outcome]:
        """A value or an exception per request, None for a cancelled one; runs in the torch thread."""
        wanted = [at for at, request in enumerate(requests) if request.id in self._live]
        values = _isolated(self._loaded, [requests[at].payload for at in wanted]) if self._loaded else []
        found: list[Outcome] = [None] * len(requests)
        for at, value in zip(wanted, values, strict=False):
            found[at] = value
        return found

    def _result(self, request: Request, outcome: Outcome) -> Result:
        if isinstance(outcome, EngineError):
            return Failed(request.id, outcome)
        if isinstance(outcome, Exception):
            what = f"{type(outcome).__name__}: {outcome}"
            return Failed(request.id, self._error(f"the model raised {what}", advice(outcome)))
        return Done(request.id, outcome)

    def _end(self, result: Result) -> None:
        inbox = self._live.pop(result.request_id, None)
        if inbox is not None:
            inbox.put_nowait(result)

    async def cancel(self, request_id: str) -> None:
        """Ends the request now; a batch that is being computed goes on for the others."""
        self._end(Failed(request_id, self._error("the request was cancelled.", "")))

    def size(self, request: Request) -> float:
        """1 for a text as long as the samples or longer; short ones share a slot, as they share the work of one."""
        return text_size(request.payload)

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._live))

    async def reset(self) -> None:
        """Do nothing: this engine caches no results."""

    def versions(self) -> Mapping[str, str]:
        """Versions of what computes, the model, and the GPU if it is one."""
        from importlib.metadata import version

        found = {name: version(name) for name in ("sentence-transformers", "torch")}
        return found | {"model": self.model_name} | gpu_version(self.device)

    def _error(self, message: str, hint: str) -> EngineError:
        return EngineError(f"{self.name}: {message}", engine=self.name, hint=hint)

    def _unavailable(self, message: str) -> EngineUnavailable:
        hint = "start the engine, and check that the model's folder or name is right and its extra is installed"
        return EngineUnavailable(f"{self.name}: {message}", engine=self.name, retryable=True, hint=hint)

    # Measuring

    async def measure(self, budget: float = 2.0) -> EngineProfile:
        """The profile with seconds by batch size; doubles the batch until throughput stops growing.

        Aims at `budget` seconds on an idle engine. Raises `EngineUnavailable` when the engine is not running.
        """
        if self._worker is None or self._loaded is None:
            raise self._unavailable("it is not running.")
        most = self._profile.max_batch
        points = await self._worker.run(timings, self._loaded.compute, self._sample, most, budget)
        curves = {kind: Curve(tuple(points)) for kind in self.kinds}
        self._profile = replace(self._profile, curves=curves, max_efficient_batch=efficient_batch(points, most))
        return self._profile


def _isolated(model: Model, payloads: Sequence[Any]) -> list[Outcome]:
    """Values, with an exception in the place of each payload that the model cannot take: halves until it is alone."""
    if not payloads:
        return []
    try:
        return list(model.compute(payloads))
    except Exception as error:
        if len(payloads) == 1:
            return [error]
        middle = len(payloads) // 2
        return _isolated(model, payloads[:middle]) + _isolated(model, payloads[middle:])
