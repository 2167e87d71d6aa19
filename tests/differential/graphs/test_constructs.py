"""Constructs of nodes and chains on the user's own models, each under every condition: nothing differs.

A construct is a row of `NODES` or `CHAINS`, a condition one of `CONDITIONS` or `CHAIN_CONDITIONS`. Results, errors,
events and checkpoints are those of the original, and so are the requests. Where a step fails, calls that were certain
until then may have been made for nothing, each at most once.
"""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import pytest
from differential.graphs.plain import Names, plain
from differential.graphs.recorder import Recorder
from differential.graphs.ways import GRAPH, RUNNABLE, is_async
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnablePassthrough, chain
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, interrupt
from support.hosted_model import HostedModel

from teola_plugin import accelerate

pytestmark = [
    pytest.mark.filterwarnings("ignore:astream_events version='v1' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This API is in beta"),
]
LATENCY_S = 0.01


class State(TypedDict, total=False):
    """The state of all graphs."""

    topic: str
    items: list[str]
    first: str
    second: str
    notes: list[str]
    parts: Annotated[list[str], operator.add]


class Kit:
    """The model that a graph calls, and where it keeps its state."""

    def __init__(self, **options: Any) -> None:
        self.model = HostedModel(**{"latency_s": LATENCY_S, **options})
        self.saver = InMemorySaver()
        self.cache: Any = InMemoryCache()
        self.style = "plain"
        self.settings = {"length": "short"}

    def ask(self, prompt: str) -> str:
        return str(self.model.invoke(prompt).content)


INPUT: State = {"topic": "oats", "items": ["a", "b", "c"], "parts": []}
CONFIG: Any = {"configurable": {"thread_id": "1", "style": "rhyming"}}
Nodes = list[Callable[..., Any]]

# ------------------------------------------------------------ constructs in nodes


def loop(kit: Kit) -> Nodes:
    model = kit.model

    def take_notes(state: State) -> State:
        notes = []
        for item in state["items"]:
            notes.append(str(model.invoke(f"note {item}").content))
        return {"notes": notes}

    def write(state: State) -> State:
        return {"second": str(model.invoke(f"write {state['topic']}").content)}

    return [take_notes, write]


def comprehension(kit: Kit) -> Nodes:
    model = kit.model

    def take_notes(state: State) -> State:
        return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}

    def write(state: State) -> State:
        return {"second": str(model.invoke(f"write from {', '.join(state['notes'])}").content)}

    return [take_notes, write]


def nodes_in_a_row(kit: Kit) -> Nodes:
    model = kit.model

    def plan(state: State) -> State:
        return {"first": str(model.invoke(f"plan {state['topic']}").content)}

    def note(state: State) -> State:
        return {"second": str(model.invoke(f"note b of {state['topic']}").content)}

    return [plan, note]


def helper(kit: Kit) -> Nodes:
    def both(state: State) -> State:
        return {"first": kit.ask(f"plan {state['topic']}"), "second": kit.ask(f"note b of {state['topic']}")}

    def write(state: State) -> State:
        return {"notes": [kit.ask(f"write {state['first']}"), kit.ask(f"title {state['topic']}")]}

    return [both, write]


def chain_in_a_node(kit: Kit) -> Nodes:
    notes = ChatPromptTemplate.from_template("note {item} of {topic}") | kit.model | StrOutputParser()

    def take_notes(state: State) -> State:
        return {"notes": notes.batch([{"item": item, "topic": state["topic"]} for item in state["items"]])}

    def write(state: State) -> State:
        return {"second": notes.invoke({"item": "all", "topic": state["topic"]})}

    return [take_notes, write]


def coroutines(kit: Kit) -> Nodes:
    model = kit.model

    async def take_notes(state: State) -> State:
        notes = []
        for item in state["items"]:
            notes.append(str((await model.ainvoke(f"note {item}")).content))
        return {"notes": notes}

    async def write(state: State) -> State:
        return {"second": str((await model.ainvoke(f"write {state['topic']}")).content)}

    return [take_notes, write]


def two_forms(kit: Kit) -> Nodes:
    model = kit.model

    def take_notes(state: State) -> State:
        return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}

    async def atake_notes(state: State) -> State:
        return {"notes": [str((await model.ainvoke(f"note {item}, async")).content) for item in state["items"]]}

    return [RunnableLambda(take_notes, atake_notes)]


def chain_as_a_node(kit: Kit) -> Nodes:
    prompt = ChatPromptTemplate.from_template("note b of {topic}")
    write = RunnablePassthrough.assign(second=prompt | kit.model | StrOutputParser())

    def plan(state: State) -> State:
        return {"first": str(kit.model.invoke(f"plan {state['topic']}").content)}

    return [plan, write | (lambda state: {"second": state["second"]})]


def settings_in_prompts(kit: Kit) -> Nodes:
    model = kit.model

    def plan(state: State, config: RunnableConfig) -> State:
        style = config["configurable"].get("style", "plain")
        return {"first": str(model.invoke(f"plan in {style} style", config).content)}

    def note(state: State, config: RunnableConfig) -> State:
        notes = [
            str(model.invoke(f"note {item} in {config['configurable']['style']}").content) for item in state["items"]
        ]
        return {"notes": notes}

    return [plan, note]


def graph_called_from_a_node(kit: Kit) -> Nodes:
    inner = compiled(nodes_in_a_row(kit))

    def research(state: State) -> State:
        return {"notes": [inner.invoke({"topic": item})["second"] for item in state["items"]]}

    return [research]


def graph_as_a_node(kit: Kit) -> Nodes:
    return [compiled(comprehension(kit)), *nodes_in_a_row(kit)[1:]]


def decided_by_the_state(kit: Kit) -> Nodes:
    model = kit.model

    def plan(state: State) -> State:
        if len(state["items"]) > 2:
            return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}
        return {"notes": [str(model.invoke("note nothing").content)]}

    return [plan]


def decided_by_an_answer(kit: Kit) -> Nodes:
    model = kit.model

    def choose(state: State) -> State:
        verdict = str(model.invoke(f"judge {state['topic']}").content)
        if "oats" in verdict:
            return {"first": verdict}
        return {"first": str(model.invoke(f"rewrite {state['topic']}").content)}

    def note(state: State) -> State:
        return {"second": str(model.invoke(f"note b of {state['topic']}").content)}

    return [choose, note]


def left_early(kit: Kit) -> Nodes:
    model = kit.model

    def find(state: State) -> State:
        for item in state["items"]:
            answer = str(model.invoke(f"note {item}").content)
            if "note b" in answer:
                return {"first": answer}
        return {"first": ""}

    return [find]


def state_changed_in_place(kit: Kit) -> Nodes:
    model = kit.model

    def plan(state: State) -> State:
        state["items"].append("d")
        return {"items": state["items"], "first": str(model.invoke("plan").content)}

    def note(state: State) -> State:
        return {"notes": [str(model.invoke(f"note {item}").content) for item in state["items"]]}

    return [plan, note]


def sent_tasks(kit: Kit) -> Nodes:
    model = kit.model

    def split(state: State) -> Command[Any]:
        return Command(goto=[Send("part", {"topic": item}) for item in state["items"]])

    def part(state: State) -> State:
        return {"parts": [str(model.invoke(f"note {state['topic']}").content)]}

    return [split, part]


def objects_changed_by_a_node(kit: Kit) -> Nodes:
    def choose(state: State) -> State:
        first = kit.ask(f"plan {state['topic']}")
        kit.style = f"rhyming {state['topic']}"
        kit.settings["length"] = "long"
        return {"first": first}

    def write(state: State) -> State:
        return {"notes": [kit.ask(f"write in {kit.style} style"), kit.ask(f"write a {kit.settings['length']} text")]}

    return [choose, write]


NODES: dict[str, Callable[[Kit], Nodes]] = {
    build.__name__: build
    for build in (
        loop,
        comprehension,
        nodes_in_a_row,
        helper,
        chain_in_a_node,
        coroutines,
        two_forms,
        chain_as_a_node,
        settings_in_prompts,
        graph_called_from_a_node,
        graph_as_a_node,
        decided_by_the_state,
        decided_by_an_answer,
        left_early,
        state_changed_in_place,
        sent_tasks,
        objects_changed_by_a_node,
    )
}
NEVER_PREFETCHED = {"chain_as_a_node", "decided_by_an_answer", "left_early", "sent_tasks", "objects_changed_by_a_node"}
RACING = {"sent_tasks", "chain_in_a_node"}
"""The original itself runs several calls at once, so that the order of its events is a matter of chance."""
ONLY_ASYNC = {"coroutines"}


def compiled(nodes: Nodes, node_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """Compile a graph of these nodes, one after the other."""
    builder = StateGraph(State)
    previous = START
    for number, node in enumerate(nodes):
        name = getattr(node, "__name__", f"node_{number}")
        builder.add_node(name, node, **(node_options or {}))
        if name != "part":
            builder.add_edge(previous, name)
        previous = name
    builder.add_edge(previous, END)
    return builder.compile(**options)


# ------------------------------------------------------------ constructs in chains


def function_that_loops(kit: Kit) -> Any:
    def take_notes(inputs: State) -> list[str]:
        return [str(kit.model.invoke(f"note {item}").content) for item in inputs["items"]]

    return RunnablePassthrough() | RunnableLambda(take_notes)


def function_with_two_forms(kit: Kit) -> Any:
    model = kit.model

    def take_notes(inputs: State) -> list[str]:
        return [str(model.invoke(f"note {item}").content) for item in inputs["items"]]

    async def atake_notes(inputs: State) -> list[str]:
        return [str((await model.ainvoke(f"note {item}, async")).content) for item in inputs["items"]]

    return RunnablePassthrough() | RunnableLambda(take_notes, atake_notes)


def mapped_function(kit: Kit) -> Any:
    model = kit.model

    def note(item: str) -> list[str]:
        return [str(model.invoke(f"note {item}, {kind}").content) for kind in ("short", "long")]

    return RunnableLambda(operator.itemgetter("items")) | RunnableLambda(note).map()


def chain_function_with_config(kit: Kit) -> Any:
    model = kit.model

    @chain
    def take_notes(inputs: State, config: RunnableConfig) -> list[str]:
        return [str(model.invoke(f"note {item}", config).content) for item in inputs["items"]]

    return take_notes


def batch_with_exceptions(kit: Kit) -> Any:
    notes = ChatPromptTemplate.from_template("note {item}") | kit.model | StrOutputParser()

    def take_notes(inputs: State) -> list[str]:
        found = notes.batch([{"item": item} for item in inputs["items"]], return_exceptions=True)
        return [*map(str, found), notes.invoke({"item": inputs["topic"]})]

    return RunnablePassthrough() | RunnableLambda(take_notes)


def batch_of_one_at_a_time(kit: Kit) -> Any:
    notes = ChatPromptTemplate.from_template("note {item}") | kit.model | StrOutputParser()

    def take_notes(inputs: State) -> list[str]:
        return notes.batch([{"item": item} for item in inputs["items"]], {"max_concurrency": 1})

    return RunnablePassthrough() | RunnableLambda(take_notes)


def mapped_behind_a_call(kit: Kit) -> Any:
    plan, note = (
        ChatPromptTemplate.from_template(text) | kit.model | StrOutputParser()
        for text in ("plan {topic}", "note {item}")
    )
    items = RunnableLambda(lambda inputs: [{"item": item} for item in inputs["items"]])
    return RunnablePassthrough.assign(plan=plan) | RunnablePassthrough.assign(notes=items | note.map())


CHAINS: dict[str, Callable[[Kit], Any]] = {
    build.__name__: build
    for build in (
        function_that_loops,
        function_with_two_forms,
        mapped_function,
        chain_function_with_config,
        batch_with_exceptions,
        batch_of_one_at_a_time,
        mapped_behind_a_call,
    )
}
RACING_CHAINS = {"mapped_function", "mapped_behind_a_call", "batch_with_exceptions"}
NEVER_PREFETCHED_CHAINS = {"batch_of_one_at_a_time"}

# ------------------------------------------------------------ conditions


@dataclass(frozen=True)
class Condition:
    """How an app is built and called, and which fault happens meanwhile."""

    way: str = "invoke"
    turns: tuple[Any, ...] = (INPUT,)
    """The inputs of its calls, one after the other."""
    model: dict[str, Any] = field(default_factory=dict)
    node_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Of `compile`."""
    between: Callable[[State], Any] | None = None
    """A node between the first two."""
    behind: Callable[[State], Any] | None = None
    """A node behind all."""
    heals: bool = False
    """True if the model fails in the first call alone."""
    keeps_state: bool = False
    has_cache: bool = False
    fails: bool = False
    """True if a step fails: certain calls behind it may have been made."""


def refuse(state: State) -> State:
    raise ValueError("refused by a step")


def approve(state: State) -> State:
    return {"topic": str(interrupt(f"is {state['topic']} good?"))}


RETRY = RetryPolicy(max_attempts=2, initial_interval=0.001, jitter=False, retry_on=ValueError)
CONDITIONS: dict[str, Condition] = {
    **{
        way: Condition(way)
        for way in (
            "invoke",
            "ainvoke",
            "batch",
            "abatch",
            "stream values",
            "stream updates",
            "stream messages",
            "astream updates",
            "astream messages",
            "astream_events v2",
        )
    },
    "an earlier step fails": Condition(between=refuse, fails=True),
    "an earlier step fails, streamed": Condition("astream updates", between=refuse, fails=True),
    "a later step fails": Condition(behind=refuse),
    "a model fails": Condition(model={"fails_on": "note b"}, fails=True),
    "a model fails, async": Condition("ainvoke", model={"fails_on": "note b"}, fails=True),
    "a model fails once, and its node is tried again": Condition(
        model={"fails_on": "note b", "failures": 1}, node_options={"retry_policy": RETRY}, fails=True
    ),
    "two turns of a thread": Condition(turns=(INPUT, {"items": ["x", "y"]}), keeps_state=True),
    "stopped before a node, and resumed": Condition(
        turns=(INPUT, None), keeps_state=True, options={"interrupt_after": "*"}
    ),
    "interrupted by a node, and resumed": Condition(
        "stream updates", turns=(INPUT, Command(resume="rye")), keeps_state=True, between=approve
    ),
    "failed, and resumed": Condition(
        turns=(INPUT, None), keeps_state=True, model={"fails_on": "note b"}, heals=True, fails=True
    ),
    "node cache": Condition(turns=(INPUT, INPUT), has_cache=True, node_options={"cache_policy": CachePolicy()}),
}
CHAIN_CONDITIONS: dict[str, Condition] = {
    **{way: Condition(way) for way in RUNNABLE if way not in ("astream_events v1", "astream_log")},
    "a model fails": Condition(model={"fails_on": "note b"}, fails=True),
    "a model fails, async": Condition("ainvoke", model={"fails_on": "note b"}, fails=True),
    "a model fails, events": Condition("astream_events v2", model={"fails_on": "note b"}, fails=True),
}


def in_a_way_that_fits(condition: Condition, name: str) -> str:
    """Return the condition's way to call an app, or the async one of it for nodes that are coroutines."""
    if name not in ONLY_ASYNC or is_async(condition.way):
        return condition.way
    return f"a{condition.way}"


def graph_of(name: str, condition: Condition, kit: Kit) -> Any:
    nodes = NODES[name](kit)
    nodes[1:1] = [condition.between] if condition.between else []
    nodes += [condition.behind] if condition.behind else []
    options = dict(condition.options)
    options |= {"checkpointer": kit.saver} if condition.keeps_state else {}
    options |= {"cache": kit.cache} if condition.has_cache else {}
    return compiled(nodes, condition.node_options, **options)


@dataclass(frozen=True)
class Seen:
    """Everything observable about the calls of an app."""

    results: Any
    events: Any
    saved: Any
    requests: Counter[str]


def see(app: Any, kit: Kit, condition: Condition, way: str, *, races: bool) -> Seen:
    """Call an app under a condition."""
    recorder, results = Recorder(), []
    for turn in condition.turns:
        config = {**CONFIG, "callbacks": [recorder], "tags": ["mine"]}
        given = turn if turn is None or isinstance(turn, Command) else {**turn, "items": [*turn["items"]]}
        try:
            results.append(plain(GRAPH[way](app, given, config)))
        except Exception as error:
            results.append(plain(error))
        kit.model.fails_on = "" if condition.heals else kit.model.fails_on
    races = races or "batch" in way
    names = Names(raced=races)
    seen_results, events = names(tuple(results)), names(tuple(recorder.events))
    saved = [[one.checkpoint["channel_values"], one.metadata, one.pending_writes] for one in kit.saver.list(None)]
    return Seen(
        Counter(map(repr, flattened(seen_results))) if races else seen_results,
        Counter(map(repr, events)) if races else events,
        Names(raced=True)(plain(saved)),
        Counter(kit.model.prompts),
    )


def flattened(value: Any) -> list[Any]:
    """Return the parts of nested results one by one, for those that come in any order."""
    return [part for one in value for part in flattened(one)] if isinstance(value, tuple) else [value]


def errors_in(results: Any) -> set[str]:
    """Return the errors that calls ended with."""
    return {text for text in map(str, results) if text.startswith("{'': 'error") and "Cancelled" not in text}


def assert_same(original: Seen, fast: Seen, condition: Condition, *, races: bool, certain: Counter[str]) -> None:
    """Check that the accelerated app behaved like the original. `certain`: the requests of a run without a failure."""
    if races and condition.fails:  # how far the others came is a matter of chance
        assert errors_in(fast.results) == errors_in(original.results)
    else:
        assert fast.results == original.results
        assert fast.events == original.events
        assert fast.saved == original.saved
    if condition.fails:
        assert original.requests - fast.requests == Counter()
        assert fast.requests - original.requests <= certain
    else:
        assert fast.requests == original.requests


def compare(build: Callable[[Condition, Kit], Any], condition: Condition, way: str, *, races: bool) -> None:
    """Compare an app and the accelerated one under a condition, and without it if that makes a step fail."""
    kits = [Kit(**condition.model) for _ in range(2)]
    original = see(build(condition, kits[0]), kits[0], condition, way, races=races)
    fast = see(accelerate(build(condition, kits[1])), kits[1], condition, way, races=races)
    certain: Counter[str] = Counter()
    if condition.fails:
        kit = Kit()
        see(build(Condition(way), kit), kit, Condition(way), way, races=races)
        certain = Counter(kit.model.prompts)
    assert_same(original, fast, condition, races=races, certain=certain)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("name", NODES)
def test_graph_behaves_as_the_original(name: str, condition: str) -> None:
    conditions = CONDITIONS[condition]

    compare(
        lambda conditions, kit: graph_of(name, conditions, kit),
        conditions,
        in_a_way_that_fits(conditions, name),
        races=name in RACING,
    )


@pytest.mark.parametrize("condition", CHAIN_CONDITIONS)
@pytest.mark.parametrize("name", CHAINS)
def test_chain_behaves_as_the_original(name: str, condition: str) -> None:
    conditions = CHAIN_CONDITIONS[condition]

    compare(lambda _, kit: CHAINS[name](kit), conditions, conditions.way, races=name in RACING_CHAINS)


# ------------------------------------------------------------ cancelled, out of time


@pytest.mark.parametrize("limit", ["cancelled", "step_timeout"])
@pytest.mark.parametrize("name", NODES)
def test_stopped_graph_sends_only_certain_requests(name: str, limit: str) -> None:
    """The requests are some of those that a whole run sends. The thread of a sync node goes on, as the original's does,
    and sends those again that were given up."""
    whole = Kit()
    asyncio.run(graph_of(name, Condition("ainvoke"), whole).ainvoke({**INPUT}, CONFIG))
    kit = Kit(latency_s=0.2)
    graph = accelerate(graph_of(name, Condition("ainvoke"), kit))
    if limit == "step_timeout":
        graph.step_timeout = 0.05

    async def stopped() -> None:
        task = asyncio.create_task(graph.ainvoke({**INPUT}, CONFIG))
        await asyncio.sleep(0.05 if limit == "cancelled" else 0)
        if limit == "cancelled":
            task.cancel()
        with pytest.raises((asyncio.CancelledError, TimeoutError)):
            await task
        await asyncio.sleep(0.01)

    asyncio.run(stopped())

    prompts = Counter(whole.model.prompts)
    assert Counter(kit.model.prompts) <= prompts + prompts


# ------------------------------------------------------------ is anything prefetched at all?


@pytest.mark.parametrize("name", sorted(NODES.keys() - NEVER_PREFETCHED - RACING))
def test_certain_calls_of_a_graph_overlap(name: str) -> None:
    kit = Kit(latency_s=0.1)

    asyncio.run(accelerate(graph_of(name, Condition(), kit)).ainvoke({**INPUT}, CONFIG))

    assert kit.model.most_at_once > 1


@pytest.mark.parametrize("name", sorted(CHAINS.keys() - RACING_CHAINS - NEVER_PREFETCHED_CHAINS))
def test_certain_calls_of_a_chain_overlap(name: str) -> None:
    kit = Kit(latency_s=0.1)

    asyncio.run(accelerate(CHAINS[name](kit)).ainvoke({**INPUT}, CONFIG))

    assert kit.model.most_at_once > 1
