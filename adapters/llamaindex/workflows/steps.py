"""Prefetched calls of the user's own models in the steps of a workflow.

When a step begins, the calls that its source shows to be certain are made at once, as far as they need nothing of each
other: the rounds of a loop, calls one after the other. If nothing else is under way, so are those of the steps that
certainly come next. The steps run unchanged and take the results.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.explain import created_models, left_rows
from teola_plugin.adapters.llamaindex.prefetching import (
    AllowedModels,
    PrefetchPlan,
    ProviderSite,
    QueryPrefetcher,
    plan_of_sites,
    rows_of_sites,
)
from teola_plugin.adapters.llamaindex.session import Run
from teola_plugin.adapters.plan_report import CallRow, Explanation, PrefetchCounts, Reason, Status
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.runtime.query_run import during
from teola_plugin.shims.llamaindex.workflows import event_values, intercept_steps, stored_values, workflow_steps
from teola_plugin.tracer.llamaindex.steps import EVENT, STORE, TracedSteps, runs_alone, trace_steps
from teola_plugin.tracer.llamaindex.trace import TracedEntry

Step = Callable[[], Any]
_SIMPLE = (str, int, float, bool, type(None), list, tuple, dict, set)


@dataclass(frozen=True, slots=True, eq=False)
class _StepPlan:
    """The plan of a step, or of a step and those that certainly come next."""

    steps: TracedSteps
    prefetched: PrefetchPlan | None
    """None if no call would start sooner."""
    objects: Mapping[str, Any]
    """The attributes of the workflow with which the plan was made."""
    sites: Mapping[str, ProviderSite]
    """The places where the steps call models and stores."""

    def prefetched_calls(self) -> set[tuple[str, int]]:
        """Return the calls that are prefetched, each by the name of its step and its number among the calls there."""
        if self.prefetched is None:
            return set()
        sites, keys = self.prefetched.sites, self.prefetched.prefetched - self.prefetched.useless
        return {
            (step, number)
            for step, names in self.steps.calls.items()
            for number, key in enumerate(name for name in names if name in sites)
            if key in keys
        }

    def holds(self, objects: Mapping[str, Any]) -> bool:
        """Return True unless something has changed that the plan depends on. `objects`: the attributes now."""
        before = self.objects
        is_same = before.keys() == objects.keys() and all(before[key] is value for key, value in objects.items())
        return is_same and self.steps.data.are_unchanged() and all(guard.holds for guard in self.steps.guards)


class StepPlans:
    """The plans of one workflow's steps, each made when its step first begins."""

    def __init__(self, workflow: Any, threads: ThreadSafety) -> None:
        self.workflow, self._threads = workflow, threads
        self._plans: dict[tuple[str, bool], _StepPlan] = {}
        self._counts: dict[str, PrefetchCounts] = {}
        """What became of the prefetched calls at each site, in all plans."""

    def plan(self, name: str, *, is_alone: bool) -> _StepPlan:
        """Return the plan of a step; it is made again when what it depends on has changed.

        `is_alone`: no other step is under way, so that the steps after it may be part of the plan.
        """
        objects = {key: value for key, value in vars(self.workflow).items() if not isinstance(value, _SIMPLE)}
        plan = self._plans.get((name, is_alone))
        if plan is None or not plan.holds(objects):
            allowed = AllowedModels(self._threads, on_loop=True)
            steps = workflow_steps(self.workflow)
            traced = trace_steps(steps, name, allowed, looks_ahead=is_alone and runs_alone(steps, name))
            for key, site in allowed.sites.items():
                allowed.sites[key] = replace(site, counts=self._counts.setdefault(key, site.counts))
            prefetched = plan_of_sites(TracedEntry(traced.traced, traced.guards, frozenset()), allowed)
            plan = self._plans[name, is_alone] = _StepPlan(traced, prefetched, objects, allowed.sites)
        return plan

    def start_run(self, traced_run: Run | None) -> RunPrefetching:
        """Return the prefetched calls of a run that begins. `traced_run`: the query whose trace contains them."""
        return RunPrefetching(self, traced_run)

    def prefetched_calls(self) -> list[str]:
        """Return a phrase for each step whose calls are prefetched: side by side, or before the step begins."""
        return list(dict.fromkeys(self._phrases()))

    def prefetches_calls(self) -> bool:
        """Return True if calls of any step are prefetched."""
        return next(self._phrases(), None) is not None

    def _phrases(self) -> Iterator[str]:
        for name in sorted(workflow_steps(self.workflow)):
            if self.plan(name, is_alone=False).prefetched is not None:
                yield f"calls that the step {name} makes one after the other, side by side"
            plan = self.plan(name, is_alone=True)
            steps_with_calls = {step for step, _ in plan.prefetched_calls()}
            for later in list(plan.steps.calls)[1:]:
                if later in steps_with_calls:
                    yield f"calls of the step {later}, while steps before it run"

    def rows(self) -> Iterator[CallRow]:
        """Yield a row for each place in a step that makes calls, and one for each step that is not all understood."""
        names = sorted(workflow_steps(self.workflow))
        plans = [(f"{name}.", self.plan(name, is_alone=True).prefetched) for name in names]
        keys = ((prefix, key) for prefix, plan in plans if plan is not None for key in plan.prefetched - plan.useless)
        lookahead_keys = {key for prefix, key in keys if not key.startswith(prefix)}
        for name in names:
            plan = self.plan(name, is_alone=False)
            for row in rows_of_sites(plan.steps.traced, plan.prefetched, plan.sites):
                if row.status is Status.IN_PLACE and row.name in lookahead_keys:
                    yield replace(row, status=Status.PREFETCHED, explanation=None, start="while steps before it run")
                else:
                    yield (
                        replace(row, explanation=Explanation(Reason.IN_ITS_STEP)) if row.reason is Reason.FIRST else row
                    )
            traced = plan.steps.traced
            yield from left_rows(created_models(traced.created_models), traced.sources)
            source = traced.sources.get(f"{name}.code")
            if source is not None and not traced.created_models:
                yield CallRow(name, Status.NOT_SEEN, source=source, explanation=Explanation(Reason.UNKNOWN_CODE))


class RunPrefetching:
    """The prefetched calls of one run of a workflow."""

    def __init__(self, plans: StepPlans, traced_run: Run | None) -> None:
        self._plans, self._traced_run = plans, traced_run
        self._gains = plans.prefetches_calls()
        self._running = set[object]()
        """One object for each step that is under way."""
        self._live: list[tuple[QueryPrefetcher, _StepPlan, list[str]]] = []
        """The prefetched calls of steps in sequence, with the names of the steps that have yet to begin."""

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Let steps of a run that begins in the body take prefetched results. An exception ends the prefetching."""
        try:
            with during(_current_run, self):
                yield
        except BaseException:
            self._drop()
            if self._traced_run is not None:
                self._traced_run.cancel()
            raise

    def close(self) -> None:
        """End the run, which has succeeded: calls that have not started do not start any more."""
        if self._traced_run is not None:
            self._traced_run.close()
        live, self._live = self._live, []
        for prefetcher, *_ in live:
            prefetcher.close(is_read_from_code=True)

    def _drop(self) -> None:
        """Give up what was prefetched for steps that may never begin."""
        live, self._live = self._live, []
        for prefetcher, *_ in live:
            prefetcher.close()

    async def around(self, step: Step, name: str, workflow: Any, event: Any, context: Any) -> Step:
        """Return the step with its prefetched calls."""
        if self._plans.workflow is not workflow or not self._gains:
            return step
        token, is_alone, prefetcher = object(), not self._running, None
        self._running.add(token)
        try:
            prefetcher = await self._begin(name, event, context, is_alone=is_alone)
        except Exception as error:  # nothing of the step has run yet
            log_fallback(error, workflow, f"the step {name!r}")

        def run() -> Any:
            with self._step(token, prefetcher, is_alone=is_alone):
                return step()

        async def arun() -> Any:
            with self._step(token, prefetcher, is_alone=is_alone):
                return await step()

        return arun if inspect.iscoroutinefunction(getattr(workflow, name, step.func)) else run  # type: ignore[attr-defined]

    async def _begin(self, name: str, event: Any, context: Any, *, is_alone: bool) -> QueryPrefetcher | None:
        """Return the prefetched calls of a step that begins: those that an earlier step has started, or new ones."""
        if is_alone:
            if any(names[:1] != [name] for _, _, names in self._live):  # the run has taken another way
                self._drop()
            for _, _, names in self._live:
                names.pop(0)
        plan = self._plans.plan(name, is_alone=is_alone)
        earlier = self._live[-1][0] if is_alone and self._live else None
        covered = {call for _, other, _ in self._live for call in other.prefetched_calls()} if is_alone else set()
        if plan.prefetched is None or plan.prefetched_calls() <= covered or not plan.prefetched.intercept():
            return earlier
        values = {EVENT: event_values(event), STORE: await stored_values(context, plan.steps.store_keys)}
        report_to = None if self._traced_run is None else self._traced_run.query_run
        prefetcher = QueryPrefetcher(plan.prefetched, values, report_to, earlier)
        if is_alone:
            self._live.append((prefetcher, plan, list(plan.steps.calls)[1:]))
        return prefetcher

    @contextlib.contextmanager
    def _step(self, token: object, prefetcher: QueryPrefetcher | None, *, is_alone: bool) -> Iterator[None]:
        """Let a step take prefetched results in the body. What was prefetched for it ends with it."""
        try:
            with nullcontext() if prefetcher is None else prefetcher.in_force():
                yield
        except BaseException:
            if is_alone:
                self._drop()
            raise
        finally:
            self._running.discard(token)
        if is_alone:
            for finished in [one for one in self._live if not one[2]]:
                self._live.remove(finished)
                finished[0].close(is_read_from_code=True)
        elif prefetcher is not None:
            prefetcher.close(is_read_from_code=True)


_current_run: ContextVar[RunPrefetching | None] = ContextVar("teola_run_prefetching", default=None)
"""Set in the runs of an accelerated workflow."""


def prefetch_in_steps() -> None:
    """Let the steps of accelerated workflows prefetch, until `uninstall`."""
    intercept_steps(_around)


async def _around(step: Step, name: str, workflow: Any, event: Any, context: Any) -> Step:
    run = _current_run.get()
    return step if run is None else await run.around(step, name, workflow, event, context)
