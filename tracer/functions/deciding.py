"""Conditions on what is there already, such as the state of a graph: decided by its values, not guessed at."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import INPUT, Ref, read_path
from teola_plugin.tracer.functions.pure import MADE, Proven, proven
from teola_plugin.tracer.functions.values import Computed, Symbol
from teola_plugin.tracer.symbols import NotUnderstood


@dataclass(frozen=True, slots=True)
class Condition:
    """On the input of a template alone; certainly pure, and soon decided."""

    test: Proven

    def holds(self, value: Any) -> bool | None:
        """Whether it does, for this input; None where that cannot be told: the plain code will."""
        try:
            return bool(self.test(**{name: read_path(value, ref.path) for name, ref in self.test.inputs.items()}))
        except Exception:
            return None


Decide = Callable[[Condition], bool | None]


def decided(test: Symbol, decide: Decide | None) -> bool | None:
    """Whether a condition holds; None where it is on more than the input, or where nobody decides."""
    if isinstance(test, Ref):
        test = Computed(ast.Name(f"{MADE}v", ast.Load()), {f"{MADE}v": test})
    if decide is None or not isinstance(test, Computed) or not test.refs:
        return None
    if any(ref.producer != INPUT for ref in test.refs.values()):
        return None
    whole = Computed(ast.Call(ast.Name("bool", ast.Load()), [test.code], []), test.refs, test.objects)
    try:
        return decide(Condition(proven(whole)))
    except NotUnderstood:
        return None
