"""A pool's file without a cluster: the same engines, policies and limits, in this process."""

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


def test_policies_and_limits_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(FILE)
    with EnginePool.from_yaml(path) as pool:
        ports = pool.runtime._ports
        chosen = {name: port.scheduler.policy for name, port in ports.items()}
        assert type(chosen["llm"]) is type(POLICIES["per-invocation"]())
        assert type(chosen["embedder"]) is type(POLICIES["topology-aware"]())
        model = ChatTeola(pool=pool)
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(model.invoke, f"Question {i}?") for i in range(8)]
        failed = [one.exception() for one in asked if one.exception() is not None]
        assert failed and all(type(one) is EngineOverloaded for one in failed)
        assert "its limit is 1" in str(failed[0]) and len(failed) < 8


def test_a_file_that_was_read_already() -> None:
    with EnginePool.from_yaml(PoolConfig.parse("engines:\n  llm: {kind: fake}\n")) as pool:
        assert ChatTeola(pool=pool).invoke("Is it there?").content


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        EnginePool.from_yaml("nowhere.yaml")
