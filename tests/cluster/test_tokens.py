"""Tests of the tokens that processes present to a cluster."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from teola_plugin.cluster.connection import host_and_port
from teola_plugin.cluster.deployment import token
from teola_plugin.cluster.deployment.head import prepare, start_head
from teola_plugin.cluster.deployment.records import DeploymentRecord, token_of
from teola_plugin.errors import ConfigError, EngineUnavailable

READ: list[str] = []
RAY: Any = SimpleNamespace(
    _raylet=SimpleNamespace(
        Config=SimpleNamespace(initialize=lambda _: READ.append(os.environ.get(token.PATH, ""))),
        AuthenticationTokenLoader=SimpleNamespace(instance=lambda: SimpleNamespace(reset_cache=lambda: None)),
    )
)
"""A process has one Ray, which the other tests use without a token."""


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(token, "_own_values", {})
    for name in (token.MODE, token.TOKEN, token.PATH):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def test_new_token_file_is_readable_by_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "pools" / "p.token"
    old = token.create_file(path).read_text()
    path.chmod(0o644)
    assert stat.S_IMODE(token.create_file(path).stat().st_mode) == 0o600
    assert len(old) == 64 and path.read_text() != old


@pytest.mark.parametrize(
    ("set_by_user", "needed"),
    [
        ({}, {token.MODE: "token", token.PATH: "file"}),
        ({token.MODE: "Token"}, {token.MODE: "token", token.PATH: "file"}),
        ({token.MODE: "disabled"}, {}),
        ({token.TOKEN: "theirs"}, {token.MODE: "token"}),
        ({token.MODE: "token", token.PATH: "theirs"}, {token.MODE: "token"}),
    ],
)
def test_token_settings_of_the_user_are_kept(
    set_by_user: dict[str, str], needed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    assert token.environment("file") == needed


def test_token_is_sent_only_to_its_cluster() -> None:
    DeploymentRecord("a", "127.0.0.1:1", 1, "a.token").write()
    DeploymentRecord("b", "127.0.0.1:2", 2).write()
    assert token_of("127.0.0.1:1") == token_of("localhost:1") == "a.token"
    assert token_of("127.0.0.1:2") == token_of("10.0.0.1:1") == ""
    READ.clear()
    for address in ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1"):
        token.use_token(RAY, token_of(address))
    assert READ == ["a.token", "", "a.token"]


def test_ray_without_tokens_is_refused_unless_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    old: Any = SimpleNamespace(_raylet=SimpleNamespace(), __version__="2.50.0")
    with pytest.raises(EngineUnavailable, match=r"2\.52"):
        token.check_support(old)
    token.use_token(old, "file")  # a cluster that is there may be older, too
    monkeypatch.setenv(token.MODE, "disabled")
    token.check_support(old)


@pytest.mark.parametrize(("given", "expected"), [(None, "127.0.0.1"), ("10.0.0.1", "10.0.0.1")])
def test_started_node_listens_on_loopback_by_default(given: str | None, expected: str) -> None:
    from ray._private.parameter import RayParams

    settings = RayParams(node_ip_address=given, ray_client_server_port=10001)
    prepare(settings, True)
    assert settings.node_ip_address == expected and settings.ray_client_server_port is None


def test_host_and_port_are_parsed() -> None:
    assert host_and_port("10.0.0.1") == ("10.0.0.1", 0)
    assert host_and_port("node:6379") == ("node", 6379)
    with pytest.raises(ConfigError, match="port"):
        host_and_port("node:x")
    with pytest.raises(ConfigError, match="other machines"):
        start_head("p", "0.0.0.0")
