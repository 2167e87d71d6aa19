"""Interprets one function with symbols in place of values: what it asks engines for becomes components of a draft.

Nothing of the function runs. The rules for its expressions and statements are in modules of their own, which use the
interpreter that is defined here.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable

from teola_plugin.graph import INPUT, Component, Ref, Role, on_loop, simple
from teola_plugin.tracer.draft import Draft, Span, mark_fallible
from teola_plugin.tracer.functions.frames import BlockExit, CallFrame, OutOfFuel, SharedContext, enter_call
from teola_plugin.tracer.functions.lookup import note_environment
from teola_plugin.tracer.functions.mutations import Mutations, assigned_names, mutated_names
from teola_plugin.tracer.functions.pruning import prune_body
from teola_plugin.tracer.functions.pure_expressions import (
    NAME_PREFIX,
    compile_pure,
    constant_node,
    decide_on_input,
    is_plain_data,
    is_small,
    read_field,
    read_setting,
    truth_of,
)
from teola_plugin.tracer.functions.rendering import Renderer, innermost_first, to_prompt, to_prompt_text
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    AwaitableValue,
    DataObject,
    Expression,
    Fields,
    ItemList,
    KnownValue,
    LocalFunction,
    Spread,
    Symbol,
    Text,
    Unknown,
    is_constant,
    map_parts,
    merge_inputs,
    to_symbol,
)
from teola_plugin.tracer.langchain.classes import unwrap_accelerated
from teola_plugin.tracer.langchain.leaves import lower_leaf
from teola_plugin.tracer.langchain.trace import FindLeaf, trace_into
from teola_plugin.tracer.leaf import RUN_TIME_EFFECTS, EmbeddingLeaf, WrappedLeaf, is_user_code
from teola_plugin.tracer.purity.purity import is_plain, plain_size
from teola_plugin.tracer.source import Definition
from teola_plugin.tracer.symbols import NotUnderstood, Prompted, Record, Value

MAX_CALL_DEPTH = 8
"""Functions of the user's that are interpreted inside each other."""
MAX_RECURSION_DEPTH = 3
"""Calls of one function that are interpreted inside each other."""
MAX_NESTING = 4
"""Conditions and loops inside each other of which both branches are interpreted."""


_name_numbers = itertools.count()
"""Refs have other names in every function: expressions of one function may be put together with those of another."""


@dataclass(slots=True)
class FunctionInterpreter:
    """Interprets one function, and the functions that it calls, or one body of a loop or branch in it."""

    draft: Draft
    frame: CallFrame
    name: str
    """Name of the function, with which the names of its components begin."""
    shared: SharedContext
    callers: tuple[CodeType, ...] = ()
    """The functions that are being interpreted inside each other, without the one that is traced itself."""
    line: int = 0
    span: Span = field(default_factory=Span)
    """The first and the last of the components so far."""
    attribute_values: dict[tuple[int, str], Symbol] = field(default_factory=dict)
    """What attributes of existing objects were set to, by the object's id and the attribute's name."""
    mutations: Mutations = field(default_factory=Mutations)
    is_incomplete: bool = False
    """True if some code was not interpreted, such as the branches of a condition that is not known yet."""
    runs_user_code: bool = False
    is_body: bool = False
    """True for the body of a loop or a branch, which runs any number of times."""
    to_outer: Callable[[Expression], Expression | None] | None = None
    """Of a body: returns an expression as one of the function around it; None if it depends on the item."""
    read_environment: Callable[[], Symbol] | None = None
    """Of a body: reads the environment variables as an input of its component."""
    nesting: int = 0
    """Number of conditions and loops around it."""
    _user_code: str = ""
    """The last component that stands for user code."""
    _ends_with_user_code: bool = False
    _code_before: tuple[str, ...] = ()
    """User code since the last call whose beginning would show that it has ended."""
    """True if no component was added after the last one that stands for user code."""

    def __post_init__(self) -> None:
        self.frame.assigned_elsewhere = self.attribute_values

    # ------------------------------------------------------------ source

    def evaluate(self, node: ast.expr) -> Symbol:
        """Return the value of an expression. What it asks engines for becomes components."""
        self.shared.fuel -= 1
        if self.shared.fuel < 0:
            raise OutOfFuel
        symbol = self.shared.rules.evaluate(self, node)
        return UNKNOWN_VALUE if self.mutations.has(symbol) else symbol

    def decide_condition(self, test: Symbol) -> bool | None:
        """Return whether a condition holds; None if that is not known yet.

        A condition on the template's input, such as a graph's state, is decided by the function that chooses the plan,
        so that each outcome can have a plan of its own.
        """
        truth = truth_of(test)
        return decide_on_input(test, self.shared.decide) if truth is None else truth

    def read_setting(self, symbol: Symbol) -> Symbol:
        """Return the symbol with the values that its settings have in the calls that are planned."""
        if isinstance(symbol, (Fields, ItemList)):
            return map_parts(symbol, self.read_setting)
        expression = self.to_expression(symbol) if isinstance(symbol, (Text, Ref)) else symbol
        if isinstance(expression, Expression) and self.to_outer is not None:
            expression = self.to_outer(expression)
        setting = symbol if expression is None else read_setting(expression, self.shared.decide)
        return setting if isinstance(setting, KnownValue) else symbol

    def has_changed(self, value: Any) -> bool:
        """Return True if code so far has changed an existing object, or a container that it holds."""
        return any(self.mutations.has(KnownValue(one)) for one in (value, *vars(value).values()))

    def run_block(self, statements: Sequence[ast.stmt]) -> BlockExit:
        """Interpret statements, one after the other."""
        return self.shared.rules.run_block(self, statements)

    def run_function(self, definition: Definition) -> BlockExit:
        """Interpret a function whose arguments are in the frame. Its result is the frame's return value."""
        if isinstance(definition, ast.Lambda):
            self.line = definition.lineno
            self.frame.return_value = self.evaluate(definition.body)
            return BlockExit.LEAVES
        block_exit = self.run_block(definition.body)
        if block_exit is BlockExit.FALLS_THROUGH:
            self.frame.return_value = KnownValue(None)
        return block_exit

    def call_function(self, func: Any, arguments: Sequence[Symbol], keywords: Mapping[str, Symbol]) -> Symbol | None:
        """Return what a function of the user's returns; None if its source cannot be interpreted."""
        entry = enter_call(func, arguments, keywords) if len(self.callers) < MAX_CALL_DEPTH else None
        if entry is None:
            return None
        definition, frame = entry
        assert frame.code is not None
        if self.callers.count(frame.code) >= MAX_RECURSION_DEPTH:
            return None
        caller_frame, caller_line, callers = self.frame, self.line, self.callers
        self.publish_names()
        frame.assigned_elsewhere = self.attribute_values
        self.frame, self.callers = frame, (*callers, frame.code)
        try:
            block_exit = self.run_function(definition)
            value = frame.return_value
            self.publish_names()
        finally:
            self.frame, self.line, self.callers = caller_frame, caller_line, callers
        if block_exit is BlockExit.UNKNOWN:
            self.is_incomplete, value = True, UNKNOWN_VALUE
            self.add_user_code()
        return AwaitableValue(value) if frame.code.co_flags & inspect.CO_COROUTINE else value

    def publish_names(self) -> None:
        """Let other functions read what this one has assigned to globals and names of its closure.

        An object can only be read. Of any other value it is not known who reads it, so it counts as user code.
        """
        values = self.frame.publish_names()
        self.shared.sets_attributes = self.shared.sets_attributes or bool(values)
        if not all(isinstance(value, KnownValue) and isinstance(value.value, Runnable) for value in values):
            self.add_user_code()

    def forget_attributes(self, body: FunctionInterpreter) -> None:
        """Treat as unknown what a body or a branch assigns to attributes, globals and names of closures."""
        for key, value in body.attribute_values.items():
            if self.attribute_values.get(key) is not value:
                self.attribute_values[key] = UNKNOWN_VALUE

    def forget_names(self, nodes: Sequence[ast.AST]) -> None:
        """Treat as unknown what code that is not interpreted assigns, or changes in place."""
        for name in mutated_names(nodes):
            self.mutations.add(self.frame.read(name))
        self.frame.names |= dict.fromkeys(assigned_names(nodes), UNKNOWN_VALUE)

    # ------------------------------------------------------------ order of components

    def append_span(self, span: Span) -> None:
        """Order components that were added after all that were there before."""
        self.note_source(*self.draft.components)
        if span.heads:
            self.span = self.draft.in_sequence(self.span, span)
            self._ends_with_user_code = False

    def add_user_code(self) -> None:
        """Note that code runs here that may do anything: what comes after it waits for it."""
        self.runs_user_code = True
        self.note_source(f"{self.name}.code")
        if not self.is_body and not self._ends_with_user_code:
            self._user_code = self.draft.name(f"{self.name}.code")
            self.draft.add(Component(self._user_code, Role.OPAQUE))
            self.append_span(Span((self._user_code,), (self._user_code,)))
            self._ends_with_user_code = True
            self._code_before += (self._user_code,)

    def note_source(self, *names: str) -> None:
        """Note the line that is interpreted now as the source of what these names stand for.

        The first line that is noted for a name stays. Nothing is noted where the code has no source.
        """
        if self.frame.code is not None:
            for name in names:
                self.draft.sources.setdefault(name, f"{self.frame.code.co_filename}:{self.line}")

    # ------------------------------------------------------------ symbols as expressions

    def name_for(self, value: Ref | object, *, is_ref: bool) -> str:
        """Return the name of a ref, or of an existing object, in expressions.

        Equal refs have one name, and so has an object, by its identity. The object is kept, so that no other one can
        get its identity.
        """
        if is_ref:
            return self.shared.ref_names.setdefault(value, f"{NAME_PREFIX}v{next(_name_numbers)}")  # type: ignore[arg-type]
        new_entry = (f"{NAME_PREFIX}o{next(_name_numbers)}", value)
        return self.shared.object_names.setdefault(id(value), new_entry)[0]

    def to_expression(self, symbol: Symbol) -> Expression | None:
        """Return the value as an expression; None if it is not known."""
        if isinstance(symbol, Expression) and symbol.ref_in(self.draft) is None:
            return symbol
        if isinstance(symbol, KnownValue):
            if symbol.value is not os.environ:
                return self._expression_of_object(symbol.value)
            symbol = self.environment
        if (
            isinstance(symbol, (Text, ItemList, Fields))
            and (expression := self._expression_of_parts(symbol)) is not None
        ):
            return expression
        try:
            ref = None if isinstance(symbol, (Unknown, AwaitableValue)) else self.to_ref(symbol)
        except NotUnderstood:
            ref = None
        if ref is None:
            return None
        name = self.name_for(ref, is_ref=True)
        return Expression(ast.Name(name, ast.Load()), {name: ref})

    @property
    def environment(self) -> Symbol:
        """The environment variables; unknown behind code that may have changed them."""
        if self.shared.environment is None or self.runs_user_code or self._user_code:
            return UNKNOWN_VALUE
        if self.read_environment is not None:
            return self.read_environment()
        note_environment()
        return self.shared.environment

    def _expression_of_parts(self, symbol: Text | ItemList | Fields) -> Expression | None:
        """Return an expression that puts a text, a list or a dictionary together; None if some of it is not known."""
        if isinstance(symbol, Fields):
            return self._expression_of_dictionary(symbol)
        parts: Sequence[Any] = symbol.pieces if isinstance(symbol, Text) else symbol.items
        expressions = [
            self.to_expression(
                KnownValue(part) if isinstance(part, str) else part.iterable if isinstance(part, Spread) else part
            )
            for part in parts
        ]
        known_parts = [expression for expression in expressions if expression is not None]
        if len(known_parts) < len(expressions):
            return None
        codes: list[ast.expr] = [
            ast.Starred(expression.code, ast.Load()) if isinstance(part, Spread) else expression.code
            for part, expression in zip(parts, known_parts, strict=True)
        ]
        if isinstance(symbol, ItemList):
            code: ast.expr = (ast.Tuple if symbol.kind is tuple else ast.List)(codes, ast.Load())
        else:
            texts: list[ast.expr] = [
                piece if isinstance(piece, ast.Constant) else ast.Call(ast.Name("str", ast.Load()), [piece], [])
                for piece in codes
            ]
            code = ast.Call(ast.Attribute(ast.Constant(""), "join", ast.Load()), [ast.List(texts, ast.Load())], [])
        return Expression(code, *merge_inputs(known_parts)) if is_small(code) else None

    def _expression_of_dictionary(self, fields: Fields) -> Expression | None:
        """Return an expression that makes a dictionary; None if it is large, changed in place or not all known."""
        if fields.base is not None or fields.attributes or self.mutations.has_inside(fields):
            return None
        expressions = [self.to_expression(item) for item in fields.items.values()]
        known_values = [expression for expression in expressions if expression is not None]
        if len(known_values) < len(expressions):
            return None
        code = ast.Dict(list(map(ast.Constant, fields.items)), [expression.code for expression in known_values])
        return Expression(code, *merge_inputs(known_values)) if is_small(code) else None

    def _expression_of_object(self, value: Any) -> Expression:
        """Return an expression for an existing object: a constant, a builtin, or a name that stands for the object.

        A list or dictionary of constants is written down; the object itself is noted for the case that it is changed.
        """
        node = constant_node(value)
        if node is not None:
            return Expression(node, {}, {} if is_constant(value) else {self.name_for(value, is_ref=False): value})
        name = getattr(value, "__name__", "") if type(value) in (type, type(len)) else ""
        if name and getattr(builtins, name, None) is value:
            return Expression(ast.Name(name, ast.Load()))
        name = self.name_for(value, is_ref=False)
        return Expression(ast.Name(name, ast.Load()), {}, {name: value})

    # ------------------------------------------------------------ symbols as refs

    def to_ref(self, symbol: Symbol) -> Ref:
        """Return the value as a ref: CALLs compute, format or build it. Raise `NotUnderstood` if it is not known."""
        if isinstance(symbol, Ref):
            return symbol
        if isinstance(symbol, Fields) and (symbol.fields_only or self.mutations.has_inside(symbol)):
            raise NotUnderstood("a value that was changed in place, or of which nothing but fields is known")
        if isinstance(symbol, Prompted):
            return self.draft.materialize(symbol, self.name, ())
        if isinstance(symbol, Fields) and not symbol.items and symbol.base is not None:
            return symbol.base
        if isinstance(symbol, (Unknown, AwaitableValue, LocalFunction, DataObject)):
            raise NotUnderstood("a value that is not known")
        if isinstance(symbol, Expression):
            ref = symbol.ref_in(self.draft)
            if ref is None:
                ref = self._compute(symbol)
                symbol.calls.append((self.draft, ref))
            return ref
        if isinstance(symbol, KnownValue) and not is_plain(symbol.value, may_hold_models=False):
            raise NotUnderstood("an object of the user's own")
        renderer = Renderer(self.to_ref)
        render = renderer.value(symbol)
        word = "constant" if isinstance(symbol, KnownValue) else "made"
        call = (lambda **values: render(values)[0]) if renderer.inputs else on_loop(lambda **values: render(values)[0])
        return self._add_call(word, simple(plain_size)(call), renderer.inputs)

    def _compute(self, expression: Expression) -> Ref:
        """Return the ref of a CALL that computes an expression. Raise `NotUnderstood` if it is not certainly pure."""
        code, refs = expression.code, expression.refs
        if isinstance(code, ast.Name) and code.id in refs:
            return refs[code.id]
        if isinstance(code, ast.Attribute) and isinstance(code.value, ast.Name) and code.value.id in refs:
            name = code.attr
            get = mark_fallible(on_loop(lambda value: read_field(value, name)))
            return self._add_call(name, get, {"value": refs[code.value.id]}, may_be_list=True)
        if isinstance(code, ast.GeneratorExp):
            expression = Expression(ast.ListComp(code.elt, code.generators), refs, expression.objects)
        func = compile_pure(expression)
        keys = {name: f"value{number + 1 if number else ''}" for number, name in enumerate(func.inputs)}
        call = mark_fallible(lambda **values: func(**{name: values[key] for name, key in keys.items()}))
        call = simple(plain_size)(call) if func.purity.degree == 1 else call
        return self._add_call("value", call, {keys[name]: ref for name, ref in func.inputs.items()}, may_be_list=True)

    def _add_call(
        self, word: str, call: Callable[..., Any], inputs: Mapping[str, Ref], *, may_be_list: bool = False
    ) -> Ref:
        """Add a component that computes a value in this process, for other components to read. Return its ref.

        `word`: last part of its name. `may_be_list`: the value may be a list that a model's text spells.
        """
        name = self.draft.name(f"{self.name}.{word}")
        self.shared.helpers.add(name)
        if may_be_list:
            self.draft.list_spellings[name] = ""
        return self.draft.add(Component(name, Role.CALL, tuple(inputs.items())), call)

    def _to_ref_or_user_code(self, symbol: Symbol) -> Ref:
        """Return a ref for a part of a prompt, which may begin with what is known though this part is not.

        A part that is not known comes from user code, unless it is data that only the run can tell. Raises
        `NotUnderstood` in a body, which has neither.
        """
        try:
            return self.to_ref(symbol)
        except NotUnderstood:
            if self.is_body:
                raise
        if is_plain_data(symbol):
            return self._add_run_time_value()
        if not self._user_code:
            self.add_user_code()
        return Ref(self._user_code)

    def to_call_input(self, symbol: Symbol) -> Ref:
        """Return the input of a call as a ref: if only the run can tell it, of a value for which no other call waits.

        Raise `NotUnderstood` for one that code of the user's makes as it is passed on, and in a body for any such one.
        """
        try:
            return self.to_ref(symbol)
        except NotUnderstood:
            is_made_here = isinstance(symbol, (Expression, Text)) and not is_plain_data(symbol)
            if self.is_body or is_made_here:
                raise
        return self._add_run_time_value()

    def _add_run_time_value(self) -> Ref:
        """Add a component for a value that only the run can tell. What comes after it does not wait for it."""
        name = self.draft.name(f"{self.name}.prompt")
        self.note_source(name)
        self.draft.order += [(tail, name) for tail in self.span.tails]
        return self.draft.add(Component(name, Role.OPAQUE, effects=RUN_TIME_EFFECTS))

    # ------------------------------------------------------------ engines

    def run_runnable(
        self,
        runnable: Runnable[Any, Any],
        argument: Symbol,
        kwargs: Mapping[str, Any],
        *,
        streamed: bool = False,
        is_async: bool = False,
    ) -> Symbol:
        """Return what a Runnable returns for an input.

        `streamed`: the call may make its models stream. `is_async`: it is a call of a coroutine method.
        """
        runnable = unwrap_accelerated(runnable)
        lower_graph = None if streamed or kwargs else self.shared.lower_graph
        if lower_graph is not None and (returned := lower_graph(self, runnable, argument, is_async)) is not None:
            return returned
        first_new = len(self.draft.components)
        location = f"{self.name}:{self.line}"
        self.note_source(location)
        find_leaves = None if streamed else self.shared.find_leaves  # own models are called in one form only
        find_leaf = None if find_leaves is None else find_leaves(runnable, location, kwargs, is_async)
        if find_leaf is not None and self._code_before:
            find_leaf = self._find_first_behind_code(find_leaf)
        try:
            value = self._runnable_input(runnable, argument)
        except NotUnderstood:
            trial = Draft()  # is there user code in it, whatever it is called with?
            trace_into(trial, runnable, Ref(INPUT), "", location, {}, find_leaf=find_leaf)
            if _has_user_code(trial.components.values()):
                self.add_user_code()
                return UNKNOWN_VALUE
            try:
                value = self.to_call_input(argument)
            except NotUnderstood:
                if not self.is_body:
                    self.add_user_code()
                return UNKNOWN_VALUE
        result, span = trace_into(
            self.draft, runnable, value, self.name, location, kwargs, may_stream=streamed, find_leaf=find_leaf
        )
        self.append_span(span)
        new = list(self.draft.components.values())[first_new:]
        if _has_user_code(new):
            self.runs_user_code = True
            if not self.is_body:
                self._code_before += tuple(component.name for component in new if component.role is Role.OPAQUE)
        return to_symbol(result)

    def _find_first_behind_code(self, find_leaf: FindLeaf) -> FindLeaf:
        """Return what finds leaves in a Runnable: once its first call begins, the user code in front has ended."""

        def find(node: Runnable[Any, Any], bound: Mapping[str, Any], path: str) -> WrappedLeaf | None:
            leaf = find_leaf(node, bound, path)
            if leaf is None or not self._code_before:
                return leaf
            code, self._code_before = self._code_before, ()
            return leaf.behind_code(code)

        return find

    def _runnable_input(self, runnable: Runnable[Any, Any], argument: Symbol) -> Value:
        """Return the input for the tracer: prompts in their pieces. Raise `NotUnderstood` if it is not known."""
        if isinstance(argument, (Prompted, Ref)):
            return argument
        if isinstance(innermost_first(runnable), BaseLanguageModel):
            if isinstance(argument, (Expression, Unknown)):
                return self.to_ref(argument)
            return to_prompt(argument, self._to_ref_or_user_code)
        if isinstance(argument, Fields):
            to_ref = self._to_ref_or_user_code
            variables = {
                key: to_prompt_text(item, to_ref) if isinstance(item, Text) else to_ref(item)
                for key, item in argument.items.items()
            }
            return Record(variables, argument.base)
        return self.to_ref(argument)

    def embed(self, leaf: EmbeddingLeaf, argument: Symbol, *, is_list: bool) -> Symbol:
        """Return the vector of a text, or with `is_list` the vectors of several documents."""
        if is_list:
            to_result = leaf.result
            leaf = replace(leaf, role="document", batchable=True, result=lambda vectors: [*map(to_result, vectors)])
        try:
            first_new = len(self.draft.components)
            ref = lower_leaf(self.draft, leaf, self.to_ref(argument), lambda word: f"{self.name}.{word}", ())
        except NotUnderstood:
            return UNKNOWN_VALUE
        self.append_span(self.draft.span(tuple(self.draft.components)[first_new:]))
        return ref

    # ------------------------------------------------------------ bodies of loops and branches

    def make_body(
        self,
        read_outer: Callable[[str], Symbol],
        to_outer: Callable[[Expression], Expression | None],
        read_environment: Callable[[], Symbol],
    ) -> FunctionInterpreter:
        """Return an interpreter for code that runs for each item or in one branch, with a draft of its own."""

        def to_outermost(expression: Expression) -> Expression | None:
            outer = to_outer(expression)
            return outer if outer is None or self.to_outer is None else self.to_outer(outer)

        return FunctionInterpreter(
            self.draft.new_body(),
            CallFrame(
                self.frame.free_names,
                read_outer=read_outer,
                code=self.frame.code,
                declared_names=set(self.frame.declared_names),
            ),
            self.name,
            self.shared,
            self.callers,
            self.line,
            attribute_values=dict(self.attribute_values),
            mutations=Mutations(objects=dict(self.mutations.objects)),
            is_body=True,
            to_outer=to_outermost,
            read_environment=read_environment,
            nesting=self.nesting + 1,
        )

    def fork(self, component_names: set[str]) -> FunctionInterpreter:
        """Return an interpreter that goes on from here on a draft of its own, as a trial that changes nothing here.

        The names of its components differ from those in `component_names`, and are added to them.
        """
        trial = replace(
            self,
            draft=replace(self.draft.new_body(), names=component_names),
            frame=replace(self.frame, names=dict(self.frame.names)),
            span=Span(),
            nesting=self.nesting + 1,
            attribute_values=dict(self.attribute_values),
        )
        trial.mutations = self.mutations.copy()
        trial.is_incomplete, trial.runs_user_code = False, False
        return trial

    def finish_body(self, output: Ref | None) -> tuple[Ref, bool] | None:
        """Drop what cannot be prefetched. Return the output, and whether that is `output`; None if nothing is left."""
        return prune_body(self.draft, output, self.shared.helpers, has_user_code=self.runs_user_code)


def _has_user_code(components: Iterable[Component]) -> bool:
    return any(map(is_user_code, components))
