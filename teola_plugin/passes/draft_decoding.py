"""A pass that names texts which an answer may repeat, so that an engine can verify several tokens at a time.

Drafts that follow from a request alone (its schema, its tools) are sent with every request, planned or not: see
`requests.draft_texts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import CARRY, LLM_PREFILLS, DraftText, Graph, GraphEdit, Primitive, PrimitiveKind, Ref
from teola_plugin.passes.base import PassContext
from teola_plugin.requests.draft_texts import forms_of_list

_K = PrimitiveKind
_CODE = frozenset({_K.CALL, _K.AGGREGATE})
"""Kinds of primitives that may stand between an answer and the prompt that contains it: a parser, a key."""


@dataclass(frozen=True, slots=True)
class DraftDecoding:
    """Add draft texts to prefillings on engines that accept drafts.

    Drafts are the earlier answers that the prompt contains (as in a refinement), the fixed forms that the app accepts
    as an answer, and the numbering or JSON keys of a list. A draft never changes the generated text: the model
    verifies it.
    """

    name: ClassVar[str] = "draft-decoding"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        """Add draft texts to the prefillings that have any; return the same graph if there are none."""
        drafts = [(p, texts) for p in graph if _accepts_drafts(p, context) and (texts := _draft_texts(p, graph))]
        if not drafts:
            return graph
        edit = GraphEdit(graph)
        for p, texts in drafts:
            edit.replace(p.with_(attributes=p.attributes.with_(drafts=texts)))
        return edit.freeze()


def _accepts_drafts(p: Primitive, context: PassContext) -> bool:
    profile = context.profile(p.engine)
    return p.kind in LLM_PREFILLS and profile is not None and profile.drafts > 0 and not p.attributes.drafts


def _draft_texts(p: Primitive, graph: Graph) -> tuple[DraftText, ...]:
    return (*_earlier_answers(p, graph), *p.attributes.forms, *_list_forms(p))


def _earlier_answers(p: Primitive, graph: Graph) -> Iterator[DraftText]:
    """Yield the prompt's variables that are answers, the last one first: it is the likeliest to be repeated."""
    names = dict.fromkeys(part.variable for part in reversed(p.prompt) if part.variable)
    return (DraftText("an earlier answer", variable=name) for name in names if _is_answer(p.input(name), graph))


def _list_forms(p: Primitive) -> Iterator[DraftText]:
    """Yield the texts that begin the items of a list answer, unless `forms` names more precise texts."""
    items = "" if p.attributes.forms else p.attributes.items
    return (DraftText("the form of its list", text=form) for form in forms_of_list(items))


def _is_answer(ref: Ref | None, graph: Graph) -> bool:
    """Return True if the value is an answer, or was computed from one alone. A carried value counts as an answer."""
    while ref is not None and ref.producer != CARRY:
        producer = graph.get(ref.producer)
        if producer is None or producer.kind not in _CODE or len(producer.inputs) != 1:
            return producer is not None and producer.decodes
        ref = producer.inputs[0][1]
    return ref is not None
