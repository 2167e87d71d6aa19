"""The adapter of the toy framework, which holds only what is specific to that framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from teola_plugin.adapters.method_adapter import MethodAdapter, MethodCall, MethodLowering
from teola_plugin.graph import INPUT, Ref
from teola_plugin.tracer.symbols import NotUnderstood
from tests.support.toy_framework import Ask, ForEach, ToyApp, ToyModel, ToyStep


class ToyAdapter(MethodAdapter):
    """Prefetches the calls of an app that do not need each other's answers."""

    entry_points: ClassVar[tuple[str, ...]] = ("answer", "aanswer")
    provider_methods: ClassVar[Mapping[type, tuple[str, ...]]] = {ToyModel: ("_ask", "_aask")}

    def recognizes(self, obj: Any) -> bool:
        return isinstance(obj, ToyApp)

    def takes_threads(self, target: Any, threads: Any) -> bool:
        """Return True: the framework says that its models may be called from any thread."""
        return True

    def lower(self, obj: Any, lowering: MethodLowering) -> Ref:
        lowering.objects.append(obj.steps)
        values: dict[str, Ref] = {}
        for step in obj.steps.steps:
            values[step.into] = self._lower_step(step, lowering, values)
        return next(reversed(values.values()), Ref(INPUT))

    def _lower_step(self, step: ToyStep, lowering: MethodLowering, values: Mapping[str, Ref]) -> Ref:
        lowering.objects.append(step)
        if type(step) is Ask:
            return self._lower_ask(step, lowering, values)
        if type(step) is not ForEach:
            raise NotUnderstood(f"a {type(step).__name__} may call anything")
        lowering.objects.append(step.step)
        inner = step.step
        captured = {name: _value(values, name) for name in inner.variables if name != "item"}

        def lower_body(body: MethodLowering, item: Ref) -> Ref:
            return self._lower_ask(inner, body, {**{name: Ref(f"${name}") for name in captured}, "item": item})

        return lowering.add_loop(step.into, _value(values, step.items), lower_body, **captured)

    def _lower_ask(self, step: Ask, lowering: MethodLowering, values: Mapping[str, Ref]) -> Ref:
        model, template, options = step.model, step.template, step.options
        is_async = lowering.on_loop and type(model)._aask is not ToyModel._aask

        def arguments(**variables: Any) -> MethodCall:
            return MethodCall("_aask" if is_async else "_ask", (template.format(**variables),), options)

        return lowering.add_call(step.into, model, arguments, **{name: _value(values, name) for name in step.variables})


def _value(values: Mapping[str, Ref], name: str) -> Ref:
    """Return the ref of a key of the state: an earlier step's answer, or part of the query's input."""
    return values.get(name, Ref(INPUT, (name,)))
