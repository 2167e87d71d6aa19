"""One function's walk: symbols flow through its source, and what it asks engines for becomes components."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable, RunnableBinding, RunnableParallel, RunnableSequence

from teola_plugin.graph import INPUT, Component, Ref, Role, on_loop, simple
from teola_plugin.tracer.draft import Draft, Span, may_raise
from teola_plugin.tracer.functions.composing import truth
from teola_plugin.tracer.functions.deciding import Decide, decided
from teola_plugin.tracer.functions.entering import called
from teola_plugin.tracer.functions.expressions import evaluate
from teola_plugin.tracer.functions.filling import Filling, as_prompt, as_text
from teola_plugin.tracer.functions.in_place import InPlace
from teola_plugin.tracer.functions.live import alive
from teola_plugin.tracer.functions.machine import Flow, Frame, Stopped, Walker
from teola_plugin.tracer.functions.pure import MADE, constant, field_of, is_small, proven
from teola_plugin.tracer.functions.source import Definition
from teola_plugin.tracer.functions.statements import block
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Coming,
    Computed,
    Defined,
    Fields,
    Known,
    Series,
    Spread,
    Symbol,
    Text,
    Unknown,
    symbol_of,
)
from teola_plugin.tracer.langchain.classes import planned
from teola_plugin.tracer.langchain.leaves import lower_leaf
from teola_plugin.tracer.langchain.trace import walk_into
from teola_plugin.tracer.leaf import EmbeddingLeaf
from teola_plugin.tracer.purity.purity import is_plain, plain_size
from teola_plugin.tracer.symbols import NotUnderstood, Prompted, Record, Value

DEPTH = 3
"""Functions of the user's that are walked inside each other."""
NESTED = 4
"""Conditions inside each other whose ways are walked."""
_NUMBERS = itertools.count()
"""Values have names of their own in all walks: what one walk made is put together with what another made."""
FUEL = 5_000
"""Expressions that are looked at for one function, with all that it calls."""


@dataclass(slots=True)
class _Shared:
    """What a walk has in common with those of its loops' bodies."""

    fuel: int = FUEL
    names: dict[Ref, str] = field(default_factory=dict)
    objects: dict[int, tuple[str, object]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    """Components that compute values for others, and are of no use by themselves."""
    decide: Decide | None = None
    """Decides conditions on what is there already."""


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
    in_place: InPlace = field(default_factory=InPlace)
    left_out: bool = False
    runs_user_code: bool = False
    is_body: bool = False
    nested: int = 0
    """Conditions and loops that it is inside of."""
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
        made = evaluate(self, node)
        return UNKNOWN_VALUE if self.in_place.has(made) else made

    def truth(self, test: Symbol) -> bool | None:
        known = truth(test)
        return decided(test, self.shared.decide) if known is None else known

    def block(self, statements: Sequence[ast.stmt]) -> Flow:
        return block(self, statements)

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
        found = called(func, given, named) if self.depth < DEPTH else None
        if found is None:
            return None
        definition, frame = found
        before = self.frame
        self.frame, self.depth = frame, self.depth + 1
        try:
            flow = self.function(definition)
            made = frame.returned
        finally:
            self.frame, self.depth = before, self.depth - 1
        if flow is Flow.STOPPED:
            self.left_out, made = True, UNKNOWN_VALUE
            self.user_code()
        assert frame.code is not None
        return Coming(made) if frame.code.co_flags & inspect.CO_COROUTINE else made

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
            return self.shared.names.setdefault(value, f"{MADE}v{next(_NUMBERS)}")
        held = self.shared.objects.setdefault(id(value), (f"{MADE}o{next(_NUMBERS)}", value))
        return held[0]

    def code(self, symbol: Symbol) -> Computed | None:
        if isinstance(symbol, Computed) and symbol.ref_in(self.draft) is None:
            return symbol
        if isinstance(symbol, Known):
            return self._code_of_object(symbol.value)
        if isinstance(symbol, (Text, Series)) and (found := self._written(symbol)) is not None:
            return found
        try:
            ref = None if isinstance(symbol, (Unknown, Coming)) else self.ref(symbol)
        except NotUnderstood:
            ref = None
        if ref is None:
            return None
        name = self.name_for(ref, is_ref=True)
        return Computed(ast.Name(name, ast.Load()), {name: ref})

    def _written(self, symbol: Text | Series) -> Computed | None:
        """A text or a list, put together in the expression; None where something of it is not known."""
        items = [Known(one) if isinstance(one, str) else one for one in _parts(symbol)]
        made = [(isinstance(one, Spread), self.code(one.of if isinstance(one, Spread) else one)) for one in items]
        codes: list[ast.expr] = []
        refs: dict[str, Ref] = {}
        objects: dict[str, object] = {}
        for spread, one in made:
            if one is None:
                return None
            refs, objects = {**refs, **one.refs}, {**objects, **one.objects}
            codes.append(ast.Starred(one.code, ast.Load()) if spread else one.code)
        if isinstance(symbol, Series):
            whole: ast.expr = (ast.Tuple if symbol.kind is tuple else ast.List)(codes, ast.Load())
        else:
            pieces = [one if isinstance(one, ast.Constant) else _called("str", one) for one in codes]
            whole = ast.Call(ast.Attribute(ast.Constant(""), "join", ast.Load()), [ast.List(pieces, ast.Load())], [])
        return Computed(whole, refs, objects) if is_small(whole) else None

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
        if isinstance(symbol, Fields) and self.in_place.inside(symbol):
            raise NotUnderstood("a value that was changed in place")
        if isinstance(symbol, Prompted):
            return self.draft.real(symbol, self.name, ())
        if isinstance(symbol, Fields) and not symbol.items and symbol.base is not None:
            return symbol.base
        if isinstance(symbol, (Unknown, Coming, Defined)):
            raise NotUnderstood("a value that is not known")
        if isinstance(symbol, Computed):
            found = symbol.ref_in(self.draft)
            if found is None:
                found = self._computed(symbol)
                symbol.made.append((self.draft, found))
            return found
        if isinstance(symbol, Known) and not is_plain(symbol.value):
            raise NotUnderstood("an object of the user's own")
        filling = Filling(self.ref)
        fill = filling.of(symbol)
        word = "constant" if isinstance(symbol, Known) else "made"
        call = (lambda **given: fill(given)[0]) if filling.inputs else on_loop(lambda **given: fill(given)[0])
        return self._call(word, simple(plain_size)(call), filling.inputs)

    def _computed(self, symbol: Computed) -> Ref:
        code = symbol.code
        if isinstance(code, ast.Name) and code.id in symbol.refs:
            return symbol.refs[code.id]
        if isinstance(code, ast.Attribute) and isinstance(code.value, ast.Name) and code.value.id in symbol.refs:
            name = code.attr
            get = may_raise(on_loop(lambda value: field_of(value, name)))
            return self._call(name, get, {"value": symbol.refs[code.value.id]}, may_be_list=True)
        if isinstance(code, ast.GeneratorExp):
            symbol = Computed(ast.ListComp(code.elt, code.generators), symbol.refs, symbol.objects)
        func = proven(symbol)
        keys = {name: f"value{number + 1 if number else ''}" for number, name in enumerate(func.inputs)}
        call = may_raise(lambda **given: func(**{name: given[key] for name, key in keys.items()}))
        call = simple(plain_size)(call) if func.reads.degree == 1 else call
        return self._call("value", call, {keys[name]: ref for name, ref in func.inputs.items()}, may_be_list=True)

    def _call(
        self, word: str, call: Callable[..., Any], inputs: Mapping[str, Ref], *, may_be_list: bool = False
    ) -> Ref:
        name = self.draft.name(f"{self.name}.{word}")
        self.shared.made.add(name)
        if may_be_list:
            self.draft.lists[name] = ""
        return self.draft.add(Component(name, Role.CALL, tuple(inputs.items())), call)

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

    def run(
        self, node: Runnable[Any, Any], given: Symbol, kwargs: Mapping[str, Any], *, streamed: bool = False
    ) -> Symbol:
        node = planned(node)
        before = len(self.draft.components)
        try:
            value = self._input(node, given)
        except NotUnderstood:
            if self._runs_user_code(node):
                self.user_code()
            return UNKNOWN_VALUE
        made, span = walk_into(
            self.draft, node, value, self.name, f"{self.name}:{self.line}", kwargs, streamed=streamed
        )
        self.emitted(span)
        if any(c.role in (Role.OPAQUE, Role.TOOL) for c in list(self.draft.components.values())[before:]):
            self.runs_user_code = True
        return symbol_of(made)

    @staticmethod
    def _runs_user_code(node: Runnable[Any, Any]) -> bool:
        """Whether not all of it is understood, whatever it is called with."""
        trial = Draft()
        walk_into(trial, node, Ref(INPUT), "", "", {})
        return any(c.role in (Role.OPAQUE, Role.TOOL) for c in trial.components.values())

    def _input(self, node: Runnable[Any, Any], given: Symbol) -> Value:
        if isinstance(given, (Prompted, Ref)):
            return given
        first = _first(node)
        if isinstance(first, BaseLanguageModel):
            if isinstance(given, (Computed, Unknown)):
                return self.ref(given)
            return as_prompt(given, self._any_ref)
        if isinstance(given, Fields):
            return Record({key: self._variable(inner) for key, inner in given.items.items()}, given.base)
        return self.ref(given)

    def _variable(self, symbol: Symbol) -> Value:
        """Of a text whose end is not known, the beginning is."""
        return as_text(symbol, self._any_ref) if isinstance(symbol, Text) else self._any_ref(symbol)

    def embed(self, leaf: EmbeddingLeaf, given: Symbol, *, several: bool) -> Symbol:
        leaf = replace(leaf, role="document", batchable=True, result=_each_of(leaf.result)) if several else leaf
        try:
            before = len(self.draft.components)
            made = lower_leaf(self.draft, leaf, self.ref(given), lambda word: f"{self.name}.{word}", ())
        except NotUnderstood:
            return UNKNOWN_VALUE
        self.emitted(self.draft.span(tuple(self.draft.components)[before:]))
        return made

    def body(self, outer: Callable[[str], Symbol]) -> Walker:
        frame = Frame(self.frame.around, outer=outer, code=self.frame.code)
        return Walk(
            self.draft.body(),
            frame,
            self.name,
            self.depth,
            self.line,
            changed=dict(self.changed),
            is_body=True,
            nested=self.nested + 1,
            shared=self.shared,
        )

    def may_try(self) -> bool:
        return self.nested < NESTED

    def trial(self, taken: set[str]) -> Walker:
        names, draft = dict(self.frame.names), Draft(names=taken)
        trial = replace(self, draft=draft, frame=replace(self.frame, names=names), span=Span(), nested=self.nested + 1)
        trial.changed, trial.in_place = dict(self.changed), self.in_place.copy()
        trial.left_out, trial.runs_user_code = False, False
        return trial

    def finished(self, output: Ref | None) -> tuple[Ref, bool] | None:
        return alive(self.draft, output, self.shared.made)


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


def _parts(symbol: Text | Series) -> Sequence[Any]:
    return symbol.pieces if isinstance(symbol, Text) else symbol.items


def _called(name: str, value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [value], [])


def _each_of(result: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda vectors: [result(one) for one in vectors]
