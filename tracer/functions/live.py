"""What of a walk's components can run ahead: not what waits for user code, which nobody tells the graph of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from teola_plugin.graph import ITEM, Component, Ref, Role
from teola_plugin.tracer.draft import Draft, Names, Span

_USER_CODE = (Role.OPAQUE, Role.TOOL)
NO_SPAN = Span()


def asks(component: Component) -> bool:
    """Whether it asks an engine for something."""
    return bool(component.engine or component.embedder) or component.body is not None


def waiting(draft: Draft) -> set[str]:
    """Components that wait for user code, and that code."""
    found: set[str] = set()
    for c in draft.components.values():
        if c.role in _USER_CODE or any(ref.producer in found for _, ref in c.inputs):
            found.add(c.name)
    return found


def alive(draft: Draft, output: Ref | None, made: set[str]) -> tuple[Ref, bool] | None:
    """Leaves in a body what runs ahead. Its output, and whether it is `output`; None where no engine is asked."""
    _drop(draft, waiting(draft))
    drop_unread(draft, made, set() if output is None else {output.producer})
    asked = [c.name for c in draft.components.values() if asks(c)]
    if not asked:
        return None
    if output is not None and (output.external or output.producer in draft.components):
        return output, True
    sure = [c.name for c in draft.components.values() if c.attributes.lookahead is None]
    return Ref(sure[-1] if sure else ITEM), False


def settle(draft: Draft, span: Span, made: set[str], wanted: set[str]) -> tuple[set[str], Span]:
    """Leaves what can run ahead, and prompts whose beginning is known: the others' names, and the span of the rest.

    Of the values in `made`, those that nobody reads are left out, but for the wanted.

    What would write stays as well: what is ordered after it waits.
    """
    found = waiting(draft)
    code = next((c.name for c in draft.components.values() if c.role in _USER_CODE), "")
    dropped = []
    for name in found:
        c = draft.components[name]
        if c.role in _USER_CODE:
            draft.components[name] = replace(c, inputs=())
        elif _begins(c, found) or any(effect.writes for effect in c.effects):
            inputs = tuple((key, Ref(code) if ref.producer in found else ref) for key, ref in c.inputs)
            draft.components[name] = replace(c, inputs=inputs)
        else:
            dropped.append(name)
    return found, drop_unread(draft, made, wanted, _drop(draft, dropped, span))


def drop_unread(draft: Draft, made: set[str], wanted: set[str], span: Span = NO_SPAN) -> Span:
    """Without the values in `made` that neither a component nor anybody else reads."""
    while True:
        read = wanted.union(*({ref.producer for _, ref in c.inputs} for c in draft.components.values()))
        unread = [name for name in draft.components if name in made and name not in read]
        if not unread:
            return span
        span = _drop(draft, unread, span)


def _begins(c: Component, unknown: set[str]) -> bool:
    """Whether something of its prompt is known before the first part that is not."""
    inputs = dict(c.inputs)
    first = c.prompt[0] if c.role is Role.GENERATION and c.prompt else None
    return first is not None and not (first.variable and inputs[first.variable].producer in unknown)


def _drop(draft: Draft, names: Iterable[str], span: Span = NO_SPAN) -> Span:
    """Without these components; what came before one still comes before what came after it."""
    heads, tails = span.heads, span.tails
    for name in names:
        del draft.components[name]
        draft.calls.pop(name, None)
        draft.lists.pop(name, None)
        before = [one for one, other in draft.order if other == name]
        after = [other for one, other in draft.order if one == name]
        between = [(one, other) for one in before for other in after]
        draft.order = [pair for pair in draft.order if name not in pair] + between
        heads, tails = _replaced(heads, name, after), _replaced(tails, name, before)
    return Span(heads, tails)


def _replaced(names: Names, name: str, others: list[str]) -> Names:
    return tuple(dict.fromkeys(one for known in names for one in (others if known == name else [known])))
