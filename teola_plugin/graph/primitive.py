"""The primitive, one symbolic operation of a graph, with its kind (paper, Table 1) and its attributes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.graph.refs import Effect, Inputs, PromptPart, Ref

if TYPE_CHECKING:
    from teola_plugin.graph.graph import Fragment


# ------------------------------------------------------------ kinds


class PrimitiveKind(Enum):
    """A kind of primitive. Two kinds differ if engines or schedulers must treat them differently."""

    CHUNKING = "chunking"
    EMBEDDING = "embedding"
    INGESTION = "ingestion"
    SEARCHING = "searching"
    RERANKING = "reranking"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PARTIAL_PREFILLING = "partial_prefilling"
    FULL_PREFILLING = "full_prefilling"
    PARTIAL_DECODING = "partial_decoding"
    CONDITION = "condition"
    AGGREGATE = "aggregate"
    CALL = "call"
    """Pure code of the framework (a parser, a key access): cheap, and may run more than once."""
    VERIFY = "verify"
    """Compares predicted items with the real ones."""
    TOOL = "tool"
    MAP = "map"
    FOLD = "fold"
    LOOP = "loop"
    BRANCH = "branch"
    OPAQUE = "opaque"
    """User code: runs once, where the original would run it; the graph only receives its result."""

    def __repr__(self) -> str:
        return self.name

    # Members are singletons; Enum's own hash runs Python code for each set membership.
    __hash__ = object.__hash__


_K = PrimitiveKind

LLM_PREFILLS = frozenset({_K.PREFILLING, _K.FULL_PREFILLING})
"""Kinds that begin an LLM request: a prefilling and its decodings are sent to the engine as one."""
LLM_DECODES = frozenset({_K.DECODING, _K.PARTIAL_DECODING})
LLM_KINDS = LLM_PREFILLS | LLM_DECODES | {_K.PARTIAL_PREFILLING}
ENGINE_KINDS = LLM_KINDS | {_K.EMBEDDING, _K.INGESTION, _K.SEARCHING, _K.RERANKING}
"""Kinds that only engines execute. All others run at the client, except a tool that names its engine."""
SERVED_KINDS = ENGINE_KINDS | {_K.TOOL}
"""Kinds that an engine may execute."""
FRAGMENT_KINDS = frozenset({_K.MAP, _K.FOLD, _K.LOOP, _K.BRANCH})
IMPURE_KINDS = frozenset({_K.TOOL, _K.OPAQUE})
"""Kinds that never run twice, never run before the original reaches them, and are never retried."""


# ------------------------------------------------------------ attributes, which tracers, passes and drivers pass on

GAP = "\ue000"
"""A gap in a draft text, to be filled by the model."""
_MAX_PRINTED = 60
"""Maximum number of characters of a literal that are printed."""


@dataclass(frozen=True, slots=True)
class DraftText:
    """A text that an answer may repeat: the value of an input, or a literal, which may have gaps.

    A text with gaps is a form of the answer, maybe one of several: it applies from the answer's first token, or, if it
    begins with a gap, from where its text appears. A text without gaps applies wherever the answer agrees with it.
    """

    description: str
    """In words, e.g. `an earlier answer`."""
    variable: str = ""
    """Name of the input whose text it is; empty for a literal."""
    text: str = ""
    in_request: bool = False
    """True if it follows from the request alone, so that it is drafted even without a plan: `requests.draft_texts`."""

    def __str__(self) -> str:
        literal = json.dumps(self.text.replace(GAP, "…"), ensure_ascii=False)
        return self.variable or (literal if len(literal) <= _MAX_PRINTED else f'{literal[: _MAX_PRINTED - 2]}…"')


@dataclass(frozen=True, slots=True)
class Attributes:
    """Facts about one component, and about the primitives that it is decomposed into. A default means "not known".

    Facts that only your own passes use go into `options` instead.
    """

    # Parameters of requests.
    role: Literal["", "query", "document"] = ""
    """EMBEDDING: `query` or `document`; empty means `query`."""
    collection: str = ""
    """SEARCHING, INGESTION: name of the collection."""
    k: int | None = None
    """SEARCHING: maximum number of hits; None means 4."""
    filter: tuple[Any, ...] = ()
    """SEARCHING: conditions on metadata, as `SearchVector` takes them."""
    wrapped: str = ""
    """Key of the call site in the chain, if the user's own model or retriever is called."""
    ends: tuple[str, ...] = ()
    """Calls that the original alone makes: ids of user code in front of them, which has ended once they begin."""
    items: str = ""
    """Decodings: how the text writes a list (`json`, `lines`, ...); empty means `json`."""

    # Facts that the tracer found in the original.
    slow: bool = False
    """OPAQUE: a retriever, model or tool of the user's own, expected to take as long as a tool."""
    is_parallel: bool = False
    """MAP, BRANCH: the original processes the items, or tries the arms, one after the other; the graph at once."""
    lookahead: bool | None = None
    """Requests for a subplan before the original reaches it: True if it is certain to, False if it may not; None for
    all other requests."""
    speculative_arms: tuple[str, ...] = ()
    """BRANCH: arms (`then`, `else`) that only search, and may begin before the condition is known."""

    form: Literal["", "whole", "unknown"] = ""
    """Generations whose requests differ for complete and streamed answers: the form that the original uses. `whole`:
    complete, unless a caller makes it stream; `unknown`: it may stream by itself, or send no request."""
    forms: tuple[DraftText, ...] = ()
    """Generations: literals that the answer may be or begin with: labels that its parser accepts, keys of its JSON."""

    # Facts that passes added.
    stream_items: tuple[str, ...] = ()
    """DECODING: ids of the MAPs that get each item as soon as it is complete."""
    grow: bool = False
    """MAP: its width is known at run time only; instances are added item by item (see `stream_items`)."""
    grows_with: str = ""
    """Prefillings: the id of a MAP. While its list grows, the known part of the prompt may be prefilled."""
    drafts: tuple[DraftText, ...] = ()
    """Prefillings: texts that the answer may repeat, likeliest first."""
    when: Literal["", "idle"] = ""
    """PARTIAL_PREFILLING: `idle` for a warm-up that waits until its engine is idle."""

    def with_(self, **changes: Any) -> Attributes:
        """Return a copy with some fields changed. (`dataclasses.replace` takes three times as long.)

        Raise KeyError for a name that is no field.
        """
        values = list(_attribute_values(self))
        for name, value in changes.items():
            values[_ATTRIBUTE_POSITIONS[name]] = value
        return Attributes(*values)

    def non_default_items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each known fact, in the order above; for a tuple of ids or texts, one pair each."""
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                if name == "forms":  # these are listed among the drafts of the prefilling
                    continue
                if name in ("ends", "stream_items", "drafts", "speculative_arms"):
                    yield from ((name, entry) for entry in value)
                else:
                    yield name, value


_DEFAULTS = {field.name: field.default for field in fields(Attributes)}
_ATTRIBUTE_POSITIONS = {name: position for position, name in enumerate(_DEFAULTS)}
_attribute_values = attrgetter(*_DEFAULTS)
ATTRIBUTES = frozenset(_DEFAULTS)
"""Names of the fields; options may not use them."""
NOTHING_SAID = Attributes()


# ------------------------------------------------------------ the primitive


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
    speculative: bool = False
    """True if it works on a predicted value: its result is used only after that value was verified."""
    fragment: Fragment | None = None
    otherwise: Fragment | None = None
    """BRANCH: the fragment for a condition that is false."""
    speculative_refs: tuple[Ref, ...] = ()
    """MAP: outputs of the speculative instances that were added before the items were known."""
    attributes: Attributes = NOTHING_SAID
    options: tuple[tuple[str, Any], ...] = ()
    """Facts that your own passes use, as key and hashable value, e.g. `("cheap", True)`."""

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*[ref for _, ref in self.inputs], *self.speculative_refs)

    @property
    def producers(self) -> tuple[str, ...]:
        """The producers of the values that it reads, each once.

        Those of speculative references count, too, so that a value is kept for a reader that may come.
        """
        producers = [ref.producer for _, ref in self.inputs]
        if self.speculative_refs:
            producers += [ref.producer for ref in self.speculative_refs]
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
        """Return a copy with some fields changed. (`dataclasses.replace` takes twice as long.)

        Raise KeyError for a name that is no field.
        """
        values = list(_values(self))
        for name, value in changes.items():
            values[_POSITIONS[name]] = value
        return Primitive(*values)

    def rename(self, names: dict[str, str], refs: dict[str, Ref], **changes: Any) -> Primitive:
        """Return a copy with ids replaced by `names`, external references by `refs`, and fields by `changes`."""

        def renamed(ref: Ref) -> Ref:
            """Return a reference with its producer renamed, or bound to what `refs` has for it."""
            if ref.producer in refs:
                base = refs[ref.producer]
                return Ref(base.producer, base.path + ref.path)
            return Ref(names.get(ref.producer, ref.producer), ref.path)

        if self.speculative_refs:
            changes["speculative_refs"] = tuple([renamed(ref) for ref in self.speculative_refs])
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
