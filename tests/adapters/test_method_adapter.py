"""Tests of an adapter for a third framework of one page. It contains only what is specific to that framework."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from langchain_core.runnables import RunnableLambda

from teola_plugin import EnginePool, Price, accelerate, uninstall
from teola_plugin.adapters import contract
from teola_plugin.errors import RegistrationError, TraceError
from teola_plugin.observe import Cost
from teola_plugin.runtime.usage import Tokens
from tests.support import toy_adapter, toy_framework
from tests.support.toy_adapter import ToyAdapter
from tests.support.toy_framework import Ask, ForEach, ToyApp, ToyModel, ToyStep

LATENCY_S = 0.15
STATE = {"question": "why", "documents": ["one", "two", "three"]}


class Calls:
    """Counts calls, and how many were under way at once."""

    def __init__(self) -> None:
        self.prompts: Counter[str] = Counter()
        self.running = self.most_at_once = 0
        self._lock = threading.Lock()

    def begin(self, prompt: str) -> None:
        with self._lock:
            self.prompts[prompt] += 1
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)

    def end(self) -> None:
        with self._lock:
            self.running -= 1


class SyncModel(ToyModel):
    """A model that takes a while for any prompt, without async code: the framework calls the sync method."""

    def __init__(self, calls: Calls, name: str = "slow") -> None:
        self.calls, self.name = calls, name

    def _answer(self, prompt: str, options: Any) -> str:
        if "fail" in prompt:
            raise ValueError(f"no answer to {prompt}")
        return f"{self.name}({prompt}{options or ''})"

    def _ask(self, prompt: str, **options: Any) -> str:
        self.calls.begin(prompt)
        time.sleep(LATENCY_S)
        self.calls.end()
        return self._answer(prompt, options)


class RemoteModel(SyncModel):
    """A model behind a network, with async code."""

    async def _aask(self, prompt: str, **options: Any) -> str:
        self.calls.begin(prompt)
        await asyncio.sleep(LATENCY_S)
        self.calls.end()
        return self._answer(prompt, options)


def independent(calls: Calls) -> ToyApp:
    return ToyApp(
        [
            Ask(RemoteModel(calls), "first {question}", "a"),
            Ask(RemoteModel(calls), "second {question}", "b", top=3),
            Ask(RemoteModel(calls), "{a} and {b}", "answer"),
        ]
    )


def grading(calls: Calls) -> ToyApp:
    grade = Ask(RemoteModel(calls), "grade {item} for {question}", "grade")
    return ToyApp([ForEach("documents", grade, "grades"), Ask(RemoteModel(calls), "answer by {grades}", "answer")])


def failing(calls: Calls) -> ToyApp:
    return ToyApp([Ask(RemoteModel(calls), "first {question}", "a"), Ask(RemoteModel(calls), "fail {question}", "b")])


def equal(calls: Calls) -> ToyApp:
    """Return an app that makes two calls with equal arguments."""
    model = RemoteModel(calls)
    return ToyApp([Ask(model, "same {question}", "a"), Ask(model, "same {question}", "b"), Ask(model, "{a}{b}", "c")])


def dependent(calls: Calls) -> ToyApp:
    return ToyApp([Ask(RemoteModel(calls), "first {question}", "a"), Ask(RemoteModel(calls), "then {a}", "b")])


def without_async_code(calls: Calls) -> ToyApp:
    model = SyncModel(calls)
    return ToyApp([Ask(model, "first {question}", "a"), Ask(model, "second {question}", "b")])


APPS: dict[str, Callable[[Calls], ToyApp]] = {
    "independent calls": independent,
    "a loop": grading,
    "a call that fails": failing,
    "equal calls": equal,
    "calls that need each other": dependent,
    "a model without async code": without_async_code,
}
ENTRIES: dict[str, Callable[[ToyApp], Any]] = {
    "answer": lambda app: app.answer(STATE),
    "aanswer": lambda app: asyncio.run(app.aanswer(STATE)),
}


class ToyOutcome(NamedTuple):
    result: Any
    events: list[tuple[str, str]]
    prompts: Counter[str]


def observed(app: ToyApp, entry: str, calls: Calls) -> ToyOutcome:
    """Return what an app answers, what listeners hear in their order, and what the models are asked."""
    events: list[tuple[str, str]] = []
    toy_framework.listeners[:] = [lambda event, text: events.append((event, text))]
    try:
        result = ENTRIES[entry](app)
    except ValueError as error:
        result = repr(error)
    finally:
        toy_framework.listeners.clear()
    return ToyOutcome(result, events, calls.prompts)


@pytest.fixture(autouse=True)
def adapter() -> Iterator[ToyAdapter]:
    adapter = ToyAdapter()
    contract.register(adapter)
    yield adapter
    contract.unregister(adapter)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", APPS)
def test_accelerated_app_gives_results_and_calls_of_the_original(name: str, entry: str) -> None:
    original_calls, calls = Calls(), Calls()
    expected = observed(APPS[name](original_calls), entry, original_calls)
    app = APPS[name](calls)
    fast = accelerate(app)
    assert observed(fast, entry, calls) == expected
    assert isinstance(fast, ToyApp)
    assert fast.original is app
    assert accelerate(fast).original is app


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("name", "at_once", "rounds"), [("independent calls", 2, 2), ("a loop", 3, 2), ("a model without async code", 2, 1)]
)
def test_independent_calls_run_at_once(name: str, at_once: int, rounds: int, entry: str) -> None:
    original_calls, calls = Calls(), Calls()
    app, fast = APPS[name](original_calls), accelerate(APPS[name](calls))
    observed(fast, entry, calls)  # the first query plans
    seconds = []
    for one, by in ((app, original_calls), (fast, calls)):
        began = time.perf_counter()
        observed(one, entry, by)
        seconds.append(time.perf_counter() - began)
    assert calls.most_at_once == at_once
    assert seconds[1] < seconds[0] - LATENCY_S / 2
    assert rounds * LATENCY_S < seconds[1]


def test_a_changed_app_is_planned_again() -> None:
    calls = Calls()
    app = independent(calls)
    fast = accelerate(app)
    fast.answer(STATE)
    calls.prompts.clear()
    app.steps.steps[1] = Ask(RemoteModel(calls), "changed {question}", "b")
    fast.answer(STATE)
    assert calls.prompts == {"first why": 1, "changed why": 1, "slow(first why) and slow(changed why)": 1}


class UnknownStep(ToyStep):
    """A step of a class that the adapter does not know."""

    into = "x"

    def run(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1}


def test_app_with_an_opaque_step_runs_unchanged() -> None:
    calls = Calls()
    app = independent(calls)
    app.steps.steps.insert(1, UnknownStep())
    fast = accelerate(app)
    assert fast.answer(STATE)["x"] == 1
    assert calls.most_at_once == 1
    assert "not understood" in fast.explain()


def test_explain_says_what_is_prefetched() -> None:
    assert accelerate(independent(Calls())).explain().splitlines() == [
        "a: in place",
        "b: prefetched",
        "answer: in place",
    ]


def test_model_not_thread_safe_is_not_prefetched_in_sync_calls(
    adapter: ToyAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyAdapter, "takes_threads", toy_adapter.MethodAdapter.takes_threads)
    calls = Calls()
    app = independent(calls)
    accelerate(app).answer(STATE)
    assert calls.most_at_once == 1
    accelerate(app, concurrent=[RemoteModel]).answer(STATE)
    assert calls.most_at_once == 2


def test_a_cancelled_query_leaves_no_call_under_way() -> None:
    calls = Calls()

    async def cancelled() -> int:
        task = asyncio.create_task(accelerate(grading(calls)).aanswer(STATE))
        await asyncio.sleep(LATENCY_S / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(cancelled()) == 1


def test_uninstall_restores_the_methods() -> None:
    before = vars(RemoteModel)["_aask"]
    calls = Calls()
    fast = accelerate(independent(calls))
    assert vars(RemoteModel)["_aask"] is not before
    uninstall()
    assert vars(RemoteModel)["_aask"] is before
    fast.answer(STATE)
    assert calls.most_at_once == 1


def test_option_unsupported_by_the_framework_raises() -> None:
    with pytest.raises(RegistrationError, match="has no shadow= for a ToyApp"):
        accelerate(independent(Calls()), shadow=1.0)
    with pytest.raises(RegistrationError, match="has no read_only= and prompt_cache= for a ToyApp"):
        accelerate(independent(Calls()), read_only=["search"], prompt_cache=True)


def test_object_without_an_adapter_raises() -> None:
    with pytest.raises(TraceError, match="cannot accelerate"):
        accelerate(object())


def test_toy_adapter_has_at_most_300_lines() -> None:
    assert len(inspect.getsource(toy_adapter).splitlines()) <= 300


# ------------------------------------------------------------ prices


PRICES = {"slow": Price(input=2.0, output=10.0)}


@pytest.fixture
def reads_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the adapter read ten tokens of the prompt, and one of the answer, from each result of a model."""
    monkeypatch.setattr(ToyAdapter, "tokens_of", lambda self, value: Tokens(10, 0, 1))


def cost_of(fast: Any) -> Cost:
    cost: Cost | None = fast.report().cost
    assert cost is not None
    return cost


def priced(calls: Calls, make: Callable[[Calls], ToyApp], **options: Any) -> Any:
    """Return an accelerated app whose models' names are in a field that says which model they call."""
    app = make(calls)
    for asking in (getattr(step, "step", step) for step in app.steps.steps):
        asking.model.model = asking.model.name
    return accelerate(app, prices=PRICES, **options)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("make", [independent, grading])
@pytest.mark.usefixtures("reads_tokens")
def test_prices_count_each_call_once(make: Callable[[Calls], ToyApp], is_async: bool) -> None:
    calls = Calls()
    fast = priced(calls, make)

    asyncio.run(fast.aanswer(STATE)) if is_async else fast.answer(STATE)

    cost, made = cost_of(fast), sum(calls.prompts.values())
    assert calls.most_at_once > 1
    assert [(row.model, row.calls, row.input_tokens, row.output_tokens) for row in cost.models] == [
        ("slow", made, 10 * made, made)
    ]
    assert cost.dollars == pytest.approx(made * (10 * 2.0 + 10.0) / 1e6)
    assert not cost.wasted.models
    assert "Cost" in fast.explain()


@pytest.mark.usefixtures("reads_tokens")
def test_prices_count_calls_of_an_app_that_is_not_understood() -> None:
    calls = Calls()
    app = independent(calls)
    app.steps.steps.insert(1, UnknownStep())
    fast = accelerate(app, prices=PRICES)

    fast.answer(STATE)

    assert sum(row.calls for row in cost_of(fast).models) == 3
    assert cost_of(fast).dollars is None  # the models say no name that the table has
    assert fast.last_trace() is None


@pytest.mark.usefixtures("reads_tokens")
def test_prefetched_call_that_nobody_used_is_counted_as_wasted() -> None:
    calls = Calls()
    fast = priced(
        calls,
        lambda calls: ToyApp(
            [Ask(RemoteModel(calls), "fail {question}", "a"), Ask(RemoteModel(calls), "second {question}", "b")]
        ),
    )

    with pytest.raises(ValueError, match="no answer"):
        fast.answer(STATE)

    assert [row.calls for row in cost_of(fast).wasted.models] == [1]


def test_adapter_that_reads_no_tokens_leaves_dollars_open() -> None:
    calls = Calls()
    fast = priced(calls, independent)

    fast.answer(STATE)

    assert cost_of(fast).facts()["calls_without_tokens"] == 3
    assert cost_of(fast).dollars is None


def test_reader_of_tokens_that_raises_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyAdapter, "tokens_of", lambda self, value: value.usage)
    fast = priced(Calls(), independent)

    assert fast.answer(STATE) == independent(Calls()).answer(STATE)
    assert cost_of(fast).facts()["calls_without_tokens"] == 3


@pytest.mark.usefixtures("reads_tokens")
def test_trace_of_a_query_has_its_cost() -> None:
    fast = priced(Calls(), independent)

    fast.answer(STATE)

    trace = fast.last_trace()
    assert trace is not None
    assert trace.cost is not None
    assert trace.cost.dollars == cost_of(fast).dollars


@pytest.mark.usefixtures("reads_tokens")
def test_calls_inside_another_app_with_prices_count_for_that_app() -> None:
    inner = priced(Calls(), independent)
    outer = accelerate(RunnableLambda(lambda state: inner.answer(state)), prices=PRICES)

    outer.invoke(STATE)

    assert sum(row.calls for row in cost_of(outer).models) == 3
    assert inner.report().cost is None


def test_without_prices_no_cost_is_reported() -> None:
    fast = accelerate(independent(Calls()))

    fast.answer(STATE)

    assert fast.report().cost is None
    assert "Cost" not in fast.explain()


def test_report_has_a_row_for_each_call() -> None:
    fast = accelerate(independent(Calls()))
    fast.answer(STATE)

    report = fast.report()

    assert [(row.name, row.status.value) for row in report.calls] == [
        ("a", "in place"),
        ("b", "prefetched"),
        ("answer", "in place"),
    ]
    assert "faster in the last call" in report.expect


def test_report_of_the_app_itself_stays_its_own() -> None:
    class ReportingApp(ToyApp):
        def report(self) -> str:
            return "three steps"

    fast = accelerate(ReportingApp(independent(Calls()).steps.steps))

    assert fast.report() == "three steps"
    assert "prefetched" in fast.explain()


def test_given_pool_traces_the_query() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    calls = Calls()
    with EnginePool.local(tracing=TracerProvider()) as pool:
        fast = accelerate(independent(calls), pool=pool)
        fast.answer(STATE)

    assert calls.most_at_once == 2
    assert pool.traces == (fast.last_trace(),)
