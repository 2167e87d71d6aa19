"""Drafts: what an answer may repeat is named, so that an engine can verify several of its tokens at a time.

What a request tells of itself (its schema, its tools) goes along with it, planned or not: see `requests.draft_texts`.
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
"""What may stand between an answer and the prompt that it goes into: a parser, a key."""


@dataclass(frozen=True, slots=True)
class DraftDecoding:
    """A prompt that holds an earlier answer, as that of a refinement does, gets that answer as its draft; a list its
    numbers or the keys of its JSON; an answer of which only some are understood, those.

    Only for engines that take drafts. A draft changes no text: it is verified by the model.
    """

    name: ClassVar[str] = "draft-decoding"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        found = [(p, texts) for p in graph if _takes_drafts(p, context) and (texts := _texts(p, graph))]
        if not found:
            return graph
        edit = GraphEdit(graph)
        for p, texts in found:
            edit.replace(p.with_(attributes=p.attributes.with_(drafts=texts)))
        return edit.freeze()


def _takes_drafts(p: Primitive, context: PassContext) -> bool:
    profile = context.profile(p.engine)
    return p.kind in LLM_PREFILLS and profile is not None and profile.drafts > 0 and not p.attributes.drafts


def _texts(p: Primitive, graph: Graph) -> tuple[DraftText, ...]:
    return (*_answers(p, graph), *p.attributes.forms, *_list_forms(p))


def _answers(p: Primitive, graph: Graph) -> Iterator[DraftText]:
    """Variables of the prompt that are answers, the last one first: that is the likeliest to be repeated."""
    names = dict.fromkeys(part.variable for part in reversed(p.prompt) if part.variable)
    return (DraftText("an earlier answer", variable=name) for name in names if _is_answer(p.input(name), graph))


def _list_forms(p: Primitive) -> Iterator[DraftText]:
    """Of a list that something maps over, unless its schema says more."""
    spelled = "" if p.attributes.forms else p.attributes.items
    return (DraftText("the form of its list", text=form) for form in forms_of_list(spelled))


def _is_answer(ref: Ref | None, graph: Graph) -> bool:
    if ref is None or ref.producer == CARRY:
        return ref is not None
    made = graph.get(ref.producer)
    while made is not None and made.kind in _CODE and len(made.inputs) == 1:
        ref = made.inputs[0][1]
        if ref.producer == CARRY:
            return True
        made = graph.get(ref.producer)
    return made is not None and made.decodes
