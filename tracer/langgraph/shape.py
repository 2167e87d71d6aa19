"""The shape of a compiled graph, known before it runs: its nodes, its edges, and how its state is updated."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableBinding, RunnableSequence
from langgraph.channels import BinaryOperatorAggregate, LastValue
from langgraph.constants import END, START
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.pregel import Pregel
from langgraph.types import interrupt

from teola_plugin.shims.langchain_agents import AgentModel, ReactModel, agent_model, react_model
from teola_plugin.tracer.functions.lookup import FreeNames, is_framework_code

UpdateRule = Literal["replace", "append", "messages", "unknown"]
"""How a channel combines an update with its value: it takes the new value, appends the new items to a list, does the
same with messages, or does anything else."""
MAX_STEPS = 500
"""Sets of nodes that may run side by side, of one graph, that are looked at."""
MESSAGES = "messages"
"""The channel with the messages of an agent."""
ROOT = "__root__"
"""The one channel of a state that has no keys."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A conditional edge."""

    path: Any
    """The Runnable that chooses; None if the node itself does, by a `Command`."""
    ends: tuple[tuple[Any, str], ...] = ()
    """Pairs of a possible result of `path` and the node that it stands for; empty if it may name any node."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it may choose, as far as they are known."""
        return tuple(dict.fromkeys(node for _, node in self.ends))

    def node_for(self, result: str) -> str:
        return next((node for label, node in self.ends if label == result), result)


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node, and the edges that leave it."""

    name: str
    bound: Any
    """The Runnable that the node calls; None for the start, which writes the input."""
    reads: tuple[str, ...] | None
    """Channels that make its input; None if the state itself is its input."""
    successors: tuple[str, ...]
    """Nodes that static edges lead to."""
    joins: tuple[str, ...]
    """Nodes that wait for it and for others."""
    branches: tuple[Branch, ...]
    skippable: bool
    """True if it may not run in its turn: its result is in a cache, or a person is asked before."""
    pauses: bool
    """True if the graph is interrupted after it."""
    model_chain: Runnable[Any, Any] | None = None
    """What the model node of an agent calls with its messages; None for other nodes, and where middleware decides."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A compiled graph: its nodes, and the channels of its state."""

    nodes: Mapping[str, NodeShape]
    update_rules: Mapping[str, UpdateRule]
    """How each channel of the state combines an update with its value."""
    first_nodes: frozenset[str]
    """Nodes of the first superstep; the start alone if conditional edges leave it."""
    inputs: frozenset[str]
    """Channels that the input writes."""
    outputs: tuple[str, ...]
    """Channels that are returned."""
    keeps_state: bool
    """True if a call of it inside of another graph goes on from its last one."""
    caches_tasks: bool = False
    """True if results of tasks that its nodes call may come from a cache."""
    is_function: bool = False
    """True for a function of the functional API (`@entrypoint`): the input of the graph is that of its only node."""

    def is_entered_from_others(self, name: str, node: NodeShape) -> bool:
        """Return True if an edge may lead to the node of this name from elsewhere than from `node`.

        The start of the graph counts as elsewhere. A conditional edge that does not name its ends may lead to any node.
        """
        other_nodes = [one for one in self.nodes.values() if one is not node]
        arms = [branch.nodes or (name,) for one in other_nodes for branch in one.branches]
        return name in itertools.chain(self.first_nodes, *(one.successors + one.joins for one in other_nodes), *arms)


def shape_of(graph: Any) -> GraphShape | None:
    """Return the shape of a graph; None for one of bare channels, which has no edges."""
    if not isinstance(graph, CompiledStateGraph):
        return _shape_of_function(graph)
    builder, nodes, agent = graph.builder, {}, agent_model(graph) or react_model(graph)
    for name, node in graph.nodes.items():
        if name == START and not builder.branches.get(START):
            continue  # the first nodes begin as soon
        channels = node.channels
        nodes[name] = NodeShape(
            name,
            None if name == START else node.bound,
            None if channels == ROOT else tuple([channels] if isinstance(channels, str) else channels),
            tuple(sorted(end for start, end in builder.edges if start == name and end != END)),
            tuple(sorted({end for starts, end in builder.waiting_edges if name in starts and end != END})),
            tuple(_branches(builder, name)),
            bool(node.cache_policy or graph.cache_policy) or _includes(graph.interrupt_before_nodes, name),
            _includes(graph.interrupt_after_nodes, name),
            _model_chain(agent) if agent is not None and agent.node == name else None,
        )
    rules = {name: _update_rule(channel) for name, channel in builder.channels.items()}
    first_nodes = [START] if START in nodes else [end for start, end in builder.edges if start == START]
    inputs = frozenset(builder.schemas.get(builder.input_schema, ()))
    outputs = (graph.output_channels,) if isinstance(graph.output_channels, str) else tuple(graph.output_channels)
    keeps_state = graph.checkpointer not in (None, False)
    return GraphShape(nodes, rules, frozenset(first_nodes), inputs, outputs, keeps_state, bool(graph.cache_policy))


def _model_chain(agent: AgentModel | ReactModel) -> Runnable[Any, Any] | None:
    """Return the prompt and the model of an agent, as a chain that is called with its messages.

    Return None where middleware, a function of the user's or a format of the answer decides what is called.
    """
    if isinstance(agent, ReactModel):
        return _react_chain(agent)
    bind_tools = getattr(type(agent.model), "bind_tools", None)
    if agent.wrapped or agent.structured or not isinstance(agent.model, BaseChatModel):
        return None
    if agent.tools and not is_framework_code(bind_tools):
        return None
    before = [] if agent.system_message is None else [agent.system_message]
    prompt = ChatPromptTemplate.from_messages([*before, MessagesPlaceholder(MESSAGES)])
    model = agent.model.bind_tools(agent.tools, tool_choice=None) if agent.tools else agent.model
    return prompt | model


def _react_chain(agent: ReactModel) -> Runnable[Any, Any] | None:
    """Return the chain of an agent of `create_react_agent`, with a prompt template in place of its own first step."""
    chain, prompt = agent.chain, agent.prompt
    if not agent.takes_messages or type(chain) is not RunnableSequence or len(chain.steps) != 2:
        return None
    model = chain.steps[1]
    if not isinstance(model.bound if isinstance(model, RunnableBinding) else model, BaseChatModel):
        return None
    if type(prompt) is ChatPromptTemplate and {*prompt.input_variables, *prompt.optional_variables} == {MESSAGES}:
        return prompt | model
    if prompt is not None and type(prompt) not in (str, SystemMessage):
        return None
    before = [] if prompt is None else [SystemMessage(prompt) if type(prompt) is str else prompt]
    return ChatPromptTemplate.from_messages([*before, MessagesPlaceholder(MESSAGES)]) | model


def _shape_of_function(graph: Any) -> GraphShape | None:
    """Return the shape of a graph that `@entrypoint` made: one node, which starts with the input and ends the graph.

    Return None for any other graph.
    """
    if not isinstance(graph, Pregel) or len(graph.nodes) != 1 or graph.output_channels != END:
        return None
    ((name, node),) = graph.nodes.items()
    if node.channels != START or list(node.triggers) != [START] or graph.input_channels != START:
        return None
    skippable = bool(node.cache_policy or graph.cache_policy) or _includes(graph.interrupt_before_nodes, name)
    pauses = _includes(graph.interrupt_after_nodes, name)
    nodes = {name: NodeShape(name, node.bound, None, (), (), (), skippable, pauses)}
    keeps_state = graph.checkpointer not in (None, False)
    return GraphShape(
        nodes, {}, frozenset(nodes), frozenset(), (END,), keeps_state, bool(graph.cache_policy), is_function=True
    )


def _includes(names: str | Sequence[str], name: str) -> bool:
    return names == "*" or name in names


def _branches(builder: Any, name: str) -> Iterator[Branch]:
    """Yield the conditional edges that leave a node, and the choice that the node itself makes by a `Command`."""
    for spec in builder.branches.get(name, {}).values():
        yield Branch(spec.path, tuple((spec.ends or {}).items()))
    if name != START and (destinations := builder.nodes[name].ends):
        yield Branch(None, tuple((end, end) for end in destinations))


def _update_rule(channel: Any) -> UpdateRule:
    """Return how a channel combines an update with its value; `unknown` for any reducer but the usual ones."""
    if type(channel) is LastValue:
        return "replace"
    if type(channel) is BinaryOperatorAggregate:
        if channel.operator is operator.add and isinstance(channel.value, list):
            return "append"
        if channel.operator is add_messages:
            return "messages"
    return "unknown"


def may_interrupt(function: Any, depth: int = 3) -> bool:
    """Return True if a function of the user's, or one that it names, names LangGraph's `interrupt`."""
    while type(function) is partial:
        function = function.func
    function = getattr(function, "__func__", function)
    if type(function) is not FunctionType or is_framework_code(function):
        return function is interrupt
    names, pending = set[str](), [function.__code__]
    while pending:
        code = pending.pop()
        names.update(code.co_names, code.co_freevars)
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    free_names = FreeNames.of_function(function)
    values = (free_names.cells.get(name, free_names.globals.get(name)) for name in names)
    return interrupt.__name__ in names or (depth > 0 and any(may_interrupt(value, depth - 1) for value in values))


def distances(shape: GraphShape) -> dict[str, int]:
    """Return how many nodes may come after each, on the longest path that passes no node twice."""
    successors = {name: _all_successors(node, shape) for name, node in shape.nodes.items()}
    lengths: dict[str, int] = {}

    def measure(name: str, path: frozenset[str]) -> int:
        """Return how many nodes may come after this one on the longest path that avoids the nodes in `path`."""
        if name in lengths:
            return lengths[name]
        nexts = [successor for successor in successors[name] if successor not in path and successor != name]
        longest = max((measure(successor, path | {name}) + 1 for successor in nexts), default=0)
        if not path & successors[name]:  # part of no cycle that is being walked: the same from everywhere
            lengths[name] = longest
        return longest

    return {name: measure(name, frozenset()) for name in shape.nodes}


def back_edges(shape: GraphShape) -> dict[str, frozenset[str]]:
    """Return, for each node, the arms that go round a loop once more: back to it, and further away from the end."""
    reachable, to_end = _reachable(shape), _shortest_to_end(shape)
    edges = {}
    for name, node in shape.nodes.items():
        arms = {arm for branch in node.branches for arm in branch.nodes if arm in shape.nodes}
        edges[name] = frozenset(arm for arm in arms if name in reachable[arm] and to_end[arm] >= to_end[name])
    return edges


def accompanied_nodes(shape: GraphShape) -> frozenset[str]:
    """Return the nodes that may run beside others in a superstep; all, if there are too many ways through the graph."""
    starts_of_joins: dict[str, set[str]] = {}
    for node in shape.nodes.values():
        for target in node.joins:
            starts_of_joins.setdefault(target, set()).add(node.name)
    no_nodes = frozenset[str]()
    seen, pending, accompanied = set[tuple[frozenset[str], frozenset[str]]](), [(shape.first_nodes, no_nodes)], no_nodes
    while pending:
        step, finished_starts = pending.pop()  # `finished_starts`: nodes that others wait for, which have run
        if (step, finished_starts) in seen:
            continue
        seen.add((step, finished_starts))
        accompanied |= step if len(step) > 1 else no_nodes
        nodes = [shape.nodes[name] for name in step if name in shape.nodes]
        finished_starts |= {node.name for node in nodes if node.joins}
        ready = [target for target, starts in starts_of_joins.items() if starts <= finished_starts]
        finished_starts = finished_starts.difference(*(starts_of_joins[target] for target in ready))
        certain = frozenset((*ready, *(name for node in nodes for name in node.successors)))
        choices = [set(branch.nodes or shape.nodes) for node in nodes for branch in node.branches]
        if len(seen) + math.prod(map(len, choices)) > MAX_STEPS:
            return frozenset(shape.nodes)
        pending += [(certain.union(arms) - {END}, finished_starts) for arms in itertools.product(*choices)]
    return accompanied


def _reachable(shape: GraphShape) -> dict[str, frozenset[str]]:
    """Return the nodes that may come after each, itself among them if it is in a cycle."""
    successors = {name: _all_successors(node, shape) for name, node in shape.nodes.items()}
    reachable: dict[str, frozenset[str]] = {}
    for name, first in successors.items():
        seen, pending = set[str](), list(first)
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending += successors[node]
        reachable[name] = frozenset(seen)
    return reachable


def _shortest_to_end(shape: GraphShape) -> dict[str, int]:
    """Return how many nodes come after each at least."""
    lengths = {name: 0 for name, node in shape.nodes.items() if _can_end(node)}
    unmeasured = [name for name in shape.nodes if name not in lengths]
    for length in range(1, len(shape.nodes) + 1):
        measured = lengths.keys()
        layer = [name for name in unmeasured if not measured.isdisjoint(_all_successors(shape.nodes[name], shape))]
        lengths |= dict.fromkeys(layer, length)
        unmeasured = [name for name in unmeasured if name not in lengths]
    return lengths | dict.fromkeys(unmeasured, len(shape.nodes))


def _can_end(node: NodeShape) -> bool:
    arms = [end for branch in node.branches for end in branch.nodes]
    return END in arms or not (node.successors or node.joins or arms)


def _all_successors(node: NodeShape, shape: GraphShape) -> frozenset[str]:
    arms = [end for branch in node.branches for end in branch.nodes]
    return frozenset(name for name in (*node.successors, *node.joins, *arms) if name in shape.nodes)


def state_after_input(shape: GraphShape, state: Mapping[str, Any], graph_input: Any) -> dict[str, Any]:
    """Return the state once the graph's input has been written to it; without the channels that are not known."""
    values = dict(state)
    for name, value in graph_input.items() if isinstance(graph_input, dict) else ():
        rule, old = shape.update_rules.get(name), values.get(name)
        if rule == "replace":
            values[name] = value
        elif rule in ("append", "messages") and isinstance(value, list):
            values[name] = [*(old or ()), *value]
        else:
            values.pop(name, None)
    return values
