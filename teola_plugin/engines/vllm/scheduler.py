"""Algorithm 2 inside vLLM: an opt-in scheduler class for its waiting queue (`VllmEngine(scheduler="topology")`).

The engine scheduler admits requests in this order already, and vLLM's priorities keep it. What they cannot know is how
things stand when a slot comes free later: when the cache is full and requests wait inside vLLM, or were preempted
there. Then this queue looks at what runs: a query whose deeper primitives run has had its turn, somebody's answer goes
before members of a gang, and nobody is passed for ever.

vLLM does not promise to keep what is subclassed here: only tested versions are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from teola_plugin.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.request import Request

NAMES = ("", "topology")
TESTED = ((0, 32),)
"""Versions of vLLM (major, minor) whose scheduler this was run with."""
KEY = "teola"
"""Under which a request's standing travels in `SamplingParams.extra_args`."""
PATIENCE = 20
"""Others that may be taken before a request whose turn it was by its priority."""
_URGENCY = {"latency": 0, "throughput": 1, "background": 2}


def check(scheduler: str, version: str, engine: str) -> None:
    """Raises ConfigError for a scheduler that there is not, or not for this version of vLLM."""
    if scheduler not in NAMES:
        raise ConfigError(
            f"engine {engine!r}: there is no scheduler {scheduler!r}.", hint='scheduler="topology", or none'
        )
    found = re.match(r"(\d+)\.(\d+)", version)
    if scheduler and (found is None or (int(found[1]), int(found[2])) not in TESTED):
        known = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
        raise ConfigError(
            f'engine {engine!r}: scheduler="{scheduler}" replaces a part of vLLM that changes between versions. It is '
            f"tested with vLLM {known}; {version} is installed.",
            hint="leave `scheduler` out (vLLM then follows the same order by its priorities), or install a tested vLLM",
        )


def class_name(*, cpu: bool, engine_args: Mapping[str, Any]) -> str:
    """What vLLM's `scheduler_cls` takes. A class derived from the synchronous one would cost GPUs their asynchronous
    scheduling."""
    synchronous = cpu or engine_args.get("async_scheduling") is False
    return f"{__name__}.{'TopologyScheduler' if synchronous else 'TopologyAsyncScheduler'}"


class Waits(Protocol):
    """What the order looks at in vLLM's requests; they compare by priority and arrival."""

    request_id: str
    sampling_params: Any

    def __lt__(self, other: Any) -> bool: ...


def standing(request: Waits) -> tuple[str, int, str]:
    """Query, depth and objective. A request that came past the engine scheduler is a query of its own."""
    said = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
    return tuple(said) if said else (request.request_id, 0, "latency")  # type: ignore[return-value]


class TopologyOrder:
    """Who is next of those that wait, given what runs. Pure."""

    def __init__(self) -> None:
        self.waiting: dict[str, Any] = {}
        self._passed: dict[str, int] = {}

    def add(self, request: Any) -> None:
        self.waiting[request.request_id] = request

    def remove(self, request: Any) -> None:
        self.waiting.pop(request.request_id, None)
        self._passed.pop(request.request_id, None)

    def next(self, running: Iterable[Waits]) -> Any:
        """Raises IndexError when nobody waits."""
        if not self.waiting:
            raise IndexError("nobody waits")
        starved = [self.waiting[name] for name, passed in self._passed.items() if passed >= PATIENCE]
        if starved:
            return min(starved)
        deepest: dict[str, int] = {}
        for request in running:
            query, depth, _ = standing(request)
            deepest[query] = max(depth, deepest.get(query, -1))
        buckets: dict[tuple[str, bool], list[Any]] = {}
        for request in self.waiting.values():
            query, _, objective = standing(request)
            buckets.setdefault((query, objective == "background"), []).append(request)
        ranked = [_rank(query, bucket, deepest) for (query, _), bucket in buckets.items()]
        return min(ranked)[-1]

    def taken(self, request: Any) -> None:
        """It runs now: those whose turn it was have been passed."""
        self.remove(request)
        for name, other in self.waiting.items():
            if other < request:
                self._passed[name] = self._passed.get(name, 0) + 1


def _rank(query: str, bucket: list[Any], deepest: Mapping[str, int]) -> tuple[bool, int, Any, Any]:
    """Queries that have had no turn first; then by objective, then by their first request. Last, who is next of it."""
    depth = max(standing(request)[1] for request in bucket)
    level = [request for request in bucket if standing(request)[1] == depth]
    urgency = min(_URGENCY.get(standing(request)[2], 0) for request in level)
    return deepest.get(query, -1) > depth, urgency, min(bucket), min(level)


def _queue_class() -> type:
    from vllm.v1.core.sched.request_queue import RequestQueue

    class TopologyQueue(RequestQueue):  # type: ignore[misc]
        """vLLM's waiting queue in that order. `peek` and the `pop` after it give the same request."""

        def __init__(self, running: Callable[[], Iterable[Request]]) -> None:
            self._order, self._running = TopologyOrder(), running
            self._next: Request | None = None

        def add_request(self, request: Request) -> None:
            self._order.add(request)
            self._next = None

        def peek_request(self) -> Request:
            if self._next is None:
                self._next = self._order.next(self._running())
            return self._next

        def pop_request(self) -> Request:
            request = self.peek_request()
            self._order.taken(request)
            self._next = None
            return request

        def prepend_request(self, request: Request) -> None:
            self.add_request(request)

        def prepend_requests(self, requests: Iterable[Request]) -> None:
            for request in requests:
                self.add_request(request)

        def remove_request(self, request: Request) -> None:
            self._order.remove(request)
            self._next = None

        def remove_requests(self, requests: Iterable[Request]) -> None:
            for request in list(requests):
                self.remove_request(request)

        def __bool__(self) -> bool:
            return bool(self._order.waiting)

        def __len__(self) -> int:
            return len(self._order.waiting)

        def __iter__(self) -> Iterator[Request]:
            return iter(sorted(self._order.waiting.values()))

    return TopologyQueue


def _scheduler_class(name: str) -> type:
    """`TopologyScheduler` or `TopologyAsyncScheduler`: vLLM's own, with another waiting queue."""
    if name == "TopologyScheduler":
        from vllm.v1.core.sched.scheduler import Scheduler as Base
    else:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base
    queue = _queue_class()

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        Base.__init__(self, *args, **more)
        self.waiting = queue(lambda: self.running)

    return type(name, (Base,), {"__init__": __init__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """The classes need vLLM: they are made when vLLM asks for them."""
    if name not in ("TopologyScheduler", "TopologyAsyncScheduler"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _scheduler_class(name)
    return made
