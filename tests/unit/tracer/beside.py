"""Runs a traced template with fake engines and given opaque values. Returns what the plan computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pool_leaves import answer, score

from teola_plugin.graph import Component, Role, WorkflowTemplate, read_path
from teola_plugin.requests.payloads import Generation, Hit
from teola_plugin.tracer.draft import TraceResult


def run_beside(traced: TraceResult, value: Any, opaque: Mapping[str, Any] | None = None) -> Any:
    """Return the template's output for a query input."""
    return _run(traced, traced.template, {"$input": value}, opaque or {})


def _run(traced: TraceResult, template: WorkflowTemplate, known: dict[str, Any], opaque: Mapping[str, Any]) -> Any:
    for c in template.components:
        inputs = {name: read_path(known[ref.producer], ref.path) for name, ref in c.inputs}
        known[c.name] = opaque[c.name] if c.role is Role.OPAQUE else _value(traced, c, inputs, opaque)
    return read_path(known[template.output.producer], template.output.path)


def _value(traced: TraceResult, c: Component, inputs: dict[str, Any], opaque: Mapping[str, Any]) -> Any:
    call = traced.calls.get(c.name)
    if c.role is Role.CALL and call is not None:
        return call(**inputs)
    if c.role is Role.GENERATION and call is not None:
        return Generation(answer(call(inputs).prompt))
    if c.role is Role.RETRIEVAL:
        return (Hit("h", f"about {inputs['query']}", {}, 1.0),)
    if c.role is Role.RERANKING:
        return [score(inputs["query"], text) for text in inputs["texts"]]
    if c.role is Role.INDEXING and call is not None:
        return [chunk.id for chunk in call(*inputs.values())]
    if c.role is Role.EMBEDDING:
        return [[0.0] for _ in inputs["texts"]]
    assert c.role is Role.MAP and c.body is not None
    return [_run(traced, c.body, {"$item": item}, opaque) for item in inputs["items"]]
