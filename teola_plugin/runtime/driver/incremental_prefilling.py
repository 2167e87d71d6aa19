"""Prefills a prompt as far as it is known while the list that it is made of still grows (see `graph.growth`).

What the calls between the list and the prompt make of its first outputs is a guess at how the prompt will begin: right
where contexts are joined in order, wrong where everything is sorted once more. What stands at its end with one output
less, too (the original question's own passages), moves on with each output and is no part of the guess. So a plan is
trusted only after one of its queries has shown that the text grows so, and until one shows that it does not; what the
queries of one tenant show is never used for another's. A wrong guess costs the engine's time, never an answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.graph import Growth, InstancePath, Primitive, PrimitiveKind, Ref, read_path, runs_on_loop
from teola_plugin.requests.payloads import UNKNOWN
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.query_run import GrowingPrompt, QueryRun
from teola_plugin.scheduling.live_query import LivePrimitive, Status

RIGHT = 0.75
"""Share of a guess that must be right."""
STEP = 8
"""A list is looked at again when it has become longer by this part of itself: its whole text is made anew each time."""

TRUSTED = 256
"""Prompts, each of one tenant, of which it is remembered whether they grow."""


@dataclass(slots=True)
class IncrementalPrefilling:
    """Looks at every value that is made, and at every warm-up that ends. One for all queries of a driver."""

    holder: Callable[[QueryRun, str], LivePrimitive | None]
    """The live MAP of that id."""
    compute: Callable[[QueryRun, Primitive, dict[str, Any]], Any]
    """The value of a CALL."""
    start: Callable[[QueryRun, Primitive], None]
    """Sends a primitive that is not in the graph to its engine."""
    stop: Callable[[QueryRun, str], None]
    """Takes it back if it has not begun."""
    code: ClientCode
    """Runs what makes the texts."""
    _kind: PrimitiveKind = field(default=PrimitiveKind.PARTIAL_PREFILLING)
    _trusted: OrderedDict[tuple[str, Growth], bool] = field(default_factory=OrderedDict)
    """By tenant and prompt of a plan: whether the prompt was last seen to grow at its end."""

    def reset(self) -> None:
        """Forget what was learned of prompts."""
        self._trusted.clear()

    def _learn(self, run: QueryRun, one: GrowingPrompt, grows: bool) -> None:
        key = run.query.tenant, one.plan
        self._trusted[key] = grows
        self._trusted.move_to_end(key)
        while len(self._trusted) > TRUSTED:
            self._trusted.popitem(last=False)

    def made(self, run: QueryRun, name: str) -> None:
        """A primitive has its value, or has ended."""
        for one in run.growing:
            if not one.over and (name == one.warmup or InstancePath(name).in_instance_of(one.growth.holder)):
                one.warmup = "" if name == one.warmup else one.warmup
                self._look(run, one)

    def dispatched(self, run: QueryRun, p: Primitive) -> None:
        """The whole prompt is there: it tells whether the guesses were right."""
        for one in run.growing:
            if one.growth.prefilling.id != p.id or one.over:
                continue
            one.over = True
            if one.warmup:
                self.stop(run, one.warmup)
            ref = p.input(one.growth.variable)
            if one.text and ref is not None and ref.producer in run.store:
                whole = run.store.read(ref)
                self._learn(run, one, isinstance(whole, str) and _begins(whole, one.text))

    def _look(self, run: QueryRun, one: GrowingPrompt) -> None:
        live = self.holder(run, one.growth.holder)
        if live is None or live.status.has_ended or one.looking or one.over:
            return
        outputs = live.outputs or live.early_outputs
        ready = _ready(run, one, outputs)
        complete = live.status is Status.EXPANDING and ready == len(outputs)
        if ready < one.seen + max(1, one.seen // STEP) or complete or one.warmup:
            return
        one.looking = True
        known = {ref.producer: run.store.read(Ref(ref.producer)) for ref in _reads(one) if ref.producer in run.store}
        whole = [run.store.read(ref) for ref in outputs[:ready]]
        first = one.whole is None

        def texts() -> tuple[dict[str, Any], dict[str, Any]]:
            return self._computed(run, one, known, []) if first else {}, self._computed(run, one, known, whole)

        self.code.run(
            run.id,
            texts,
            lambda made, error: self._looked(run, one, ready, made),
            short=self._short(run, one, known, whole),
        )

    def _short(self, run: QueryRun, one: GrowingPrompt, known: dict[str, Any], outputs: list[Any]) -> bool:
        calls = (run.calls_of(call.id).get(call.call) for call in one.growth.calls)
        given = [outputs, known]
        return all(call is None or runs_on_loop(call, given) for call in calls)

    def _looked(
        self, run: QueryRun, one: GrowingPrompt, ready: int, made: tuple[dict[str, Any], dict[str, Any]] | None
    ) -> None:
        """What the prompt would be with the outputs that were there."""
        one.looking = False
        if one.over or made is None:
            return
        variable = one.growth.variable
        if one.whole is None:
            nothing = made[0].get(variable)
            one.whole = nothing if isinstance(nothing, str) else ""
        whole = made[1].get(variable)
        if not isinstance(whole, str):
            one.over = True
            return
        if whole == one.whole:  # the latest outputs are of no use: a document that was refused
            one.seen = ready
            self._look(run, one)
            return
        text = whole[: len(whole) - alike(one.whole[::-1], whole[::-1])]
        if not _begins(text, one.text):
            one.over = True
            self._learn(run, one, False)
            return
        grown = len(text) > len(one.text)
        one.seen, one.whole, one.text = ready, whole, text
        if grown and self._trusted.get((run.query.tenant, one.plan)):
            self._warm(run, one, {**made[1], variable: text + UNKNOWN})
        self._look(run, one)

    def _computed(self, run: QueryRun, one: GrowingPrompt, known: dict[str, Any], outputs: list[Any]) -> dict[str, Any]:
        """The variables of the prompt up to the one that grows, as of now; none of them where that cannot be said."""
        values = {**known, one.growth.holder: outputs}
        try:
            for call in one.growth.calls:
                if call.id not in values:
                    given = {key: read_path(values[ref.producer], ref.path) for key, ref in call.inputs}
                    values[call.id] = self.compute(run, call, given)
            wanted = {part.variable for part in one.growth.prefilling.prompt[: one.growth.end]}
            inputs = [(key, ref) for key, ref in one.growth.prefilling.inputs if key in wanted]
            return {key: read_path(values[ref.producer], ref.path) for key, ref in inputs}
        except Exception:  # a value that is not there yet, or the user's function on less than it will get
            return {}

    def _warm(self, run: QueryRun, one: GrowingPrompt, made: dict[str, Any]) -> None:
        p = one.growth.prefilling
        one.warmups += 1
        one.warmup = InstancePath(p.id).grown(one.warmups - 1)
        for key, value in made.items():
            run.store.put(f"{one.warmup}.{key}", value)
        inputs = tuple((key, Ref(f"{one.warmup}.{key}")) for key in made)
        prompt = p.prompt[: one.growth.end]
        self.start(run, p.with_(id=one.warmup, kind=self._kind, inputs=inputs, after=(), effects=(), prompt=prompt))


def _ready(run: QueryRun, one: GrowingPrompt, outputs: list[Ref]) -> int:
    """How many outputs are there, in their order."""
    if outputs is not one.outputs:
        one.outputs, one.ready = outputs, 0
    while one.ready < len(outputs) and outputs[one.ready].producer in run.store:
        one.ready += 1
    return one.ready


def _reads(one: GrowingPrompt) -> list[Ref]:
    """What the text is made of, beside the list."""
    inputs = [ref for call in (*one.growth.calls, one.growth.prefilling) for _, ref in call.inputs]
    return [ref for ref in inputs if ref.producer != one.growth.holder]


def _begins(whole: str, guess: str) -> bool:
    """Whether the guess was right for most of its length: what is left of it was worth its prefilling."""
    return alike(whole, guess) >= RIGHT * len(guess)


def alike(one: str, other: str) -> int:
    """How many characters the two have in common at their beginnings."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda n: one[: n + 1] != other[: n + 1])
