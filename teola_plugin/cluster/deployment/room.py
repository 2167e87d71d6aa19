"""Checks whether a cluster has room for the resources that engines reserve, now or once it has grown.

Ray itself lets an actor wait for ever, and says nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.cluster.config import EngineConfig
from teola_plugin.cluster.connection import ensure_ray
from teola_plugin.errors import EngineUnavailable
from teola_plugin.shims import ray as private_ray

Resources = Mapping[str, float]
GPU = "GPU"
MAX_TRIES = 20_000
"""Placements of replicas on nodes that are tried before they are assumed to fit."""
MAX_DEPTH = 300
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Reservation:
    """Replicas of one engine, and the resources that each of them reserves on one node."""

    engine: str
    replicas: int
    amounts: Resources

    @classmethod
    def of(cls, engine: str, config: EngineConfig, replicas: int) -> Reservation:
        amounts = {"CPU": config.cpus, GPU: config.gpus, **config.resources}
        return cls(engine, replicas, {name: amount for name, amount in amounts.items() if amount > 0})

    def describe(self, resource: str) -> str:
        return f"{self.engine} {self.replicas} x {self.amounts[resource]:g}"


def shortage(reservations: Sequence[Reservation], nodes: Sequence[Resources]) -> str:
    """Return what is reserved but not there, with the figures, as a sentence without its end; empty if all fits."""
    reservations = [reservation for reservation in reservations if reservation.replicas and reservation.amounts]
    return (
        _find_too_large(reservations, nodes)
        or _find_too_many(reservations, nodes)
        or _find_unpackable(reservations, nodes)
    )


def _find_too_large(reservations: Sequence[Reservation], nodes: Sequence[Resources]) -> str:
    """Return the complaint about a replica that is larger than every node; empty if each fits on some empty node."""
    for reservation in reservations:
        amounts = reservation.amounts
        if not any(all(_has(node, name, amount) for name, amount in amounts.items()) for node in nodes):
            needs = " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
            return f"a replica of {reservation.engine!r} asks for {needs} on one node; {_list_nodes(nodes, amounts)}"
    return ""


def _has(node: Resources, name: str, amount: float) -> bool:
    return node.get(name, 0.0) >= amount - TOLERANCE


def _resource_names(reservations: Sequence[Reservation]) -> list[str]:
    """Return the names of all reserved resources, GPUs first."""
    return sorted({name for r in reservations for name in r.amounts}, key=lambda name: (name != GPU, name))


def _find_too_many(reservations: Sequence[Reservation], nodes: Sequence[Resources]) -> str:
    """Return the complaint about a resource of which all replicas together need more than all nodes have; empty if
    none."""
    for name in _resource_names(reservations):
        concerned = [r for r in reservations if name in r.amounts]
        total, available = sum(r.replicas * r.amounts[name] for r in concerned), sum(n.get(name, 0.0) for n in nodes)
        if total > available + TOLERANCE:
            parts = ", ".join(r.describe(name) for r in concerned)
            return f"{total:g} {name} are asked for ({parts}), {available:g} are there"
    return ""


def _find_unpackable(reservations: Sequence[Reservation], nodes: Sequence[Resources]) -> str:
    """Return the complaint that the replicas cannot be placed on the nodes together; empty if they can."""
    if _Packing(reservations).fits(tuple(_Node.of(node) for node in nodes)):
        return ""
    names = _resource_names(reservations)
    parts = "; ".join(f"{n}: {', '.join(r.describe(n) for r in reservations if n in r.amounts)}" for n in names)
    return f"the replicas ({parts}) do not fit on the nodes together; {_list_nodes(nodes, names)}"


def _list_nodes(nodes: Sequence[Resources], names: Iterable[str]) -> str:
    """Return a phrase for an error message that lists how much each node has of the named resources."""
    if not nodes:
        return "there are no nodes"
    return "the nodes have " + ", ".join(
        f"{name} " + "/".join(f"{node.get(name, 0.0):g}" for node in nodes) for name in names
    )


# ------------------------------------------------------------ putting replicas on nodes


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """The free resources of a node. A part of a GPU is a part of one card: three times 0.6 needs three cards."""

    cards: tuple[float, ...]
    rest: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, resources: Resources) -> _Node:
        """Return a node from the resources that Ray reports: its whole cards, a part of a card, and all other amounts.

        Ray counts GPUs as one number: 2.5 are two whole cards and half of a third one. Rests below `TOLERANCE` are
        ignored.
        """
        full_cards, rest_of_card = divmod(resources.get(GPU, 0.0), 1)
        cards = (1.0,) * int(full_cards) + ((rest_of_card,) if rest_of_card > TOLERANCE else ())
        return cls(cards, tuple(sorted((name, amount) for name, amount in resources.items() if name != GPU)))

    def without(self, amounts: Resources) -> _Node | None:
        """Return what is left beside one more replica; None if it does not fit."""
        cards = _cards_without(self.cards, amounts.get(GPU, 0.0))
        rest = dict(self.rest)
        for name, amount in amounts.items():
            if name != GPU:
                rest[name] = rest.get(name, 0.0) - amount
        if cards is None or any(amount < -TOLERANCE for amount in rest.values()):
            return None
        return _Node(cards, tuple(sorted(rest.items())))


def _cards_without(cards: tuple[float, ...], gpus: float) -> tuple[float, ...] | None:
    """Return the free parts of a node's GPUs after a replica took `gpus` of them; None if they do not suffice.

    A fraction comes from one card, the fullest that has room; a whole number takes free cards.
    """
    free = sorted(cards)
    if 0 < gpus < 1:
        for index, card in enumerate(free):  # the fullest card on which it fits
            if card >= gpus - TOLERANCE:
                free[index] = card - gpus
                return tuple(free)
        return None
    for _ in range(round(gpus)):
        if not free or free.pop() < 1 - TOLERANCE:
            return None
    return tuple(free)


class _Packing:
    """Puts replicas on nodes, the largest first, and backtracks."""

    def __init__(self, reservations: Sequence[Reservation]) -> None:
        order = sorted(
            reservations,
            key=lambda reservation: (reservation.amounts.get(GPU, 0.0), sum(reservation.amounts.values())),
            reverse=True,
        )
        self._amounts = [reservation.amounts for reservation in order for _ in range(reservation.replicas)]
        self._tries = 0

    def fits(self, nodes: tuple[_Node, ...], index: int = 0) -> bool:
        """Return True if the replicas from `index` on fit, or if that could not be found out."""
        self._tries += 1
        if index == len(self._amounts) or self._tries > MAX_TRIES or index > MAX_DEPTH:
            return True
        for number, node in _distinct_nodes(nodes):
            left = node.without(self._amounts[index])
            if left is not None and self.fits((*nodes[:number], left, *nodes[number + 1 :]), index + 1):
                return True
        return False


def _distinct_nodes(nodes: tuple[_Node, ...]) -> list[tuple[int, _Node]]:
    """Return one of each kind of equal nodes, the fullest first."""
    return sorted(((number, node) for node, number in {n: i for i, n in enumerate(nodes)}.items()), key=_fullness)


def _fullness(numbered_node: tuple[int, _Node]) -> tuple[float, float]:
    return sum(numbered_node[1].cards), sum(amount for _, amount in numbered_node[1].rest)


RELEASE_TIMEOUT_S = 5.0
"""Seconds that others have to release resources: an engine that was just ended does so late."""
_MIRRORED_TYPE = re.compile(r"node_[0-9a-f]+")
"""Ray's name for the type of a node that it has not started itself."""


def need_room(reservations: Sequence[Reservation], on_waiting: Callable[[str], None]) -> None:
    """Return once the reserved resources are there, or where an autoscaler may bring them; then call `on_waiting`.

    Raises `EngineUnavailable`, with the figures.
    """
    reservations = [reservation for reservation in reservations if reservation.amounts]
    if not reservations:
        return
    if missing := shortage(reservations, _nodes()):
        if not _can_grow():
            raise EngineUnavailable(
                f"the cluster is too small: {missing}.",
                hint="lower gpus, cpus or replicas, or add a node (`ray start --address=...`)",
            )
        on_waiting(f"waiting for the cluster to grow: {missing}")
        return
    if (missing := _lasting_shortage(reservations)) and not _can_grow():
        raise EngineUnavailable(
            f"other work uses what the pool needs: counting what is free, {missing}.",
            retryable=True,
            hint="end what holds it (`teola status` of other pools, `ray status`), or lower gpus, cpus or replicas",
        )
    if missing:
        on_waiting(f"waiting for the cluster to grow, or for others to end; counting what is free, {missing}")


def _lasting_shortage(reservations: Sequence[Reservation]) -> str:
    """Return the resources that are not free, even after a while."""
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while missing := shortage(reservations, private_ray.free_by_node(ensure_ray())):
        if time.monotonic() > deadline:
            return missing
        time.sleep(0.25)
    return ""


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in ensure_ray().nodes() if node["Alive"]]


def _can_grow() -> bool:
    """Return True if an autoscaler is there.

    Ray has no public question for it: hosted clusters publish what they may grow to; elsewhere the report of the
    autoscaler tells. That report exists in every cluster, and in a fixed one mirrors its nodes, each as a type of its
    own.
    """
    ray = ensure_ray()
    return private_ray.has_growth_limits() or _has_own_types(private_ray.autoscaler_report()) or _has_own_types_v2(ray)


def _has_own_types(report: Mapping[str, Any]) -> bool:
    """Return True if the autoscaler that `ray up` starts reports types of nodes."""
    autoscaler_report = report.get("autoscaler_report") or {}
    types = [
        *autoscaler_report.get("active_nodes", ()),
        *(autoscaler_report.get("idle_nodes") or ()),
        *autoscaler_report.get("pending_launches", ()),
    ]
    return any(not _MIRRORED_TYPE.fullmatch(name) for name in types)


def _has_own_types_v2(ray: Any) -> bool:
    """Return True if the newer autoscaler (KubeRay) does: its nodes know the type that they were started as."""
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status
        from ray.autoscaler.v2.utils import is_autoscaler_v2

        if not is_autoscaler_v2(fetch_from_server=True):  # Ray would remember that of another cluster
            return False
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
    except Exception:
        return False
    nodes = [*status.active_nodes, *status.idle_nodes]
    return any(node.ray_node_type_name and not _MIRRORED_TYPE.fullmatch(node.ray_node_type_name) for node in nodes)
