"""Private names of LangGraph: each touched here, in a function that says what happens without it.

Seen unchanged from langgraph 1.0.0 to 1.2.22.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Wrap = Callable[[Any], Any]
"""What the loop runs for a node -> what it runs instead."""


def watched_node(node: Any, wrap: Wrap, **changes: Any) -> Any:
    """A copy of a `PregelNode`, with other values for some fields, of which the loop runs `wrap(...)`.

    `bound` stays what it was, by which the node cache tells nodes apart, and so do the writers. Private:
    `PregelNode.node`, the cached property that the loop reads (`langgraph.pregel._read`); since langgraph 0.3. Where it
    is no cached property any more, the node is given back as it is: it runs as always, and nothing ahead of it.
    """
    if not hasattr(type(node), "node") or not hasattr(node, "copy"):
        return node
    copied = node.copy(changes)
    run = copied.node
    if run is None:
        return copied
    if not hasattr(getattr(type(node), "node", None), "attrname"):
        return node.copy(changes)
    vars(copied)["node"] = wrap(run)
    return copied


def plain_node(node: Any) -> Any:
    """Of a node that `watched_node` made: the same without what `wrap` added. Private: as there."""
    return node.copy({})
