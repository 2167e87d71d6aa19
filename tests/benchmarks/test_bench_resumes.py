"""Tests that `make bench` resumes after an interruption, keeps only whole files, and takes documented arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import common, kept

ROOT = Path(__file__).parents[2]


class Runs:
    """In the place of processes."""

    def __init__(self, text: str = '{"benchmark": "one"}', code: int = 0) -> None:
        self.text, self.code = text, code
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], into: Path) -> int:
        self.commands.append(list(command[2:]))
        into.write_text(self.text)
        return self.code


def test_finished_benchmark_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, results, runs = tmp_path / "out", tmp_path / "results", Runs()
    results.mkdir()
    for _ in range(2):
        kept.keep("overhead", folder, results, runs)
    assert runs.commands == [["benchmarks.overhead", "--json"]]
    assert json.loads((results / "overhead.json").read_text()) == {"benchmark": "one"}
    stderr = capsys.readouterr().err
    assert "overhead: begun" in stderr and "overhead: done in 0 s" in stderr and "done before" in stderr
    (folder / "overhead.json").unlink()
    kept.keep("overhead", folder, results, runs)
    assert len(runs.commands) == 2


@pytest.mark.parametrize(("text", "code"), [("", 1), ('{"half": ', 0), ('{"benchmark": "one"}', 3)])
def test_interrupted_run_leaves_no_result(text: str, code: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"graphs failed .* run it again"):
        kept.keep("graphs", tmp_path / "out", tmp_path, Runs(text, code))
    assert not list(tmp_path.glob("*.json"))
    kept.keep("graphs", tmp_path / "out", tmp_path, Runs())
    assert (tmp_path / "graphs.json").exists()


def test_arguments_equal_those_in_the_documents(tmp_path: Path) -> None:
    runs = Runs()
    for name in kept.ARGUMENTS:
        kept.keep(name, tmp_path / "out", tmp_path, runs)
    commands = [" ".join(one) for one in runs.commands]
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    assert f"benchmarks.ablation --kept {tmp_path}/out/ablation.jsonl --json" in commands
    assert "benchmarks.llamaindex_patterns --objects own --json" in commands
    for command in [one for one in commands if re.search(r"\.(graphs|single_query|apps) ", one)]:
        without = re.sub(r" --folder \S+", "", command)  # where runs are kept, so that they are resumed
        assert f"`python -m {without}`" in table


def test_make_bench_keeps_draws_and_writes_tables() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\nbench:")[1].split("\n\n")[0]
    assert re.search(
        r"benchmarks\.kept .*benchmarks\.pictures docs/images.*--update-golden tests/test_docs\.py", recipe, re.DOTALL
    )


def test_result_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {"rev-parse": "abc1234\n", "status": ""}
    monkeypatch.setattr(common, "_git", lambda command, *_: printed[command].strip())
    assert common.environment()["commit"] == "abc1234"
    printed["status"] = " M benchmarks/common.py\n"
    assert common.environment()["commit"] == "abc1234 with changes"


def test_commit_is_none_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() == "none"


def test_result_has_the_load_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = common.environment()["load_1m"]
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0))
    assert common.environment()["load_1m"] == before
