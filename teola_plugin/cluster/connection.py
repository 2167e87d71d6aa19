"""This process's connection to a Ray cluster."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from typing import Any

from teola_plugin.cluster.deployment import token as tokens
from teola_plugin.cluster.deployment.records import ADDRESS, LOOPBACK, plain, token_of
from teola_plugin.cluster.names import NAMESPACE
from teola_plugin.errors import ConfigError, EngineUnavailable, extra
from teola_plugin.runtime.threads import in_child
from teola_plugin.shims import ray as shim

_connected_parents: list[bool] = []
"""Not empty in a process that was forked from one that was connected."""


def _note_fork() -> None:
    """Record in a forked child that its parent was connected to Ray, since that connection does not work in the child.

    It runs in every child right after the fork.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        _connected_parents.append(True)
        atexit.unregister(ray.shutdown)  # it would wait for the parent's threads at the child's end, for ever


in_child(_note_fork)


def ensure_ray() -> Any:
    """Return the module. Raises `EngineUnavailable` if Ray is not installed."""
    try:
        import ray
    except ImportError:
        raise EngineUnavailable("the shared pool needs Ray, which is not installed.", hint=extra("ray")) from None
    return ray


def check_address(address: str) -> str:
    """Return the address if answers can be streamed over it. Raises `ConfigError`."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address!r} is an address of Ray Client, over which answers cannot be streamed.",
            hint="give the cluster's own address, e.g. '10.0.0.1:6379' (what `ray start --head` prints), or 'auto' on "
            "one of its nodes",
        )
    host_and_port(address)
    return address


def connect(address: str | None = None, *, token: str = "") -> None:
    """Connect this process to the cluster. Idempotent. Raises `ConfigError`, `EngineUnavailable`.

    `token` is a file; the default is that of the pool of this machine at that address, if there is one.
    """
    ray = ensure_ray()
    cluster_address = check_address(address or os.environ.get(ADDRESS, "") or "auto")
    if ray.is_initialized():
        if _connected_parents:
            raise _forked_error()
        _check_same_cluster(ray, cluster_address)
        return
    known_address = shim.current_address() if cluster_address == "auto" else cluster_address
    tokens.use_token(ray, token or token_of(known_address))
    if known_address != "auto":
        _check_reachable(known_address)
    if cluster_address != "auto":  # for "auto", Ray may yet find a token of its own
        _check_token(cluster_address)
    init_options = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    try:
        with shim.loopback_as_it_is(known_address.rpartition(":")[0] in LOOPBACK):
            ray.init(address=cluster_address, namespace=NAMESPACE, **init_options)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if known_address != cluster_address:
            _check_token(known_address)  # Ray does not say that the token was missing
        raise _no_cluster_error(cluster_address, error) from error


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of `host:port`; the port is 0 if there is none. Raises `ConfigError`."""
    host, _, port = (address if ":" in address else f"{address}:0").rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"{address!r} has no number for its port.", hint="write host:port, e.g. 10.0.0.1:6379")
    return host, int(port)


def _check_reachable(address: str) -> None:
    """Raise `EngineUnavailable` at once if nothing listens at the address: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5.0).close()
    except (OSError, ValueError) as error:
        raise _no_cluster_error(address, error) from None


def _check_token(address: str) -> None:
    """Raise `EngineUnavailable` if the cluster wants another token: Ray itself tries for 20 s, and does not say why."""
    if shim.has_tokens(ensure_ray()) and shim.wants_another_token(address):
        raise EngineUnavailable(
            f"the Ray cluster at {address!r} asks for a token; this process has shown none, or another one.",
            hint="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (a file); of a pool of its own, "
            "`teola up` names the file",
        )


def _check_same_cluster(ray: Any, address: str) -> None:
    """Raise `ConfigError` if this process is connected to another Ray cluster than the one at `address`."""
    connected_address = ray.get_runtime_context().gcs_address
    if address != "auto" and plain(address) != plain(connected_address):
        raise ConfigError(
            f"this process is connected to the Ray cluster at {connected_address} already, not to {address}.",
            hint="use one cluster in a process, or call ray.shutdown() before",
        )


def _forked_error() -> EngineUnavailable:
    """Return the error for using Ray in a process that was forked from a connected one."""
    return EngineUnavailable(
        "this process was forked from one that was connected to Ray: Ray does not work here.",
        hint="connect in the child alone (e.g. gunicorn's post_fork hook, or without preloading), or start processes "
        "by spawn instead of fork",
    )


def _no_cluster_error(address: str, error: Exception) -> EngineUnavailable:
    """Return the error with the reason in one line and what to do about it."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if "ersion mismatch" in str(error):
        hint = "use the same versions of Python and Ray in the app and in the cluster"
        text = " ".join(str(error).split())
    elif "oken" in str(error) or "auth" in str(error).lower():
        hint = "give this process the cluster's token: RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH (a file)"
    else:
        hint = "start the pool with `teola up pool.yaml`, or give the address of a running cluster"
    return EngineUnavailable(f"no Ray cluster at {address!r}: {text}", retryable=True, hint=hint)


def actor(name: str) -> Any:
    """Return the handle of a named actor. Raises ValueError if there is none."""
    return ensure_ray().get_actor(name, namespace=NAMESPACE)


def was_restarted() -> bool:
    """Return True if Ray made this actor again after it was lost.

    A host that was restarted goes on with one replica at first, since the cluster may have shrunk; a new one needs all.
    Return False outside of a Ray cluster.
    """
    ray = ensure_ray()
    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)
