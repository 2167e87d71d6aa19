"""Prefilling of a prompt as far as it is known while the list of which it is made still grows (see `graph.growth`).

The calls between the list and the prompt are made for the first outputs of the list. Their text predicts the beginning
of the prompt: rightly if contexts are joined in order, wrongly if everything is sorted once more. A text at the end
that is there with one output less, too (the original question's own passages), moves on with each output and is no part
of the prediction. So a plan is trusted only after one of its queries has shown that its text grows so, and until one
shows that it does not. Queries of one tenant teach nothing about another's. A wrong prediction costs the engine's time,
never an answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from teola_plugin.graph import (
    INPUT,
    Graph,
    Growth,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Ref,
    growths,
    read_path,
    runs_on_loop,
)
from teola_plugin.requests.payloads import UNKNOWN
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.live_query import LivePrimitive, Status

MIN_RIGHT_SHARE = 0.75
"""Share of a predicted text that must be right for the prediction to count as right."""
GROWTH_STEP = 8
"""A prompt's text is made again when the list has grown by one part in this many, since it is made as a whole."""
MAX_TRUSTED = 256
"""Prompts, each of one tenant, of which it is remembered whether they grow at their end."""


@dataclass(slots=True, eq=False)
class GrowingPrompt:
    """A prompt of a live query that may grow with a list, and how far it is known."""

    growth: Growth
    plan_growth: Growth
    """The same growth as the plan has it: what one query shows of it holds for others."""
    outputs: list[Ref] = field(default_factory=list)
    """Outputs of the list, as far as the graph knows them."""
    ready: int = 0
    """Number of these outputs, from the first on, whose values were there at the last look."""
    used: int = 0
    """Number of outputs of which the latest text is made."""
    latest_text: str | None = None
    """The prompt's growing variable, made of the first `used` outputs; None before the first look."""
    prefix: str = ""
    """Predicted beginning of that variable."""
    is_over: bool = False
    is_computing: bool = False
    """True while the client's code makes the next text."""
    warmup: str = ""
    """Primitive that prefills the latest prefix now; empty if there is none."""
    warmups: int = 0
    """Number of prefixes that were prefilled so far."""


_growths: WeakKeyDictionary[Graph, tuple[Growth, ...]] = WeakKeyDictionary()


def growing_prompts(graph: Graph, subplan: str = "", input_name: str = INPUT) -> list[GrowingPrompt]:
    """Return the prompts that may grow in a query with this e-graph, or in a subplan with this name and input."""
    plan_growths = _growths.get(graph)
    if plan_growths is None:
        plan_growths = _growths[graph] = growths(graph)
    if not subplan or not plan_growths:
        return [GrowingPrompt(growth, growth) for growth in plan_growths]
    names = {p.id: InstancePath(subplan).child(p.id) for p in graph}
    return [GrowingPrompt(growth.renamed(names, {INPUT: Ref(input_name)}), growth) for growth in plan_growths]


@dataclass(slots=True)
class IncrementalPrefilling:
    """The prefilling of the growing prompts of all queries of a driver. It hears of each value."""

    holder: Callable[[QueryRun, str], LivePrimitive | None]
    """Returns the live MAP with an id."""
    compute: Callable[[QueryRun, Primitive, dict[str, Any]], Any]
    """Computes the value of a CALL."""
    start: Callable[[QueryRun, Primitive], None]
    """Sends a primitive that is not in the graph to its engine."""
    stop: Callable[[QueryRun, str], None]
    """Cancels such a primitive if it has not begun."""
    code: ClientCode
    """Runs the functions that make the texts."""
    _trusted: OrderedDict[tuple[str, Growth], bool] = field(default_factory=OrderedDict)
    """(tenant, growth of a plan) -> True if the prompt was last seen to grow at its end."""

    def reset(self) -> None:
        """Forget everything that was learned about prompts."""
        self._trusted.clear()

    def note_end(self, run: QueryRun, name: str) -> None:
        """Note that a primitive has its value, or has ended."""
        for prompt in run.growing:
            if prompt.is_over:
                continue
            if name == prompt.warmup:
                prompt.warmup = ""
            elif not InstancePath(name).in_instance_of(prompt.growth.holder):
                continue
            self._follow(run, prompt)

    def note_dispatch(self, run: QueryRun, p: Primitive) -> None:
        """Learn from a prompt that is complete whether its predictions were right."""
        for prompt in run.growing:
            if prompt.growth.prefilling.id != p.id or prompt.is_over:
                continue
            prompt.is_over = True
            if prompt.warmup:
                self.stop(run, prompt.warmup)
            ref = p.input(prompt.growth.variable)
            if prompt.prefix and ref is not None and ref.producer in run.store:
                text = run.store.read(ref)
                self._learn(run, prompt, grows=isinstance(text, str) and _is_right(prompt.prefix, text))

    def _learn(self, run: QueryRun, prompt: GrowingPrompt, *, grows: bool) -> None:
        key = run.query.tenant, prompt.plan_growth
        self._trusted[key] = grows
        self._trusted.move_to_end(key)
        while len(self._trusted) > MAX_TRUSTED:
            self._trusted.popitem(last=False)

    def _follow(self, run: QueryRun, prompt: GrowingPrompt) -> None:
        """Make the prompt's text again if the list has grown enough since the last time."""
        holder = self.holder(run, prompt.growth.holder)
        if holder is None or holder.status.has_ended or prompt.is_computing or prompt.is_over:
            return
        outputs = holder.outputs or holder.early_outputs
        if outputs is not prompt.outputs:
            prompt.outputs, prompt.ready = outputs, 0
        while prompt.ready < len(outputs) and outputs[prompt.ready].producer in run.store:
            prompt.ready += 1
        ready = prompt.ready
        is_complete = holder.status is Status.EXPANDING and ready == len(outputs)
        if ready < prompt.used + max(1, prompt.used // GROWTH_STEP) or is_complete or prompt.warmup:
            return
        prompt.is_computing = True
        growth = prompt.growth
        refs = [ref for call in (*growth.calls, growth.prefilling) for _, ref in call.inputs]
        other_values = {
            ref.producer: run.store.read(Ref(ref.producer))
            for ref in refs
            if ref.producer != growth.holder and ref.producer in run.store
        }
        list_values = [run.store.read(ref) for ref in outputs[:ready]]
        needs_empty_text = prompt.latest_text is None

        def compute_variables() -> tuple[dict[str, Any], dict[str, Any]]:
            without_outputs = self._variables(run, prompt, other_values, []) if needs_empty_text else {}
            return without_outputs, self._variables(run, prompt, other_values, list_values)

        functions = (run.calls_of(call.id).get(call.call) for call in growth.calls)
        inputs = [list_values, other_values]
        self.code.run(
            run.id,
            compute_variables,
            lambda variables, error: self._take_variables(run, prompt, ready, variables),
            is_short=all(function is None or runs_on_loop(function, inputs) for function in functions),
        )

    def _take_variables(
        self,
        run: QueryRun,
        prompt: GrowingPrompt,
        used: int,
        variables: tuple[dict[str, Any], dict[str, Any]] | None,
    ) -> None:
        """Take the prompt's variables for no outputs and for the first `used` ones, and prefill a longer prefix."""
        prompt.is_computing = False
        if prompt.is_over or variables is None:
            return
        without_outputs, with_outputs = variables
        name = prompt.growth.variable
        if prompt.latest_text is None:
            empty_text = without_outputs.get(name)
            prompt.latest_text = empty_text if isinstance(empty_text, str) else ""
        text = with_outputs.get(name)
        if not isinstance(text, str):
            prompt.is_over = True
            return
        if text == prompt.latest_text:  # the latest outputs are not used: a document that was refused
            prompt.used = used
            self._follow(run, prompt)
            return
        prefix = text[: len(text) - common_prefix_length(prompt.latest_text[::-1], text[::-1])]
        if not _is_right(prompt.prefix, prefix):
            prompt.is_over = True
            self._learn(run, prompt, grows=False)
            return
        is_longer = len(prefix) > len(prompt.prefix)
        prompt.used, prompt.latest_text, prompt.prefix = used, text, prefix
        if is_longer and self._trusted.get((run.query.tenant, prompt.plan_growth)):
            self._warm_up(run, prompt, {**with_outputs, name: prefix + UNKNOWN})
        self._follow(run, prompt)

    def _variables(
        self, run: QueryRun, prompt: GrowingPrompt, other_values: dict[str, Any], list_values: list[Any]
    ) -> dict[str, Any]:
        """Return the prompt's variables up to the growing one, for these outputs; {} if they cannot be computed."""
        growth = prompt.growth
        values = {**other_values, growth.holder: list_values}
        try:
            for call in growth.calls:
                if call.id not in values:
                    inputs = {key: read_path(values[ref.producer], ref.path) for key, ref in call.inputs}
                    values[call.id] = self.compute(run, call, inputs)
            names = {part.variable for part in growth.prefilling.prompt[: growth.end]}
            refs = [(key, ref) for key, ref in growth.prefilling.inputs if key in names]
            return {key: read_path(values[ref.producer], ref.path) for key, ref in refs}
        except Exception:  # a value that is not there yet, or the user's function on less than it will get
            return {}

    def _warm_up(self, run: QueryRun, prompt: GrowingPrompt, variables: dict[str, Any]) -> None:
        p = prompt.growth.prefilling
        prompt.warmups += 1
        name = prompt.warmup = InstancePath(p.id).grown(prompt.warmups - 1)
        for key, value in variables.items():
            run.store.put(f"{name}.{key}", value)
        warmup = p.with_(
            id=name,
            kind=PrimitiveKind.PARTIAL_PREFILLING,
            inputs=tuple((key, Ref(f"{name}.{key}")) for key in variables),
            after=(),
            effects=(),
            prompt=p.prompt[: prompt.growth.end],
        )
        self.start(run, warmup)


def _is_right(prediction: str, text: str) -> bool:
    """Return True if a text begins with most of a prediction, so that its prefilling was worth it."""
    return common_prefix_length(text, prediction) >= MIN_RIGHT_SHARE * len(prediction)


def common_prefix_length(one: str, other: str) -> int:
    """Return the number of characters that two texts have in common at their beginnings."""
    shorter = min(len(one), len(other))
    return bisect_left(range(shorter), True, key=lambda n: one[: n + 1] != other[: n + 1])
