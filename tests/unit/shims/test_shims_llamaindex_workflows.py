"""Tests of `shims.llamaindex.workflows` on the installed version, and with each private name missing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.core.workflow.errors import WorkflowCancelledByUser
from pydantic import BaseModel
from support.llamaindex_engines import Library
from workflows.plugins.basic import BasicRuntime

from teola_plugin.adapters.llamaindex import TeolaLLM
from teola_plugin.shims.llamaindex import copies, interceptors, workflows
from teola_plugin.shims.llamaindex.records import Unreadable


class Flow(Workflow):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        await asyncio.sleep(ev.get("takes", 0.01))
        if self.fails:
            raise ValueError("failed")
        return StopEvent(result="done")


class Number(Event):
    """One of several events."""


class Bare:
    """A handler of another version."""


# ------------------------------------------------------------ runs


@pytest.mark.parametrize("way", ["done", "failed", "cancelled"])
async def test_call_when_ended_reports_the_outcome_of_a_run(way: str) -> None:
    outcomes: list[Any] = []
    handler = Flow(way == "failed").run(takes=30 if way == "cancelled" else 0.0)
    workflows.call_when_ended(handler, outcomes.append)
    await asyncio.sleep(0.01)
    if way == "cancelled":
        handler._result_task.cancel()
    with pytest.raises((ValueError, asyncio.CancelledError)) if way != "done" else pytest.MonkeyPatch.context():
        await handler
    [error] = outcomes
    assert type(error) is {"done": type(None), "failed": ValueError, "cancelled": asyncio.CancelledError}[way]


def test_call_when_ended_reports_a_lost_run_as_cancelled() -> None:
    outcomes: list[Any] = []
    loop = asyncio.new_event_loop()

    async def begun() -> None:
        workflows.call_when_ended(Flow().run(takes=30), outcomes.append)

    loop.run_until_complete(begun())
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    del task
    gc.collect()
    assert [type(one) for one in outcomes] == [asyncio.CancelledError]


def test_unknown_handler_reports_its_end_when_freed() -> None:
    outcomes: list[Any] = []
    handler: Any = Bare()
    workflows.call_when_ended(handler, outcomes.append)
    assert outcomes == []
    del handler
    gc.collect()
    assert outcomes == [None]


async def test_intercepted_result_replaces_the_result_of_a_run() -> None:
    async def other(result: workflows.Result, cancel: workflows.Result) -> Any:
        event = await result()
        return StopEvent(result=f"{event.result}, and more")

    handler = Flow().run()
    before = type(handler._external_adapter)
    workflows.intercept_result(handler, other)
    assert isinstance(handler._external_adapter, before) and issubclass(before, object)
    assert isinstance(handler._external_adapter, workflows.ResultHooks)
    assert await handler == "done, and more" and handler.ctx.is_running is False


async def test_intercepted_result_can_cancel_its_run() -> None:
    async def at_once(result: workflows.Result, cancel: workflows.Result) -> Any:
        await cancel()
        return await result()

    handler = Flow().run(takes=30)
    workflows.intercept_result(handler, at_once)
    with pytest.raises(WorkflowCancelledByUser):
        await handler
    assert [type(event).__name__ async for event in handler.stream_events()] == ["WorkflowCancelledEvent"]


def test_a_handler_without_an_adapter_keeps_its_result() -> None:
    def never(result: workflows.Result, cancel: workflows.Result) -> Awaitable[Any]:
        raise AssertionError

    handler: Any = Bare()
    workflows.intercept_result(handler, never)
    assert vars(handler) == {}


def test_runs_any_workflow_looks_through_decorators() -> None:
    class Around:
        def __init__(self, inner: Any) -> None:
            self._decorated = inner

    assert workflows.runs_any_workflow(Flow().runtime) and workflows.runs_any_workflow(Around(Around(Flow().runtime)))
    assert workflows.runs_any_workflow(Verbose().runtime)
    assert not workflows.runs_any_workflow(Bare()) and not workflows.runs_any_workflow(Around(Bare()))


class Verbose(Flow):
    def __init__(self) -> None:
        Workflow.__init__(self, verbose=True)


# ------------------------------------------------------------ classes


async def test_intercepted_steps_run_through_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    async def around(step: Any, name: str, workflow: Any, event: Any, context: Any, bound: Any) -> Any:
        names.append(name)
        assert workflows.event_values(event)["takes"] == 0
        assert workflows.event_data(event) == {"takes": 0}
        assert bound == {}
        return step

    interceptors.uninstall()  # what other tests have left
    monkeypatch.setattr(interceptors.interceptors, "is_installed", True)
    workflows.intercept_steps(around)
    try:
        assert await Flow().run(takes=0) == "done"
    finally:
        interceptors.uninstall()
    assert names == ["only"]


def test_intercept_steps_tolerates_a_missing_binding_function(monkeypatch: pytest.MonkeyPatch) -> None:
    async def around(*arguments: Any) -> Any:
        raise AssertionError

    monkeypatch.delattr("workflows.runtime.types.step_function.partial")
    workflows.intercept_steps(around)


def test_a_steps_function_is_bound_to_its_workflow() -> None:
    flow = Flow()
    only = workflows.workflow_steps(flow)["only"]
    assert only.function.__self__ is flow
    assert only.function.__name__ == "only"
    assert (only.event_name, only.context_name) == ("ev", "")


def test_steps_accept_events_of_their_classes_alone() -> None:
    only = workflows.workflow_steps(Flow())["only"]
    assert only.accepts(StartEvent)
    assert not only.accepts(type("Special", (StartEvent,), {}))
    assert replace(only, takes_subclasses=True).accepts(type("Special", (StartEvent,), {}))


def test_steps_with_several_events_are_recognized() -> None:
    class Numbers(Workflow):
        @step
        async def split(self, ev: StartEvent) -> list[Number]:
            return [Number(), Number()]

        @step
        async def join(self, ev: list[Number]) -> StopEvent:
            return StopEvent(result=len(ev))

    steps = workflows.workflow_steps(Numbers())
    assert steps["split"].sends_list
    assert steps["split"].takes_one_event
    assert not steps["join"].takes_one_event
    assert steps["join"].collected == (("ev", True),)


class Typed(BaseModel):
    """A state with a field."""

    key: int = 0


async def test_stored_state_returns_its_class_and_values() -> None:
    class Noting(Workflow):
        @step
        async def note(self, ctx: Context, ev: StartEvent) -> StopEvent:
            await ctx.store.set("key", 1)
            return StopEvent(result=await workflows.stored_state(ctx))

    class NotingTyped(Workflow):
        @step
        async def note(self, ctx: Context[Typed], ev: StartEvent) -> StopEvent:
            await ctx.store.set("key", 2)
            return StopEvent(result=await workflows.stored_state(ctx))

    kind, values = await Noting().run()
    assert workflows.is_dictionary_state(kind)
    assert kind is workflows.state_class(Noting())
    assert values == {"key": 1}
    assert await NotingTyped().run() == (Typed, {"key": 2})
    assert workflows.state_class(NotingTyped()) is Typed
    assert not workflows.is_dictionary_state(Typed)
    assert issubclass(kind, workflows.MAPPING_MODEL)


async def test_a_store_that_is_not_in_memory_has_no_known_values() -> None:
    class Elsewhere:
        store = Bare()

    assert await workflows.stored_state(Elsewhere()) is None


def test_state_class_is_base_model_if_it_cannot_be_inferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("workflows.context.state_store.infer_state_type")
    assert workflows.state_class(Flow()) is BaseModel


class Collecting(Workflow):
    """Collects two numbers, and notes what the running step knows."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    @step
    async def split(self, ctx: Context, ev: StartEvent) -> Number | None:
        ctx.send_event(Number())
        ctx.send_event(Number(), step="join")
        self.notes.append([receiver for _, receiver in workflows.sent_events() or ()])
        self.notes.append(workflows.run_id(ctx) != "")
        return None

    @step(num_workers=1)
    async def join(self, ctx: Context, ev: Number) -> StopEvent | None:
        self.notes.append({name: len(events) for name, events in workflows.collected_events().items()})
        return None if ctx.collect_events(ev, [Number] * 2) is None else StopEvent()


async def test_events_of_the_running_step_are_read() -> None:
    flow = Collecting()
    await flow.run()
    assert flow.notes == [["", "join"], True, {}, {"default": 1}]


async def test_events_outside_a_step_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workflows.sent_events() is None
    monkeypatch.delattr("workflows.runtime.types.results.StepWorkerStateContextVar")
    assert workflows.sent_events() is None
    assert workflows.collected_events() == {}
    assert workflows.run_id(Bare()) == ""


def test_free_steps_are_copied_to_a_subclass() -> None:
    class Free(Workflow):
        pass

    @step(workflow=Free)
    async def free(ev: StartEvent) -> StopEvent:
        return StopEvent(result="free")

    sub: Any = type("Free", (Free,), {})
    assert "free" not in vars(sub)["_step_functions"]
    assert "free" in copies.with_steps_of(sub, Free)()._get_steps()
    assert copies.with_steps_of(Bare, object) is Bare and vars(Bare).get("_step_functions") is None


def test_step_names_and_used_objects_are_read() -> None:
    model, other = object(), object()

    class Using(Flow):
        @step
        async def only(self, ev: StartEvent) -> StopEvent:
            return StopEvent(result=(model, MODEL, self.fails))

    assert workflows.step_names(Using()) == ["only"]
    used = list(workflows.objects_used_by_steps(Using()))
    assert any(one is model for one in used) and any(one is MODEL for one in used)
    assert not any(one is other for one in used)
    assert workflows.step_names(Bare()) == [] and list(workflows.objects_used_by_steps(Bare())) == []


MODEL = object()


# ------------------------------------------------------------ tools, coroutines


def test_tool_arguments_contain_messages_and_tool_schemas(stock: Library) -> None:
    tool = FunctionTool.from_defaults(lambda of: of, name="same", description="The same.")
    messages = [ChatMessage("which?")]
    llm = TeolaLLM(pool=stock.llm.pool, is_function_calling_model=True)
    made = workflows.tool_arguments(llm, [tool], messages, {"allow_parallel_tool_calls": True})
    assert made["messages"] == messages and made["parallel_tool_calls"] is True
    assert made["tools"] == [tool.metadata.to_openai_tool()]
    assert workflows.tool_arguments(MockFunctionCallingLLM(), [tool], messages, {})["messages"] == messages


def test_run_without_waiting_raises_if_the_coroutine_waits() -> None:
    async def nothing() -> int:
        return 1

    assert copies.run_without_waiting(nothing()) == 1
    with pytest.raises(Unreadable, match="takes waiting"):
        copies.run_without_waiting(asyncio.sleep(0))


def test_switched_runtime_registers_the_original_or_the_object_itself() -> None:
    class One(Workflow):
        @step
        async def only(self, ev: StartEvent) -> StopEvent:
            return StopEvent()

    original = One()

    class Shared(workflows.RuntimeHooks, One):
        original: Any = None

        def __teola_original__(self) -> Any:
            return self.original or self

    before, runtime = original.runtime, BasicRuntime()
    shared = copies.sharing(Shared, original)
    Shared.original = original
    shared._switch_runtime(runtime)
    assert original in runtime._pending
    Shared.original = None
    alone = Shared()
    alone._switch_runtime(runtime)
    assert alone in runtime._pending
    assert before is not runtime
