"""What a Ray cluster has, what of it is free, and whether it grows by itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from teola_plugin.cluster.connection import ensure_ray
from teola_plugin.cluster.deployment.room import Ask, Resources, shortage
from teola_plugin.errors import EngineUnavailable
from teola_plugin.shims import ray as private_ray

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
    while lacking := shortage(asks, private_ray.free_by_node(ensure_ray())):
        if time.monotonic() > ends:
            return lacking
        time.sleep(0.25)
    return ""


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in ensure_ray().nodes() if node["Alive"]]


def _grows() -> bool:
    """Whether an autoscaler is there. Ray has no public question for it: hosted clusters publish what they may grow to;
    elsewhere the report of the autoscaler tells, which exists in every cluster and in a fixed one mirrors its nodes,
    each as a type of its own."""
    ray = ensure_ray()
    return private_ray.has_growth_limits() or _scales(private_ray.autoscaler_report()) or _scales_v2(ray)


def _scales(report: Mapping[str, Any]) -> bool:
    """The report of the autoscaler that `ray up` starts."""
    found = report.get("autoscaler_report") or {}
    types = [*found.get("active_nodes", ()), *(found.get("idle_nodes") or ()), *found.get("pending_launches", ())]
    return any(not _MIRRORED.fullmatch(name) for name in types)


def _scales_v2(ray: Any) -> bool:
    """The report of the newer one (KubeRay): its nodes know of which type they were started."""
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status
        from ray.autoscaler.v2.utils import is_autoscaler_v2

        if not is_autoscaler_v2(fetch_from_server=True):  # Ray would remember that of another cluster
            return False
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
    except Exception:
        return False
    nodes = [*status.active_nodes, *status.idle_nodes]
    return any(node.ray_node_type_name and not _MIRRORED.fullmatch(node.ray_node_type_name) for node in nodes)
