"""Tests of the `teola` command: errors for bad input, and the meaning of its figures. (`make demo` is a whole run.)"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from teola_plugin.cli import main as command_line
from teola_plugin.cli.demo import documents
from teola_plugin.cli.demo.measure import tokens_cached_by_warmups
from teola_plugin.cli.main import main
from teola_plugin.errors import RegistrationError
from teola_plugin.observe import QueryTrace, Span


def test_missing_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("teola-plugin ")


def test_missing_document_is_reported_with_its_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--docs", str(tmp_path / "lost.txt")]) == 2
    stderr = capsys.readouterr().err
    assert "lost.txt" in stderr and "--docs" in stderr


def test_unreadable_documents_raise(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in ((empty, "no text"), (binary, "UTF-8")):
        with pytest.raises(RegistrationError, match=reason):
            documents.load_documents([str(path)])


def test_documents_of_a_folder_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "picture.png"):
        (tmp_path / name).write_text(f"Ünïcode of {name}")
    assert [d.page_content for d in documents.load_documents([str(tmp_path)])] == [
        "Ünïcode of a.txt",
        "Ünïcode of b.md",
    ]


def test_default_document_has_unwrapped_paragraphs() -> None:
    loaded = documents.load_documents([])
    assert len(loaded) == len(documents.DEFAULT_TOPICS)
    assert 'optional "else" clause is executed if the control flow leaves' in loaded[0].page_content
    assert documents.join_lines("one\ntwo\n\n  three\n") == "one two\n\nthree"


def test_only_tokens_warmed_by_the_same_query_count_as_cached() -> None:
    def span(primitive: str, kind: str, tokens: int, cached: int, done: float | None = 1.0) -> Span:
        return Span("q", "app", primitive, kind, queued=0.0, done=done, tokens=tokens, cached=cached)

    warmed = [span("a", "FULL_PREFILLING", 300, 128), span("a.partial#0", "PARTIAL_PREFILLING", 160, 0)]
    cold = [span("b", "FULL_PREFILLING", 300, 96), span("c", "PREFILLING", 300, 64)]
    unfinished = [span("d", "FULL_PREFILLING", 300, 32), span("d.partial#0", "PARTIAL_PREFILLING", 32, 0, done=None)]
    assert tokens_cached_by_warmups(trace_of(warmed + cold + unfinished)) == 128


def trace_of(spans: list[Span]) -> QueryTrace:
    return QueryTrace("q", "app", 0.0, 1.0, tuple(spans))


@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts engines of its own (make test-all)")
@pytest.mark.vllm
@pytest.mark.postgres
@pytest.mark.models
def test_demo_command_reports_equal_answers() -> None:
    command = [sys.executable, "-m", "teola_plugin.cli.main", "demo", "--json", "--repeats", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["answers_equal"] is True and report["cached_prefix_tokens"] > 0
    assert report["stock"]["answers_equal"] is True and report["stock"]["answer"] == report["answer"]
    assert set(report["passes_fired"]) == {
        "prune-dependencies",
        "stage-decomposition",
        "prefilling-split",
        "decoding-pipelining",
    }
    assert Path(report["trace_html"]).is_file()


BAD = {
    "nothing": [],
    "a command that is not there": ["nonsense"],
    "an option that is not there": ["doctor", "--nonsense"],
    "no repeats": ["demo", "--repeats", "0"],
    "fewer": ["demo", "--repeats", "-3"],
    "repeats of another kind": ["demo", "--repeats", "two"],
    "a page in no folder": ["demo", "--trace", "no/such/folder/page.html"],
    "no replicas": ["scale", "llm", "0"],
    "replicas of another kind": ["scale", "llm", "many"],
    "no file to start from": ["up", "no/such/pool.yaml"],
    "a folder to start from": ["up", "."],
    "no file to measure": ["calibrate", "no/such/pool.yaml"],
    "an address without a port": ["status", "--address", "here:there"],
    "an address of Ray Client": ["status", "--address", "ray://127.0.0.1:10001"],
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_arguments_are_reported_in_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(BAD[case])
    except SystemExit as ended:  # as argparse ends
        status = ended.code  # type: ignore[assignment]
    stderr = capsys.readouterr().err.strip()
    assert status == 2 and stderr.startswith("teola: ") and "Next: " in stderr, stderr
    assert "\n" not in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("words", [["--help"], ["demo", "--help"], ["--version"], ["calibrate", "pool.yaml"]])
def test_closed_stdout_ends_the_command_without_traceback(words: list[str], tmp_path: Path) -> None:
    """`teola ... | true`: no traceback, and the status of a program that SIGPIPE has ended (argparse's own is 0)."""
    (tmp_path / "pool.yaml").write_text("engines: {llm: {kind: fake}}")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "teola_plugin.cli.main", *words]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path, env=environment
        )
    finally:
        os.close(writing)
    assert done.returncode == (141 if words[0] == "calibrate" else 0) and "Traceback" not in done.stderr, done.stderr


def runs(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let the command import a package that is not installed, in a module of this name."""
    code = {"__name__": module}
    exec("def run(options):\n    import prometheus_client_of_nobody", code)
    options = argparse.Namespace(command="serve", run=code["run"])
    monkeypatch.setattr(command_line, "parser", lambda: argparse.Namespace(parse_args=lambda arguments: options))


def test_missing_package_of_a_command_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, "teola_plugin.server.metrics")
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == (
        "teola: teola serve needs prometheus-client-of-nobody, which is not installed. "
        "Next: in a checkout of teola-plugin, pip install '.[server]'\n"
    )


def test_missing_package_of_user_code_raises_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, "my_app")
    with pytest.raises(ModuleNotFoundError, match="prometheus_client_of_nobody"):
        main(["serve"])
