"""What a call waits for in the plan of a node that begins before its own."""

from __future__ import annotations

from collections.abc import Sequence

from teola_plugin.graph import INPUT, Ref, Role
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions.pruning import uses_engine
from teola_plugin.tracer.langgraph.lookahead import STATE
from teola_plugin.tracer.langgraph.shape import ROOT


def label(ref: Ref) -> str:
    """What fills a variable of a prompt: a channel of the state, another call."""
    if ref.producer != INPUT:
        return ref.producer
    path = [str(one) for one in ref.path if one not in (STATE, ROOT)]
    return ".".join(path) or "state"


def waits_for(plan: TraceResult, call: str) -> list[str]:
    """Calls of engines, and user code, that stand before it in a plan, directly."""
    known = {c.name: c for c in plan.template.components}
    found, todo, seen = dict[str, None](), [ref.producer for _, ref in known[call].inputs], set[str]()
    while todo:
        name = todo.pop(0)
        if name not in known or name in seen:
            continue
        seen.add(name)
        if uses_engine(known[name]) or known[name].role is Role.OPAQUE:
            found[name] = None
        else:
            todo += [ref.producer for _, ref in known[name].inputs]
    return list(found)


def waits_for_code(plan: TraceResult, waits: Sequence[str]) -> bool:
    code = {c.name for c in plan.template.components if c.role is Role.OPAQUE}
    return not code.isdisjoint(waits)


def known_tokens(plan: TraceResult, call: str) -> int:
    """Of the beginning of its prompt: what stands before the first variable that waits for user code."""
    asked = next(c for c in plan.template.components if c.name == call)
    code = {c.name for c in plan.template.components if c.role is Role.OPAQUE}
    unknown = {key for key, ref in asked.inputs if ref.producer in code}
    last = next((i for i, part in enumerate(asked.prompt) if part.variable in unknown), len(asked.prompt))
    return sum(part.tokens for part in asked.prompt[:last])


def once(waits: Sequence[str]) -> str:
    return f", once {' and '.join(waits)} {'have' if len(waits) > 1 else 'has'} ended" if waits else ""
