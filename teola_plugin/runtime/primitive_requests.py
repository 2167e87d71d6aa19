"""Requests of a primitive: their payloads, the events that queue them at an engine, and the value of their results.

The events also carry how long the query still takes, by the profiles of idle engines, for batch policies that look at
seconds.

A prompt that is made of a list is prefilled as far as it is known while the list still grows (see `graph.growth`). The
calls between the list and the prompt are made for the first outputs of the list. Their text predicts the beginning
of the prompt: rightly if contexts are joined in order, wrongly if everything is sorted once more. A text at the end
that is there with one output less, too (the original question's own passages), moves on with each output and is no part
of the prediction. So a plan is trusted only after one of its queries has shown that its text grows so, and until one
shows that it does not. Queries of one tenant teach nothing about another's. A wrong prediction costs the engine's time,
never an answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from teola_plugin.graph import (
    INPUT,
    EngineProfile,
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
from teola_plugin.graph.build import COLLECTION
from teola_plugin.passes import PassContext
from teola_plugin.passes.estimate import remaining_times, seconds
from teola_plugin.requests.draft_texts import texts_of
from teola_plugin.requests.payloads import (
    UNKNOWN,
    Chunk,
    EmbedText,
    IngestRow,
    ScorePair,
    SearchText,
    SearchVector,
    Warmup,
)
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.engine_requests import EngineRequest, placed
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling import LiveQuery
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue
from teola_plugin.scheduling.live_query import WARM_UP, GangObjective, LivePrimitive, Objective, Status

Calls = Mapping[str, Callable[..., Any]]
"""Callables of the client by key; see `Primitive.call`."""

_K = PrimitiveKind


def payloads(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """Return one payload per request. Raises what the client's callables raise, and TypeError for a wrong value."""
    return _BUILD[p.kind](p, inputs, calls)


def drafts(p: Primitive, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return texts that the primitive's answer may repeat, as the graph says: literals, and inputs that are texts."""
    values = (inputs.get(part.variable) if part.variable else part.text for part in p.attributes.drafts)
    return tuple(text for text in values if isinstance(text, str) and text)


def all_drafts(profile: EngineProfile, payload: Any, texts: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the draft texts of a request: `texts`, and those in its payload if the engine takes drafts."""
    return tuple(dict.fromkeys((*texts, *texts_of(payload)))) if profile.drafts else tuple(texts)


def value(p: Primitive, results: Sequence[Any]) -> Any:
    """Return the primitive's value: a list if it is batchable (or reranks), else its single result."""
    return list(results) if p.batchable or p.kind is _K.RERANKING else results[0]


def _texts(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """Return the payloads of an EMBEDDING, one per text or chunk. Raise TypeError for another value."""
    texts = inputs["texts"]
    role = p.attributes.role or "query"
    embeddings = []
    for item in texts if p.batchable else [texts]:
        text = item.text if isinstance(item, Chunk) else item
        if not isinstance(text, str):
            raise TypeError(f"{p.id} embeds text, but got {type(text).__name__}")
        embeddings.append(EmbedText(text, role))
    return embeddings


def _rows(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    collection = _collection(p, inputs)
    return [IngestRow(collection, c, v) for c, v in zip(inputs["chunks"], inputs["vectors"], strict=True)]


def _searches(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """Return the payloads of a SEARCHING: by vectors, by words, or one call of the user's own retriever.

    Raise TypeError for a query that is no text.
    """
    if p.attributes.wrapped:  # the user's own retriever: one call of the object
        return [calls[p.call](inputs)]
    k = 4 if p.attributes.k is None else p.attributes.k
    if "vectors" in inputs:
        vectors = inputs["vectors"] if p.batchable else [inputs["vectors"]]
        return [SearchVector(_collection(p, inputs), vector, k, p.attributes.filter) for vector in vectors]
    searches = []
    for query in inputs["queries"] if p.batchable else [inputs["query"]]:
        if not isinstance(query, str):
            raise TypeError(f"{p.id} searches by words, but got {type(query).__name__}")
        searches.append(SearchText(query, k))
    return searches


def _collection(p: Primitive, inputs: Mapping[str, Any]) -> str:
    """Return the collection of a primitive: the query's, if the query names it, else the graph's."""
    return str(inputs.get(COLLECTION, p.attributes.collection))


def _pairs(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    return [ScorePair(inputs["query"], text) for text in inputs["texts"]]


def _from_client(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """Return the payload of a generation or a tool call, which the client makes."""
    return [calls[p.call](inputs)]


def _warmup(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> list[Any]:
    """Return the payload of a warm-up: the prompt of the generation that the client's callable makes, to be cached."""
    return [Warmup(calls[p.call](inputs).prompt)]


_BUILD: dict[PrimitiveKind, Callable[[Primitive, Mapping[str, Any], Calls], list[Any]]] = {
    _K.EMBEDDING: _texts,
    _K.INGESTION: _rows,
    _K.SEARCHING: _searches,
    _K.RERANKING: _pairs,
    _K.PREFILLING: _from_client,
    _K.FULL_PREFILLING: _from_client,
    _K.PARTIAL_PREFILLING: _warmup,
    _K.TOOL: _from_client,
}


def needs_client(p: Primitive, inputs: Mapping[str, Any], calls: Calls) -> bool:
    """Return True if code of the client that may be slow makes the primitive's payloads or its value."""
    return bool(p.call) and p.call in calls and not runs_on_loop(calls[p.call], inputs)


def enqueue_event(
    at: float, run: QueryRun, p: Primitive, depth: int, live: LivePrimitive | None, remaining: float = 0.0
) -> Enqueue:
    """Return the event with which a primitive is queued. `live` is None for a prefix that has grown.

    Such a prefix is not in the graph.
    """
    query, gang_objective = run.query, live.gang_objective if live is not None else WARM_UP
    # Instances for several items have one `call`: each is a session, or all would go to one replica of the engine.
    session = f"{run.id}/{p.call}{InstancePath(p.id).items}" if p.prompt else ""
    is_for_idle_engine = p.attributes.when == "idle"
    priority = (
        query.app,
        query.weight,
        session,
        is_for_idle_engine,
        _gang(run, gang_objective),
        gang_objective.objective,
    )
    return Enqueue(at, run.id, p.id, p.kind, (), depth, *priority, remaining, _remaining_s(at, run))


def gang_changed(
    at: float, run: QueryRun, live: LivePrimitive | None, claimed: Iterable[EngineRequest]
) -> DepthChanged | None:
    """Give requests that were made before the graph came to their primitive the graph's objective and gang.

    Return the event that tells their engine; None if nothing changes.
    """
    if live is None or live.gang_objective.objective is Objective.BACKGROUND:
        return None
    objective, gang = live.gang_objective.objective, _gang(run, live.gang_objective)
    is_member = objective is Objective.THROUGHPUT
    changed = [
        entry
        for entry in claimed
        if not (entry.has_ended or entry.stream.is_prefilled)
        and entry.queued_gang != gang
        and (not is_member or entry.claims.made_by is Caller.ORIGINAL)
    ]
    for entry in changed:
        entry.queued_gang = gang
    primitives = {entry.primitive for entry in changed}
    return DepthChanged(at, run.id, {}, dict.fromkeys(primitives, (objective, gang))) if primitives else None


def call_enqueue_event(
    at: float,
    run: QueryRun,
    kind: PrimitiveKind,
    name: str,
    depth: int,
    gang: str,
    new: Sequence[EngineRequest],
    remaining: float = 0.0,
) -> tuple[Enqueue, DepthChanged | None]:
    """Return the event with which a call of the original is queued, and an event about the call before, if any.

    Calls from branches that run side by side are the `gang` of their place. Other calls are a gang if the second one
    is made before the first token of the first: the original waits for both. A call whose pieces are read as they come
    is in no gang.
    """
    query, engine = run.query, new[0].engine
    before, is_known_member = (None, True) if gang else run.last_calls.get((engine, kind), (None, False))
    is_streamed = any(entry.stream.is_read for entry in new)
    overlaps = before is not None and not is_streamed and not (before.has_ended or before.stream.is_prefilled)
    is_member = not is_streamed and (bool(gang) or overlaps or len(new) > 1)
    urgency = (Objective.THROUGHPUT, f"{run.id}/{gang or engine + '.calls'}") if is_member else (Objective.LATENCY, "")
    for entry in new:
        entry.queued_gang = urgency[1]
    if not (is_streamed or gang):
        run.last_calls[engine, kind] = new[-1], is_member
    priority = query.app, query.weight, "", False, urgency[1], urgency[0]
    event = Enqueue(at, run.id, name, kind, (), depth, *priority, remaining, _remaining_s(at, run))
    change = None
    if before is not None and overlaps and not is_known_member:
        before.queued_gang = urgency[1]
        change = DepthChanged(at, run.id, {}, {before.primitive: urgency})
    return event, change


def changed_depths(run: QueryRun, depths: Mapping[str, int]) -> dict[str, int]:
    """Return the depths to tell engines of, when those of dispatched primitives have changed.

    Engines know a request by the primitive that made it, and go by the deepest one that waits for it.
    """
    changed = dict(depths)
    for name, depth in depths.items():
        live = run.primitives.get(name)
        for entry in live.entries if live is not None else ():
            entry.request_context = placed(
                entry.request_context, max(depth, entry.request_context.depth), entry.request_context.gang
            )
            entry.queued_depth = entry.request_context.depth
            changed[entry.primitive] = max(entry.queued_depth, changed.get(entry.primitive, 0))
    return changed


def _remaining_s(at: float, run: QueryRun) -> float | None:
    """Return the seconds until the query should be over; None if nothing says that."""
    return None if run.due is None else run.due - at


def _gang(run: QueryRun, gang_objective: GangObjective) -> str:
    return f"{run.id}/{gang_objective.gang}" if gang_objective.gang else ""


UNKNOWN_PRIMITIVE_S = 0.1
"""Assumed duration of a primitive of which only its depth is known."""


class RemainingTimes:
    """The times that the queries of one runtime still take, by the profiles of idle engines.

    They are kept with each planned graph, which serves many queries. From a primitive that was spliced in, its children
    are followed to where they meet the plan. Beyond the end of a subplan only the number of primitives is known.
    `profiles` are read when a graph is met for the first time.
    """

    def __init__(self, profiles: Callable[[], Mapping[str, EngineProfile]]) -> None:
        self._profiles = profiles
        self._by_graph: WeakKeyDictionary[Graph, Mapping[str, float]] = WeakKeyDictionary()

    def of(self, query: LiveQuery | None, p: Primitive, depth: int) -> float:
        """Return the expected seconds from the beginning of `p` to the end of its query."""
        if query is None:
            return 0.0
        planned = self._times_in_plan(query.graph).get(p.id)
        if planned is not None:
            return planned
        live = query.get(p.id)
        return depth * UNKNOWN_PRIMITIVE_S if live is None else self._of_spliced(query, live)

    def of_call(self, query: LiveQuery | None, depth: int) -> float:
        """Return the expected seconds from a call of the original to the end of its query, for its Enqueue event.

        The graph does not have the call: it counts as much as the most urgent primitive.
        """
        if query is None:
            return 0.0
        planned = self._times_in_plan(query.graph)
        return max(
            [planned.get(live.id, 0.0) for live in query if not live.status.has_ended],
            default=depth * UNKNOWN_PRIMITIVE_S,
        )

    def _times_in_plan(self, graph: Graph) -> Mapping[str, float]:
        """Return the seconds from each primitive's beginning to the end of the graph, computed once for each graph."""
        times = self._by_graph.get(graph)
        if times is None:
            times = self._by_graph[graph] = remaining_times(graph, PassContext(self._profiles()))
        return times

    def _of_spliced(self, query: LiveQuery, live: LivePrimitive) -> float:
        """Return the seconds for a primitive that was spliced in.

        Goes depth first, with a stack instead of recursion: a chain may be thousands of primitives long.
        """
        planned, context = self._times_in_plan(query.graph), PassContext(self._profiles())
        remaining_s: dict[str, float] = {}
        stack = [live]
        while stack:
            current = stack[-1]
            children = query.children(current.id)
            for child in children:
                if child.id in planned:
                    remaining_s.setdefault(child.id, planned[child.id])
            missing = [child for child in children if child.id not in remaining_s]
            if missing:
                stack += missing
                continue
            stack.pop()
            after_s = max(
                [remaining_s[child.id] for child in children], default=current.base_depth * UNKNOWN_PRIMITIVE_S
            )
            remaining_s[current.id] = seconds(current.primitive, context) + after_s
        return remaining_s[live.id]


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
        """Remember if predictions of this tenant's prompt were right: only then are its later ones prefilled."""
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
        outputs = holder.outputs or holder.speculative_outputs
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
        """Send the predicted beginning of a growing prompt to its engine, as a primitive that is not in the graph."""
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
