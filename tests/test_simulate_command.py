"""Tests of `teola simulate`: its report, and its errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.llamaindex import TeolaLLM
from teola_plugin.cli.main import main

HERE = Path(__file__).stem


def chain(pool: EnginePool) -> Any:
    return ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=pool, max_tokens=8)


def synthesizer(pool: EnginePool) -> Any:
    from llama_index.core import get_response_synthesizer

    return get_response_synthesizer(llm=TeolaLLM(pool=pool, max_tokens=8))


def fast(pool: EnginePool) -> Any:
    return accelerate(chain(pool))


def numbers(pool: EnginePool) -> Any:
    """Return a Runnable whose input type is unknown."""
    from langchain_core.runnables import RunnableLambda

    def double(number: int) -> int:
        return 2 * number

    return RunnableLambda(double)


def no_pool() -> Any:
    return None


def breaks(pool: EnginePool) -> Any:
    raise KeyError("mine")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text("engines: {llm: {kind: fake, options: {machine: rtx3090}}}\n")
    return tmp_path


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", "pool.yaml", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_rate_way_and_seed_is_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(
        capsys, "--app", f"desk={HERE}:chain", "--rate", "1,2", "--queries", "4", "--seeds", "2", "--arrivals", "bursty"
    )
    runs = [(run["way"], run["rate"], run["seed"], run["queries"]) for run in found["runs"]]
    assert runs == [(way, rate, seed, 4) for way in ("plain", "accelerated") for rate in (1, 2) for seed in (0, 1)]
    assert found["idle_s"]["plain"]["desk"] > 0


@pytest.mark.long
def test_parallel_workers_give_the_same_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--app", f"{HERE}:chain", "--rate", "3", "--queries", "5")
    assert simulated(capsys, *arguments)["runs"] == simulated(capsys, *arguments, "--workers", "2")["runs"]


def test_two_apps_run_by_a_trace_of_arrivals(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    lines = [
        {"at": 0, "app": "a", "input_tokens": 20, "output_tokens": 4},
        {"at": 1, "app": "b", "input": {"query": "why?", "nodes": ["Lambs eat grass."]}},
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "b.jsonl").write_text(json.dumps(lines[1]["input"]))
    apps = ("--app", f"a={HERE}:chain", "--app", f"b={HERE}:synthesizer", "--inputs", "b=b.jsonl")
    found = simulated(capsys, *apps, "--arrivals", "trace.jsonl", "--way", "plain")
    (run,) = found["runs"]
    assert (run["rate"], run["queries"], run["failed"]) == (None, 2, 0)
    assert set(run["apps"]) == {"a", "b"}


def test_inputs_are_drawn_by_popularity(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"question": "one"}\n{"question": "two"}\n')
    found = simulated(capsys, "--app", f"{HERE}:chain", "--inputs", "in.jsonl", "--popularity", "1", "--queries", "3")
    assert len(found["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--app", f"{HERE}:no_pool"], "no function of a pool"),
        (["--app", f"{HERE}:lost"], "has no 'lost'"),
        (["--app", f"{HERE}:breaks"], "raised KeyError"),
        (["--app", f"{HERE}:fast"], "accelerated object"),
        (["--app", f"{HERE}:numbers"], "--inputs"),
        (["--app", f"{HERE}:chain", "--app", f"{HERE}:chain"], "two apps"),
        (["--app", f"{HERE}:chain", "--inputs", "other=x.jsonl"], "which is none"),
        (["--app", f"{HERE}:chain", "--inputs", "lost.jsonl"], "cannot read lost.jsonl"),
        (["--app", f"{HERE}:chain", "--arrivals", "often"], "--arrivals"),
        (["--app", f"{HERE}:chain", "--policy", "best"], "batch policy"),
        (["--app", f"{HERE}:chain", "--machine", "cray"], "no machine 'cray'"),
    ],
)
def test_invalid_input_is_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "pool.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Next: " in error and "Traceback" not in error


@pytest.mark.parametrize("rate", ["0", "-1", "x", "1,,2", "nan"])
def test_invalid_rate_is_reported(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "pool.yaml", "--app", "a:b", "--rate", rate])
    assert ended.value.code == 2
    assert "above 0" in capsys.readouterr().err


def test_failed_queries_exit_with_status_1(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"other": "one"}\n')
    assert main(["simulate", "pool.yaml", "--app", f"{HERE}:chain", "--inputs", "in.jsonl", "--queries", "2"]) == 1
    assert "failed: KeyError" in capsys.readouterr().out
