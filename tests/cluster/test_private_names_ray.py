"""Tests of every use of Ray's private names, with the installed Ray and with the name missing."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from teola_plugin.cluster import connection
from teola_plugin.errors import EngineUnavailable
from teola_plugin.shims import ray as shim

CHECKED = {
    "autoscaler_report",
    "current_address",
    "free_by_node",
    "has_growth_limits",
    "has_tokens",
    "loopback_as_it_is",
    "read_token_again",
    "stay_on_loopback",
    "wants_another_token",
}
"""Functions of the shim that are called below, all of them."""


def test_every_function_of_the_ray_shim_is_checked() -> None:
    found = inspect.getmembers(shim, inspect.isfunction)
    assert {name for name, one in found if one.__module__ == shim.__name__ and name[0] != "_"} == CHECKED


@pytest.fixture
def constants() -> Iterator[Any]:
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    yield ray_constants
    ray_constants.ENABLE_RAY_CLUSTER = before


def test_installed_ray_has_all_private_names(constants: Any) -> None:
    import ray
    from ray._private.parameter import RayParams
    from ray._private.services import get_ray_address_from_environment

    assert [*inspect.signature(get_ray_address_from_environment).parameters] == ["addr", "temp_dir"]
    assert isinstance(constants.ENABLE_RAY_CLUSTER, bool)
    raylet: Any = ray._raylet
    assert shim.has_tokens(ray) and hasattr(raylet.AuthenticationTokenLoader.instance(), "reset_cache")
    assert hasattr(raylet.Config, "initialize") and hasattr(raylet, "GcsClient")
    assert hasattr(RayParams, "update_if_absent")


def test_ray_command_belongs_to_this_python() -> None:
    ran = subprocess.run([*shim.COMMAND, "--version"], capture_output=True, text=True, timeout=60)
    assert f"version {version('ray')}" in ran.stdout, ran.stderr


def test_default_address_is_that_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setattr(services, "get_ray_address_from_environment", lambda addr, temp_dir: "10.0.0.1:6379")
    assert shim.current_address() == "10.0.0.1:6379"
    monkeypatch.delattr(services, "get_ray_address_from_environment")
    assert shim.current_address() == "auto", "Ray looks itself"


def test_loopback_address_is_not_replaced(constants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    constants.ENABLE_RAY_CLUSTER = True
    with shim.loopback_as_it_is(True):
        assert not constants.ENABLE_RAY_CLUSTER
    with shim.loopback_as_it_is(False):
        assert constants.ENABLE_RAY_CLUSTER
    with pytest.raises(KeyError), shim.loopback_as_it_is(True):
        raise KeyError
    assert constants.ENABLE_RAY_CLUSTER, "put back"
    monkeypatch.delattr(constants, "ENABLE_RAY_CLUSTER")
    with shim.loopback_as_it_is(True):
        assert not hasattr(constants, "ENABLE_RAY_CLUSTER"), "nothing is changed"
    monkeypatch.undo()


def fake_ray(*missing: str) -> Any:
    """Create a stand-in for Ray that counts reads of the environment, and that lacks some names."""
    read: list[str] = []
    loader = {"reset_cache": lambda: read.append("loader")}
    raylet = {
        "Config": SimpleNamespace(initialize=lambda _: read.append("config")),
        "AuthenticationTokenLoader": SimpleNamespace(instance=lambda: SimpleNamespace(**loader)),
    }
    for name in missing:
        raylet.pop(name, None)
        loader.pop(name, None)
    return SimpleNamespace(_raylet=SimpleNamespace(**raylet), __version__="2.99.0", read=read)


def test_token_cache_is_reset_before_reading() -> None:
    ray = fake_ray()
    shim.read_token_again(ray)
    assert ray.read == ["config", "loader"]


def test_ray_without_tokens_needs_no_token_reset() -> None:
    old = fake_ray("AuthenticationTokenLoader")
    assert not shim.has_tokens(old) and not shim.has_tokens(SimpleNamespace())
    shim.read_token_again(old)
    assert old.read == []


@pytest.mark.parametrize("missing", ["Config", "reset_cache"])
def test_unresettable_token_cache_raises(missing: str) -> None:
    with pytest.raises(EngineUnavailable, match=r"Ray 2\.99\.0 reads its token in another way") as refused:
        shim.read_token_again(fake_ray(missing))
    assert "RAY_AUTH_MODE=disabled" in refused.value.hint


def test_rejected_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import AuthenticationError

    def client(error: Exception | None) -> Any:
        def answer(address: str) -> None:
            if error is not None:
                raise error

        return answer

    raylet: Any = ray._raylet
    for error, wants in ((None, False), (AuthenticationError("no"), True), (RuntimeError("elsewhere"), False)):
        monkeypatch.setattr(raylet, "GcsClient", client(error))
        assert shim.wants_another_token("127.0.0.1:1") is wants
    monkeypatch.setattr(raylet, "GcsClient", client(AuthenticationError("no")))
    with pytest.raises(EngineUnavailable, match="asks for a token"):
        connection._check_token("127.0.0.1:1")
    monkeypatch.delattr(raylet, "GcsClient")
    assert not shim.wants_another_token("127.0.0.1:1"), "Ray says it in the next step"


def test_node_that_cannot_be_limited_to_loopback_raises() -> None:
    """`test_tokens` covers the other cases, with Ray's own settings."""
    with pytest.raises(AttributeError):
        shim.stay_on_loopback(SimpleNamespace(), True)
    assert shim.START_HOOK not in os.environ


def test_free_resources_of_a_cluster_are_read(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray._private import state
    from ray.experimental import internal_kv

    connection.connect(ray_address)
    nodes = ray.nodes()
    known = [node["Resources"] for node in nodes if node["Alive"]]
    free = shim.free_by_node(ray)
    assert len(free) == len(known) and all(one["CPU"] <= all_of["CPU"] for one, all_of in zip(free, known, strict=True))
    assert not shim.has_growth_limits() and isinstance(shim.autoscaler_report(), dict)
    monkeypatch.delattr(state, "available_resources_per_node")
    monkeypatch.setattr(state, "state", SimpleNamespace(node_table=lambda: nodes))
    monkeypatch.delattr(internal_kv, "_internal_kv_get")
    assert shim.free_by_node(ray) == known
    assert not shim.has_growth_limits() and shim.autoscaler_report() == {}
