"""One function's walk: symbols flow through its source, and what it asks engines for becomes components."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable, RunnableBinding, RunnableParallel, RunnableSequence

from teola_plugin.graph import Component, Ref, Role, on_loop, simple
from teola_plugin.tracer.draft import Draft, Span, may_raise
from teola_plugin.tracer.functions.expressions import evaluate
from teola_plugin.tracer.functions.filling import Filling, as_prompt
from teola_plugin.tracer.functions.live import alive
from teola_plugin.tracer.functions.machine import Flow, Frame, Stopped
from teola_plugin.tracer.functions.pure import MADE, constant, field_of, proven
from teola_plugin.tracer.functions.reading import Surroundings
from teola_plugin.tracer.functions.source import Definition, source_of
from teola_plugin.tracer.functions.statements import statement
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Coming,
    Computed,
    Fields,
    Known,
    Symbol,
    Unknown,
    symbol_of,
)
from teola_plugin.tracer.langchain.classes import planned
from teola_plugin.tracer.langchain.trace import walk_into
from teola_plugin.tracer.purity.purity import plain, size
from teola_plugin.tracer.symbols import NotUnderstood, Prompted, Record, Value

DEPTH = 3
"""Functions of the user's that are walked inside each other."""
FUEL = 20_000
"""Expressions that are looked at for one function, with all that it calls."""


@dataclass(slots=True)
class _Shared:
    """What a walk has in common with those of its loops' bodies."""

    fuel: int = FUEL
    names: dict[Ref, str] = field(default_factory=dict)
    objects: dict[int, tuple[str, object]] = field(default_factory=dict)


@dataclass(slots=True)
class Walk:
    """A `Walker`."""

    draft: Draft
    frame: Frame
    name: str
    depth: int = 0
    line: int = 0
    span: Span = field(default_factory=Span)
    changed: dict[tuple[int, str], Symbol] = field(default_factory=dict)
    left_out: bool = False
    runs_user_code: bool = False
    is_body: bool = False
    shared: _Shared = field(default_factory=_Shared)
    _code: str = ""
    """The last OPAQUE that stands for user code."""
    _open: bool = False
    """Whether nothing came after it."""

    # ------------------------------------------------------------ source

    def evaluate(self, node: ast.expr) -> Symbol:
        self.shared.fuel -= 1
        if self.shared.fuel < 0:
            raise Stopped
        return evaluate(self, node)

    def block(self, statements: Sequence[ast.stmt]) -> Flow:
        for one in statements:
            flow = statement(self, one)
            if flow is not Flow.NEXT:
                return flow
        return Flow.NEXT

    def function(self, definition: Definition) -> Flow:
        """Walks through the function whose arguments the frame has."""
        if isinstance(definition, ast.Lambda):
            self.frame.returned = self.evaluate(definition.body)
            return Flow.ENDED
        flow = self.block(definition.body)
        if flow is Flow.NEXT:
            self.frame.returned = Known(None)
        return flow

    def call_function(self, func: Any, given: Sequence[Symbol], named: Mapping[str, Symbol]) -> Symbol | None:
        plainly, given = unbound(func, given)
        definition = None if plainly is None else source_of(plainly.__code__)
        if plainly is None or definition is None or self.depth >= DEPTH:
            return None
        names = arguments(plainly, given, named)
        if names is None:
            return None
        before = self.frame
        self.frame, self.depth = frame_of(plainly, names), self.depth + 1
        try:
            flow = self.function(definition)
            made = self.frame.returned if flow is Flow.ENDED or flow is Flow.NEXT else UNKNOWN_VALUE
        finally:
            self.frame, self.depth = before, self.depth - 1
        if flow is Flow.STOPPED:
            self.left_out = True
            self.user_code()
        return Coming(made) if inspect.iscoroutinefunction(plainly) else made

    # ------------------------------------------------------------ order

    def emitted(self, span: Span) -> None:
        """Components come after all that was there before."""
        if span.heads:
            self.span = self.draft.then(self.span, span)
            self._open = False

    def user_code(self) -> None:
        self.runs_user_code = True
        if not self.is_body and not self._open:
            self._code = self.draft.name(f"{self.name}.code")
            self.draft.add(Component(self._code, Role.OPAQUE))
            self.emitted(Span((self._code,), (self._code,)))
            self._open = True

    # ------------------------------------------------------------ values

    def name_for(self, value: Any, *, is_ref: bool) -> str:
        if is_ref:
            return self.shared.names.setdefault(value, f"{MADE}v{len(self.shared.names)}")
        held = self.shared.objects.setdefault(id(value), (f"{MADE}o{len(self.shared.objects)}", value))
        return held[0]

    def code(self, symbol: Symbol) -> Computed | None:
        if isinstance(symbol, Computed) and (symbol.ref is None or symbol.home is not self.draft):
            return symbol
        if isinstance(symbol, Known):
            return self._code_of_object(symbol.value)
        try:
            ref = None if isinstance(symbol, (Unknown, Coming)) else self.ref(symbol)
        except NotUnderstood:
            ref = None
        if ref is None:
            return None
        name = self.name_for(ref, is_ref=True)
        return Computed(ast.Name(name, ast.Load()), {name: ref})

    def _code_of_object(self, value: Any) -> Computed:
        written = constant(value)
        if written is not None:
            return Computed(written)
        name = getattr(value, "__name__", "") if type(value) in (type, type(len)) else ""
        if name and getattr(builtins, name, None) is value:
            return Computed(ast.Name(name, ast.Load()))
        name = self.name_for(value, is_ref=False)
        return Computed(ast.Name(name, ast.Load()), {}, {name: value})

    def ref(self, symbol: Symbol) -> Ref:
        if isinstance(symbol, Ref):
            return symbol
        if isinstance(symbol, Prompted):
            return self.draft.real(symbol, self.name, ())
        if isinstance(symbol, Fields) and not symbol.items and symbol.base is not None:
            return symbol.base
        if isinstance(symbol, (Unknown, Coming)):
            raise NotUnderstood("a value that is not known")
        if isinstance(symbol, Computed):
            if symbol.ref is None or symbol.home is not self.draft:
                symbol.ref, symbol.home = self._computed(symbol), self.draft
            return symbol.ref
        if isinstance(symbol, Known) and not plain(symbol.value):
            raise NotUnderstood("an object of the user's own")
        filling = Filling(self.ref)
        fill = filling.of(symbol)
        word = "constant" if isinstance(symbol, Known) else "made"
        call = (lambda **given: fill(given)[0]) if filling.inputs else on_loop(lambda **given: fill(given)[0])
        name = self.draft.name(f"{self.name}.{word}")
        return self.draft.call(name, simple(size)(call), (), **filling.inputs)

    def _computed(self, symbol: Computed) -> Ref:
        code = symbol.code
        if isinstance(code, ast.Name) and code.id in symbol.refs:
            return symbol.refs[code.id]
        if isinstance(code, ast.Attribute) and isinstance(code.value, ast.Name) and code.value.id in symbol.refs:
            name, field_name = self.draft.name(f"{self.name}.{code.attr}"), code.attr
            get = may_raise(on_loop(lambda value: field_of(value, field_name)))
            self.draft.lists[name] = ""
            return self.draft.call(name, get, (), value=symbol.refs[code.value.id])
        if isinstance(code, ast.GeneratorExp):
            symbol = Computed(ast.ListComp(code.elt, code.generators), symbol.refs, symbol.objects)
        func = proven(symbol)
        name = self.draft.name(f"{self.name}.value")
        self.draft.lists[name] = ""
        call = may_raise(lambda **given: func(**given))
        return self.draft.call(name, simple(size)(call) if func.reads.degree == 1 else call, (), **func.inputs)

    def _any_ref(self, symbol: Symbol) -> Ref:
        """A ref also for what is not known: a prompt may begin with what is."""
        try:
            return self.ref(symbol)
        except NotUnderstood:
            if self.is_body:
                raise
        if not self._code:
            self.user_code()
        return Ref(self._code)

    # ------------------------------------------------------------ engines

    def run(self, node: Runnable[Any, Any], given: Symbol, kwargs: Mapping[str, Any]) -> Symbol:
        node = planned(node)
        before = len(self.draft.components)
        try:
            value = self._input(node, given)
        except NotUnderstood:
            self.user_code()
            return UNKNOWN_VALUE
        made, span = walk_into(self.draft, node, value, self.name, f"{self.name}:{self.line}", kwargs)
        self.emitted(span)
        if any(c.role in (Role.OPAQUE, Role.TOOL) for c in list(self.draft.components.values())[before:]):
            self.runs_user_code = True
        return symbol_of(made)

    def _input(self, node: Runnable[Any, Any], given: Symbol) -> Value:
        if isinstance(given, (Prompted, Ref)):
            return given
        first = _first(node)
        if isinstance(first, BaseLanguageModel):
            if isinstance(given, (Computed, Unknown)):
                return self.ref(given)
            return as_prompt(given, self._any_ref)
        if isinstance(given, Fields):
            return Record({key: self._any_ref(inner) for key, inner in given.items.items()}, given.base)
        return self.ref(given)

    def body(self, outer: Callable[[str], Symbol]) -> Walk:
        frame = Frame(self.frame.around, outer=outer)
        return Walk(
            self.draft.body(),
            frame,
            self.name,
            self.depth,
            self.line,
            changed=self.changed,
            is_body=True,
            shared=self.shared,
        )

    def finished(self, output: Ref | None) -> tuple[Ref, bool] | None:
        return alive(self.draft, output)


def _first(node: Any) -> Any:
    """What gets the input."""
    while True:
        if isinstance(node, RunnableSequence):
            node = node.first
        elif isinstance(node, RunnableBinding):
            node = node.bound
        elif isinstance(node, RunnableParallel) and len(node.steps__) == 1:
            node = next(iter(node.steps__.values()))
        else:
            return node


def unbound(func: Any, given: Sequence[Symbol]) -> tuple[FunctionType | None, list[Symbol]]:
    """The function of a bound method, and its arguments with `self`; None for anything but a function in Python."""
    if type(func) is MethodType:
        func, given = func.__func__, [Known(func.__self__), *given]
    return (func if type(func) is FunctionType else None), list(given)


def arguments(func: FunctionType, given: Sequence[Symbol], named: Mapping[str, Symbol]) -> dict[str, Symbol] | None:
    """The function's names as it begins; None where the arguments do not fit."""
    code = func.__code__
    wanted = code.co_varnames[: code.co_argcount]
    only_named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    defaults = dict(zip(wanted[::-1], (func.__defaults__ or ())[::-1], strict=False)) | (func.__kwdefaults__ or {})
    found = {name: Known(value) for name, value in defaults.items()} | dict(zip(wanted, given, strict=False))
    found |= {name: one for name, one in named.items() if name in (*wanted, *only_named)}
    return {name: UNKNOWN_VALUE for name in (*wanted, *only_named)} | found


def frame_of(func: FunctionType, names: Mapping[str, Symbol]) -> Frame:
    code = func.__code__
    return Frame(Surroundings.of(func), frozenset((*code.co_varnames, *code.co_cellvars)), dict(names))
