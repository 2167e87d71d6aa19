"""The components that may start before the original has chosen which part of it runs next.

An unnecessary search costs little, an unnecessary answer of an LLM does not. So of several parts at most one has an LLM
write early, and only if no other would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from teola_plugin.graph import Component, PromptPart, Ref, Role
from teola_plugin.tracer.draft import Draft, as_lookahead

_NEVER_PREFETCHED = frozenset({Role.OPAQUE, Role.TOOL, Role.INDEXING})
_BARRIER = "later"
"""The input that keeps a prompt, all of which is known, from being answered yet."""


def lookahead_of_choice(drafts: Sequence[Draft], certain: bool) -> list[Component]:
    """Return the components of parts that may start before one of them is chosen.

    `certain`: the only part is called whatever happens.
    """
    startable = [list(_prefetchable_components(draft)) for draft in drafts]
    if not certain and sum(any(map(_generates, components)) for components in startable) > 1:
        startable = [list(_prefetchable_components(draft, with_generations=False)) for draft in drafts]
    useful = [c for components in startable if any(map(_uses_engine, components)) for c in components]
    return [as_lookahead(c, certain=certain) for c in useful]


def lookahead_of_arms(
    arms: Sequence[Draft], unknown: Callable[[], Ref], preceding: Draft, *, only_prompts: bool = False
) -> list[Component]:
    """Return the components of a graph's next nodes that may start before one of them is chosen.

    Of the prompts that are not answered early, the beginning is prefilled as far as it is known. `unknown` adds a
    component for what is not known before the choice; `preceding` is the draft of what runs before it. What waits for
    the engines of `preceding` is known little earlier than the choice, which mostly waits for them, too: an arm that
    waits for nothing goes before it. With `only_prompts`, engines only prefill the beginnings of prompts.
    """
    if only_prompts:
        parts = [_prefetchable_part_of_arm(arm, set(), unknown, only_prompts=True) for arm in arms]
        return [as_lookahead(c, certain=False) for part in parts for c in part]
    generating = [_prefetchable_generations(arm, set()) for arm in arms]
    if sum(map(bool, generating)) > 1:
        late = _names_behind_engines(preceding)
        generating = [_prefetchable_generations(arm, late) for arm in arms]
    is_only_one = sum(map(bool, generating)) == 1
    components: list[Component] = []
    for arm, names in zip(arms, generating, strict=True):
        components += _prefetchable_part_of_arm(arm, names if is_only_one else set(), unknown)
    return [as_lookahead(c, certain=False) for c in components]


def _prefetchable_components(
    draft: Draft, late: Iterable[str] = (), *, with_generations: bool = True
) -> Iterator[Component]:
    """Yield the components without side effects that depend on nothing but each other, and on no `late` component."""
    skipped = set(late)
    for c in draft.components.values():
        is_excluded = _is_never_prefetched(c) or (not with_generations and _generates(c))
        if is_excluded or not skipped.isdisjoint(_producers(c)):
            skipped.add(c.name)
        else:
            yield c


def _is_never_prefetched(c: Component) -> bool:
    """Return True for a component that must not start before the original has chosen it.

    These are components with side effects, those that call the user's own model or retriever, and those that are
    already marked as starting early, inside another choice.
    """
    is_choice_in_choice = c.attributes.lookahead is not None
    has_side_effects = c.role in _NEVER_PREFETCHED or any(effect.writes for effect in c.effects)
    return has_side_effects or is_choice_in_choice or _calls_provider(c)


def _calls_provider(c: Component) -> bool:
    """Return True if a model or retriever of the user's own is called, which speculation may not do."""
    inner = [inner for body in (c.body, c.otherwise) if body is not None for inner in body.components]
    return bool(c.attributes.wrapped) or any(map(_calls_provider, inner))


def _producers(c: Component) -> list[str]:
    return [ref.producer for _, ref in c.inputs]


def _uses_engine(c: Component) -> bool:
    return c.engine != "" or c.embedder != "" or c.body is not None


def _generates(c: Component) -> bool:
    """Return True if an LLM writes something for the component or inside of its body."""
    inner = [inner for body in (c.body, c.otherwise) if body is not None for inner in body.components]
    return c.role is Role.GENERATION or any(map(_generates, inner))


def _names_behind_engines(draft: Draft) -> set[str]:
    """Return the names of the components that use an engine, or that read from one that does.

    Producers come first in `draft.components`. Where an LLM could write early for several of the next nodes,
    `lookahead_of_arms` rules out those whose prompts wait for these components of what runs before.
    """
    names: set[str] = set()
    for c in draft.components.values():
        if _uses_engine(c) or not names.isdisjoint(_producers(c)):
            names.add(c.name)
    return names


def _prefetchable_generations(arm: Draft, late: Iterable[str]) -> set[str]:
    """Return the names of the components for which an LLM could write early."""
    return {c.name for c in _prefetchable_components(arm, late) if _generates(c)}


def _prefetchable_part_of_arm(
    arm: Draft, generating: set[str], unknown: Callable[[], Ref], *, only_prompts: bool = False
) -> list[Component]:
    """Return the components of an arm that start early; an LLM may write for those that `generating` names.

    With `only_prompts`, no other component uses an engine.
    """
    skipped: set[str] = set()
    components: list[Component] = []
    for c in arm.components.values():
        late = skipped & set(_producers(c))
        is_excluded = _uses_engine(c) if only_prompts else _generates(c) and c.name not in generating
        if _is_never_prefetched(c) or late or is_excluded:
            skipped.add(c.name)
            if c.role is Role.GENERATION and _is_beginning_known(c, late):
                components.append(_as_prefilling(c, late, unknown()))
        else:
            components.append(c)
    read: set[str] = set()
    useful: list[Component] = []
    for c in reversed(components):
        if _uses_engine(c) or c.name in read:
            useful.append(c)
            read.update(_producers(c))
    return useful[::-1]


def _is_beginning_known(generation: Component, late: Iterable[str]) -> bool:
    """Return True if the prompt does not begin with a variable that is not known yet."""
    if not generation.prompt:
        return False
    first = generation.prompt[0]
    return not (first.variable and dict(generation.inputs)[first.variable].producer in late)


def _as_prefilling(generation: Component, late: Iterable[str], unknown: Ref) -> Component:
    """Return the generation, waiting for the unknown component: only the known beginning of its prompt is prefilled."""
    if late:
        inputs = tuple((key, unknown if ref.producer in late else ref) for key, ref in generation.inputs)
        return replace(generation, inputs=inputs)
    prompt = (*generation.prompt, PromptPart.var(_BARRIER))
    return replace(generation, inputs=(*generation.inputs, (_BARRIER, unknown)), prompt=prompt)
