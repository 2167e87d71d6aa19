"""The flow of an app's query, found by watching it: which engine work it asks for, and what each piece waits for.

One run on an idle cluster says what is asked for, given up and changed. What each of these waits for is found by
holding up one work after the other, and nothing else: whatever then does not happen before one of its tokens, or its
end, waits for that. Nothing is inferred from when things happen to follow each other. Nothing of the app is read; a
plain object and an accelerated one are watched alike.

What a flow cannot tell: that an app asks for other things at load than alone, and that it goes on with whichever of
several things is first. `run.simulate` runs the app itself; a test
compares both.
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
from teola_plugin.simulation.watching import Act, Asked, Key, Log, watched

Waits = Mapping[Act, tuple[After, ...]]


def record(cluster: Cluster, app: str, make: Make, value: object, *, seed: int = 0) -> Flow:
    """The flow of one query that is asked with this value; it is run once for every work that it asks for.

    Raises `TeolaError` where the app fails, or asks for nothing.
    """

    def run(held: Key | None = None) -> Log:
        return run_virtual(watched(cluster, app, make, value, held), seed, inline=True)

    alone = run()
    if not alone.asked:
        raise TeolaError("the app asked no engine of the cluster for anything.", hint="make it of the pool's objects")
    runs = [run(asked.key) for asked in alone.asked]
    waits = _waits(alone, runs)
    works = tuple(_work(asked, alone, waits) for asked in alone.asked)
    return Flow(works, waits[("answer",)])


def _waits(alone: Log, runs: Sequence[Log]) -> Waits:
    """What each act of the query waits for: (number of a work, its token). What did not happen at all waits for its
    end: by then, there was nothing left to change or to give up."""
    found: dict[Act, tuple[After, ...]] = {}
    for act in alone.acts:
        own = act[1] if act[0] == "ask" else None
        each = ((number, log.acts.get(act, END)) for number, log in enumerate(runs) if log.held != own)
        found[act] = tuple((number, token) for number, token in each if token)
    asks = [found["ask", asked.key] for asked in alone.asked]
    found = {act: _reduced(after, asks) for act, after in found.items()}
    for log in runs:
        leave = ("leave", log.held)
        if leave not in found and (ask := _overtaking(log, leave, alone)) is not None:
            found[leave] = found[ask]
    return found


def _reduced(after: tuple[After, ...], asks: Sequence[tuple[After, ...]]) -> tuple[After, ...]:
    """Without what others of these have waited for themselves."""
    known: dict[int, float] = {}
    for before, _ in after:
        for number, token in asks[before]:
            known[number] = max(known.get(number, 0), _order(token))
    return tuple((number, token) for number, token in after if _order(token) > known.get(number, 0))


def _order(token: int) -> float:
    return float("inf") if token == END else token


def _overtaking(log: Log, leave: Act, alone: Log) -> Act | None:
    """A warm-up that takes too long is given up when the prompt itself comes, which does not happen alone."""
    if leave not in log.at or log.at[leave] == log.at["answer",]:
        return None
    now = [act for act, at in log.at.items() if act[0] == "ask" and at == log.at[leave] and act in alone.acts]
    return now[-1] if now else None


def _work(asked: Asked, log: Log, waits: Waits) -> FlowWork:
    event = asked.event
    return FlowWork(
        asked.engine.name,
        event.kind,
        tuple(_request(asked, work, blocks=log.wants_blocks) for work in asked.works),
        waits["ask", asked.key],
        asked.works[0].claims.made_by is Caller.PLANNER,
        event.depth,
        event.objective,
        _inside(event.gang),
        _inside(event.session),
        event.when_idle,
        event.remaining,
        waits.get(("leave", asked.key)),
        tuple(_change(asked, change, waits[act]) for act, change in log.changes.items() if act[1] == asked.key),
    )


def _inside(name: str) -> str:
    """Without the query's own name in front of it."""
    return name.partition("/")[2]


def _change(asked: Asked, event: DepthChanged, after: tuple[After, ...]) -> FlowChange:
    name = asked.event.primitive
    wanted = event.objectives.get(name)
    return FlowChange(
        after, event.depths.get(name), None if wanted is None else wanted[0], _inside(wanted[1]) if wanted else ""
    )


_names = PrefixCache(1)


def _request(asked: Asked, work: EngineRequest, *, blocks: bool) -> FlowRequest:
    size, payload = asked.engine.size(work.request), work.request.payload
    if not isinstance(payload, Generate | Warmup):
        return FlowRequest(size)
    text = payload.prompt.known_prefix() if isinstance(payload, Warmup) else payload.prompt.flat()
    tokens = split_tokens(text)
    value = asked.values.get(work.request.id)
    output = value.completion_tokens if isinstance(value, Generation) else 0
    named = block_hashes(payload.prompt.known_prefix(), tenant=asked.tenant) if blocks else ()
    return FlowRequest(size, len(tokens), output, _names.keys(tokens, asked.tenant), named)
