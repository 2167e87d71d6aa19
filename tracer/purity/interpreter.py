"""An abstract interpreter that finds out how long a function may take, without running it.

It goes through the source once, on sizes in place of values. A loop has a bound if it iterates over the items of
something whose size is known and carries nothing from iteration to iteration; a call, if the callee is known; what
grows has to grow by a bound. So the time that a function takes, and the size of what it makes, is a polynomial in the
size of its argument. Everything else, and a function without source, has no bound.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from types import FunctionType

from teola_plugin.tracer.purity.abstract_values import (
    ARGUMENT_SIZE,
    REPR_FACTOR,
    SMALL,
    AbstractValue,
    Constant,
    Machine,
    ReadableFunction,
    Size,
    SizedValue,
    Term,
    Unbounded,
    add,
    constant_size,
    is_plain_constant,
    join_values,
    length_of,
    printed_size,
    scale,
    size_of,
)
from teola_plugin.tracer.purity.calls import (
    BUILTINS,
    LARGEST_CONSTANT,
    OPERATORS,
    are_counts,
    call_value,
    field_width,
    read_attribute,
    to_readable,
    trusted_constant,
)
from teola_plugin.tracer.purity.data_classes import DataClass
from teola_plugin.tracer.source import Definition

_MAX_CALL_DEPTH = 20
_Variables = dict[str, AbstractValue]
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


_ANY_VALUE = SizedValue(ARGUMENT_SIZE)


def step_bound(
    func: FunctionType, definition: Definition | None = None, argument: AbstractValue = _ANY_VALUE
) -> Term | None:
    """Return how many steps `func(value)` takes at most, for a value of size n; None without a bound. Run nothing.

    Args:
        func: The function.
        definition: Its source, if it is not in a file.
        argument: What is known of the value.
    """
    interpreter = Interpreter()
    try:
        result = interpreter.call(to_readable(func, definition), [argument], {})
        interpreter.spend(size_of(result))
    except Exception:  # `Unbounded`, or source of a shape that is not known here
        return None
    return interpreter.cost


@dataclass(slots=True)
class _Scope:
    """A call of a function that is being interpreted."""

    func: ReadableFunction
    names: frozenset[str]
    """Names that belong to the function or to those around it, whether they have a value yet or not."""
    variables: _Variables
    outer_loops: int
    """Number of loops that were open when the call began."""
    outer_variables: list[frozenset[str]] = field(default_factory=list)
    """Variables set before each open loop: setting one of them inside carries a value from iteration to iteration."""
    captured_names: set[str] = field(default_factory=set)
    """Names that functions inside it read, perhaps later."""
    return_values: list[AbstractValue] = field(default_factory=list)
    """One value for each return statement."""


class Interpreter(Machine):
    """An abstract machine that goes through the source of one function, and of what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self._scopes: list[_Scope] = []

    @property
    def _scope(self) -> _Scope:
        return self._scopes[-1]

    def call(
        self, func: ReadableFunction, args: Sequence[AbstractValue], kwargs: Mapping[str, AbstractValue]
    ) -> AbstractValue:
        """Go through the source of a function that is called with these arguments. Return a bound for its
        results.

        The steps are counted in `cost`. Raise `Unbounded` if they have no bound, also for recursion.
        """
        is_recursive = any(scope.func.definition is func.definition for scope in self._scopes)
        if is_recursive or len(self._scopes) > _MAX_CALL_DEPTH:
            raise Unbounded("it calls itself")
        own_names = _assigned_names(func.definition)
        variables = {name: value for name, value in func.variables.items() if name not in own_names}
        variables |= _parameters(func, args, kwargs)
        scope = _Scope(func, func.outer_names | own_names, variables, self.loops.depth)
        self._scopes.append(scope)
        body = func.definition.body
        if isinstance(body, ast.expr):
            scope.return_values.append(self._evaluate(body))
        elif self._run_block(body):
            scope.return_values.append(Constant(None))
        self._scopes.pop()
        if not scope.return_values:
            raise Unbounded("it returns nothing")
        return reduce(join_values, scope.return_values)

    # ------------------------------------------------------------ statements

    def _run_block(self, statements: Iterable[ast.stmt]) -> bool:
        """Go through statements. Return True if control may fall through to what follows them."""
        return all(self._run_statement(statement) for statement in statements)

    def _run_statement(self, statement: ast.stmt) -> bool:
        """Go through one statement. Return True if control may fall through to the next one."""
        self.tick()
        scope = self._scope
        match statement:
            case ast.Return(value):
                returned = Constant(None) if value is None else self._evaluate(value)
                if scope.outer_variables:  # in a loop
                    returned = SizedValue(self.loops.sum_over_loops(size_of(returned), scope.outer_loops))
                scope.return_values.append(returned)
                return False
            case ast.Break() | ast.Continue():
                return False
            case ast.If():
                return self._run_branches(statement)
            case ast.For():
                return self._run_loop(statement)
            case ast.Assign(targets, value):
                assigned = self._evaluate(value)
                for target in targets:
                    self._assign(target, assigned)
            case ast.AnnAssign(target, _, value) if value is not None or not isinstance(target, ast.Name):
                self._assign(target, Constant(None) if value is None else self._evaluate(value))
            case ast.FunctionDef(name):
                self._set_variable(name, self._make_function(statement))
            case ast.Expr(value) if not isinstance(value, ast.Constant):
                self._evaluate(value)
        return True

    def _run_branches(self, statement: ast.If) -> bool:
        """Go through both branches of an `if` statement, and join the variables that they leave behind."""
        self._test(statement.test)
        scope, before = self._scope, self._scope.variables
        ends = []
        for block in (statement.body, statement.orelse):
            scope.variables = dict(before)
            if self._run_block(block):
                ends.append(scope.variables)
        if ends:
            scope.variables = reduce(_merge_variables, ends)
        return bool(ends)

    def _run_loop(self, statement: ast.For) -> bool:
        """Go through a loop. What it sets is unknown behind it: it may set nothing."""
        scope, before = self._scope, self._scope.variables
        item = self._enter_loop(statement.iter)
        scope.outer_variables.append(frozenset(before))
        scope.variables = dict(before)
        self._assign(statement.target, item)
        self._run_block(statement.body)
        scope.outer_variables.pop()
        scope.variables = before
        self.loops.leave()
        return True

    def _enter_loop(self, iterable: ast.expr) -> AbstractValue:
        """Open a loop, and return its item."""
        value = self._evaluate(iterable)
        return SizedValue(self.loops.enter(add(constant_size(1), size_of(value)), length_of(value)))

    # ------------------------------------------------------------ variables

    def _assign(self, target: ast.expr, value: AbstractValue) -> None:
        """Assign a value to a name, or its items to several. Raise `Unbounded` for what changes an object."""
        if isinstance(target, ast.Name):
            self._set_variable(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            size = size_of(value)
            for part in target.elts:
                self._assign(part, SizedValue(size))
        else:
            raise Unbounded("it changes a value")

    def _set_variable(self, name: str, value: AbstractValue) -> None:
        """Set a variable. Raise `Unbounded` if an iteration passes it to the next, or a function inside reads it."""
        scope = self._scope
        if scope.outer_variables and name in scope.outer_variables[-1]:
            raise Unbounded(f"{name} is carried from round to round")
        if name in scope.captured_names:
            raise Unbounded(f"a function inside it reads {name}, which changes")
        scope.variables[name] = value

    def _read_variable(self, name: str) -> AbstractValue:
        """Return what is known of a variable, global or builtin. Raise `Unbounded` for one that is not trusted."""
        scope = self._scope
        if name in scope.variables:
            return scope.variables[name]
        if name in scope.names or name.startswith("__"):
            raise Unbounded(f"{name} is not there yet")
        if name in scope.func.globals:
            return trusted_constant(scope.func.globals[name])
        if name in BUILTINS:
            return Constant(getattr(builtins, name))
        raise Unbounded(f"{name} is not known")

    def _make_function(self, definition: ast.FunctionDef | ast.Lambda) -> ReadableFunction:
        """Return a function that is defined inside the interpreted one, with the variables that it may read.

        Raise `Unbounded` for defaults and decorators.
        """
        scope, arguments = self._scope, definition.args
        if arguments.defaults or arguments.kw_defaults or getattr(definition, "decorator_list", []):
            raise Unbounded("a function with defaults, or decorated")
        scope.captured_names |= free_names([definition])
        return ReadableFunction(definition, dict(scope.variables), scope.func.globals, (), scope.names)

    # ------------------------------------------------------------ expressions

    def _evaluate(self, node: ast.expr) -> AbstractValue:
        """Return what is known of an expression's value, and count its steps. Raise `Unbounded` for no bound."""
        self.tick()
        match node:
            case ast.Constant(value) if is_plain_constant(value):
                return Constant(value)
            case ast.Name(name):
                return self._read_variable(name)
            case ast.NamedExpr(ast.Name(name), value) if name not in self._scope.variables:
                self._set_variable(name, self._evaluate(value))
                return self._read_variable(name)
            case ast.Attribute(value, name):
                return read_attribute(self._evaluate(value), name)
            case ast.Subscript():
                return self._subscript(node)
            case ast.Call():
                return self._call(node)
            case ast.Lambda():
                return self._make_function(node)
            case ast.BinOp(ast.Constant(str(form)), ast.Mod(), ast.Tuple(items)) if "%" not in form.replace("%s", ""):
                return self._join_text([ast.Constant(form), *(ast.FormattedValue(item, -1) for item in items)])
            case ast.BinOp(left, operator, right):
                return OPERATORS[type(operator)](self, self._evaluate(left), self._evaluate(right))
            case ast.UnaryOp(operator, operand):
                return self._apply_unary(operator, operand)
            case ast.BoolOp(_, operands):
                return reduce(join_values, [self._test(operand) for operand in operands])
            case ast.IfExp(test, body, orelse):
                self._test(test)
                return join_values(self._evaluate(body), self._evaluate(orelse))
            case ast.Compare(left, _, comparators):
                sizes = [size_of(self._evaluate(operand)) for operand in (left, *comparators)]
                self.spend(add(*(scale(size, 2) for size in sizes)))
                return SMALL
            case ast.JoinedStr(parts):
                return self._join_text(parts)
            case ast.FormattedValue():
                return self._format_field(node)
            case ast.Tuple(items) | ast.List(items) | ast.Set(items):
                return self._make_container(node, items)
            case ast.Dict(keys, values):
                return self._make_container(node, [item for item in (*keys, *values) if item is not None])
            case ast.ListComp(element) | ast.SetComp(element) | ast.GeneratorExp(element):
                return self._comprehend(node, [element])
            case ast.DictComp(key, value):
                return self._comprehend(node, [key, value])
        raise Unbounded(f"the expression {type(node).__name__}")

    def _test(self, node: ast.expr) -> AbstractValue:
        """Evaluate a condition, and count the steps that its truth value may take."""
        value = self._evaluate(node)
        self.spend(add(constant_size(1), size_of(value)))
        return value

    def _subscript(self, node: ast.Subscript) -> AbstractValue:
        """Return a bound for an item or slice of a container: it is no larger than the container."""
        container, key = self._evaluate(node.value), node.slice
        size = size_of(container)
        if isinstance(key, ast.Slice):
            for part in (key.lower, key.upper, key.step):
                size_of(Constant(None) if part is None else self._evaluate(part))
            self.spend(size)
        else:
            self.spend(size_of(self._evaluate(key)))
        is_text = isinstance(container, SizedValue) and container.is_text
        return SizedValue(size, is_text, length=length_of(container) if isinstance(key, ast.Slice) else None)

    def _call(self, node: ast.Call) -> AbstractValue:
        """Return a bound for what a call returns, and count its steps. Raise `Unbounded` for an unknown callee."""
        func = self._evaluate(node.func)
        args = [self._evaluate(arg) for arg in node.args]
        if not all(keyword.arg for keyword in node.keywords) and not isinstance(func, DataClass):
            raise Unbounded("any keyword arguments")
        keywords = {one.arg or f"**{number}": one.value for number, one in enumerate(node.keywords)}
        return call_value(self, func, args, {name: self._evaluate(value) for name, value in keywords.items()})

    def _apply_unary(self, operator: ast.unaryop, operand: ast.expr) -> AbstractValue:
        """Return a bound for the result of a unary operator; a negative number stays a constant."""
        value = self._test(operand)
        if isinstance(operator, ast.Not):
            return SMALL
        if isinstance(operator, ast.USub) and isinstance(value, Constant) and type(value.value) in (int, float):
            return Constant(-value.value)
        return self.make(add(constant_size(1), size_of(value)), is_count=are_counts(value))

    def _join_text(self, parts: Sequence[ast.expr]) -> AbstractValue:
        """Return a bound for the text of an f-string or `%s`: a constant if all parts are, else their total size."""
        values = [self._evaluate(part) for part in parts]
        texts = [value.value for value in values if isinstance(value, Constant) and isinstance(value.value, str)]
        if len(texts) == len(values) and sum(map(len, texts)) <= LARGEST_CONSTANT:
            return Constant("".join(texts))
        return self.make(add(constant_size(1), *map(size_of, values)), is_text=True)

    def _format_field(self, node: ast.FormattedValue) -> AbstractValue:
        """Return a bound for the text of an f-string's field. Raise `Unbounded` for a large or unknown width."""
        width = field_width(self._evaluate(node.format_spec)) if node.format_spec else 0
        value = self._evaluate(node.value)
        if isinstance(value, Constant) and isinstance(value.value, str) and node.conversion < 0 and not width:
            return value
        size = scale(size_of(value), REPR_FACTOR) if chr(max(node.conversion, 0)) in "ra" else printed_size(value)
        return self.make(add(constant_size(30 + width), size), is_text=True)

    def _make_container(self, node: ast.expr, items: Iterable[ast.expr]) -> AbstractValue:
        """Return a bound for a tuple, list, set or dictionary of items; a tuple of constants is a constant itself."""
        parts = [
            SizedValue(size_of(self._evaluate(item.value))) if isinstance(item, ast.Starred) else self._evaluate(item)
            for item in items
        ]
        constants = [part.value for part in parts if isinstance(part, Constant)]
        are_constant = all(is_plain_constant(constant) or isinstance(constant, type) for constant in constants)
        if isinstance(node, ast.Tuple) and are_constant and len(constants) == len(parts):
            return Constant(tuple(constants))  # also of classes, for `isinstance`
        size, number = add(constant_size(1 + len(parts)), *map(size_of, parts)), constant_size(1 + len(parts))
        has_all_items = isinstance(node, (ast.Tuple, ast.List, ast.Set)) and not any(
            isinstance(item, ast.Starred) for item in node.elts
        )
        return self.make(size, length=number if has_all_items else None)

    def _comprehend(self, node: Comprehension, parts: Sequence[ast.expr]) -> AbstractValue:
        """Return a bound for a comprehension, the total size of its `parts` in all iterations, and count its steps."""
        scope, outer_variables, depth = self._scope, self._scope.variables, self.loops.depth
        if isinstance(node, ast.GeneratorExp):  # it may run later
            scope.captured_names |= inner_names(node)
        scope.variables = dict(outer_variables)
        for generator in node.generators:
            item = self._enter_loop(generator.iter)
            for name in _stored_names(generator.target):
                scope.variables[name] = item
            for condition in generator.ifs:
                self._test(condition)
        growth: Size = constant_size(1)
        for part in parts:
            size = size_of(self._evaluate(part))
            self.spend(size)
            growth = add(growth, self.loops.sum_over_loops(add(constant_size(1), size), depth))
        length = self.loops.sum_over_loops(constant_size(1), depth)
        for _ in node.generators:
            self.loops.leave()
        scope.variables = outer_variables
        return SizedValue(growth, length=length)


def _merge_variables(left: _Variables, right: _Variables) -> _Variables:
    """Return the variables where two paths of control flow meet."""
    both = {name: join_values(left[name], right[name]) for name in left.keys() & right.keys()}
    return left | right | both


def _parameters(
    func: ReadableFunction, args: Sequence[AbstractValue], kwargs: Mapping[str, AbstractValue]
) -> _Variables:
    """Return the parameters of a call by name. Raise `Unbounded` if the arguments do not fit them."""
    arguments = func.definition.args
    if (
        arguments.vararg
        or arguments.kwarg
        or arguments.posonlyargs
        or isinstance(func.definition, ast.AsyncFunctionDef)
    ):
        raise Unbounded("it takes any arguments, or is asynchronous")
    names = [argument.arg for argument in arguments.args]
    values = {n: trusted_constant(default) for n, default in zip(names[::-1], func.defaults[::-1], strict=False)}
    values |= dict(zip(names, args, strict=False)) | dict(kwargs)
    if len(args) > len(names) or values.keys() != {*names, *(argument.arg for argument in arguments.kwonlyargs)}:
        raise Unbounded("it is called with other arguments")
    return values


# ------------------------------------------------------------ names in source

_KNOWN_STATEMENTS = (
    *(ast.AnnAssign, ast.Assign, ast.Break, ast.Continue, ast.Expr, ast.For, ast.FunctionDef, ast.If, ast.Pass),
    ast.Return,
)
_GENERATORS = (ast.Await, ast.Yield, ast.YieldFrom)


@lru_cache(maxsize=1024)
def _assigned_names(definition: Definition) -> frozenset[str]:
    """Return the names that are assigned anywhere inside a function. Raise `Unbounded` for statements without a rule.

    Statements that never run are looked at, too: they decide which names are the function's.
    """
    for node in ast.walk(definition):
        is_unknown = isinstance(node, ast.stmt) and node is not definition and not isinstance(node, _KNOWN_STATEMENTS)
        if is_unknown or isinstance(node, _GENERATORS) or (isinstance(node, ast.For) and node.orelse):
            raise Unbounded(f"the statement {type(node).__name__}")
        if isinstance(node, ast.comprehension) and node.is_async:
            raise Unbounded("an asynchronous comprehension")
    return frozenset(_stored_names(definition))


def _stored_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a part of the source assigns, and those of the functions that it defines."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.FunctionDef) and part is not node:
            yield part.name


def free_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that parts of a function read of the function around them."""
    parts = [part for node in nodes for part in ast.walk(node)]
    assigned = {part.arg for part in parts if isinstance(part, ast.arg)}.union(*map(_stored_names, nodes))
    return {part.id for part in parts if isinstance(part, ast.Name)} - assigned


def inner_names(node: Comprehension) -> set[str]:
    """Return the names that a comprehension reads of the function around it, except at its very beginning."""
    first = node.generators[0]
    parts = [part for part in ast.iter_child_nodes(node) if part is not first]
    return free_names([*parts, first.target, *first.ifs])
