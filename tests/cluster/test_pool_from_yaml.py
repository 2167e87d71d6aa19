"""Tests of a pool's YAML without a cluster: the same engines, policies and limits in this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from teola_plugin import EnginePool
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.errors import ConfigError, EngineOverloaded
from teola_plugin.langchain import ChatTeola
from teola_plugin.scheduling import POLICIES

FILE = """\
engines:
  llm: {kind: fake, replicas: 2, policy: per-invocation, max_queued: 1, options: {seconds: 0.3}}
  embedder: {kind: fake}
"""


def test_local_pool_uses_policies_and_limits_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(FILE)
    with EnginePool.from_yaml(path) as pool:
        ports = pool.runtime._ports
        chosen = {name: port.scheduler.policy for name, port in ports.items()}
        assert type(chosen["llm"]) is type(POLICIES["per-invocation"]())
        assert type(chosen["embedder"]) is type(POLICIES["topology-aware"]())
        model = ChatTeola(pool=pool)
        with ThreadPoolExecutor(8) as threads:
            futures = [threads.submit(model.invoke, f"Question {i}?") for i in range(8)]
        failed = [one.exception() for one in futures if one.exception() is not None]
        assert failed and all(type(one) is EngineOverloaded for one in failed)
        assert "its limit is 1" in str(failed[0]) and len(failed) < 8


def test_local_pool_is_built_from_a_parsed_config() -> None:
    with EnginePool.from_yaml(PoolConfig.parse("engines:\n  llm: {kind: fake}\n")) as pool:
        assert ChatTeola(pool=pool).invoke("Is it there?").content


def test_missing_pool_file_raises() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        EnginePool.from_yaml("nowhere.yaml")
