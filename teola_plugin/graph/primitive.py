"""The unit of everything: one symbolic operation."""

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
    """One symbolic operation. Pure data: picklable, without query values and without run state."""

    id: str
    kind: PrimitiveKind
    engine: str = ""
    """Name of the engine that executes it; empty for what runs at the client."""
    inputs: Inputs = ()
    """The values it reads, by name."""
    after: tuple[str, ...] = ()
    """Order-only edges: from the template, from effects, or from a partial prefilling to its full one."""
    effects: tuple[Effect, ...] = ()
    scope: tuple[str, ...] = ()
    """Path of the framework node it belongs to."""
    call: str = ""
    """Key of the callable in the client's table that makes its payload (engine kinds) or its value (CALL)."""
    batchable: bool = False
    """Its first input is a list of independent requests, and so is its value; otherwise it is one request."""
    splittable: bool = False
    size: int | None = None
    """Expected number of requests; None where it is known at run time only."""
    prompt: tuple[PromptPart, ...] = ()
    item: int | None = None
    """PARTIAL_DECODING: index of the item it forwards."""
    tentative: bool = False
    """Works on a predicted value: invisible until verified, forgotten otherwise."""
    fragment: Fragment | None = None
    otherwise: Fragment | None = None
    """BRANCH: the arm taken when the condition is false."""
    early: tuple[Ref, ...] = ()
    """MAP: outputs of the instances that were made before the items were known."""
    attributes: Attributes = NOTHING_SAID
    options: tuple[tuple[str, Any], ...] = ()
    """What passes of your own tell each other, by keys of their own, e.g. `("cheap", True)`. Hashable."""

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*[ref for _, ref in self.inputs], *self.early)

    @property
    def producers(self) -> tuple[str, ...]:
        """Whose values it reads; each once."""
        found = [ref.producer for _, ref in self.inputs]
        if self.early:
            found += [ref.producer for ref in self.early]
        return tuple(dict.fromkeys(found)) if len(found) > 1 else tuple(found)

    def input(self, name: str) -> Ref | None:
        return next((ref for key, ref in self.inputs if key == name), None)

    def option(self, name: str, default: Any = None) -> Any:
        """The option of this key, else `default`."""
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
        """May be re-run from its inputs, and may run ahead of its place."""
        return self.kind not in IMPURE_KINDS and not any(effect.writes for effect in self.effects)

    @property
    def holds_fragment(self) -> bool:
        return self.kind in FRAGMENT_KINDS

    def with_(self, **changes: Any) -> Primitive:
        """A copy with other values for some fields. (`dataclasses.replace` takes twice as long.)"""
        values = list(_values(self))
        for name, value in changes.items():
            values[_PLACES[name]] = value
        return Primitive(*values)

    def rename(self, names: dict[str, str], refs: dict[str, Ref], **changes: Any) -> Primitive:
        """A copy whose id and edges follow `names`, and whose external refs follow `refs`; `changes` as in `with_`."""

        def moved(ref: Ref) -> Ref:
            if ref.producer in refs:
                base = refs[ref.producer]
                return Ref(base.producer, base.path + ref.path)
            return Ref(names.get(ref.producer, ref.producer), ref.path)

        if self.early:
            changes["early"] = tuple([moved(ref) for ref in self.early])
        if self.after:
            changes["after"] = tuple([names.get(a, a) for a in self.after])
        if self.attributes.stream_items:
            holders = tuple([names.get(holder, holder) for holder in self.attributes.stream_items])
            changes["attributes"] = self.attributes.with_(stream_items=holders)
        inputs = tuple([(key, moved(ref)) for key, ref in self.inputs])
        return self.with_(id=names.get(self.id, self.id), inputs=inputs, **changes)


_NAMES = tuple(f.name for f in fields(Primitive))
_PLACES = {name: place for place, name in enumerate(_NAMES)}
_values = attrgetter(*_NAMES)


def is_impure(p: Primitive) -> bool:
    """User code, or a holder whose instances run user code."""
    if p.kind in IMPURE_KINDS:
        return True
    if p.fragment is None:
        return False
    return any(is_impure(inner) for f in (p.fragment, p.otherwise) if f is not None for inner in f.graph)
