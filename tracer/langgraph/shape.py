"""What is fixed about a compiled graph before it runs: its nodes, the edges between them, how its state is updated."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langgraph.channels import BinaryOperatorAggregate, LastValue
from langgraph.constants import END, START
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

Update = Literal["replace", "append", "messages", "unknown"]
"""What a channel makes of an update: the new value; the list and the new items; the same with messages; anything."""
ROOT = "__root__"
"""The one channel of a state that has no keys."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A conditional edge."""

    path: Any
    """The Runnable that chooses; None where the node itself does, by a `Command`."""
    ends: tuple[tuple[Any, str], ...] = ()
    """What it may say, and the node that it stands for; empty where it may name any."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that it may choose, as far as that is known."""
        return tuple(dict.fromkeys(node for _, node in self.ends))

    def node(self, said: str) -> str:
        return next((node for word, node in self.ends if word == said), said)


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node, and where the graph goes from it."""

    name: str
    bound: Any
    """What it does: a Runnable; None for the start, which writes the input."""
    reads: tuple[str, ...] | None
    """Channels that make its input; None where that is the state itself."""
    then: tuple[str, ...]
    """Nodes that static edges lead to."""
    joins: tuple[str, ...]
    """Nodes that wait for it and for others."""
    branches: tuple[Branch, ...]
    skippable: bool
    """Whether it may not run though its turn has come: its result is in a cache, or a person is asked before."""
    pauses: bool
    """Whether the graph is interrupted behind it."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A compiled graph."""

    nodes: Mapping[str, NodeShape]
    updates: Mapping[str, Update]
    """What each channel of the state makes of an update."""
    parallel: bool
    """Whether nodes may run side by side."""


def shape_of(graph: Any) -> GraphShape | None:
    """None for a graph without edges to look at: of the functional API, or of bare channels."""
    if not isinstance(graph, CompiledStateGraph):
        return None
    builder, nodes = graph.builder, {}
    for name, node in graph.nodes.items():
        if name == START and not builder.branches.get(START):
            continue  # the first nodes begin as soon
        channels = node.channels
        then = tuple(sorted(end for start, end in builder.edges if start == name and end != END))
        joins = tuple(sorted({end for starts, end in builder.waiting_edges if name in starts and end != END}))
        nodes[name] = NodeShape(
            name,
            None if name == START else node.bound,
            None if channels == ROOT else tuple([channels] if isinstance(channels, str) else channels),
            then,
            joins,
            tuple(_branches(builder, name)),
            bool(node.cache_policy or graph.cache_policy) or _named(graph.interrupt_before_nodes, name),
            _named(graph.interrupt_after_nodes, name),
        )
    starts = [end for start, end in builder.edges if start == START]
    parallel = len(starts) > 1 or any(len(n.then) + len(n.joins) > 1 or n.joins for n in nodes.values())
    return GraphShape(nodes, {name: _update(channel) for name, channel in builder.channels.items()}, parallel)


def _named(names: str | Sequence[str], name: str) -> bool:
    return names == "*" or name in names


def _branches(builder: Any, name: str) -> Iterator[Branch]:
    for spec in builder.branches.get(name, {}).values():
        yield Branch(spec.path, tuple((spec.ends or {}).items()))
    if name != START and (told := builder.nodes[name].ends):
        yield Branch(None, tuple((end, end) for end in told))


def _update(channel: Any) -> Update:
    if type(channel) is LastValue:
        return "replace"
    if type(channel) is BinaryOperatorAggregate:
        if channel.operator is operator.add and isinstance(channel.value, list):
            return "append"
        if channel.operator is add_messages:
            return "messages"
    return "unknown"


def distances(shape: GraphShape) -> dict[str, int]:
    """How many nodes may come after each, on the longest way that passes no node twice in a circle."""
    follows = {name: _all_next(node, shape) for name, node in shape.nodes.items()}
    found: dict[str, int] = {}

    def measure(name: str, above: frozenset[str]) -> int:
        if name in found:
            return found[name]
        after = [measure(one, above | {name}) + 1 for one in follows[name] if one not in above and one != name]
        longest = max(after, default=0)
        if not above & follows[name]:  # part of no circle that is being walked: the same from everywhere
            found[name] = longest
        return longest

    return {name: measure(name, frozenset()) for name in shape.nodes}


def reachable(shape: GraphShape) -> dict[str, frozenset[str]]:
    """The nodes that may come behind each, itself among them where it is in a circle."""
    follows = {name: _all_next(node, shape) for name, node in shape.nodes.items()}
    found: dict[str, frozenset[str]] = {}
    for name, todo in follows.items():
        seen, left = set[str](), list(todo)
        while left:
            one = left.pop()
            if one not in seen:
                seen.add(one)
                left += follows[one]
        found[name] = frozenset(seen)
    return found


def backwards(shape: GraphShape) -> dict[str, frozenset[str]]:
    """For each node, those of its arms that go round once more: they lead back to it, and further from the end."""
    behind, ends = reachable(shape), _to_the_end(shape)
    found = {}
    for name, node in shape.nodes.items():
        arms = {arm for branch in node.branches for arm in branch.nodes if arm in shape.nodes}
        found[name] = frozenset(arm for arm in arms if name in behind[arm] and ends[arm] >= ends[name])
    return found


def _to_the_end(shape: GraphShape) -> dict[str, int]:
    """How many nodes come after each at least."""
    found = {name: 0 for name, node in shape.nodes.items() if _may_end(node)}
    left = [name for name in shape.nodes if name not in found]
    for far in range(1, len(shape.nodes) + 1):
        near = [name for name in left if any(one in found for one in _all_next(shape.nodes[name], shape))]
        found |= dict.fromkeys(near, far)
        left = [name for name in left if name not in found]
    return found | dict.fromkeys(left, len(shape.nodes))


def _may_end(node: NodeShape) -> bool:
    chosen = [end for branch in node.branches for end in branch.nodes]
    return END in chosen or not (node.then or node.joins or chosen)


def _all_next(node: NodeShape, shape: GraphShape) -> frozenset[str]:
    chosen = [end for branch in node.branches for end in branch.nodes]
    return frozenset(name for name in (*node.then, *node.joins, *chosen) if name in shape.nodes)


def begun_with(shape: GraphShape, state: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """The state behind the start: with what the graph was called with."""
    found = dict(state)
    for name, value in given.items() if isinstance(given, dict) else ():
        how, old = shape.updates.get(name), found.get(name)
        if how == "replace":
            found[name] = value
        elif how in ("append", "messages") and isinstance(value, list):
            found[name] = [*(old or ()), *value]
        else:
            found.pop(name, None)
    return found
