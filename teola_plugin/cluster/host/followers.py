"""Pre-scheduling at the engine's side: what follows a primitive is queued as soon as its value is there.

The value goes from engine to engine. The client, whose graph scheduler would have dispatched the follower next, learns
of it afterwards: adjacent primitives are issued together (Teola, pre-scheduling).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.cluster.wire import Submit
from teola_plugin.graph import Primitive, read_path
from teola_plugin.requests.payloads import Request
from teola_plugin.runtime import primitive_requests as requests
from teola_plugin.runtime.ports.port import Follow, follower_request

log = logging.getLogger("teola_plugin")


@dataclass(slots=True)
class _Expected:
    """A primitive with followers whose requests are running."""

    primitive: Primitive
    order: tuple[str, ...]
    followers: tuple[Follow, ...]
    values: dict[str, Any] = field(default_factory=dict)


class Followers:
    """Queues followers here by `queue(client, order)`, and on other engines by `forward(client, engine, order)`."""

    def __init__(
        self, engine: str, queue: Callable[[str, Submit], None], forward: Callable[[str, str, Submit], None]
    ) -> None:
        self._engine, self._queue, self._forward = engine, queue, forward
        self._expected: dict[tuple[str, str], _Expected] = {}

    def expect(self, client: str, order: Submit) -> None:
        """Remember the followers of an order."""
        if order.primitive is None:
            return
        names = tuple(request.id for request in order.requests)
        expected = _Expected(order.primitive, names, order.then)
        for name in names:
            self._expected[client, name] = expected

    def end_request(self, client: str, request: str, value: Any, error: BaseException | None) -> None:
        """Record that a request ended; queue the followers with the last one of its primitive, unless it failed."""
        expected = self._expected.pop((client, request), None)
        if expected is None:
            return
        if error is not None:
            for name in expected.order:
                self._expected.pop((client, name), None)
            return
        expected.values[request] = value
        if len(expected.values) == len(expected.order):
            result = requests.value(expected.primitive, [expected.values[name] for name in expected.order])
            for follow in expected.followers:
                self._begin(client, follow, result)

    def _begin(self, client: str, follow: Follow, value: Any) -> None:
        """Queue one follower, here or at the host of its engine, now that the value before it is known.

        If the value does not fit, do nothing: the client dispatches the follower itself.
        """
        order = follower_order(follow, value)
        if order is None:
            return
        if follow.primitive.engine == self._engine:
            self._queue(client, order)
        else:
            self._forward(client, follow.primitive.engine, order)

    def cancel(self, client: str, names: Sequence[str]) -> None:
        """Cancel these requests, or followers by their names, and what follows them."""
        for name in names:
            expected = self._expected.pop((client, name), None)
            for other in expected.order if expected is not None else ():
                self._expected.pop((client, other), None)
        unwanted = frozenset(names)
        for (owner, _), waiting in self._expected.items():
            if owner == client:
                waiting.followers = _without(waiting.followers, unwanted)

    def forget(self, client: str) -> None:
        self._expected = {key: value for key, value in self._expected.items() if key[0] != client}


def _without(follows: tuple[Follow, ...], unwanted: frozenset[str]) -> tuple[Follow, ...]:
    """Return the followers, at every depth, without those whose names are unwanted."""
    remaining = (follow for follow in follows if follow.name not in unwanted)
    return tuple(
        replace(follow, followers=_without(follow.followers, unwanted)) if follow.followers else follow
        for follow in remaining
    )


def follower_order(follow: Follow, value: Any) -> Submit | None:
    """Return the follower's requests, once the value before it is known.

    Returns None if the value does not fit: then the client dispatches the follower the ordinary way and gets the error.
    """
    inputs = dict(follow.inputs)
    p = follow.primitive
    try:
        for key, path in follow.pending:
            inputs[key] = read_path(value, path)
        payloads = requests.payloads(p, inputs, {})
    except Exception as error:
        log.debug("primitive %s cannot follow: %r", p.id, error)
        return None
    follower_requests = tuple(
        Request(
            follower_request(follow.name, n),
            p.kind,
            payload,
            follow.event.query,
            follow.tenant,
            keep_remote=follow.keep_remote,
        )
        for n, payload in enumerate(payloads)
    )
    return Submit(replace(follow.event), follower_requests, p if follow.followers else None, follow.followers)
