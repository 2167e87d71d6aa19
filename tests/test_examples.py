"""Tests that every example runs as a script from another folder, and prints what its docstring says."""

from __future__ import annotations

import ast
import doctest
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.public_apps.server import fake_server

Printed = dict[Path, tuple[Future[str], Path]]
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))


def expected(script: Path) -> str:
    """Return what the docstring says that the script prints: the block after the last `::`."""
    docstring = ast.get_docstring(ast.parse(script.read_text()), clean=True) or ""
    block = re.split(r"::\n\n", docstring)[-1]
    return textwrap.dedent("\n".join(line for line in block.splitlines() if line.startswith("    ") or not line))


def measured(text: str) -> str:
    """Return `text` with equal figures of time, counts of the run and bars."""
    text = re.sub(r" *\d[\d.]* (s|ms|µs)\b", " # s", text)
    text = re.sub(r"\d+(\.\d+)? (times|chunks|primitives)", r"# \2", text)
    text = re.sub(r"\(\d+ on the critical path\)|primitives  \d+", "#", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def run(script: Path, folder: Path, *arguments: str, base_url: str = "") -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TEOLA_DISABLE")}
    if base_url:
        env |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-W", "error::RuntimeWarning", str(script), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ratio_of_virtual_runs(output: str, folder: Path) -> None:
    found = re.search(r"same answer, ([\d.]+) times sooner", output)
    assert found is not None and float(found[1]) > 1.3


def written(output: str, folder: Path) -> None:
    assert "<svg" in (folder / "trace.html").read_text()
    assert '"traceEvents"' in (folder / "trace.json").read_text()


def at_least_a_fifth_sooner(output: str, folder: Path) -> None:
    plain, accelerated = (float(value) for value in re.findall(r"(?m)^(?:plain|accelerated) +([\d.]+) s", output))
    assert plain > 1.2 * accelerated


def order_of_policies(output: str, folder: Path) -> None:
    mean = {name: float(value) for name, value in re.findall(r"(?m)^([a-z-]+) +([\d.]+) s", output)}
    assert mean["topology-aware"] < mean["throughput-oriented"] < mean["per-invocation"]


FURTHER: dict[str, Callable[[str, Path], None]] = {
    "01_no_gpu": ratio_of_virtual_runs,
    "05_inspect_a_query": written,
    "06_compare_policies": order_of_policies,
    "13_hosted_corrective_rag": at_least_a_fifth_sooner,
    "14_hosted_research": at_least_a_fifth_sooner,
}


def test_examples_with_further_checks_exist() -> None:
    assert {script.stem for script in EXAMPLES} >= FURTHER.keys()


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Printed]:
    """Run the scripts of the chosen tests, two at a time. Return what each prints, and its folder."""

    def begun(script: Path) -> tuple[Future[str], Path]:
        folder = tmp_path_factory.mktemp(script.stem)
        arguments = [str(folder)] if script.stem == "05_inspect_a_query" else []
        base_url = server.base_url if "_hosted_" in script.stem else ""
        return pool.submit(run, script, folder, *arguments, base_url=base_url), folder

    scripts = [item.callspec.params["script"] for item in request.session.items if "printed" in item.fixturenames]  # type: ignore[attr-defined]
    with fake_server() as server, ThreadPoolExecutor(2) as pool:
        yield {script: begun(script) for script in scripts}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_prints_its_documented_output(script: Path, printed: Printed) -> None:
    running, folder = printed[script]
    output = running.result(480)
    wanted, got = measured(expected(script)), measured(output)
    assert doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS), f"wanted:\n{wanted}\ngot:\n{got}"
    FURTHER.get(script.stem, lambda *_: None)(output, folder)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_has_at_most_80_lines(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 80


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts a vLLM of its own (make test-all)")
def test_rag_example_runs_on_real_engines(tmp_path: Path) -> None:
    script = next(one for one in EXAMPLES if one.stem == "02_langchain_rag")
    assert "same answer: True" in run(script, tmp_path, "--real")
