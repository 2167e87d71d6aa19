"""Tests of calls, tokens and cost in `teola compare`: everything that a provider was asked for, counted once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from benchmarks.public_apps.__main__ import APPS
from benchmarks.public_apps.apps import App
from benchmarks.public_apps.langchain_apps import chat_model
from benchmarks.public_apps.replies import prompt_tokens
from benchmarks.public_apps.server import FakeServer, LoggedRequest, fake_server
from teola_plugin import accelerate
from teola_plugin.adapters.app_frameworks import entries_of
from teola_plugin.cli.compare.figures import cost_per_query
from teola_plugin.cli.compare.measure import (
    ASYNC,
    FAST_ASYNC,
    FAST_SYNC,
    SYNC,
    CompareSession,
    TimedRun,
)
from teola_plugin.cli.main import main
from teola_plugin.observe import Price
from teola_plugin.runtime.usage import QueryUsage, Tokens
from teola_plugin.shims.interception import observed, observers

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of ChatOpenAI with a schema

SCALE = 0.05
"""Latencies of the fake server, small, but long enough to keep calls apart."""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(SCALE, keeps_connections=False) as running:
        yield running


def chats(requests: list[LoggedRequest]) -> list[LoggedRequest]:
    return [one for one in requests if one.path == "/v1/chat/completions"]


def input_of(app: App) -> Any:
    return {"query": app.input} if app.kind == "workflow" else app.input


def facts_of(run: TimedRun) -> dict[str, Any]:
    assert run.usage is not None
    return run.usage.cost().facts()


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_calls_and_tokens_equal_those_the_server_received(app: App, server: FakeServer) -> None:
    original = app.build(server.base_url)
    fast = accelerate(original)
    server.take_log()
    with CompareSession(original, fast, None, entries_of(original, app.name)) as session:
        variants = [variant for variant in (SYNC, FAST_SYNC, ASYNC, FAST_ASYNC) if variant in session.variants]
        for variant in (*variants, *variants):  # models that are created inside are known from the second query on
            run = session.run(variant, 0, input_of(app))
            requests = chats(server.take_log())

            if not run.error:  # `invoke` of a graph of coroutines
                facts = facts_of(run)
                assert facts["calls"] == len(requests), variant
                assert facts["calls_without_tokens"] == facts["wasted_calls"] == 0, variant
                assert facts["input_tokens"] == sum(prompt_tokens(one.body) for one in requests), variant
                assert facts["output_tokens"] >= len(requests), variant


def test_unclaimed_prefetched_call_counts_as_wasted(server: FakeServer) -> None:
    """The parser between the two calls raises, so the original never makes the second one."""
    ask, model = ChatPromptTemplate.from_template, chat_model(server.base_url)
    first = RunnablePassthrough.assign(a=ask("A of {x}") | model | JsonOutputParser())
    chain: Any = first.assign(b=ask("B of {x}") | model)
    fast = accelerate(chain, speculate="all")
    server.take_log()

    with CompareSession(chain, fast, None, entries_of(chain, "chain")) as session:
        plain = session.run(ASYNC, 0, {"x": "oats"})
        plain_requests = chats(server.take_log())
        accelerated = session.run(FAST_ASYNC, 0, {"x": "oats"})
        accelerated_requests = chats(server.take_log())

    assert plain.error == accelerated.error != ""
    assert facts_of(plain)["calls"] == len(plain_requests) == 1
    assert facts_of(plain)["wasted_calls"] == 0
    assert facts_of(accelerated)["calls"] == len(accelerated_requests) == 2
    assert facts_of(accelerated)["wasted_calls"] == 1


def test_streamed_runs_count_their_calls_once(server: FakeServer) -> None:
    model = chat_model(server.base_url, stream_usage=True)
    chain: Any = ChatPromptTemplate.from_template("A of {x}") | model
    server.take_log()

    with CompareSession(chain, accelerate(chain), None, entries_of(chain, "chain")) as session:
        run = session.run("plain, stream", 0, {"x": "oats"})

    (request,) = chats(server.take_log())
    facts = facts_of(run)
    assert (facts["calls"], facts["calls_without_tokens"]) == (1, 0)
    assert facts["input_tokens"] == prompt_tokens(request.body)


def test_calls_after_the_comparison_are_not_counted(server: FakeServer) -> None:
    chain: Any = ChatPromptTemplate.from_template("A of {x}") | chat_model(server.base_url)
    with CompareSession(chain, accelerate(chain), None, entries_of(chain, "chain")) as session:
        run = session.run(SYNC, 0, {"x": "oats"})

    chain.invoke({"x": "oats"})
    asyncio.run(chain.ainvoke({"x": "oats"}))

    assert facts_of(run)["calls"] == 1


# ------------------------------------------------------------ figures


def run_with(
    variant: str, calls: int, tokens_in: int, tokens_out: int, unreported: int = 0, price: Price | None = None
) -> TimedRun:
    usage = QueryUsage(lambda model: price, lambda value: value)
    for number in range(calls):
        call = usage.call_began(object(), {})
        if number >= unreported:
            usage.result_came(call, Tokens(tokens_in, 0, tokens_out))
    return TimedRun(variant, 0, 1.0, "answer", usage=usage)


def test_cost_is_the_mean_of_a_query() -> None:
    price = Price(2.0, 10.0)
    plain = [run_with(SYNC, 1, 1000, 100, price=price), run_with(ASYNC, 3, 1000, 100, price=price)]

    cost = cost_per_query([*plain, run_with(FAST_SYNC, 4, 500, 50, unreported=1, price=price)])

    assert cost["plain"] == {
        "calls": 2.0,
        "calls_without_tokens": 0.0,
        "wasted_calls": 0.0,
        "tokens_in": 2000.0,
        "tokens_out": 200.0,
        "dollars": pytest.approx(0.006),
    }
    assert cost["accelerated"]["calls_without_tokens"] == 1.0
    assert cost["accelerated"]["tokens_in"] == 1500.0
    assert cost["accelerated"]["dollars"] == pytest.approx(0.0045)


def test_cost_without_prices_has_no_dollars() -> None:
    assert cost_per_query([run_with(SYNC, 1, 1000, 100)])["plain"]["dollars"] is None


# ------------------------------------------------------------ the command

COMMAND_APP = """
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.language_models import BaseChatModel

class Counting(BaseChatModel):
    _llm_type = "counting"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        usage = {"input_tokens": 1000, "output_tokens": 200, "total_tokens": 1200}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("an answer", usage_metadata=usage))])

counting = Counting()
silent = FakeListChatModel(responses=["an answer"])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module with two models into the current folder, and return its name."""
    name = f"costs_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(COMMAND_APP)
    (tmp_path / "in.jsonl").write_text('"what?"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def arguments_for(name: str, *more: str) -> list[str]:
    return ["compare", name, "--inputs", "in.jsonl", "--repeats", "1", "--no-stream", *more]


def test_json_has_tokens_and_dollars_of_a_query(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = main(arguments_for(f"{module}:counting", "--json", "--price-in", "0.15", "--price-out", "0.6"))

    cost = json.loads(capfd.readouterr().out)["cost_per_query"]
    figures = {"calls": 1.0, "calls_without_tokens": 0.0, "wasted_calls": 0.0, "tokens_in": 1000.0, "tokens_out": 200.0}
    assert status == 0
    assert cost["plain"] == cost["accelerated"] == {**figures, "dollars": pytest.approx(0.00027)}


def test_report_has_tokens_and_dollars_of_a_query(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments_for(f"{module}:counting", "--price-in", "0.15", "--price-out", "0.6"))

    printed = capsys.readouterr().out
    assert "plain           1.0 calls   1,000.0 tokens in     200.0 out   $0.000270" in printed
    assert "accelerated     1.0 calls   1,000.0 tokens in     200.0 out   $0.000270" in printed


def test_report_counts_calls_without_known_tokens(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments_for(f"{module}:silent"))

    printed = capsys.readouterr().out
    assert "Without the tokens of calls that reported none: 1.0 plain, 1.0 accelerated." in printed
    assert "$" not in printed


@pytest.mark.parametrize("prices", [["--price-in", "1"], ["--price-out", "1"]])
def test_one_price_alone_is_refused(module: str, prices: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments_for(f"{module}:counting", *prices)) == 2
    assert "give both --price-in and --price-out" in capsys.readouterr().err


@pytest.mark.parametrize("price", ["-1", "much", "inf", "nan"])
def test_price_that_is_not_a_number_is_refused(module: str, price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments_for(f"{module}:counting", f"--price-in={price}", "--price-out=1"))

    assert "is no price" in capsys.readouterr().err


# ------------------------------------------------------------ observed methods


class RecordingObserver:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.calls = 0
        self.values: list[Any] = []

    def call_began(self, target: Any, options: Any, /) -> int:
        self.calls += 1
        return self.calls

    def result_came(self, call: int, value: Any) -> None:
        self.values.append((call, value))


@pytest.fixture
def observer() -> Iterator[RecordingObserver]:
    observer = RecordingObserver()
    observers[:] = [observer]
    yield observer
    observers.clear()


def test_methods_are_not_wrapped_without_an_observer() -> None:
    assert observed(len) is len


def test_observed_methods_return_unchanged_results(observer: RecordingObserver) -> None:
    def chunks() -> Iterator[str]:
        yield from ("a", "b")

    async def achunks() -> AsyncIterator[str]:
        yield "a"
        yield "b"

    async def answer() -> str:
        return "answer"

    async def stream() -> AsyncIterator[str]:
        return achunks()

    async def run() -> list[Any]:
        streams = [observed(achunks)(), await observed(stream)()]
        return [await observed(answer)(), *[[one async for one in chunks] for chunks in streams]]

    assert observed(lambda: "whole")() == "whole"
    assert list(observed(chunks)()) == ["a", "b"]
    assert asyncio.run(run()) == ["answer", ["a", "b"], ["a", "b"]]
    assert observer.calls == 5
    assert [value for _, value in observer.values] == ["whole", "a", "b", "answer", "a", "b", "a", "b"]


def test_nested_method_calls_count_once(observer: RecordingObserver) -> None:
    def inner() -> Iterator[str]:
        yield from observed(lambda: ["nested"])()

    assert list(observed(inner)()) == ["nested"]
    assert observed(lambda: observed(lambda: "inner")())() == "inner"
    assert observer.calls == 2


def test_partly_read_stream_is_closed(observer: RecordingObserver) -> None:
    closed = []

    def chunks() -> Iterator[str]:
        try:
            yield "a"
            yield "b"
        finally:
            closed.append(True)

    stream = observed(chunks)()
    next(stream)
    stream.close()

    assert closed == [True]
