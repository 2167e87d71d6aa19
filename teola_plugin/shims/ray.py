"""Ray's names that are not its API: how it finds a cluster, reads its token, and starts a node.

Known to Ray 2.52 to 2.60. Ray itself is handed in, or imported where it is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from teola_plugin.errors import EngineUnavailable

START_HOOK = "RAY_START_HOOK"
"""Variable of the environment: a function, by its dotted name, that `ray start` calls with its settings."""
COMMAND = (sys.executable, "-m", "ray.scripts.scripts")
"""What the command `ray` of this Python's Ray runs."""


def current_address() -> str:
    """Return the address of the cluster that `ray.init("auto")` would take.

    By `ray._private.services.get_ray_address_from_environment`. `auto` where there is none, or where the function is
    missing: then Ray looks itself, without the pool's token.
    """
    try:
        from ray._private.services import get_ray_address_from_environment

        return str(get_ray_address_from_environment("auto", None))
    except Exception:
        return "auto"


@contextmanager
def loopback_as_it_is(loopback: bool) -> Iterator[None]:
    """Keep `ray.init` from taking an address on loopback for the machine's outer one, on which it does not listen.

    By `ray._private.ray_constants.ENABLE_RAY_CLUSTER`, put back afterwards. Where the constant is missing nothing is
    changed, and Ray says so if it does not find the cluster.
    """
    try:
        from ray._private import ray_constants
    except ImportError:
        ray_constants = None
    if not loopback or not hasattr(ray_constants, "ENABLE_RAY_CLUSTER"):
        yield
        return
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def has_tokens(ray: Any) -> bool:
    """Return True if this Ray asks for tokens: `ray._raylet.AuthenticationTokenLoader`, since 2.52.

    Without it a cluster of ours is not started unless the user wants no token.
    """
    return hasattr(getattr(ray, "_raylet", None), "AuthenticationTokenLoader")


def read_token_again(ray: Any) -> None:
    """Make Ray read its environment, and its token, once more.

    `_raylet.Config.initialize` and `AuthenticationTokenLoader.reset_cache` do that, since 2.52; nothing to do before.
    Raise `EngineUnavailable` where one of them is gone since: a cluster would be shown the token of another.
    """
    if not has_tokens(ray):
        return
    config: Any = getattr(ray._raylet, "Config", None)
    loader = ray._raylet.AuthenticationTokenLoader.instance()
    if not hasattr(config, "initialize") or not hasattr(loader, "reset_cache"):
        raise EngineUnavailable(
            f"Ray {ray.__version__} reads its token in another way than Ray 2.52 to 2.60 do.",
            hint="install ray>=2.52,<=2.60, or set RAY_AUTH_MODE=disabled if nobody else can reach this machine",
        )
    config.initialize("")
    loader.reset_cache()


def wants_another_token(address: str) -> bool:
    """Return True if the cluster refuses this process's token: `ray._raylet.GcsClient` says so at once, since 2.52.

    `ray.init` asks for 20 s before it gives up, and does not say why. False where the client is missing, or has another
    reason: Ray says that in the next step.
    """
    try:
        from ray import _raylet
        from ray.exceptions import AuthenticationError
    except ImportError:
        return False
    try:
        _raylet.GcsClient(address=address)  # type: ignore[attr-defined]
    except AuthenticationError:
        return True
    except Exception:
        pass
    return False


def stay_on_loopback(settings: Any, head: bool) -> None:
    """Keep a node on loopback. For `START_HOOK`, with Ray's `ray._private.parameter.RayParams`.

    `ray start` itself takes loopback for the machine's outer address, and opens a Ray Client server where grpcio is
    installed. Raise AttributeError where `update_if_absent` is missing: Ray then does not start, rather than open to
    the network.
    """
    settings.ray_client_server_port = None
    settings.update_if_absent(node_ip_address="127.0.0.1")


def free_by_node(ray: Any) -> list[Mapping[str, float]]:
    """Return the resources that are free on each node: `ray._private.state.available_resources_per_node`.

    Where it is missing, all that the living nodes have: then nobody is said to lack room that others hold.
    """
    try:
        from ray._private.state import available_resources_per_node

        return list(available_resources_per_node().values())
    except ImportError:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def has_growth_limits() -> bool:
    """Return True if the cluster says what it may grow to, as hosted ones do:
    `ray._private.state.state.get_max_resources_from_cluster_config`. False where it is missing."""
    try:
        from ray._private.state import state

        return state.get_max_resources_from_cluster_config() is not None
    except Exception:
        return False


def autoscaler_report() -> Mapping[str, Any]:
    """Return the autoscaler's last report.

    By `_internal_kv_get("__autoscaling_status")` of `ray.experimental.internal_kv`. Empty where it is missing, or says
    nothing: then the cluster counts as one that does not grow.
    """
    try:
        from ray.experimental.internal_kv import _internal_kv_get

        report = _internal_kv_get("__autoscaling_status")
    except Exception:
        return {}
    figures: Mapping[str, Any] = json.loads(report) if report else {}
    return figures
