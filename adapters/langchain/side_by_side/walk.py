"""Composites of a chain that are to begin their calls together: copies of them, and of what is around them."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import LLM
from langchain_core.runnables import RunnableBinding

from teola_plugin.adapters.langchain.own_models.call_sites import eligible
from teola_plugin.adapters.langchain.own_models.composites import parts, with_parts
from teola_plugin.adapters.langchain.side_by_side import classes
from teola_plugin.adapters.langchain.side_by_side.composites import BY_NAME, PARTS, Composite, ManyPrompts
from teola_plugin.adapters.langchain.side_by_side.models import prepare, text_model
from teola_plugin.adapters.langchain.side_by_side.threads import Threads
from teola_plugin.adapters.own_class import subclass_of
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.shims.pydantic import sharing


def side_by_side(node: Any, safety: ThreadSafety) -> Any:
    """The object, or a copy in which composites begin together what they call one after the other; nothing is changed.

    Only where all that is called may run on several threads. A copy is of a class with the same name, and shares the
    parts.
    """
    return _Walk(Threads(safety)).visit(node)


class _Walk:
    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def visit(self, node: Any) -> Any:
        if isinstance(node, RunnableBinding) and "max_concurrency" in node.config:
            return node  # as many at once as it says
        if isinstance(node, LLM):
            return text_model(node, threads=self._threads.model(node)) if eligible(node) else node
        if name := classes.name_of(node):
            return self._composite(name, node)
        before = dict(parts(node))
        made = {where: self.visit(part) for where, part in before.items()}
        return node if all(made[where] is before[where] for where in made) else with_parts(node, made)

    def _composite(self, name: str, node: Any) -> Any:
        before = {field: getattr(node, field) for field in classes.FIELDS[name]}
        made = {field: self._field(value) for field, value in before.items()}
        new = {field: value for field, value in made.items() if value is not before[field]}
        allowed = tuple(self._threads.allow(one) for one in classes.calls_of(node))
        if PARTS in vars(node) or not (new or any(allowed)):
            return node
        mixin = BY_NAME[name] if any(allowed) else Composite
        one: Any = sharing(subclass_of(type(node), mixin), node.model_copy(update=new))
        vars(one)[PARTS] = allowed
        if mixin is ManyPrompts:
            prepare(node.llm)
        return one

    def _field(self, value: Any) -> Any:
        if not isinstance(value, list):
            return self.visit(value)
        made = [self.visit(one) for one in value]
        return value if all(a is b for a, b in zip(made, value, strict=True)) else made
