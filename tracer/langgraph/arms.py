"""Of the nodes that a graph may go to next, what may begin before it is known which.

A search too many costs little, an answer too many does not: of several arms one at most has an LLM write early, and it
does so only if no other would. What waits for the engines of the nodes before is known little earlier than the choice,
which mostly waits for them, too: an arm that waits for nothing goes before it. Of all others the prompts are
prefilled, as far as they are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from teola_plugin.graph import Component, PromptPart, Ref, Role
from teola_plugin.tracer.draft import Draft, as_lookahead

_NEVER = frozenset({Role.OPAQUE, Role.TOOL, Role.INDEXING})
_LATER = "later"
"""The input of a prompt that is known, and not to be answered yet."""


def begun_before_chosen(arms: Sequence[Draft], unknown: Callable[[], Ref], before: Draft) -> list[Component]:
    """Components of the arms; `unknown` stands for what nobody can tell before the choice, `before` is what runs
    before it."""
    written = [_written(arm, set()) for arm in arms]
    if sum(map(bool, written)) > 1:
        late = _made_by_engines(before)
        written = [_written(arm, late) for arm in arms]
    one = sum(map(bool, written)) == 1
    found: list[Component] = []
    for arm, names in zip(arms, written, strict=True):
        found += _begun(arm, names if one else set(), unknown)
    return [as_lookahead(c, certain=False) for c in found]


def _made_by_engines(draft: Draft) -> set[str]:
    """Components whose values wait for an engine."""
    found: set[str] = set()
    for c in draft.components.values():
        if c.engine or c.embedder or c.body is not None or not found.isdisjoint(_reads(c)):
            found.add(c.name)
    return found


def _written(arm: Draft, late: Iterable[str]) -> set[str]:
    """Components for which an LLM may write: those that wait neither for what is left out nor for what is late."""
    return {c.name for c in _known(arm, late) if _asks(c)}


def _known(arm: Draft, late: Iterable[str]) -> Iterator[Component]:
    """Components without side effects that read nothing but such, and nothing that is late."""
    left_out = set(late)
    for c in arm.components.values():
        if _excluded(c) or not left_out.isdisjoint(_reads(c)):
            left_out.add(c.name)
        else:
            yield c


def _begun(arm: Draft, written: set[str], unknown: Callable[[], Ref]) -> list[Component]:
    """What of an arm begins; an LLM may write for what is `written`."""
    left_out: set[str] = set()
    found: list[Component] = []
    for c in arm.components.values():
        late = left_out & set(_reads(c))
        if _excluded(c) or late or (_asks(c) and c.name not in written):
            left_out.add(c.name)
            if c.role is Role.GENERATION and _begins(c, late):
                found.append(_prefilled(c, late, unknown()))
        else:
            found.append(c)
    return _useful(found)


def _prefilled(c: Component, late: Iterable[str], unknown: Ref) -> Component:
    """The same, waiting for what nobody can tell: only the beginning of its prompt is prefilled."""
    inputs = tuple((key, unknown if ref.producer in late else ref) for key, ref in c.inputs)
    if late:
        return replace(c, inputs=inputs)
    return replace(c, inputs=(*inputs, (_LATER, unknown)), prompt=(*c.prompt, PromptPart.var(_LATER)))


def _begins(c: Component, late: Iterable[str]) -> bool:
    """Whether something of its prompt is known."""
    first, inputs = c.prompt[0] if c.prompt else None, dict(c.inputs)
    return first is not None and not (first.variable and inputs[first.variable].producer in late)


def _useful(found: list[Component]) -> list[Component]:
    """Without what nobody reads, and no engine is asked for."""
    read: set[str] = set()
    kept: list[Component] = []
    for c in reversed(found):
        if c.engine or c.embedder or c.body is not None or c.name in read:
            kept.append(c)
            read.update(_reads(c))
    return kept[::-1]


def _excluded(c: Component) -> bool:
    again = c.attributes.lookahead is not None  # a choice inside of what may not be chosen
    return c.role in _NEVER or again or any(effect.writes for effect in c.effects)


def _reads(c: Component) -> list[str]:
    return [ref.producer for _, ref in c.inputs]


def _asks(c: Component) -> bool:
    """Whether an LLM writes something for it."""
    inner = [inner for body in (c.body, c.otherwise) if body is not None for inner in body.components]
    return c.role is Role.GENERATION or any(_asks(one) for one in inner)
