"""The flow of an app's query, found by watching it: its engine work, and what each piece waits for.

One run on an idle cluster shows what is requested, given up and changed. What each of these waits for is found by
delaying one work after the other, and nothing else: whatever then does not happen before one of its tokens, or its end,
waits for that. Nothing is inferred from the order in which things happen. The app's code is not read; an original and
an accelerated app are watched alike.

A flow cannot show that an app makes other requests under load than alone, or that it goes on with whichever of several
results is first. `run.simulate` runs the app itself; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from teola_plugin.engines.fake import split_tokens
from teola_plugin.engines.fake.llm import PrefixCache
from teola_plugin.errors import TeolaError
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.requests.payloads import Generate, Generation, Warmup
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling.engine_events import DepthChanged
from teola_plugin.simulation.cluster import Cluster
from teola_plugin.simulation.flows import END, After, Flow, FlowChange, FlowRequest, FlowWork
from teola_plugin.simulation.run import Make
from teola_plugin.simulation.watching import Action, Key, Log, RecordedWork, watch_query

Waits = Mapping[Action, tuple[After, ...]]


def record(cluster: Cluster, app: str, make: Make, value: object, *, seed: int = 0) -> Flow:
    """Return the flow of one query with this input; the query is run once for every work that it requests.

    Raises `TeolaError` if the app fails, or requests nothing.
    """

    def run(delayed_key: Key | None = None) -> Log:
        return run_virtual(watch_query(cluster, app, make, value, delayed_key), seed, inline=True)

    undelayed = run()
    if not undelayed.works_in_order:
        raise TeolaError("the app asked no engine of the cluster for anything.", hint="make it of the pool's objects")
    runs = [run(recorded.key) for recorded in undelayed.works_in_order]
    waits = _waits(undelayed, runs)
    works = tuple(_work(recorded, undelayed, waits) for recorded in undelayed.works_in_order)
    return Flow(works, waits[("answer",)])


def _waits(undelayed: Log, runs: Sequence[Log]) -> Waits:
    """Return what each action of the query waits for: (number of a work, its token).

    An action that did not happen at all waits for the work's end: by then, there was nothing left to change or to give
    up.
    """
    waits: dict[Action, tuple[After, ...]] = {}
    for action in undelayed.actions:
        own_key = action[1] if action[0] == "ask" else None
        last_tokens = (
            (number, log.actions.get(action, END)) for number, log in enumerate(runs) if log.delayed_key != own_key
        )
        waits[action] = tuple((number, token) for number, token in last_tokens if token)
    request_waits = [waits["ask", recorded.key] for recorded in undelayed.works_in_order]
    waits = {action: _reduced(after, request_waits) for action, after in waits.items()}
    for log in runs:
        leave_action = ("leave", log.delayed_key)
        if leave_action not in waits and (request_action := _overtaking(log, leave_action, undelayed)) is not None:
            waits[leave_action] = waits[request_action]
    return waits


def _reduced(after: tuple[After, ...], asks: Sequence[tuple[After, ...]]) -> tuple[After, ...]:
    """Return what an action waits for without what others of these have waited for themselves."""
    awaited: dict[int, float] = {}
    for work, _ in after:
        for number, token in asks[work]:
            awaited[number] = max(awaited.get(number, 0), _order(token))
    return tuple((number, token) for number, token in after if _order(token) > awaited.get(number, 0))


def _order(token: int) -> float:
    return float("inf") if token == END else token


def _overtaking(log: Log, leave_action: Action, undelayed: Log) -> Action | None:
    """Return the request that made the query give up a delayed warm-up: its prompt, which came first."""
    if leave_action not in log.at or log.at[leave_action] == log.at["answer",]:
        return None
    simultaneous = [
        action
        for action, time_s in log.at.items()
        if action[0] == "ask" and time_s == log.at[leave_action] and action in undelayed.actions
    ]
    return simultaneous[-1] if simultaneous else None


def _work(recorded: RecordedWork, log: Log, waits: Waits) -> FlowWork:
    event = recorded.event
    return FlowWork(
        recorded.engine.name,
        event.kind,
        tuple(_request(recorded, work, blocks=log.wants_blocks) for work in recorded.works),
        waits["ask", recorded.key],
        recorded.works[0].claims.made_by is Caller.PLANNER,
        event.depth,
        event.objective,
        _inside(event.gang),
        _inside(event.session),
        event.when_idle,
        event.remaining,
        waits.get(("leave", recorded.key)),
        tuple(_change(recorded, change, waits[act]) for act, change in log.changes.items() if act[1] == recorded.key),
    )


def _inside(name: str) -> str:
    """Return the name without the query's own name in front of it."""
    return name.partition("/")[2]


def _change(recorded: RecordedWork, event: DepthChanged, after: tuple[After, ...]) -> FlowChange:
    name = recorded.event.primitive
    objective = event.objectives.get(name)
    return FlowChange(
        after,
        event.depths.get(name),
        None if objective is None else objective[0],
        _inside(objective[1]) if objective else "",
    )


_names = PrefixCache(1)


def _request(recorded: RecordedWork, work: EngineRequest, *, blocks: bool) -> FlowRequest:
    size, payload = recorded.engine.size(work.request), work.request.payload
    if not isinstance(payload, Generate | Warmup):
        return FlowRequest(size)
    text = payload.prompt.known_prefix() if isinstance(payload, Warmup) else payload.prompt.flat()
    tokens = split_tokens(text)
    value = recorded.values.get(work.request.id)
    output = value.completion_tokens if isinstance(value, Generation) else 0
    block_names = block_hashes(payload.prompt.known_prefix(), tenant=recorded.tenant) if blocks else ()
    return FlowRequest(size, len(tokens), output, _names.keys(tokens, recorded.tenant), block_names)
