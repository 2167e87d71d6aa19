"""Tests of `teola compare` on small apps: its report, and its errors for bad input."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teola_plugin.adapters.app_frameworks import entries_of
from teola_plugin.adapters.langchain.shadow import failure
from teola_plugin.adapters.named_objects import Target, load
from teola_plugin.cli.compare.figures import (
    best_speedup,
    compare_answers,
    engine_shares,
    equality_of_answers,
    group_by_variant,
    latency_figures,
    quantile,
    time_ratio,
    wasted_work,
)
from teola_plugin.cli.compare.measure import (
    ASYNC,
    CONTROL,
    FAST_ASYNC,
    FAST_SYNC,
    STREAM,
    SYNC,
    CompareSession,
    TimedRun,
    run_schedule,
    variants_of,
)
from teola_plugin.cli.compare.options import InputLine, read_inputs
from teola_plugin.cli.compare.report import latency_strips, write_plot
from teola_plugin.cli.main import main
from teola_plugin.errors import RegistrationError
from teola_plugin.observe import QueryTrace, Span

APP = '''
"""An app as a user has it."""
import random
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

print("the app prints when it is imported")

def ask(text, model):
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()

fake = ask("{question}", FakeListChatModel(responses=["always this"]))
in_turn = ask("{question}", FakeListChatModel(responses=["this", "that"]))
number = 7

class Box:
    inside = fake

def nothing():
    return 7

triple = (fake, {}, 7)

def broken():
    raise LookupError("no key")

def pooled():
    from teola_plugin import EnginePool
    from teola_plugin.adapters.langchain.chat import ChatTeola
    from teola_plugin.engines.fake import fake_engines
    from teola_plugin.engines.profiles import rtx3090

    model = ChatTeola(pool=EnginePool.local(fake_engines()), max_tokens=6)
    return RunnablePassthrough.assign(a=ask("Rewrite {question}", model)).assign(b=ask("Shorten {question}", model))

def graphed():
    from typing import TypedDict
    from langgraph.graph import START, StateGraph
    from teola_plugin import EnginePool
    from teola_plugin.engines.fake import fake_engines
    from teola_plugin.langchain import ChatTeola

    model = ChatTeola(pool=EnginePool.local(fake_engines()), max_tokens=6)

    class State(TypedDict, total=False):
        question: str
        messages: list
        answer: str

    def ask(state: State) -> State:
        return {"messages": [model.invoke("Rewrite " + state["question"])]}

    def answer(state: State) -> State:
        return {"answer": model.invoke("Shorten " + state["question"]).text}

    return StateGraph(State).add_sequence([ask, answer]).add_edge(START, "ask").compile()

def with_pool():
    from teola_plugin import EnginePool
    from teola_plugin.engines.fake import fake_engines
    return fake, {"pool": EnginePool.local(fake_engines()), "bind": []}

def accelerated():
    from teola_plugin import accelerate
    return accelerate(fake)

async def only_async(given):
    print("user code prints", flush=True)
    return given["question"].upper()

one_way = RunnableLambda(only_async)
'''


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module with a new name into the current folder, and return the name. Its pools end without a warning."""
    name = f"app_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP)
    (tmp_path / "in.jsonl").write_text('{"question": "what?"}\n\n{"question": "why?"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def compared(capfd: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["compare", *arguments, "--inputs", "in.jsonl", "--repeats", "1", "--json"]) == status
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


# ------------------------------------------------------------ whole runs


def test_compare_reports_a_chain_on_a_pool(app: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = compared(capfd, f"{app}:pooled")
    assert found["equality"] == {
        "state": "equal",
        "inputs": [{"line": 1, "state": "equal", "detail": ""}, {"line": 3, "state": "equal", "detail": ""}],
    }
    assert list(found["latency_s"]) == [SYNC, ASYNC, CONTROL, FAST_SYNC, FAST_ASYNC]
    assert all(figures["n"] == 2 and 0 < figures["min"] <= figures["p99"] for figures in found["latency_s"].values())
    assert set(found["time_to_first_token_s"]) == {"plain, stream", "accelerated, stream"}
    assert found["time_to_first_token_s"]["accelerated, stream"]["n"] == 2
    assert list(found["where_the_time_went"]) == ["llm", "your code, and waiting"]
    assert found["wasted"]["calls"] == 4
    assert found["speedup"]["ratio"] > 0 and found["control"]["pairs"] == 2 and found["errors"] == []
    assert found["speedup"]["verdict"] == "cannot tell", "two pairs of runs say nothing"
    assert list(found["over_each_plain"]) == [FAST_SYNC, FAST_ASYNC]
    assert all(list(over) == [SYNC, ASYNC] for over in found["over_each_plain"].values())


def test_graph_with_messages_compares_equal(app: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = compared(capfd, f"{app}:graphed")
    assert found["equality"]["state"] == "equal" and found["errors"] == []
    assert found["wasted"] == {"calls": 4, "primitives": 0, "tokens": 0, "median_tokens_per_call": 0}
    assert not any("expect no gain" in line for line in found["advice"])


def test_report_of_a_fake_model_expects_no_gain(app: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", f"{app}:fake", "--inputs", "in.jsonl", "--repeats", "2", "--plot", "times.html"]
    assert main(command) == 0
    stdout = capsys.readouterr().out
    assert "equal: every accelerated answer" in stdout and "2 of 2 inputs: equal" in stdout
    for part in ("Latency", "Time to first token", "What would help", "p99", "FakeListChatModel", "expect no gain"):
        assert part in stdout
    assert "<svg" in Path("times.html").read_text() and "loaded" not in Path("times.html").read_text()


def test_nondeterministic_original_is_undecided(app: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = compared(capfd, f"{app}:in_turn")
    assert found["equality"]["state"] == "undecided"
    assert found["equality"]["inputs"][0]["detail"].startswith("plain, ")


def test_different_answer_exits_with_status_1(
    app: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable

    async def wrong(*_: Any, **__: Any) -> str:
        return "another"

    monkeypatch.setattr(AcceleratedRunnable, "ainvoke", wrong)
    found = compared(capfd, f"{app}:fake", "--no-stream", status=1)
    assert found["equality"]["state"] == "different"
    assert found["equality"]["inputs"][0]["detail"].endswith("'another' here, 'always this' there")
    assert found["time_to_first_token_s"] == {}


def test_object_with_only_async_calls_is_compared(app: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = compared(capfd, f"{app}:one_way", "--limit", "1")
    assert found["equality"]["state"] == "equal" and len(found["equality"]["inputs"]) == 1
    assert found["latency_s"][SYNC]["failed"] == 1 and found["latency_s"][SYNC]["median"] is None
    assert found["latency_s"][FAST_ASYNC]["failed"] == 0
    assert any("TypeError" in error for error in found["errors"])


def test_stdout_has_only_the_json(app: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "teola_plugin.cli.main", "compare", f"{app}:one_way", "--inputs", "in.jsonl"]
    ran = subprocess.run(
        [*command, "--repeats", "1", "--json"], capture_output=True, text=True, cwd=tmp_path, env=os.environ
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["object"] == f"{app}:one_way"
    assert "the app prints" in ran.stderr and "user code prints" in ran.stderr


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("reply", ["", "n\n", "no\n"])
def test_many_runs_need_the_users_consent(
    app: str, reply: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(reply))
    assert main(["compare", f"{app}:fake", "--inputs", "in.jsonl"]) == 2
    printed = capsys.readouterr()
    assert "the app runs 95 times (2 inputs, 6 repeats of each way" in printed.err
    assert "nothing was run" in printed.err
    assert "equal" not in printed.out


@pytest.mark.parametrize(("reply", "arguments"), [("y\n", []), ("", ["--yes"])], ids=["agreed", "--yes"])
def test_many_runs_start_after_consent(
    app: str, reply: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(reply))
    assert main(["compare", f"{app}:fake", "--inputs", "in.jsonl", *arguments]) == 0
    assert "equal: every accelerated answer" in capsys.readouterr().out


def test_number_of_runs_equals_the_announced_number(
    app: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, variants = CompareSession.run, list[str]()

    def counted(session: CompareSession, variant: str, *arguments: Any) -> TimedRun:
        variants.append(variant)
        return run(session, variant, *arguments)

    monkeypatch.setattr(CompareSession, "run", counted)

    assert main(["compare", f"{app}:fake", "--inputs", "in.jsonl", "--repeats", "1"]) == 0

    assert f"the app runs {len(variants)} times" in capsys.readouterr().err


# ------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{app}", "not of the form module:object"),
        ("{app}:lost", "has no 'lost'"),
        ("{app}:number", "is a int, which cannot be compared"),
        ("{app}:nothing", "is a int, which cannot be compared"),
        ("{app}:triple", "is a tuple that is no pair of an object and the arguments of accelerate()"),
        ("{app}:broken", "LookupError: no key"),
        ("no_such_module:x", "No module named 'no_such_module'"),
    ],
)
def test_object_that_cannot_be_loaded_is_reported(
    app: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", name.format(app=app), "--inputs", "in.jsonl"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Next: " in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"question": "a"}\n{"question": b}\n', "line 2, column 14: no JSON value"),
        (b"what do lambs eat?\n", "line 1, column 1"),
        (b"\n \n", "holds no inputs"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "cannot read"),
    ],
)
def test_unreadable_inputs_are_reported(
    app: str, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        Path("in.jsonl").unlink()
    else:
        Path("in.jsonl").write_bytes(content)
    assert main(["compare", f"{app}:fake", "--inputs", "in.jsonl"]) == 2
    assert message in capsys.readouterr().err


def test_inputs_on_which_every_run_raises_are_reported(app: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text('{"query": 1}\n')
    assert main(["compare", f"{app}:fake", "--inputs", "in.jsonl"]) == 2
    assert "raised on every input; on line 1: KeyError" in capsys.readouterr().err


def test_invalid_compare_options_are_reported(
    app: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["compare", f"{app}:fake", "--inputs", "in.jsonl"]
    assert main([*command, "--plot", "times.png"]) == 2
    assert main([*command, "--repeats", "1", "--plot", "no/such/folder.svg"]) == 2
    assert "cannot write no/such/folder.svg" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([*command, "--repeats", "0"])
    assert ended.value.code == 2
    monkeypatch.setenv("TEOLA_DISABLE", "1")
    assert main(command) == 2
    assert "TEOLA_DISABLE" in capsys.readouterr().err


def test_compare_loads_objects_by_name(app: str) -> None:
    fake = load(f"{app}:fake").plain
    assert load(f"{app}:Box.inside") == Target(fake)
    found = load(f"{app}:accelerated")
    assert found.plain is fake and found.fast.original is fake, "an accelerated object is compared to its original"
    assert load(f"{app}:with_pool").arguments.keys() == {"pool", "bind"}
    with pytest.raises(RegistrationError, match="python -c"):
        load("json.nowhere:x")


def test_inputs_keep_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('\ufeff"a"\n\n[1]\n{"k": "\u2028"}\n', encoding="utf-8")
    assert read_inputs(str(path)) == [InputLine(1, "a"), InputLine(3, [1]), InputLine(4, {"k": "\u2028"})]
    assert read_inputs(str(path), 2) == [InputLine(1, "a"), InputLine(3, [1])]


# ------------------------------------------------------------ verdicts and figures


def run(way: str, answer: Any, seconds: float = 1.0, raised: str = "", index: int = 0) -> TimedRun:
    return TimedRun(way, index, seconds, failure(ValueError(raised)) if raised else answer, raised)


def test_equality_verdict_follows_the_answers() -> None:
    plain = [run(SYNC, "a"), run(ASYNC, "a"), run(CONTROL, "a")]
    assert compare_answers([*plain, run(FAST_SYNC, "a"), run(FAST_ASYNC, "a")]).state == "equal"
    assert compare_answers([*plain, run(FAST_SYNC, "b"), run(FAST_ASYNC, "a")]).state == "different"
    assert (
        compare_answers([*plain, run(FAST_SYNC, "a"), run(FAST_ASYNC, "a"), run(FAST_ASYNC, "b")]).state == "different"
    )
    assert compare_answers([*plain, run(FAST_SYNC, "", raised="x"), run(FAST_ASYNC, "a")]).state == "different"
    assert compare_answers([*plain, run(SYNC, "b"), run(FAST_SYNC, "b")]).state == "undecided"
    assert compare_answers([run(SYNC, "b"), *plain[1:], run(FAST_SYNC, "b"), run(FAST_ASYNC, "a")]).state == "undecided"
    fails = [run(way, "", raised="x") for way in variants_of(streams=False)]
    assert compare_answers(fails).state == "equal"
    assert compare_answers([*fails[:3], run(FAST_SYNC, "a"), fails[4]]).state == "different"


def test_one_different_input_makes_the_verdict_different() -> None:
    runs = [run(way, "a", index=i) for i in (0, 1) for way in variants_of(streams=False)]
    runs[-1] = run(FAST_ASYNC, "b", index=1)
    found = equality_of_answers([InputLine(1, "x"), InputLine(5, "y")], runs)
    assert found["state"] == "different"
    assert [(row["line"], row["state"]) for row in found["inputs"]] == [(1, "equal"), (5, "different")]


def test_quantiles_are_interpolated() -> None:
    tenths = [i / 10 for i in range(11)]
    assert [quantile(tenths, share) for share in (0.0, 0.5, 0.9, 1.0)] == [0.0, 0.5, 0.9, 1.0]
    assert quantile([1.0, 2.0], 0.5) == 1.5 and quantile([3.0], 0.99) == 3.0 and quantile([], 0.5) is None


def test_failed_runs_have_no_latency() -> None:
    found = latency_figures([run(SYNC, "a", 2.0), run(SYNC, "", 0.1, raised="x")])
    assert (found["median"], found["n"], found["failed"]) == (2.0, 1, 1)


@pytest.mark.parametrize("inputs", [1, 2, 3])
def test_each_variant_runs_first_and_last_equally_often(inputs: int) -> None:
    chosen = variants_of(streams=True)
    repeats = 2 * len(chosen)
    found = list(run_schedule(inputs, repeats, chosen))
    rounds = [found[i : i + len(chosen)] for i in range(0, len(found), len(chosen))]
    assert all(sorted(way for way, _, _ in one) == sorted(chosen) for one in rounds)
    for index in range(inputs):
        mine = [[way for way, at, _ in one] for one in rounds if one[0][1] == index]
        for edge in (0, -1):
            assert {way: [one[edge] for one in mine].count(way) for way in chosen} == dict.fromkeys(chosen, 2)
        assert all(mine[i] == mine[i + 1][::-1] for i in range(0, repeats, 2)), "a round, and the same backwards"


def paired(way: str, *seconds: float) -> list[TimedRun]:
    return [TimedRun(way, 0, one, "a", round=i) for i, one in enumerate(seconds)]


def test_ratio_of_pairs_ignores_drift() -> None:
    """Drift from round to round changes both runs of a pair, and does not count."""
    drift = [1.0, 2.0, 4.0, 8.0, 3.0, 5.0, 7.0, 6.0]
    runs = [*paired(SYNC, *drift), *paired(FAST_SYNC, *(one / 2 for one in drift))]
    found = time_ratio(runs, SYNC, FAST_SYNC)
    assert found is not None and (found.ratio, found.low, found.high, found.pairs) == (2.0, 2.0, 2.0, 8)
    assert found.verdict() == "faster"
    back = time_ratio(runs, FAST_SYNC, SYNC)
    assert back is not None and back.verdict() == "slower"
    assert time_ratio(runs, SYNC, FAST_ASYNC) is None


def test_noisy_or_few_runs_give_no_verdict() -> None:
    """An earlier version printed 2.17 for an object without any gain, after one or two cold runs."""
    even, cold = [1.0] * 8, [5.0, 4.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]
    for plain, fast in ((cold, even), (even, cold), (even, even), (cold[:5], even[:5]), ([3.0] * 5, [1.0] * 5)):
        runs = [*paired(SYNC, *plain), *paired(FAST_SYNC, *fast)]
        found = time_ratio(runs, SYNC, FAST_SYNC)
        assert found is not None and found.verdict() == "cannot tell", (plain, fast, found)


def test_best_original_variant_and_its_noise_decide_the_verdict() -> None:
    slow, quick = [2.0] * 8, [1.0, 1.01] * 4
    runs = [*paired(SYNC, *slow), *paired(ASYNC, *quick), *paired(FAST_SYNC, *quick), *paired(FAST_ASYNC, *quick)]
    latency = {way: latency_figures(found) for way, found in group_by_variant(runs).items()}
    best = best_speedup(runs, latency)
    assert best is not None and best["plain"] == ASYNC and best["verdict"] == "cannot tell"
    noisy = [*paired(ASYNC, *[1.2] * 8), *paired(CONTROL, *[1.0] * 8), *paired(FAST_ASYNC, *[1.1] * 8)]
    latency = {way: latency_figures(found) for way, found in group_by_variant(noisy).items()}
    best = best_speedup(noisy, latency)
    assert best is not None and best["low"] > 1.0
    assert best["verdict"] == "cannot tell", "the plain object differs as much from itself"


def test_report_has_shares_of_time_and_waste() -> None:
    def span(engine: str, begin: float, done: float, outcome: str = "done") -> Span:
        return Span(
            "q", "a", f"{engine}{begin}", "X", begin, begin, done=done, engine=engine, outcome=outcome, tokens=3
        )

    spans = (span("llm", 0.0, 4.0), span("store", 3.0, 6.0), span("wrapped", 8.0, 9.0, "wasted"), span("", 0.0, 10.0))
    found = engine_shares([QueryTrace("q", "a", 0.0, 10.0, spans)])
    expected = {"llm": 0.4, "store": 0.3, "your models and retrievers": 0.1, "your code, and waiting": 0.3}
    assert found == pytest.approx(expected)
    assert wasted_work([QueryTrace("q", "a", 0.0, 10.0, spans)])["tokens"] == 3
    assert engine_shares([]) == {}


# ------------------------------------------------------------ pictures


def test_terminal_plot_shows_every_variant() -> None:
    runs = [*(run(SYNC, "a", s) for s in (1.0, 1.0, 3.0)), run(FAST_SYNC, "a", 1.0), run(ASYNC, "", 9.0, raised="x")]
    lines = latency_strips(runs, 20).splitlines()
    assert lines[0] == f"{SYNC:24}|█{' ' * 18}▄|"
    assert lines[1] == f"{ASYNC:24}|{' ' * 20}|" and lines[2] == f"{FAST_SYNC:24}|█{' ' * 19}|"
    assert lines[3].split() == ["1.00", "s", "3.00", "s"]
    assert latency_strips([run(SYNC, "", raised="x")], 20) == ""
    assert "█" in latency_strips([run(SYNC, "a", 1.0)], 20)


def test_plot_file_is_valid_svg(tmp_path: Path) -> None:
    runs = [run(way, "a", 0.1 * (i + 1)) for i in range(4) for way in variants_of(streams=False)]
    path = tmp_path / "times.svg"
    write_plot(str(path), runs, "a <title> & more")
    tree = ElementTree.parse(path)
    curves = [found for found in tree.iter("{http://www.w3.org/2000/svg}path")]
    assert len(curves) == 5 and curves[0].get("d", "").count("V") == 4
    assert "a <title> & more" in "".join(tree.getroot().itertext())
    write_plot(str(path), [], "nothing ended well")
    ElementTree.parse(path)


def test_first_token_time_skips_empty_chunks() -> None:
    from langchain_core.messages import AIMessageChunk
    from langchain_core.runnables import RunnableGenerator

    from teola_plugin import accelerate

    async def chunks(given: Any) -> Any:
        async for _ in given:
            yield AIMessageChunk("")
            yield AIMessageChunk("x")

    async def silence(given: Any) -> Any:
        async for _ in given:
            yield AIMessageChunk("")

    for made, has_text in ((chunks, True), (silence, False)):
        plain: Any = RunnableGenerator(made)
        with CompareSession(plain, accelerate(plain), None, entries_of(plain, "x")) as session:
            found = session.run(STREAM, 0, "x")
        assert not found.error and (found.first_token_s is not None) is has_text
