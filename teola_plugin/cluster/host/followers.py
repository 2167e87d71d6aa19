"""Pre-scheduling at the engine's side: what follows a primitive is queued the moment its value is there.

The value goes from engine to engine; the client, whose graph scheduler would have dispatched the follower next, hears
of it afterwards: adjacent primitives are issued together (Teola, pre-scheduling).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.cluster.wire import Submit
from teola_plugin.graph import Primitive, read_path
from teola_plugin.requests.request import Request
from teola_plugin.runtime import primitive_requests as requests
from teola_plugin.runtime.ports.port import Follow, follower_request

log = logging.getLogger("teola_plugin")


@dataclass(slots=True)
class _Expected:
    """A primitive with followers whose requests are under way."""

    primitive: Primitive
    order: tuple[str, ...]
    then: tuple[Follow, ...]
    values: dict[str, Any] = field(default_factory=dict)


class Followers:
    """`queue(client, order)` takes what runs here, `forward(client, engine, order)` what runs elsewhere."""

    def __init__(
        self, engine: str, queue: Callable[[str, Submit], None], forward: Callable[[str, str, Submit], None]
    ) -> None:
        self._engine, self._queue, self._forward = engine, queue, forward
        self._expected: dict[tuple[str, str], _Expected] = {}

    def expect(self, client: str, order: Submit) -> None:
        """Something follows `order`."""
        if order.primitive is None:
            return
        names = tuple(request.id for request in order.requests)
        expected = _Expected(order.primitive, names, order.then)
        for name in names:
            self._expected[client, name] = expected

    def ended(self, client: str, request: str, value: Any, error: BaseException | None) -> None:
        """A request ended; with the last one of its primitive, what follows is queued. After an error nothing is."""
        expected = self._expected.pop((client, request), None)
        if expected is None:
            return
        if error is not None:
            for name in expected.order:
                self._expected.pop((client, name), None)
            return
        expected.values[request] = value
        if len(expected.values) == len(expected.order):
            made = requests.value(expected.primitive, [expected.values[name] for name in expected.order])
            for follow in expected.then:
                self._begin(client, follow, made)

    def _begin(self, client: str, follow: Follow, value: Any) -> None:
        order = follower_order(follow, value)
        if order is None:
            return
        if follow.primitive.engine == self._engine:
            self._queue(client, order)
        else:
            self._forward(client, follow.primitive.engine, order)

    def cancel(self, client: str, names: Sequence[str]) -> None:
        """These requests, or followers by their names, are not wanted: nor is what follows them."""
        for name in names:
            expected = self._expected.pop((client, name), None)
            for other in expected.order if expected is not None else ():
                self._expected.pop((client, other), None)
        unwanted = frozenset(names)
        for (owner, _), waiting in self._expected.items():
            if owner == client:
                waiting.then = _without(waiting.then, unwanted)

    def forget(self, client: str) -> None:
        self._expected = {key: value for key, value in self._expected.items() if key[0] != client}


def _without(follows: tuple[Follow, ...], unwanted: frozenset[str]) -> tuple[Follow, ...]:
    kept = (follow for follow in follows if follow.name not in unwanted)
    return tuple(replace(follow, then=_without(follow.then, unwanted)) if follow.then else follow for follow in kept)


def follower_order(follow: Follow, value: Any) -> Submit | None:
    """The follower's requests, now that the value before it is known; None where it does not fit, so that the client,
    who dispatches it the ordinary way, meets the error."""
    inputs = dict(follow.inputs)
    p = follow.primitive
    try:
        for key, path in follow.pending:
            inputs[key] = read_path(value, path)
        made = requests.payloads(p, inputs, {})
    except Exception as error:
        log.debug("primitive %s cannot follow: %r", p.id, error)
        return None
    asked = tuple(
        Request(
            follower_request(follow.name, n),
            p.kind,
            payload,
            follow.event.query,
            follow.tenant,
            keep_remote=follow.keep_remote,
        )
        for n, payload in enumerate(made)
    )
    return Submit(replace(follow.event), asked, p if follow.then else None, follow.then)
