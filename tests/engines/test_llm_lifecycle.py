"""Tests of starting and stopping the LLM engine: clear errors before, nothing left behind after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from teola_plugin.engines.base import Engine
from teola_plugin.engines.bundled import llama as tiny_llama
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.engines.vllm import args as llm_args
from teola_plugin.engines.vllm.process import group_members
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Failed, Generate, Prompt, Request

SCRIPT = """
import asyncio, sys
from teola_plugin.engines.vllm import VllmEngine
async def main():
    engine = VllmEngine("orphan", sys.argv[1], cores="0", engine_args={"kv_cache_memory_bytes": 64 << 20})
    start = asyncio.create_task(engine.start())
    while engine._host is None:
        await asyncio.sleep(0.01)
    print(engine._host.process.pid, engine._host.folder, flush=True)
    if sys.argv[2] == "started":
        await start
    else:
        await asyncio.sleep(1.0)
    print("now", flush=True)
    if sys.argv[3] == "killed":
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_vllm_engine_implements_the_engine_interface() -> None:
    assert isinstance(VllmEngine("llm", "model"), Engine)


async def test_engine_is_unavailable_before_start() -> None:
    engine = VllmEngine("llm", "model")
    request = Request("r", PrimitiveKind.PREFILLING, Generate(Prompt(text="x")))
    (failed,) = [result async for result in engine.execute([request])]
    assert (
        isinstance(failed, Failed)
        and isinstance(failed.error, EngineUnavailable)
        and "not started" in str(failed.error)
    )
    await engine.cancel("r")
    await engine.stop()
    assert not await engine.healthy()
    assert engine.size(request) == 1


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0"])
def test_unsupported_vllm_versions_raise(version: str) -> None:
    with pytest.raises(EngineUnavailable, match=r"needs >=0\.26,<0\.33"):
        llm_args._check_version(version, "llm")


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "dev"])
def test_supported_vllm_versions_are_accepted(version: str) -> None:
    llm_args._check_version(version, "llm")


async def test_missing_vllm_raises_with_the_install_command(tmp_path: Path) -> None:
    """In a Python that sees this package only."""
    code = "from teola_plugin.engines.vllm import args; args.check_installed('llm')"
    package = Path(llm_args.__file__).parents[3]
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "EngineUnavailable: vLLM is not installed." in ran.stderr and "pip install" in ran.stderr


def test_environment_of_caller_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    before = dict(os.environ)
    env = llm_args.environment(str(tmp_path), "0-1", tmp_path)
    assert dict(os.environ) == before
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["VLLM_LOGGING_LEVEL"], env["HF_HUB_OFFLINE"]) == ("0-1", "DEBUG", "1")
    assert "HF_HUB_OFFLINE" not in llm_args.environment("org/model", None, tmp_path) or "HF_HUB_OFFLINE" in before


def test_arguments_of_the_user_override_defaults() -> None:
    args = llm_args.engine_args("m", {"block_size": 64, "max_model_len": 10}, cpu=True)
    assert (args["block_size"], args["max_model_len"], args["enable_prefix_caching"]) == (64, 10, True)
    assert "enforce_eager" not in llm_args.engine_args("m", {}, cpu=False)


@pytest.mark.vllm
async def test_missing_model_raises_with_the_log_path(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    engine = VllmEngine("llm", tmp_path / "model", log=tmp_path / "log")
    with pytest.raises(EngineUnavailable, match="did not start") as caught:
        await engine.start()
    assert str(tmp_path / "log") in str(caught.value) and (tmp_path / "log").stat().st_size > 0
    assert engine._host is None
    await engine.stop()


@pytest.mark.vllm
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("starting", "killed"),
        ("starting", "exits"),
        pytest.param("started", "killed", marks=pytest.mark.long),
        pytest.param("started", "exits", marks=pytest.mark.long),
    ],
)
def test_no_process_survives_the_interpreter(when: str, how: str, tmp_path: Path) -> None:
    """This also proves that a script without a `__main__` guard works."""
    command = [sys.executable, "-c", SCRIPT, str(tiny_llama.make()), when, how]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as script:
        assert script.stdout is not None
        group, folder = script.stdout.readline().split()
        assert script.stdout.readline() == "now\n"
        assert group_members(int(group)) or how == "exits"
        if how == "killed":
            script.send_signal(signal.SIGKILL)
        script.communicate()
    deadline = time.monotonic() + 10
    while group_members(int(group), trackers=True) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(int(group), trackers=True) == []
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (None, {}),
        ("0-2,5", {"VLLM_CPU_OMP_THREADS_BIND": "0-2,5", "OMP_NUM_THREADS": "4"}),
        ("0-1|2-3", {"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"}),
    ],
)
def test_cores_set_environment_variables(cores: str | None, expected: dict[str, str]) -> None:
    assert llm_args.core_variables(cores) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize(
    ("cores", "args", "in_one"),
    [("0", {}, True), ("0", {"tensor_parallel_size": 2}, False), ("0|1", {}, False), ("auto", {}, False)],
)
def test_pinning_ends_with_the_start_of_the_engine(
    cores: str, args: dict[str, int], in_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "as it was")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    before = os.sched_getaffinity(0)
    with llm_args.pin_cores(args) as found:
        assert found is in_one
        assert os.sched_getaffinity(0) == ({0} if in_one else before)
    assert os.sched_getaffinity(0) == before
