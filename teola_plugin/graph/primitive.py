"""The primitive: one symbolic operation of a graph."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from teola_plugin.graph.attributes import NOTHING_SAID, Attributes
from teola_plugin.graph.kinds import (
    ENGINE_KINDS,
    FRAGMENT_KINDS,
    IMPURE_KINDS,
    LLM_DECODES,
    LLM_PREFILLS,
    PrimitiveKind,
)
from teola_plugin.graph.refs import Effect, Inputs, PromptPart, Ref

if TYPE_CHECKING:
    from teola_plugin.graph.fragment import Fragment


@dataclass(frozen=True, slots=True)
class Primitive:
    """A symbolic operation. Immutable, picklable data, without values of a query and without run state."""

    id: str
    kind: PrimitiveKind
    engine: str = ""
    """Name of the engine that executes it; empty if it runs at the client."""
    inputs: Inputs = ()
    """The values that it reads, by name."""
    after: tuple[str, ...] = ()
    """Order-only edges: from the template, from effects, or from a partial prefilling to its full one."""
    effects: tuple[Effect, ...] = ()
    scope: tuple[str, ...] = ()
    """Path of the framework node it belongs to."""
    call: str = ""
    """Key of the callable in the client's table that computes its payload (engine kinds) or its value (CALL)."""
    batchable: bool = False
    """True if its first input is a list of independent requests, and its value the list of their results."""
    splittable: bool = False
    size: int | None = None
    """Expected number of requests; None if it is known at run time only."""
    prompt: tuple[PromptPart, ...] = ()
    item: int | None = None
    """PARTIAL_DECODING: index of the item that it forwards."""
    tentative: bool = False
    """True if it works on a predicted value: its result is used only after that value was verified."""
    fragment: Fragment | None = None
    otherwise: Fragment | None = None
    """BRANCH: the fragment for a condition that is false."""
    early: tuple[Ref, ...] = ()
    """MAP: outputs of the speculative instances that were added before the items were known."""
    attributes: Attributes = NOTHING_SAID
    options: tuple[tuple[str, Any], ...] = ()
    """Facts that your own passes use, as key and hashable value, e.g. `("cheap", True)`."""

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*[ref for _, ref in self.inputs], *self.early)

    @property
    def producers(self) -> tuple[str, ...]:
        """The producers of the values that it reads, each once."""
        producers = [ref.producer for _, ref in self.inputs]
        if self.early:
            producers += [ref.producer for ref in self.early]
        return tuple(dict.fromkeys(producers)) if len(producers) > 1 else tuple(producers)

    def input(self, name: str) -> Ref | None:
        return next((ref for key, ref in self.inputs if key == name), None)

    def option(self, name: str, default: Any = None) -> Any:
        """Return the option with this key, else `default`."""
        return next((value for key, value in self.options if key == name), default)

    @property
    def on_engine(self) -> bool:
        return self.kind in ENGINE_KINDS or (self.kind is PrimitiveKind.TOOL and bool(self.engine))

    @property
    def prefills(self) -> bool:
        return self.kind in LLM_PREFILLS

    @property
    def decodes(self) -> bool:
        return self.kind in LLM_DECODES

    @property
    def pure(self) -> bool:
        """True if it may run again with the same inputs, and before the original reaches it."""
        return self.kind not in IMPURE_KINDS and not any(effect.writes for effect in self.effects)

    @property
    def holds_fragment(self) -> bool:
        return self.kind in FRAGMENT_KINDS

    def with_(self, **changes: Any) -> Primitive:
        """Return a copy with some fields changed. (`dataclasses.replace` takes twice as long.)"""
        values = list(_values(self))
        for name, value in changes.items():
            values[_POSITIONS[name]] = value
        return Primitive(*values)

    def rename(self, names: dict[str, str], refs: dict[str, Ref], **changes: Any) -> Primitive:
        """Return a copy with ids replaced by `names`, external references by `refs`, and fields by `changes`."""

        def renamed(ref: Ref) -> Ref:
            if ref.producer in refs:
                base = refs[ref.producer]
                return Ref(base.producer, base.path + ref.path)
            return Ref(names.get(ref.producer, ref.producer), ref.path)

        if self.early:
            changes["early"] = tuple([renamed(ref) for ref in self.early])
        if self.after:
            changes["after"] = tuple([names.get(a, a) for a in self.after])
        if self.attributes.stream_items:
            maps = tuple([names.get(map_id, map_id) for map_id in self.attributes.stream_items])
            changes["attributes"] = self.attributes.with_(stream_items=maps)
        inputs = tuple([(key, renamed(ref)) for key, ref in self.inputs])
        return self.with_(id=names.get(self.id, self.id), inputs=inputs, **changes)


_NAMES = tuple(f.name for f in fields(Primitive))
_POSITIONS = {name: position for position, name in enumerate(_NAMES)}
_values = attrgetter(*_NAMES)


def is_impure(p: Primitive) -> bool:
    """Return True for user code, and for a primitive whose fragments contain user code."""
    if p.kind in IMPURE_KINDS:
        return True
    if p.fragment is None:
        return False
    return any(is_impure(inner) for f in (p.fragment, p.otherwise) if f is not None for inner in f.graph)
