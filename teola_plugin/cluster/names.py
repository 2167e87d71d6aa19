"""The names of a pool's actors, and the options with which Ray makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teola_plugin.cluster.config import EngineConfig

NAMESPACE = "teola"
MAX_CONCURRENT_CALLS = 4000
"""Calls that an actor works on at once: they wait more than they compute. Each client has two open for events."""
_QUIET = {"enable_task_events": False}
"""Ray keeps no record of each call: that is a quarter of a call's cost, for a dashboard that a pool does not have."""


def actor_name(pool: str, engine: str) -> str:
    return f"teola/{pool}/{engine}"


def directory_name(pool: str) -> str:
    return f"teola/{pool}"


def pool_of(actor: str) -> str:
    """Return the pool that an actor of this name belongs to; empty for actors of others."""
    first, _, rest = actor.partition("/")
    return rest.partition("/")[0] if first == "teola" else ""


def host_options(pool: str, engine: str) -> dict[str, Any]:
    """Return the options of an engine host: it outlives its maker, and is made again when its process or node dies."""
    return {
        "name": actor_name(pool, engine),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": MAX_CONCURRENT_CALLS,
        **_QUIET,
        "num_cpus": 0,
        "get_if_exists": True,
    }


def directory_options(pool: str) -> dict[str, Any]:
    return {**host_options(pool, ""), "name": directory_name(pool)}


def replica_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of a replica, which belongs to its host; Ray spreads replicas over the nodes."""
    return {
        "max_concurrency": MAX_CONCURRENT_CALLS,
        **_QUIET,
        "num_cpus": config.cpus,
        "num_gpus": config.gpus,
        "resources": dict(config.resources),
        "scheduling_strategy": "SPREAD",
        "max_restarts": 0,
    }


def engine_spec(name: str, config: EngineConfig) -> Mapping[str, Any]:
    """Return what `build_engine` needs, as plain data."""
    return {"name": name, **config.model_dump(include=_SPEC)}


_SPEC = {"kind", "factory", "model", "dsn", "base_url", "gpus", "cores", "engine_args", "drafts", "options"}
