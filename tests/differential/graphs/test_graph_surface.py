"""Tests of an accelerated graph's methods other than calls, and of its copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from differential.graphs.plain import Names, plain
from differential.graphs.sides import Side
from langgraph.graph.state import CompiledStateGraph
from langgraph.pregel import Pregel
from support.graphs import GRAPHS

from teola_plugin.errors import RegistrationError

MORE = {"explain", "last_trace", "original", "report"}
"""What an accelerated graph has in addition."""
NAMES = [name for name, case in GRAPHS.items() if case.is_graph]

pytestmark = [
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This API is in beta"),  # as_tool
]


def _tried(ask: Any) -> Any:
    try:
        return Names()(plain(ask()))
    except Exception as error:
        return Names()(plain(error))


def _node(one: Any) -> Any:
    return type(one).__name__, type(one.bound).__name__, one.channels, one.triggers, one.metadata, one.tags


def _description(graph: Any) -> dict[str, Any]:
    """Return what the methods of a graph report about it."""
    questions = {
        "name": lambda: (graph.name, graph.get_name(), type(graph).__name__, type(graph).__qualname__, str(graph)),
        "drawn": lambda: graph.get_graph().draw_mermaid(),
        "drawn whole": lambda: graph.get_graph(xray=True).to_json(),
        "subgraphs": lambda: [(name, type(one).__name__) for name, one in graph.get_subgraphs(recurse=True)],
        "input": lambda: graph.get_input_jsonschema(),
        "output": lambda: graph.get_output_jsonschema(),
        "config": lambda: graph.get_config_jsonschema(),
        "context": lambda: graph.get_context_jsonschema(),
        "types": lambda: (repr(graph.InputType), repr(graph.OutputType), repr(graph.config_specs)),
        "channels": lambda: (graph.stream_channels_list, graph.stream_channels_asis, sorted(graph.channels)),
        "nodes": lambda: {name: _node(one) for name, one in graph.nodes.items()},
        "triggers": lambda: graph.trigger_to_nodes,
    }
    return {what: _tried(ask) for what, ask in questions.items()}


@pytest.mark.parametrize("name", NAMES)
def test_accelerated_graph_describes_itself_as_the_original(name: str, accelerated_side: Side) -> None:
    made = GRAPHS[name].build(accelerated_side.kit())
    before = dict(vars(made))
    fast = accelerated_side.fast(made)
    assert isinstance(fast, type(made)) and isinstance(fast, Pregel)
    assert _description(fast) == _description(made)
    assert set(dir(fast)) - set(dir(made)) <= MORE | {n for n in dir(fast) if n.startswith("_")}
    assert set(dir(made)) <= set(dir(fast))
    assert vars(fast) is vars(made), "they share one state"
    assert vars(made) == before, "the original is left as it was"
    assert fast.explain()


async def test_async_graph_description_equals_the_originals(original_side: Side, accelerated_side: Side) -> None:
    found = []
    for side in (original_side, accelerated_side):
        graph = side.fast(GRAPHS["one_subgraph_for_two_nodes"].build(side.kit()))
        subgraphs = [(name, type(one).__name__) async for name, one in graph.aget_subgraphs(recurse=True)]
        found.append(((await graph.aget_graph(xray=True)).draw_mermaid(), subgraphs))
    assert found[0] == found[1]


QUESTION = {"question": "what is a class?"}
CONFIG: Any = {"configurable": {"thread_id": "thread"}}

COPIES: dict[str, Any] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "copy": lambda graph: graph.copy(),
    "copy with": lambda graph: graph.copy({"name": "another"}),
    "with_config": lambda graph: graph.with_config(tags=["more"], recursion_limit=9),
    "with_config again": lambda graph: graph.with_config(tags=["one"]).with_config(metadata={"two": 2}),
    "validate": lambda graph: graph.validate(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_accelerated_graph_behave_as_the_originals(
    name: str, original_side: Side, accelerated_side: Side
) -> None:
    """Copies have the class of a graph, are accelerated, and behave like copies of the original."""
    found = []
    for side in (original_side, accelerated_side):
        kit = side.kit()
        made = _tried(lambda side=side, kit=kit: _copied(side, kit, name))
        found.append((made, kit.saver.storage.keys()))
    assert found[0] == found[1]


def _copied(side: Side, kit: Any, name: str) -> Any:
    made = COPIES[name](side.fast(GRAPHS["private_channels"].build(kit)))
    assert isinstance(made, CompiledStateGraph)
    assert hasattr(made, "explain") is side.accelerated
    return made.name, made.config, made.invoke(QUESTION, CONFIG)


def _error(call: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_pickling_a_graph_of_functions_raises(original_side: Side, accelerated_side: Side) -> None:
    """LangGraph's own graphs cannot be pickled; with a pool the reason is said before."""
    made = GRAPHS["private_channels"].build(original_side.kit())
    for graph in (made, accelerated_side.fast(made)):
        error = _error(lambda graph=graph: pickle.dumps(graph))
        assert isinstance(error, AttributeError | TypeError | pickle.PicklingError | RegistrationError)


def test_attributes_set_on_accelerated_graph_take_effect(original_side: Side, accelerated_side: Side) -> None:
    """Attributes that are set on the accelerated graph are set on the original, too."""
    for side in (original_side, accelerated_side):
        made = GRAPHS["private_channels"].build(side.kit())
        graph = side.fast(made)
        graph.interrupt_before_nodes = ["draft"]
        graph.name = "another"
        graph.invoke(QUESTION, CONFIG)
        assert graph.get_state(CONFIG).next == ("draft",)
        assert graph.get_name() == "another"
        if side.accelerated:
            assert made.name == "another"
            assert made.interrupt_before_nodes == ["draft"]


@pytest.mark.parametrize("setting", ["on the original", "on the accelerated graph"])
def test_interrupt_set_later_stops_the_graph(setting: str, accelerated_side: Side) -> None:
    made = GRAPHS["private_channels"].build(accelerated_side.kit())
    fast = accelerated_side.fast(made)
    fast.invoke(QUESTION, {"configurable": {"thread_id": "first"}})
    graph = made if setting == "on the original" else fast
    graph.interrupt_before_nodes = ["draft"]
    fast.invoke(QUESTION, CONFIG)
    assert fast.get_state(CONFIG).next == ("draft",)


def test_get_subgraphs_returns_the_users_objects(accelerated_side: Side) -> None:
    made = GRAPHS["one_subgraph_for_two_nodes"].build(accelerated_side.kit())
    fast = accelerated_side.fast(made)
    subgraphs = dict(fast.get_subgraphs())
    assert subgraphs and all(graph is dict(made.get_subgraphs())[name] for name, graph in subgraphs.items())


def test_interrupt_set_later_on_a_subgraph_stops_it(accelerated_side: Side) -> None:
    made = GRAPHS["one_subgraph_for_two_nodes"].build(accelerated_side.kit())
    fast = accelerated_side.fast(made)
    fast.invoke(QUESTION, {"configurable": {"thread_id": "first"}})
    name, inner = next(iter(made.get_subgraphs()))
    inner.interrupt_before_nodes = list(inner.builder.nodes)[:1]
    fast.invoke(QUESTION, CONFIG)
    assert name in fast.get_state(CONFIG).next


@pytest.mark.parametrize(
    "made", ["with_retry", "with_fallbacks", "with_types", "bind", "pick", "map", "with_listeners"]
)
def test_runnables_made_of_accelerated_graph_equal_the_originals(
    made: str, original_side: Side, accelerated_side: Side
) -> None:
    """Runnables made of an accelerated graph are what LangChain makes of a plain one."""
    arguments: dict[str, Any] = {"with_fallbacks": ([],), "pick": ("answer",), "with_types": ()}
    found = []
    for side in (original_side, accelerated_side):
        one = getattr(side.fast(GRAPHS["private_channels"].build(side.kit())), made)(*arguments.get(made, ()))
        given = [QUESTION] if made == "map" else QUESTION
        found.append((type(one).__name__, _tried(lambda one=one, given=given: one.invoke(given, CONFIG))))
    assert found[0] == found[1]
