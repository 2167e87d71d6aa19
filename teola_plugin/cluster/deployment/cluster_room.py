"""What a Ray cluster has, what of it is free, and whether it grows by itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from teola_plugin.cluster.connection import ensure_ray
from teola_plugin.cluster.deployment.room import Ask, Resources, shortage
from teola_plugin.errors import EngineUnavailable
from teola_plugin.shims import ray as shim

BUSY = 5.0
"""Seconds that others have to let go of what they hold: an engine that was just ended does so late."""
_MIRRORED = re.compile(r"node_[0-9a-f]+")
"""Ray's name for the type of a node that it has not started itself."""


def need_room(asks: Sequence[Ask], on_waiting: Callable[[str], None]) -> None:
    """Returns once what is asked for is there, or where an autoscaler may bring it; `on_waiting` then hears of it.

    Raises `EngineUnavailable`, with the figures.
    """
    asks = [ask for ask in asks if ask.each]
    if not asks:
        return
    if lacking := shortage(asks, _nodes()):
        if not _grows():
            raise EngineUnavailable(
                f"the cluster is too small: {lacking}.",
                hint="lower gpus, cpus or instances, or add a node (`ray start --address=...`)",
            )
        on_waiting(f"waiting for the cluster to grow: {lacking}")
        return
    if (lacking := _taken(asks)) and not _grows():
        raise EngineUnavailable(
            f"what is asked for is taken: counting what is free, {lacking}.",
            retryable=True,
            hint="end what holds it (`teola status` of other pools, `ray status`), or lower gpus, cpus or instances",
        )
    if lacking:
        on_waiting(f"waiting for the cluster to grow, or for others to end; counting what is free, {lacking}")


def _taken(asks: Sequence[Ask]) -> str:
    """What is not free, even after a while."""
    ends = time.monotonic() + BUSY
    while lacking := shortage(asks, _free()):
        if time.monotonic() > ends:
            return lacking
        time.sleep(0.25)
    return ""


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in ensure_ray().nodes() if node["Alive"]]


def _free() -> list[Resources]:
    free = shim.free_by_node()
    return _nodes() if free is None else free


def _grows() -> bool:
    """Whether an autoscaler is there. Ray has no public question for it: hosted clusters publish what they may grow to;
    elsewhere the report of the autoscaler tells, which exists in every cluster and in a fixed one mirrors its nodes,
    each as a type of its own."""
    ray = ensure_ray()
    if shim.may_grow_to() is not None:
        return True
    types = [*_types(shim.autoscaler_report()), *shim.autoscaler_node_types(ray)]
    return any(name and not _MIRRORED.fullmatch(name) for name in types)


def _types(report: Mapping[str, Any]) -> list[str]:
    """Of nodes that are there or on their way."""
    found = report.get("autoscaler_report") or {}
    return [*found.get("active_nodes", ()), *(found.get("idle_nodes") or ()), *found.get("pending_launches", ())]
