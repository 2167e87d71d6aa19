"""Where something may stand between a model's answer and its tools: then nothing of the tools begins early.

Tools may begin while a node asks its model only if the node leads to them directly. What leads elsewhere first (hooks
after the model, a node that asks a human) has the last word, and so does `interrupt()` in anything on the way.
"""

from __future__ import annotations

from collections.abc import Collection

from teola_plugin.adapters.langgraph.agents.reach import reach
from teola_plugin.tracer.langgraph.shape import GraphShape, NodeShape

Names = frozenset[str]


def models_before(shape: GraphShape, tools: Names) -> Names:
    """The nodes that may lead to one of these directly, without anybody being asked on the way."""
    before = frozenset(name for name, node in shape.nodes.items() if tools and _leads(node, tools))
    return frozenset(name for name in before if not _held_back(shape, shape.nodes[name], tools))


def _leads(node: NodeShape, tools: Names) -> bool:
    if not tools.isdisjoint((*node.then, *node.joins)):
        return True
    return any(not branch.ends or not tools.isdisjoint(branch.nodes) for branch in node.branches)


def _held_back(shape: GraphShape, node: NodeShape, tools: Names) -> bool:
    """Whether somebody is asked in the node itself, in what chooses where it leads, in the tools' own node, or in
    another node that it may lead to."""
    bound = [shape.nodes[name].bound for name in {node.name, *behind(shape, node), *tools} if name in shape.nodes]
    return any(reach(one).asks for one in (*bound, *(branch.path for branch in node.branches)))


def behind(shape: GraphShape, node: NodeShape) -> Names:
    """The nodes that it may lead to directly; all of them where a conditional edge does not say."""
    chosen = (end for branch in node.branches for end in branch.nodes or shape.nodes)
    return frozenset((*node.then, *node.joins, *chosen))


def paused(asked: Collection[str] | str | None, nodes: Names) -> bool:
    """Whether a graph that is to stop at these nodes (`interrupt_before`, `interrupt_after`) stops at one of ours."""
    return asked == "*" or (not isinstance(asked, str) and not nodes.isdisjoint(asked or ()))
