"""Keeps the components that can run before the original gets there, and drops those that wait for user code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from teola_plugin.graph import ITEM, Component, Ref, Role
from teola_plugin.tracer.draft import Draft, Names, Span
from teola_plugin.tracer.leaf import is_user_code, searches_own_store

EMPTY_SPAN = Span()


def uses_engine(component: Component) -> bool:
    """Return True if the component, or the body that it runs, sends requests to an engine."""
    return bool(component.engine or component.embedder) or component.body is not None


def prune_body(
    draft: Draft, output: Ref | None, helpers: set[str], *, has_user_code: bool = False
) -> tuple[Ref, bool] | None:
    """Keep the components of a loop's or branch's body that can run before the original gets there.

    `helpers` are the components that compute values for others; those that nobody reads are dropped, too.
    `has_user_code`: the body also runs code that may write to any store, so that searches of the user's own stores wait
    for the original.

    Returns the output of the body, and whether that is `output`; None if no component uses an engine.
    """
    _drop(draft, _waiting_for_user_code(draft, with_searches=has_user_code))
    _drop_unread(draft, helpers, set() if output is None else {output.producer})
    if not any(map(uses_engine, draft.components.values())):
        return None
    if output is not None and (output.external or output.producer in draft.components):
        return output, True
    certain = [c.name for c in draft.components.values() if c.attributes.lookahead is None]
    return Ref(certain[-1] if certain else ITEM), False


def prune_function(draft: Draft, span: Span, helpers: set[str], outputs: set[str]) -> tuple[set[str], Span]:
    """Keep the components of a function that can run before the original gets there, and prompts that can begin.

    Components that write are kept as well: what is ordered after them waits. So are those that only wait for a value
    which the run computes: they stay in their place, but what is ordered after them does not. `helpers` that neither a
    component nor `outputs` reads are dropped.

    Returns the names of all components that wait for user code, and the span of what is left.
    """
    waiting = _waiting_for_user_code(draft)
    user_code = next((c.name for c in draft.components.values() if is_user_code(c)), "")
    dropped = []
    for name in waiting:
        c = draft.components[name]
        if is_user_code(c):
            draft.components[name] = replace(c, inputs=())
        elif _has_known_prefix(c, waiting) or any(effect.writes for effect in c.effects):
            inputs = tuple((key, Ref(user_code) if ref.producer in waiting else ref) for key, ref in c.inputs)
            draft.components[name] = replace(c, inputs=inputs)
        else:
            dropped.append(name)
    return waiting, _drop_unread(draft, helpers, outputs, _drop(draft, dropped, span))


def _waiting_for_user_code(draft: Draft, *, with_searches: bool = False) -> set[str]:
    """Return the names of the components that are user code, or that read its values.

    `with_searches`: searches of the user's own stores wait for user code as well.
    """
    names: set[str] = set()
    for c in draft.components.values():
        is_waiting = is_user_code(c) or (with_searches and searches_own_store(c))
        if is_waiting or any(ref.producer in names for _, ref in c.inputs):
            names.add(c.name)
    return names


def _has_known_prefix(c: Component, unknown: set[str]) -> bool:
    """Return True if the prompt begins with a part that is known before the components in `unknown`."""
    inputs = dict(c.inputs)
    first = c.prompt[0] if c.role is Role.GENERATION and c.prompt else None
    return first is not None and not (first.variable and inputs[first.variable].producer in unknown)


def _drop_unread(draft: Draft, helpers: set[str], outputs: set[str], span: Span = EMPTY_SPAN) -> Span:
    """Drop the helpers that neither a component nor `outputs` reads. Return the span of what is left."""
    while True:
        read = outputs.union(*({ref.producer for _, ref in c.inputs} for c in draft.components.values()))
        unread = [name for name in draft.components if name in helpers and name not in read]
        if not unread:
            return span
        span = _drop(draft, unread, span)


def _drop(draft: Draft, names: Iterable[str], span: Span = EMPTY_SPAN) -> Span:
    """Drop these components; what was ordered before one is still ordered before what was ordered after it.

    Returns the span of what is left.
    """
    heads, tails = span.heads, span.tails
    for name in names:
        del draft.components[name]
        draft.calls.pop(name, None)
        draft.list_spellings.pop(name, None)
        earlier = [before for before, after in draft.order if after == name]
        later = [after for before, after in draft.order if before == name]
        bridges = [(before, after) for before in earlier for after in later]
        draft.order = [pair for pair in draft.order if name not in pair] + bridges
        heads, tails = _replace_name(heads, name, later), _replace_name(tails, name, earlier)
    return Span(heads, tails)


def _replace_name(names: Names, name: str, replacements: list[str]) -> Names:
    return tuple(dict.fromkeys(new for old in names for new in (replacements if old == name else [old])))
