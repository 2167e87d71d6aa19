"""Prefetched calls of the user's own models in the steps of a workflow.

When a step begins, the calls that its source shows to be certain are made at once, as far as they need nothing of each
other: the rounds of a loop, calls one after the other. The step runs unchanged and takes their results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.llamaindex.prefetching import AllowedModels, PrefetchPlan, QueryPrefetcher, plan_of_sites
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.runtime.context import during
from teola_plugin.shims.llamaindex.workflows import (
    event_values,
    intercept_steps,
    step_function,
    step_names,
    step_parameters,
    stored_values,
)
from teola_plugin.tracer.llamaindex.steps import EVENT, STORE, TracedStep, trace_step
from teola_plugin.tracer.llamaindex.trace import TracedEntry

Step = Callable[[], Any]
_SIMPLE = (str, int, float, bool, type(None), list, tuple, dict, set)


class StepPlans:
    """The plans of one workflow's steps, each made when its step first begins."""

    def __init__(self, workflow: Any, threads: ThreadSafety) -> None:
        self.workflow, self._threads = workflow, threads
        self._plans: dict[str, tuple[TracedStep, PrefetchPlan | None, Mapping[str, Any]]] = {}

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which the workflow's runs prefetch calls in its steps."""
        return during(_current_plans, self)

    def plan(self, name: str, event_name: str, context_name: str) -> tuple[TracedStep, PrefetchPlan | None]:
        """Return the plan of a step; it is made again when what it depends on has changed."""
        objects = {key: value for key, value in vars(self.workflow).items() if not isinstance(value, _SIMPLE)}
        planned = self._plans.get(name)
        if planned is None or not _holds(*planned, objects):
            allowed = AllowedModels(self._threads, on_loop=True)
            step = trace_step(step_function(self.workflow, name), event_name, context_name, allowed)
            plan = plan_of_sites(TracedEntry(step.traced, step.guards, frozenset()), allowed)
            planned = self._plans[name] = (step, plan, objects)
        return planned[0], planned[1]

    def gaining_steps(self) -> list[str]:
        """Return the names of the steps that prefetch calls."""
        names = step_names(self.workflow)
        return [name for name in names if self.plan(name, *step_parameters(self.workflow, name))[1] is not None]


def _holds(step: TracedStep, _: PrefetchPlan | None, before: Mapping[str, Any], objects: Mapping[str, Any]) -> bool:
    is_same = before.keys() == objects.keys() and all(before[key] is value for key, value in objects.items())
    return is_same and step.data.are_unchanged() and all(guard.holds for guard in step.guards)


_current_plans: ContextVar[StepPlans | None] = ContextVar("teola_step_plans", default=None)
"""Set in the runs of an accelerated workflow."""


def prefetch_in_steps() -> None:
    """Let the steps of accelerated workflows prefetch, until `uninstall`."""
    intercept_steps(_around)


async def _around(step: Step, name: str, workflow: Any, event: Any, context: Any, context_name: str) -> Step:
    """Return the step with its prefetched calls."""
    plans = _current_plans.get()
    if plans is None or plans.workflow is not workflow:
        return step
    try:
        event_name = next((key for key, value in step.keywords.items() if value is event), "")  # type: ignore[attr-defined]
        traced, plan = plans.plan(name, event_name, context_name)
        if plan is None or not plan.intercept():
            return step
        values = {EVENT: event_values(event), STORE: await stored_values(context, traced.store_keys)}
        prefetcher = QueryPrefetcher(plan, values, None)
    except Exception as error:  # nothing of the step has run yet
        log_fallback(error, workflow, f"the step {name!r}")
        return step

    def run() -> Any:
        with prefetcher.in_force():
            result = step()
        prefetcher.close(is_read_from_code=True)
        return result

    async def arun() -> Any:
        with prefetcher.in_force():
            result = await step()
        prefetcher.close(is_read_from_code=True)
        return result

    return arun if inspect.iscoroutinefunction(getattr(workflow, name)) else run
