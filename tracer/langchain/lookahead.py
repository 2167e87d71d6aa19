"""What a composite may choose, begun before it has chosen.

The arms of a branch, the primary of a fallback, what is retried: the composite itself runs as it always did, and so
does what it chooses. But what that asks engines of the pool for is often known before, from the same input. Of several
arms at most one may ask an LLM early: a retrieval too many costs little, an answer too many does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from langchain_core.runnables import RouterRunnable, Runnable, RunnableBranch, RunnableWithFallbacks
from langchain_core.runnables.retry import RunnableRetry

from teola_plugin.graph import Component, Role
from teola_plugin.tracer.draft import Draft, as_lookahead
from teola_plugin.tracer.langchain.classes import changed, planned

Node = Runnable[Any, Any]
_NEVER = frozenset({Role.OPAQUE, Role.TOOL, Role.INDEXING})


class Choice(NamedTuple):
    """What a composite may call."""

    parts: tuple[Node, ...]
    certain: bool
    """Whether it calls the only one of them whatever happens."""
    key: str = ""
    """What of its input it passes on; all of it by default."""


def choice(node: Node) -> Choice | None:
    """None for a composite that is not one of these, or of a class that may do anything with its parts."""
    for kind, make in _KINDS:
        if type(node) is kind and not changed(node, kind):
            found = make(node)
            return found._replace(parts=tuple(planned(part) for part in found.parts))
    return None


_KINDS: tuple[tuple[type, Callable[[Any], Choice]], ...] = (
    (RunnableBranch, lambda node: Choice((*(arm for _, arm in node.branches), node.default), False)),
    (RouterRunnable, lambda node: Choice(tuple(node.runnables.values()), False, "input")),
    (RunnableWithFallbacks, lambda node: Choice((node.runnable,), True)),
    (RunnableRetry, lambda node: Choice((node.bound,), True)),
)


def begun_early(drafts: Sequence[Draft], certain: bool) -> list[Component]:
    """Of what the parts would do, what may be done before one of them is chosen."""
    known = [list(_known(draft, _NEVER)) for draft in drafts]
    if not certain and sum(any(_asks(c) for c in components) for components in known) > 1:
        known = [list(_known(draft, _NEVER | {Role.GENERATION})) for draft in drafts]
    useful = [c for components in known if any(_works(c) for c in components) for c in components]
    return [as_lookahead(c, certain=certain) for c in useful]


def _known(draft: Draft, never: frozenset[Role]) -> Iterator[Component]:
    """Components without side effects that read nothing but such."""
    left_out: set[str] = set()
    for c in draft.components.values():
        reads = {ref.producer for _, ref in c.inputs}
        asks = Role.GENERATION in never and _asks(c)
        again = c.attributes.lookahead is not None  # a choice inside of what may not be chosen
        if c.role in never or asks or again or reads & left_out or any(effect.writes for effect in c.effects):
            left_out.add(c.name)
        else:
            yield c


def _asks(c: Component) -> bool:
    """Whether an LLM writes something for it."""
    inner = [inner for body in (c.body, c.otherwise) if body is not None for inner in body.components]
    return c.role is Role.GENERATION or any(_asks(one) for one in inner)


def _works(c: Component) -> bool:
    return c.engine != "" or c.embedder != "" or c.body is not None
