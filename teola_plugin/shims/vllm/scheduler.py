"""vLLM's scheduler with a waiting queue of ours. vLLM says that this interface is not public and may change.

A class is made where vLLM asks for it by its name (`scheduler_cls`), in the process of its EngineCore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from teola_plugin.shims.vllm.versions import missing, number, unset

TESTED = ((0, 32),)
"""Versions (major, minor) of vLLM whose scheduler this was run with."""
SYNCHRONOUS, ASYNCHRONOUS = (
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
)
_QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue"
_METHODS = frozenset(
    {"add_request", "peek_request", "pop_request", "prepend_request", "prepend_requests"}
    | {"remove_request", "remove_requests", "__bool__", "__len__", "__iter__"}
)
"""The abstract methods of vLLM's `RequestQueue`, all of which the queue below has."""


class Order(Protocol):
    """Decides who is next of those that wait, given what runs. Requests are `vllm.v1.request.Request`s."""

    waiting: dict[str, Any]
    """By request id."""

    def add(self, request: Any) -> None: ...

    def remove(self, request: Any) -> None: ...

    def next(self, running: Iterable[Any]) -> Any:
        """Raises IndexError when nobody waits."""
        ...

    def start(self, request: Any) -> None:
        """Note that a request runs from now on."""
        ...


def tested(version: str) -> bool:
    """Return True if this was run with that version of vLLM."""
    return number(version) in TESTED


def lacking() -> tuple[str, ...]:
    """Return the names that the scheduler below needs and the installed vLLM lacks, or has otherwise than 0.32.

    `Scheduler.waiting` and `.running`, set when it is made; `RequestQueue` with the ten abstract methods `_METHODS` and
    no other; `Request.request_id`, `.sampling_params` and its order by priority and arrival.
    """
    names = missing(SYNCHRONOUS, ASYNCHRONOUS, _QUEUE, "vllm.v1.request:Request")
    if names:
        return names
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    abstract = _METHODS ^ RequestQueue.__abstractmethods__
    return (
        *unset(Scheduler, "waiting", "running"),
        *unset(Request, "request_id", "sampling_params", "priority", "arrival_time"),
        *(() if "__lt__" in vars(Request) else ("vllm.v1.request:Request.__lt__",)),
        *(f"{_QUEUE}.{name}" for name in sorted(abstract)),
    )


def extra(request: Any, key: str) -> Any:
    """Return a value that a caller put into `SamplingParams.extra_args`, None if there is none.

    Read from `vllm.v1.request.Request.sampling_params`, as in 0.26 to 0.32. Requests of pooling models have no such
    field.
    """
    return (getattr(request.sampling_params, "extra_args", None) or {}).get(key)


def scheduler_class(base: str, name: str, module: str, order: Callable[[], Order]) -> type:
    """vLLM's scheduler `base` (`SYNCHRONOUS` or `ASYNCHRONOUS`), its `waiting` replaced once it is made.

    `name` and `module` are those by which vLLM imports the class. As in 0.32; see `lacking`. Raises ImportError.
    """
    queue = queue_class()
    base_class = _imported(base)

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        base_class.__init__(self, *args, **more)
        self.waiting = queue(order(), lambda: self.running)

    return type(name, (base_class,), {"__init__": __init__, "__module__": module})


def _imported(name: str) -> Any:
    """Import one of vLLM's two scheduler classes by its name. Raise ImportError if it is not there."""
    if name == SYNCHRONOUS:
        from vllm.v1.core.sched.scheduler import Scheduler

        return Scheduler
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler


def queue_class() -> Any:
    """vLLM's `RequestQueue` (`vllm.v1.core.sched.request_queue`) by an `Order`. As in 0.32; see `lacking`. Raises
    ImportError."""
    from vllm.v1.core.sched.request_queue import RequestQueue

    class OrderedQueue(RequestQueue):  # type: ignore[misc]
        """`peek` and the `pop` after it give the same request."""

        def __init__(self, order: Order, running: Callable[[], Iterable[Any]]) -> None:
            self._order, self._running = order, running
            self._next: Any = None

        def add_request(self, request: Any) -> None:
            self._order.add(request)
            self._next = None

        def peek_request(self) -> Any:
            """Return the request that is to run next, and remember it for `pop_request`."""
            if self._next is None:
                self._next = self._order.next(self._running())
            return self._next

        def pop_request(self) -> Any:
            """Take the next request out of the queue, the one that `peek_request` has shown. Raise IndexError if none
            waits."""
            request = self.peek_request()
            self._order.start(request)
            self._next = None
            return request

        def prepend_request(self, request: Any) -> None:
            self.add_request(request)

        def prepend_requests(self, requests: Iterable[Any]) -> None:
            for request in requests:
                self.add_request(request)

        def remove_request(self, request: Any) -> None:
            self._order.remove(request)
            self._next = None

        def remove_requests(self, requests: Iterable[Any]) -> None:
            for request in list(requests):
                self.remove_request(request)

        def __bool__(self) -> bool:
            return bool(self._order.waiting)

        def __len__(self) -> int:
            return len(self._order.waiting)

        def __iter__(self) -> Iterator[Any]:
            return iter(sorted(self._order.waiting.values()))

    return OrderedQueue
