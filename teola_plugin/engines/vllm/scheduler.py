"""Algorithm 2 inside vLLM: an opt-in scheduler class for its waiting queue (`VllmEngine(scheduler="topology")`).

The engine scheduler admits requests in this order already, and vLLM's priorities keep it. What they cannot know is how
the load is when a slot becomes free later: when the cache is full and requests wait inside vLLM, or were preempted
there. Then this queue looks at what runs: a query whose deeper primitives run has had its turn, an answer that
a caller waits for goes before members of a gang, and no request is passed for ever.

vLLM does not promise to keep what is subclassed here: only tested versions are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from teola_plugin.errors import ConfigError
from teola_plugin.shims.vllm import scheduler as shim

NAMES = ("", "topology")
KEY = "teola"
"""The key of a request's `Hints` in `SamplingParams.extra_args`."""
PATIENCE = 20
"""Maximum number of others that are taken before a request whose turn it was by its priority."""
_URGENCY = {"latency": 0, "throughput": 1, "background": 2}


def check(scheduler: str, version: str, engine: str) -> None:
    """Raise ConfigError for an unknown scheduler, or one that does not fit this version of vLLM."""
    if scheduler not in NAMES:
        raise ConfigError(
            f"engine {engine!r}: there is no scheduler {scheduler!r}.", hint='scheduler="topology", or none'
        )
    if scheduler and not shim.tested(version):
        tested = ", ".join(f"{major}.{minor}" for major, minor in shim.TESTED)
        raise _unfit_error(engine, scheduler, f"It is tested with vLLM {tested}; {version} is installed.")


def check_names(scheduler: str, engine: str) -> None:
    """Raise ConfigError if the installed vLLM lacks what the scheduler needs. Imports vLLM."""
    if scheduler and (lacking := shim.lacking()):
        raise _unfit_error(engine, scheduler, f"In the one installed, these are not as expected: {', '.join(lacking)}.")


def _unfit_error(engine: str, scheduler: str, reason: str) -> ConfigError:
    """Return the error for a scheduler class that does not fit the installed vLLM, with the reason."""
    return ConfigError(
        f'engine {engine!r}: scheduler="{scheduler}" replaces a part of vLLM that changes between versions. {reason}',
        hint="leave `scheduler` out (vLLM then follows the same order by its priorities), or install a tested vLLM",
    )


def class_name(*, cpu: bool, engine_args: Mapping[str, Any]) -> str:
    """Return the value for vLLM's `scheduler_cls`.

    A class derived from the synchronous scheduler would cost GPUs their asynchronous scheduling.
    """
    synchronous = cpu or engine_args.get("async_scheduling") is False
    return f"{__name__}.{'TopologyScheduler' if synchronous else 'TopologyAsyncScheduler'}"


class WaitingRequest(Protocol):
    """The part of vLLM's requests that decides their order; they compare by priority and arrival."""

    request_id: str
    sampling_params: Any

    def __lt__(self, other: Any) -> bool: ...


class Hints(NamedTuple):
    """The facts that our engine scheduler knows of a request."""

    query: str
    depth: int = 0
    objective: str = "latency"


def hints(request: WaitingRequest) -> Hints:
    """Return the hints of a request. One that bypassed the engine scheduler is a query of its own."""
    values = shim.extra(request, KEY)
    return Hints(*values) if values else Hints(request.request_id)


class TopologyOrder:
    """The order of waiting requests, given the running ones. Has no side effects."""

    def __init__(self) -> None:
        self.waiting: dict[str, Any] = {}
        self._passed: dict[str, int] = {}

    def add(self, request: Any) -> None:
        self.waiting[request.request_id] = request

    def remove(self, request: Any) -> None:
        self.waiting.pop(request.request_id, None)
        self._passed.pop(request.request_id, None)

    def next(self, running: Iterable[WaitingRequest]) -> Any:
        """Return the next request. Raise IndexError if none waits."""
        if not self.waiting:
            raise IndexError("nobody waits")
        starved = [self.waiting[name] for name, passed in self._passed.items() if passed >= PATIENCE]
        if starved:
            return min(starved)
        deepest: dict[str, int] = {}
        for request in running:
            query, depth, _ = hints(request)
            deepest[query] = max(depth, deepest.get(query, -1))
        buckets: dict[tuple[str, bool], list[Any]] = {}
        for request in self.waiting.values():
            query, _, objective = hints(request)
            buckets.setdefault((query, objective == "background"), []).append(request)
        ranked = [_rank(query, bucket, deepest) for (query, _), bucket in buckets.items()]
        return min(ranked)[-1]

    def start(self, request: Any) -> None:
        """Take a request out of the queue, and note which requests before it were passed over."""
        self.remove(request)
        for name, other in self.waiting.items():
            if other < request:
                self._passed[name] = self._passed.get(name, 0) + 1


def _rank(query: str, bucket: list[Any], deepest: Mapping[str, int]) -> tuple[bool, int, Any, Any]:
    """Return the rank of a bucket, with its next request last.

    Queries that have had no turn come first; then by objective, then by their first request.
    """
    depth = max(hints(request).depth for request in bucket)
    level = [request for request in bucket if hints(request).depth == depth]
    urgency = min(_URGENCY.get(hints(request).objective, 0) for request in level)
    return deepest.get(query, -1) > depth, urgency, min(bucket), min(level)


def __getattr__(name: str) -> Any:
    """Create a scheduler class when vLLM asks for it, as the classes need vLLM."""
    if name not in ("TopologyScheduler", "TopologyAsyncScheduler"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = shim.SYNCHRONOUS if name == "TopologyScheduler" else shim.ASYNCHRONOUS
    scheduler_class = globals()[name] = shim.scheduler_class(base, name, __name__, TopologyOrder)
    return scheduler_class
