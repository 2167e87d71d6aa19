"""Prefetched calls of the user's own models in the steps of a workflow.

When a step begins, the calls that its source shows to be certain are made at once, as far as they need nothing of each
other: the rounds of a loop, calls one after the other. If nothing else is under way, so are those of the steps that
certainly come next. The steps run unchanged and take the results.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llama_index.core.workflow import StopEvent, Workflow

from teola_plugin.adapters.explain import created_models, left_rows
from teola_plugin.adapters.llamaindex.prefetching import (
    AllowedModels,
    PrefetchPlan,
    ProviderSite,
    QueryPrefetcher,
    plan_of_sites,
    rows_of_sites,
)
from teola_plugin.adapters.llamaindex.started_calls import Run
from teola_plugin.adapters.llamaindex.workflows.agent_runs import is_agent
from teola_plugin.adapters.plan_report import CallRow, Explanation, PrefetchCounts, Reason, Status
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.runtime.query_run import during
from teola_plugin.shims.llamaindex.workflows import (
    WorkflowStep,
    collected_events,
    event_data,
    event_values,
    intercept_steps,
    run_id,
    sent_events,
    state_class,
    stored_state,
    workflow_steps,
)
from teola_plugin.tracer.functions.pure_expressions import Decide
from teola_plugin.tracer.langgraph.decisions import PlanTree
from teola_plugin.tracer.llamaindex.step_data import (
    COLLECTED,
    EVENT,
    EVENT_CLASSES,
    EVENT_DATA,
    FRAMEWORK_ATTRIBUTES,
    STORE,
    StoreUses,
    changing_attributes,
    class_names,
)
from teola_plugin.tracer.llamaindex.step_models import UnreadCall
from teola_plugin.tracer.llamaindex.steps import (
    MAX_COLLECTED,
    Collected,
    StepSituation,
    TracedSteps,
    may_call_models,
    runs_alone,
    trace_steps,
)
from teola_plugin.tracer.llamaindex.trace import TracedEntry

Step = Callable[[], Any]
_SIMPLE = (str, int, float, bool, type(None), list, tuple, dict, set)
MAX_SITUATIONS = 256
"""Situations of one workflow's steps for which there are plans."""


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
    """The plans of one workflow's steps, each made when its step first begins in a situation."""

    def __init__(self, workflow: Any, threads: ThreadSafety, outer: tuple[Any, ...] = ()) -> None:
        """`outer`: the workflows whose steps run this one, which have it as an attribute."""
        self.workflow, self._threads = workflow, threads
        attributes = vars(workflow).items()
        self.inner = {
            name: StepPlans(value, threads, (*outer, workflow))
            for name, value in attributes
            if _is_plain_workflow(value) and not any(value is one for one in (*outer, workflow))
        }
        """The plans of workflows that are attributes of this one, by the attributes' names."""
        self.steps = workflow_steps(workflow)
        self.state_class = state_class(workflow)
        self._attributes = changing_attributes(workflow)
        self._store_uses = StoreUses(self.steps)
        self.run_alone = frozenset(name for name in self.steps if runs_alone(self.steps, name))
        """Steps beside which nothing else is under way when they begin."""
        self._trees: dict[tuple[str, StepSituation], PlanTree[_StepPlan]] = {}
        self._largest_plans: dict[tuple[str, bool], _StepPlan] = {}
        """The plan with the most prefetched calls of each step, if it runs alone and if not."""
        self._counts: dict[str, PrefetchCounts] = {}
        """What became of the prefetched calls at each site, in all plans."""

    def situation(
        self, name: str, running: Collection[str], state: Mapping[str, Any] | None, *, is_alone: bool
    ) -> StepSituation:
        """Return what is known of the run in which a step begins. `running`: the names of other steps under way."""
        changing_later = self._store_uses.changing_keys(name, (*running, name), None)
        changing = frozenset[str]() if is_alone else self._store_uses.changing_keys(name, running, state)
        return StepSituation(is_alone, changing, changing_later, self._attributes)

    def plan(self, name: str, situation: StepSituation, values: Any = None) -> _StepPlan | None:
        """Return the plan of a step for the values of its input; it is made again when what it depends on has changed.

        None if the step has begun in too many situations.
        """
        tree = self._trees.get((name, situation))
        plan = None if tree is None else tree.plan(values)
        if plan is None or not plan.holds(self._objects()):
            if tree is None and len(self._trees) >= MAX_SITUATIONS:
                return None
            tree = self._trees[name, situation] = PlanTree(partial(self._make, name, situation))
            plan = tree.plan(values)
        return plan

    def _objects(self) -> dict[str, Any]:
        """Return the workflow's attributes that hold objects, by which a plan notices that one was replaced."""
        attributes = vars(self.workflow).items()
        return {
            key: value
            for key, value in attributes
            if key not in FRAMEWORK_ATTRIBUTES and not isinstance(value, _SIMPLE)
        }

    def _make(self, name: str, situation: StepSituation, decide: Decide | None) -> _StepPlan:
        """Trace a step in a situation and plan its prefetched calls; remember the plan if no other prefetches more.

        `decide` answers conditions on the step's input; None assumes no outcome.
        """
        allowed = AllowedModels(self._threads, on_loop=True)
        traced = trace_steps(self.steps, name, allowed, self.state_class, situation, decide)
        for key, site in allowed.sites.items():
            allowed.sites[key] = replace(site, counts=self._counts.setdefault(key, site.counts))
        prefetched = plan_of_sites(TracedEntry(traced.traced, traced.guards, frozenset()), allowed)
        plan = _StepPlan(traced, prefetched, self._objects(), allowed.sites)
        best_plan = self._largest_plans.get((name, situation.is_alone))
        if best_plan is None or len(best_plan.prefetched_calls()) <= len(plan.prefetched_calls()):
            self._largest_plans[name, situation.is_alone] = plan
        return plan

    def start_run(self, traced_run: Run | None) -> RunPrefetching:
        """Return the prefetched calls of a run that begins. `traced_run`: the query whose trace contains them."""
        return RunPrefetching(self, traced_run)

    # ------------------------------------------------------------ explanations

    def prefetched_calls(self) -> list[str]:
        """Return a phrase for each step whose calls are prefetched: side by side, or before the step begins."""
        return list(dict.fromkeys(self._phrases()))

    def prefetches_calls(self) -> bool:
        """Return True if calls of any step are prefetched."""
        return next(self._phrases(), None) is not None

    def _phrases(self, prefix: str = "") -> Iterator[str]:
        """Yield a phrase for each step whose calls are prefetched, also in workflows that are attributes of this one.

        `prefix`: what stands before the steps' names.
        """
        for name in sorted(self.steps):
            plan = self._largest_plan(name, is_alone=True)
            steps_with_calls = {step for step, _ in plan.prefetched_calls()}
            if name in steps_with_calls or self._largest_plan(name, is_alone=False).prefetched is not None:
                yield f"calls that the step {prefix}{name} makes one after the other, side by side"
            for later in list(plan.steps.calls)[1:]:
                if later in steps_with_calls:
                    yield f"calls of the step {prefix}{later}, while steps before it run"
        for name, inner in self.inner.items():
            yield from inner._phrases(f"{prefix}{name}.")

    def _largest_plan(self, name: str, *, is_alone: bool) -> _StepPlan:
        """Return the plan with the most prefetched calls of those that were made for a step, and of some others."""
        key = name, is_alone
        if key not in self._largest_plans or not self._largest_plans[key].holds(self._objects()):
            self._largest_plans.pop(key, None)
            situation = self.situation(name, (), {}, is_alone=is_alone)
            tree = self._trees[name, situation] = PlanTree(partial(self._make, name, situation))
            tree.prepare()
            plan = tree.plan(None)
            if plan is not None and (plan.steps.collections or self.steps[name].collected):
                self._make(name, replace(situation, collected=self._example(plan, name)), None)
        return self._largest_plans[key]

    def _example(self, plan: _StepPlan, name: str) -> Collected:
        """Return events that the collections of a step may have come to: two where their number is not known."""
        step = self.steps[name]
        accepted = step.accepted_events[-1:] * 2
        collected: dict[str, tuple[type, ...]] = {}
        for (parameter, is_list), kind in zip(step.collected, step.accepted_events, strict=False):
            collected[parameter] = accepted if is_list else (kind,)
        for one in plan.steps.collections:
            try:
                collected[one.key] = tuple(one.expected({}))
            except Exception:  # it needs what the run knows
                collected[one.key] = accepted
        return tuple(collected.items())

    def rows(self) -> Iterator[CallRow]:
        """Yield a row for each place in a step that makes calls, and one for each step that is not all understood."""
        names = sorted(self.steps)
        plans = [(f"{name}.", self._largest_plan(name, is_alone=True).prefetched) for name in names]
        keys = ((prefix, key) for prefix, plan in plans if plan is not None for key in plan.prefetched - plan.useless)
        lookahead_keys = {key for prefix, key in keys if not key.startswith(prefix)}
        for name in names:
            plan = self._largest_plan(name, is_alone=name in self.run_alone)
            site_rows = rows_of_sites(plan.steps.traced, plan.prefetched, plan.sites)
            for row in (one for one in site_rows if one.name.startswith(f"{name}.")):
                if row.status is Status.IN_PLACE and row.name in lookahead_keys:
                    yield replace(row, status=Status.PREFETCHED, explanation=None, start="while steps before it run")
                else:
                    yield (
                        replace(row, explanation=Explanation(Reason.IN_ITS_STEP)) if row.reason is Reason.FIRST else row
                    )
            traced = plan.steps.traced
            created = {key: model for key, model in traced.created_models.items() if key.startswith(f"{name}:")}
            yield from left_rows(created_models(created), traced.sources)
            unread_calls = {key: one for key, one in plan.steps.unread_calls.items() if one.step == name}
            source = traced.sources.get(f"{name}.code")
            may_call = source in unread_calls or may_call_models(self.steps[name])
            if source is not None and not created and may_call:
                explanation = _why_unread(unread_calls.get(source))
                yield CallRow(name, Status.NOT_SEEN, source=source, explanation=explanation)
            read_lines = {traced.sources.get(key) for key in plan.sites}
            for line, call in unread_calls.items():
                if call.method and line not in read_lines:
                    explanation = Explanation(Reason.UNREAD_CALL)
                    yield CallRow(f"{name}.{call.method}", Status.IN_PLACE, call.class_name, line, "", explanation)
        for name, inner in self.inner.items():
            yield from (replace(row, name=f"{name}.{row.name}") for row in inner.rows())


def _is_plain_workflow(value: Any) -> bool:
    """Return True for a workflow that is neither an agent nor accelerated by itself."""
    return isinstance(value, Workflow) and not is_agent(value) and not hasattr(value, "__teola_accelerated__")


def _why_unread(call: UnreadCall | None) -> Explanation:
    """Return why nothing is known behind a place in a step's code. `call`: the call there, if it is a known one."""
    if call is None or call.method:
        return Explanation(Reason.UNKNOWN_CODE)
    if not call.class_name:
        return Explanation(Reason.WAITS_FOR_EVENT)
    return Explanation(Reason.RUNS_WORKFLOW, (call.class_name,))


class RunPrefetching:
    """The prefetched calls of one run of a workflow."""

    def __init__(self, plans: StepPlans, traced_run: Run | None) -> None:
        self._plans, self._traced_run = plans, traced_run
        self._gains = plans.prefetches_calls()
        self._running: dict[object, str] = {}
        """The names of the steps that are under way, by one object for each."""
        self._due = DueSteps(plans.steps)
        self._live: list[tuple[QueryPrefetcher, _StepPlan, list[str]]] = []
        """The prefetched calls of steps in sequence, with the names of the steps that have yet to begin."""
        self._run_id, self._is_over = "", False
        self._inner: dict[str, RunPrefetching] = {}
        """The prefetched calls of runs of other workflows that steps have begun, by the ids of the runs."""

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
        inner, self._inner = self._inner, {}
        for run in inner.values():
            run._drop()

    def _drop(self) -> None:
        """Give up what was prefetched for steps that may never begin."""
        live, self._live = self._live, []
        for prefetcher, *_ in live:
            prefetcher.close()
        inner, self._inner = self._inner, {}
        for run in inner.values():
            run._drop()

    def _find_run(self, workflow: Any, run_id: str) -> RunPrefetching | None:
        """Return the prefetched calls of this run, or of one that its steps have begun; None for any other."""
        if self._plans.workflow is workflow and self._run_id in ("", run_id):
            self._run_id = run_id
            return self
        if run_id in self._inner:
            return self._inner[run_id]
        for run in self._inner.values():
            if (inner_run := run._find_run(workflow, run_id)) is not None:
                return inner_run
        plans = next((one for one in self._plans.inner.values() if one.workflow is workflow), None)
        if plans is None or not run_id:
            return None
        self._inner = {key: run for key, run in self._inner.items() if not run._is_over}
        run = self._inner[run_id] = RunPrefetching(plans, self._traced_run)
        run._run_id = run_id
        return run

    async def around(
        self, step: Step, name: str, workflow: Any, event: Any, context: Any, bound: Mapping[str, Any]
    ) -> Step:
        """Return the step with its prefetched calls."""
        run = self._find_run(workflow, run_id(context)) if self._gains else None
        if run is None:
            return step
        if run is self:
            return await self._around_own(step, name, event, context, bound, is_certain=True)
        return await run._around_own(step, name, event, context, bound, is_certain=len(self._running) == 1)

    async def _around_own(
        self, step: Step, name: str, event: Any, context: Any, bound: Mapping[str, Any], *, is_certain: bool
    ) -> Step:
        """Return a step of this run. `is_certain`: no step of a run around it may end it."""
        workflow, token = self._plans.workflow, object()
        running = set(self._running.values())
        prefetcher = None
        self._due.begin(event)
        is_alone = is_certain and not running and (self._due.are_none or name in self._plans.run_alone)
        self._running[token] = name
        try:
            prefetcher = await self._begin(name, event, context, bound, running, is_alone=is_alone)
        except Exception as error:  # nothing of the step has run yet
            log_fallback(error, workflow, f"the step {name!r}")

        def run() -> Any:
            """Run a sync step, whose calls take prefetched results, and note what it returns."""
            with self._step(token, prefetcher, is_alone=is_alone):
                result = step()
                self._step_ended(result)
                return result

        async def arun() -> Any:
            """Run an async step as `run` runs a sync one."""
            with self._step(token, prefetcher, is_alone=is_alone):
                result = await step()
                self._step_ended(result)
                return result

        return arun if inspect.iscoroutinefunction(getattr(workflow, name, step.func)) else run  # type: ignore[attr-defined]

    def _step_ended(self, result: Any) -> None:
        """Note what a step returns, in which this is called."""
        self._due.end(result)
        self._is_over = self._is_over or isinstance(result, StopEvent)

    async def _begin(
        self, name: str, event: Any, context: Any, bound: Mapping[str, Any], running: set[str], *, is_alone: bool
    ) -> QueryPrefetcher | None:
        """Return the prefetched calls of a step that begins: those that an earlier step has started, or new ones."""
        if is_alone:
            if any(names[:1] != [name] for _, _, names in self._live):  # the run has taken another way
                self._drop()
            for _, _, names in self._live:
                names.pop(0)
        earlier = self._live[-1][0] if is_alone and self._live else None
        state = await stored_state(context)
        if state is not None and state[0] is not self._plans.state_class:
            return earlier
        values = _input_of_step(event, bound, None if state is None else state[1])
        situation = self._plans.situation(name, running, values.get(STORE), is_alone=is_alone)
        collected = {key: (events if type(events) is list else [events]) for key, events in bound.items()}
        plan = self._plan(name, situation, values, event, collected)
        covered = {call for _, other, _ in self._live for call in other.prefetched_calls()} if is_alone else set()
        if plan is None or plan.prefetched is None:
            return earlier
        if plan.prefetched_calls() <= covered or not plan.prefetched.intercept():
            return earlier
        report_to = None if self._traced_run is None else self._traced_run.query_run
        prefetcher = QueryPrefetcher(plan.prefetched, values, report_to, earlier)
        if is_alone:
            self._live.append((prefetcher, plan, list(plan.steps.calls)[1:]))
        return prefetcher

    def _plan(
        self, name: str, situation: StepSituation, values: dict[str, Any], event: Any, collected: dict[str, list[Any]]
    ) -> _StepPlan | None:
        """Return the plan of a step that begins. The events that it has collected are added to `values`."""
        if collected:
            situation = _with_collected(situation, values, collected)
        plan = self._plans.plan(name, situation, values)
        if plan is None or not plan.steps.collections:
            return plan
        buffers = collected_events()
        for one in plan.steps.collections:
            try:
                expected = one.expected(values)
            except Exception:  # it raises in the step as well, or more events are expected than plans are made for
                return plan
            events = _collect(expected, [*buffers.get(one.buffer, ()), event])
            if events is None:  # the step is about to return
                return plan
            collected[one.key] = events
        return self._plans.plan(name, _with_collected(situation, values, collected), values)

    @contextlib.contextmanager
    def _step(self, token: object, prefetcher: QueryPrefetcher | None, *, is_alone: bool) -> Iterator[None]:
        """Let a step take prefetched results in the body. What was prefetched for it ends with it."""
        try:
            with nullcontext() if prefetcher is None else prefetcher.in_force():
                yield
        except BaseException:
            self._due.forget()
            if is_alone:
                self._drop()
            raise
        finally:
            self._running.pop(token, None)
        if is_alone:
            for finished in [one for one in self._live if not one[2]]:
                self._live.remove(finished)
                finished[0].close(is_read_from_code=True)
        elif prefetcher is not None:
            prefetcher.close(is_read_from_code=True)


class DueSteps:
    """Counts the events that steps of a run have sent, and whose steps have not begun."""

    def __init__(self, steps: Mapping[str, WorkflowStep]) -> None:
        self._steps = steps
        self._count: int | None = 0 if all(step.takes_one_event for step in steps.values()) else None
        """None if it is not known: after an error, or where steps wait for several events."""

    @property
    def are_none(self) -> bool:
        """True if no step is due."""
        return self._count == 0

    def begin(self, event: Any) -> None:
        """Note that a step begins with an event. If none is due, the event comes from outside the workflow."""
        if self._count is not None:
            self._count += -1 if self._count else self._accepting(event) - 1

    def end(self, result: Any) -> None:
        """Note what a step returns, in which this is called, and what it has sent."""
        events = sent_events()
        if self._count is None or events is None or isinstance(result, list):
            self._count = None
            return
        self._count += self._accepting(result)
        self._count += sum(1 if receiver else self._accepting(event) for event, receiver in events)

    def forget(self) -> None:
        """Give up the count: after an error it is not known which steps will run."""
        self._count = None

    def _accepting(self, event: Any) -> int:
        return sum(step.accepts(type(event)) for step in self._steps.values())


def _input_of_step(event: Any, bound: Mapping[str, Any], state: dict[str, Any] | None) -> dict[str, Any]:
    """Return the input of a step's template."""
    values: dict[str, Any] = {} if state is None else {STORE: state}
    if not bound:
        values |= {EVENT: event_values(event), EVENT_DATA: event_data(event), EVENT_CLASSES: class_names(type(event))}
    return values


def _with_collected(
    situation: StepSituation, values: dict[str, Any], collected: Mapping[str, list[Any]]
) -> StepSituation:
    """Return the situation of a step that has these events, after adding them to the input of its template."""
    values[COLLECTED] = {key: [event_values(event) for event in events] for key, events in collected.items()}
    kinds = tuple((key, tuple(type(event) for event in events)) for key, events in collected.items())
    return replace(situation, collected=kinds)


def _collect(expected: Sequence[type], events: Sequence[Any]) -> list[Any] | None:
    """Return what `collect_events` returns: the events in the order of their expected classes; None if one is missing.

    The last one of `events` is that of the step.
    """
    if len(expected) > MAX_COLLECTED or Counter(expected) != Counter(type(event) for event in events):
        return None
    remaining = list(events)
    return [remaining.pop(next(i for i, one in enumerate(remaining) if type(one) is kind)) for kind in expected]


_current_run: ContextVar[RunPrefetching | None] = ContextVar("teola_run_prefetching", default=None)
"""Set in the runs of an accelerated workflow."""


def prefetch_in_steps() -> None:
    """Let the steps of accelerated workflows prefetch, until `uninstall`."""
    intercept_steps(_around)


async def _around(step: Step, name: str, workflow: Any, event: Any, context: Any, bound: Mapping[str, Any]) -> Step:
    run = _current_run.get()
    return step if run is None else await run.around(step, name, workflow, event, context, bound)
