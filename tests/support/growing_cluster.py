"""A Ray cluster with Ray's own autoscaler, which starts new nodes as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.ray_nodes import _silent

# Not by its short name, `fake_multinode`: Ray's wheel lacks the file of defaults that it reads for it.
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD_ID = "f" * 51 + "0" * 5
"""The id of the head node, as that provider expects it."""


@contextlib.contextmanager
def growing_cluster(
    newer: bool, *, head: dict[str, float], worker: dict[str, float], workers: int = 1
) -> Iterator[str]:
    """Start the cluster, connect this process to it, and yield its address. Connect to the former cluster afterwards.

    Args:
        newer: True for version 2 of the autoscaler.
        head: resources of the head node.
        worker: resources of each worker node.
        workers: the most worker nodes that the autoscaler may start.
    """
    import ray

    from teola_plugin.cluster.connection import connect

    before = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    ray.shutdown()
    with tempfile.TemporaryDirectory(prefix="grow") as folder:
        address = f"{_this_machine()}:{_free_port()}"
        process = _start(Path(folder), address, newer, head, worker, workers)
        try:
            with _silent():
                _wait_until_up(address, process)
            yield address
        finally:
            with _silent():
                ray.shutdown()
            _end(process)
            if before:
                with _silent():
                    connect(before)


def _start(
    folder: Path, address: str, newer: bool, head: dict[str, float], worker: dict[str, float], workers: int
) -> subprocess.Popen[bytes]:
    host, port = address.split(":")
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(_config(address, newer, head, worker, workers)))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += [f"--node-ip-address={host}", f"--autoscaling-config={config}", f"--temp-dir={folder}/ray"]
    command += [f"--num-cpus={head.get('CPU', 0)}", f"--num-gpus={head.get('GPU', 0)}", "--include-dashboard=false"]
    command += ["--object-store-memory=104857600", "--disable-usage-stats"]
    env = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_AUTH_MODE": "disabled"}
    env |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "RAY_NODE_TYPE_NAME": "ray.head.default"}
    if newer:
        env |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the cluster with all nodes that the autoscaler started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def _config(
    address: str, newer: bool, head: dict[str, float], worker: dict[str, float], workers: int
) -> dict[str, object]:
    types = {
        "ray.head.default": {"resources": head, "node_config": {}, "max_workers": 0},
        "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": workers},
    }
    provider: dict[str, object] = {
        "type": "external",
        "module": _PROVIDER,
    }
    provider |= {"gcs_address": address, "use_node_id_as_ip": True}
    if newer:
        provider |= {"launch_multiple": True, "head_node_id": HEAD_ID}
    return {
        "cluster_name": "growing",
        "max_workers": workers,
        "provider": provider,
        "available_node_types": types,
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 10,
        "auth": {},
        **{key: {} for key in ("docker", "file_mounts", "head_node", "worker_nodes")},
        **{key: [] for key in _LISTS},
    }


_LISTS = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


def _wait_until_up(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the cluster is up and its autoscaler has reported."""
    from teola_plugin.cluster.connection import connect
    from teola_plugin.cluster.deployment import room
    from teola_plugin.errors import EngineUnavailable

    ends = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < ends, "the cluster did not start"
        try:
            connect(address)
            break
        except EngineUnavailable:
            time.sleep(0.5)
    while not room._can_grow():
        assert time.monotonic() < ends, "no autoscaler has reported"
        time.sleep(0.5)


def _this_machine() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
