"""Workflows and agents: the end of a run, the steps of a class, the parts of tools, the arguments of tool calls.

Written for `llama-index-workflows` 2.26. Each function says what it touches, and what happens without it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.core.workflow import Event
from pydantic import BaseModel

from teola_plugin.shims import report_missing
from teola_plugin.shims.llamaindex.copies import sharing, without_spans
from teola_plugin.shims.llamaindex.interceptors import intercept_methods
from teola_plugin.shims.llamaindex.records import Parts, attribute

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.tools.types import BaseTool
    from llama_index.core.workflow.handler import WorkflowHandler  # type: ignore[attr-defined]

Result = Callable[[], Awaitable[Any]]
"""Waits for the event that ends a run; raises what the run failed with."""

# ------------------------------------------------------------ runs


def call_when_ended(handler: WorkflowHandler, callback: Callable[[BaseException | None], None]) -> None:
    """Call `callback` on the run's loop when the run has ended, with its exception or None.

    It is also called, with `CancelledError`, if the run can never end because its loop is gone.

    Touches the handler's `_result_task`. Without it: when the handler is freed.
    """
    task = getattr(handler, "_result_task", None)
    if not isinstance(task, asyncio.Task):
        weakref.finalize(handler, callback, None).atexit = False
        return
    task.add_done_callback(lambda ended: callback(_error(ended)))
    weakref.finalize(task, callback, asyncio.CancelledError()).atexit = False


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


class ResultHooks:
    """A base class put before the class of a handler's adapter, to change how the result is awaited."""

    if TYPE_CHECKING:

        async def __teola_result__(self, result: Result, cancel: Result) -> Any: ...

    async def get_result(self) -> Any:
        result, cancel = super().get_result, super().cancel  # type: ignore[misc]
        return await self.__teola_result__(result, cancel)


def intercept_result(handler: WorkflowHandler, awaited: Callable[[Result, Result], Awaitable[Any]]) -> None:
    """Make the handler's result what `awaited` returns; it gets the run's own result and what cancels the run.

    Must be called before the event loop continues.

    Touches the handler's `_external_adapter`. Without it: the result is the run's own.
    """
    adapter = getattr(handler, "_external_adapter", None)
    if adapter is None or not hasattr(adapter, "__dict__"):
        if not hasattr(handler, "_external_adapter"):
            missing = "WorkflowHandler._external_adapter"
            report_missing("llama-index-workflows", missing, "a run's time limit does not end its result")
        return
    kind: Any = type(adapter)

    async def hooked(self: Any, result: Result, cancel: Result) -> Any:
        return await awaited(result, cancel)

    names = {"__teola_result__": hooked, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    handler._external_adapter = sharing(type(kind)(kind.__name__, (ResultHooks, kind), names), adapter)


class RuntimeHooks:
    """A base class put before a workflow's class, so that runtimes register and run its `__teola_original__`."""

    if TYPE_CHECKING:

        def __teola_original__(self) -> Any: ...

    def _switch_runtime(self, new_runtime: Any) -> None:
        """Switch the original, too, which a runtime would keep otherwise."""
        original = self.__teola_original__()
        switch = super()._switch_runtime if original is self else original._switch_runtime  # type: ignore[misc]
        switch(new_runtime)


def runs_any_workflow(runtime: Any) -> bool:
    """Return True if a runtime runs any workflow of this process, not only those registered at its launch.

    Touches the `_decorated` of runtimes around others. Without it: no, unless it is the basic one.
    """
    while hasattr(runtime, "_decorated"):
        runtime = runtime._decorated
    return type(runtime).__module__ == "workflows.plugins.basic"


# ------------------------------------------------------------ classes


def step_names(workflow: Any) -> list[str]:
    """Return the names of a workflow's steps, sorted.

    Touches `_get_steps`. Without it: none.
    """
    steps = getattr(workflow, "_get_steps", None)
    if steps is None:
        report_missing("llama-index-workflows", "Workflow._get_steps", "its steps are not in the report")
    return sorted(steps()) if steps is not None else []


def objects_used_by_steps(workflow: Any) -> Iterator[object]:
    """Yield the globals and closure variables that a workflow's steps use.

    Touches `_get_steps`. Without it: nothing.
    """
    steps = getattr(workflow, "_get_steps", None)
    if steps is None:
        report_missing(
            "llama-index-workflows", "Workflow._get_steps", "objects that its steps name are not accelerated"
        )
    for step in steps().values() if steps is not None else ():
        function = inspect.unwrap(getattr(step, "__func__", step))
        if inspect.isfunction(function):
            variables = inspect.getclosurevars(function)
            yield from (*variables.nonlocals.values(), *variables.globals.values())


AroundStep = Callable[[Callable[[], Any], str, Any, Any, Any, dict[str, Any]], Awaitable[Callable[[], Any]]]
"""(step with its arguments, its name, workflow, event, context, events by parameter) -> what runs.

The last one holds the events of a step that gets several, each an event or a list of them; it is empty for others.
"""


def intercept_steps(around: AroundStep) -> None:
    """Run what `around` returns in place of each step, until `uninstall`. Idempotent.

    Touches `partial` of `workflows.runtime.types.step_function`. Without it: steps run as they are.
    """
    try:
        step_functions: Any = importlib.import_module("workflows.runtime.types.step_function")
    except ImportError:
        step_functions = None
    if not hasattr(step_functions, "partial"):
        report_missing("llama-index-workflows", "step_function.partial", "no call in a step is prefetched")
        return

    def wrap(original: Any) -> Any:
        """Wrap the function by which the workflow runtime binds a step to its event, to bind what `around` returns."""

        @functools.wraps(original)
        async def bind(func: Any, step_config: Any, event: Any, context: Any, workflow: Any, **kwargs: Any) -> Any:
            step = await original(func, step_config, event, context, workflow, **kwargs)
            bound = next((dict(value) for value in kwargs.values() if value is not None), {})
            return await around(step, func.__name__, workflow, event, context, bound)

        return bind

    intercept_methods(step_functions, {"partial": wrap})


@dataclass(frozen=True, slots=True)
class WorkflowStep:
    """A step of a workflow, as its signature declares it."""

    name: str
    function: Any
    """Bound to its workflow, unless it is a free function."""
    event_name: str
    context_name: str
    """Names of the parameters for its event and its context; the latter is empty without one."""
    accepted_events: tuple[type, ...]
    takes_subclasses: bool
    """True if it also accepts events of subclasses."""
    takes_one_event: bool
    """False for a step that runs when several events have come, or after an error."""
    sends_list: bool
    """True if it returns a list of events."""
    num_workers: int = 1
    """Events that it handles at the same time."""
    collected: tuple[tuple[str, bool], ...] = ()
    """The parameters for events of a step that runs when several have come; True for one that takes a list."""

    def accepts(self, kind: type) -> bool:
        """Return True if an event of this class makes it run, alone or together with others."""
        return any(kind is one or (self.takes_subclasses and issubclass(kind, one)) for one in self.accepted_events)


def workflow_steps(workflow: Any) -> dict[str, WorkflowStep]:
    """Return a workflow's steps by name.

    Touches `_get_steps` of workflows and `_step_config` of steps.
    """
    steps: dict[str, WorkflowStep] = {}
    for name, step in workflow._get_steps().items():
        config, method = step._step_config, getattr(workflow, name, step)
        function = inspect.unwrap(getattr(method, "__func__", method))
        steps[name] = WorkflowStep(
            name,
            MethodType(function, workflow) if inspect.ismethod(method) else function,
            config.event_name,
            config.context_parameter or "",
            tuple(kind for kind in config.accepted_events if inspect.isclass(kind)),
            getattr(config, "accept_event_subclasses", False),
            not any(getattr(config, name, None) for name in ("collect_params", "collection_param"))
            and getattr(config, "role", "step") == "step",
            getattr(config, "is_fan_out", False),
            config.num_workers,
            _collected_parameters(config),
        )
    return steps


def _collected_parameters(config: Any) -> tuple[tuple[str, bool], ...]:
    listed = getattr(config, "collection_param", None)
    single = getattr(config, "collect_params", None) or ()
    return ((listed[0], True),) if listed else tuple((name, False) for name, _ in single)


def event_values(event: Any) -> dict[str, Any]:
    """Return the values that an event holds, by name; lists are copied."""
    values = {**{name: getattr(event, name) for name in type(event).model_fields}, **dict(event.items())}
    return {name: list(value) if type(value) is list else value for name, value in values.items()}


def event_data(event: Any) -> dict[str, Any]:
    """Return the values that an event holds and that are no declared fields of its class, by name."""
    return dict(event.items())


# ------------------------------------------------------------ the state of a run

MAPPING_MODEL: type[Any] = Event.__mro__[1]
"""The base class of events and of states without declared fields, whose values may be read by key."""


def is_dictionary_state(kind: type) -> bool:
    """Return True for the class of states without declared fields, which take any key."""
    return kind.__name__ == "DictState" and kind.__module__.startswith("workflows.")


def state_class(workflow: Any) -> type[BaseModel]:
    """Return the class of the state that the runs of a workflow have.

    Touches `infer_state_type` of `workflows.context.state_store`. Without it: `BaseModel`, which no state is.
    """
    try:
        infer = importlib.import_module("workflows.context.state_store").infer_state_type
    except (ImportError, AttributeError):
        report_missing("llama-index-workflows", "infer_state_type", "calls behind reads of the store stay in place")
        return BaseModel
    try:
        kind: type[BaseModel] = infer(workflow)
    except ValueError:  # the run raises it as well
        return BaseModel
    return kind


async def stored_state(context: Any) -> tuple[type, dict[str, Any]] | None:
    """Return the class and the values of the state in a context's store; None if it is not in memory."""
    store = context.store
    if type(store).__name__ != "InMemoryStateStore":
        return None
    state = await store.get_state()
    values = dict(vars(state))
    return type(state), values | dict(state.items()) if isinstance(state, MAPPING_MODEL) else values


# ------------------------------------------------------------ the step that runs


def run_id(context: Any) -> str:
    """Return the id of the run to which a step's context belongs.

    Touches `_face` of contexts and `_internal_adapter` of that. Without them: an empty text.
    """
    return str(getattr(getattr(getattr(context, "_face", None), "_internal_adapter", None), "run_id", ""))


def collected_events() -> Mapping[str, Sequence[Any]]:
    """Return the events that the running step has collected before, by the names of their buffers.

    Touches `StepWorkerStateContextVar` of `workflows.runtime.types.results`. Without it: none.
    """
    step_context = _step_context()
    return {} if step_context is None else dict(step_context.state.collected_events)


def sent_events() -> list[tuple[Any, str]] | None:
    """Return the events that the running step has sent so far, each with the step that alone gets it, if there is one.

    Touches `StepWorkerStateContextVar` of `workflows.runtime.types.results`. Without it: None.
    """
    step_context = _step_context()
    entries = None if step_context is None else step_context.sends.entries
    return None if entries is None else [(one.event, str(one.step_id or "")) for one in entries]


def _step_context() -> Any:
    """Return the context of the running step, which holds its collected and sent events; None without one.

    Touches `StepWorkerStateContextVar` of `workflows.runtime.types.results`. Without it: None, which is logged.
    """
    try:
        variable = importlib.import_module("workflows.runtime.types.results").StepWorkerStateContextVar
        return variable.get(None)
    except (ImportError, AttributeError):
        report_missing("llama-index-workflows", "StepWorkerStateContextVar", "fewer calls in steps are prefetched")
        return None


# ------------------------------------------------------------ tools


@dataclass(frozen=True, slots=True)
class QueryEngineToolParts(Parts):
    OF: ClassVar = (QueryEngineTool,)

    part: BaseQueryEngine = attribute("_query_engine", BaseQueryEngine)


@dataclass(frozen=True, slots=True)
class RetrieverToolParts(Parts):
    OF: ClassVar = (RetrieverTool,)

    part: BaseRetriever = attribute("_retriever", BaseRetriever)


def tool_arguments(
    llm: FunctionCallingLLM, tools: Sequence[BaseTool], messages: Sequence[ChatMessage], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments that `chat_with_tools` passes to `chat`, without events.

    Touches `_prepare_chat_with_tools`, which every such LLM writes.
    """
    prepare = without_spans(llm, "_prepare_chat_with_tools")
    chat_arguments: dict[str, Any] = prepare(tools, chat_history=list(messages), **arguments)
    return chat_arguments
