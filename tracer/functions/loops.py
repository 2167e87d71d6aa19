"""`for` and `while` loops: what all iterations ask for is asked at once, if none needs the one before it.

Lists and texts that grow in each iteration (`found.append(item)`, `text += item`) are put together after the loop.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import CARRY, ITEM, Component, Path, Ref, Role
from teola_plugin.tracer.draft import DERIVED, Span
from teola_plugin.tracer.functions.bodies import MAX_UNROLLED_ITEMS, Captures, MapLoop
from teola_plugin.tracer.functions.calls import may_write
from teola_plugin.tracer.functions.frames import BlockExit
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.mutations import (
    assigned_names,
    has_statement,
    loop_carried_names,
    names_in,
    nonlocal_names,
)
from teola_plugin.tracer.functions.operations import (
    as_list,
    assign_names,
    compose,
    evaluate_iterable,
    items_of,
    make_list,
    read_key,
)
from teola_plugin.tracer.functions.pruning import uses_engine
from teola_plugin.tracer.functions.pure_expressions import (
    NAME_PREFIX,
    compile_pure,
    copy_code,
    is_small,
    truth_of,
)
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    AwaitableValue,
    Expression,
    Fields,
    Item,
    ItemList,
    KnownValue,
    Spread,
    Symbol,
    Unknown,
    symbol_of_item,
)
from teola_plugin.tracer.functions.texts import is_text, make_text
from teola_plugin.tracer.symbols import NotUnderstood

_PAIRING: Mapping[str, Callable[..., Iterable[tuple[Any, ...]]]] = {"enumerate": enumerate, "zip": zip}
_ForLoop = ast.For | ast.AsyncFor
_name_numbers = itertools.count()
"""Variables of comprehensions that are made of loops have names of their own: one may stand inside another."""


def run_for(interpreter: FunctionInterpreter, node: _ForLoop) -> BlockExit:
    """Interpret a `for` loop."""
    items = _pair_objects(evaluate_iterable(interpreter, node.iter))
    item_list = items_of(items)
    known_items = [item for item in item_list if not isinstance(item, Spread)]
    all_known = len(known_items) == len(item_list) <= MAX_UNROLLED_ITEMS
    if node.orelse or has_statement(node.body, (ast.Return, ast.Break)) or _may_catch_raise(interpreter, node.body):
        first = known_items[0] if all_known and known_items else read_key(items, KnownValue(0))
        assign_names(interpreter, node.target, UNKNOWN_VALUE if first is None else first)
        return _exit_after_first_iteration(interpreter, node, interpreter.run_block(node.body))
    if all_known:
        return _run_unrolled(interpreter, node, known_items)
    names_before = dict(interpreter.frame.names)
    is_map = _run_as_map(interpreter, node, items)
    if not is_map and not _run_as_fold(interpreter, node, items, names_before):
        interpreter.is_incomplete = True
    return BlockExit.FALLS_THROUGH


def run_while(interpreter: FunctionInterpreter, node: ast.While) -> BlockExit:
    """Interpret a `while` loop: no more than its first iteration is certain, if that is."""
    runs_once = truth_of(interpreter.evaluate(node.test))
    if runs_once is False:
        return interpreter.run_block(node.orelse)
    block_exit = interpreter.run_block(node.body) if runs_once else BlockExit.UNKNOWN
    return _exit_after_first_iteration(interpreter, node, block_exit)


def _may_catch_raise(interpreter: FunctionInterpreter, body: Sequence[ast.stmt]) -> bool:
    """Return True if a `raise` in the body of a loop may be caught, so that the loop ends and the function goes on."""
    may_be_caught = interpreter.shared.catching_blocks or has_statement(
        body, (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)
    )
    return bool(may_be_caught) and has_statement(body, (ast.Raise,))


def _pair_objects(items: Symbol) -> Symbol:
    """Return `enumerate` or `zip` of lists of existing objects as a list of tuples, and any other symbol as it is.

    The objects are not plain data, so the call is not run.
    """
    code = items.code if isinstance(items, Expression) else None
    is_pairing = isinstance(code, ast.Call) and isinstance(code.func, ast.Name) and code.func.id in _PAIRING
    if not isinstance(items, Expression) or not isinstance(code, ast.Call) or not is_pairing:
        return items
    lists = [items.objects.get(one.id) if isinstance(one, ast.Name) else _constants_of(one) for one in code.args]
    known_lists: list[Any] = [one for one in lists if type(one) in (list, tuple)]
    options = {one.arg or "": one.value.value for one in code.keywords if isinstance(one.value, ast.Constant)}
    is_known = len(known_lists) == len(lists) > 0 and len(options) == len(code.keywords)
    if not is_known or max(map(len, known_lists)) > MAX_UNROLLED_ITEMS:
        return items
    try:
        pairs = list(_PAIRING[code.func.id](*known_lists, **options))  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # the original raises it as well
        return items
    return ItemList(tuple(ItemList(tuple(map(KnownValue, one)), tuple) for one in pairs))


def _constants_of(node: ast.expr) -> Any:
    """Return the value of an expression of constants; None for any other one."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None


# ------------------------------------------------------------ loops that are interpreted as they run


def _exit_after_first_iteration(
    interpreter: FunctionInterpreter, node: _ForLoop | ast.While, block_exit: BlockExit
) -> BlockExit:
    """Return how a loop exits that may stop early, after its first iteration was interpreted.

    Nobody knows how many iterations there will be: what they assign becomes unknown.
    """
    body = [*node.body, *node.orelse]
    may_go_on = has_statement(node.body, (ast.Break, ast.Continue))
    if block_exit is BlockExit.LEAVES and not may_go_on:
        return block_exit
    interpreter.is_incomplete = True
    interpreter.forget_names(body if isinstance(node, ast.While) else [node.target, *body])
    if may_write(interpreter, body):
        interpreter.add_user_code()
    is_endless = isinstance(node, ast.While) and isinstance(node.test, ast.Constant)
    is_endless = is_endless and not has_statement(node.body, (ast.Break,))
    may_leave = has_statement(body, (ast.Return, ast.Raise)) or node.orelse or is_endless
    return BlockExit.UNKNOWN if may_leave else BlockExit.FALLS_THROUGH


def _run_unrolled(interpreter: FunctionInterpreter, node: _ForLoop, items: Sequence[Symbol]) -> BlockExit:
    """Interpret a loop over a few known items, one iteration after the other.

    It stops where control is not known; what the rest of the loop assigns becomes unknown.
    """
    for item in items:
        assign_names(interpreter, node.target, item)
        if interpreter.run_block(node.body) is BlockExit.UNKNOWN:
            interpreter.forget_names([node.target, *node.body])
            break
    return BlockExit.FALLS_THROUGH


# ------------------------------------------------------------ loops that become one component


def _run_as_map(interpreter: FunctionInterpreter, node: _ForLoop, items: Symbol) -> bool:
    """Interpret a loop as a MAP: what it asks for with each item is asked at once. Return True if that is anything.

    A loop that asks for nothing but computes lists becomes comprehensions, for which the result is True as well. A list
    to which coroutines are added is a list of coroutines.
    """
    item: Symbol = Ref(ITEM)
    if isinstance(items, AwaitableValue):
        items, item = items.value, AwaitableValue(item)
    counters, listed_items = _find_counters(interpreter, node), items
    if counters and isinstance(item, Ref):
        items, item = _enumerate(interpreter, items), Ref(ITEM).at(1)
    loop, first_new = MapLoop(interpreter, items), len(interpreter.draft.components)
    accumulators = Accumulators.of_loop(interpreter, node.body)
    names = loop.body.frame.names
    names |= dict.fromkeys(assigned_names(node.body), UNKNOWN_VALUE)
    names |= {name: _count(loop.body, *counter) for name, counter in counters.items() if item == Ref(ITEM).at(1)}
    names |= {name: ItemList(()) for name in accumulators.initial}  # one object each: mutations go by identity
    assign_names(loop.body, node.target, item)
    block_exit = loop.body.run_block(accumulators.statements)
    is_unknown = block_exit is BlockExit.UNKNOWN
    interpreter.is_incomplete = interpreter.is_incomplete or loop.body.is_incomplete or is_unknown
    added = {} if is_unknown else accumulators.added_items(names)
    coroutines = {name: added_one.value for name, added_one in added.items() if isinstance(added_one, AwaitableValue)}
    added |= coroutines
    comprehensions = {} if loop.changes_what_it_reads else _to_comprehensions(loop, added)
    results = loop.finish(accumulators.output(added), one_by_one=True)
    if any(ref.producer == ITEM for ref in loop.body.mutations.refs):
        interpreter.mutations.add(listed_items)
    interpreter.forget_names([node.target, *node.body])
    uses_engines = any(map(uses_engine, list(interpreter.draft.components.values())[first_new:]))
    has_results = isinstance(results, Ref) and (uses_engines or len(comprehensions) < len(added))
    if has_results:
        assert isinstance(results, Ref)
        lists = {name: _read_each(interpreter, results, name if len(added) > 1 else "") for name in added}
        interpreter.frame.names |= accumulators.final_values(interpreter, added, lists)
    elif not uses_engines:
        interpreter.frame.names |= accumulators.final_values(interpreter, added, comprehensions)
    for name in coroutines:
        started_empty = truth_of(accumulators.initial[name]) is False
        results_of_all = interpreter.frame.names[name]
        interpreter.frame.names[name] = AwaitableValue(results_of_all) if started_empty else UNKNOWN_VALUE
    return uses_engines or has_results or len(comprehensions) > 0


def _find_counters(interpreter: FunctionInterpreter, node: _ForLoop) -> dict[str, tuple[int, int]]:
    """Return the names to which each iteration adds the same number, and which it reads: (value before, number)."""
    counters: dict[str, tuple[int, int]] = {}
    for index, statement in enumerate(node.body):
        if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Add):
            continue
        target, added = statement.target, statement.value
        if not isinstance(target, ast.Name) or not isinstance(added, ast.Constant) or type(added.value) is not int:
            continue
        other_statements = [*node.body[:index], *node.body[index + 1 :]]
        is_changed_otherwise = target.id in assigned_names([node.target, *other_statements]) or any(
            target.id in nonlocal_names(other) for other in other_statements
        )
        is_skipped = has_statement(node.body[:index], (ast.Continue,))
        if is_changed_otherwise or is_skipped or target.id not in names_in(other_statements):
            continue
        initial = interpreter.frame.read(target.id) if target.id in interpreter.frame.names else UNKNOWN_VALUE
        if isinstance(initial, KnownValue) and type(initial.value) is int:
            counters[target.id] = initial.value, added.value
    return counters


def _enumerate(interpreter: FunctionInterpreter, items: Symbol) -> Symbol:
    """Return `list(enumerate(items))`; unknown if the items are."""
    enumerated = ast.Call(ast.Name("enumerate", ast.Load()), [ast.Constant(0)], [])
    return as_list(compose(interpreter, enumerated, {"args": [items]}))


def _count(body: FunctionInterpreter, initial: int, step: int) -> Symbol:
    """Return the value that a counter has when an iteration begins. The item of the body is an index with an item."""
    product = ast.BinOp(ast.Constant(0), ast.Mult(), ast.Constant(step))
    count = compose(body, product, {"left": Ref(ITEM).at(0)})
    return compose(body, ast.BinOp(ast.Constant(initial), ast.Add(), ast.Constant(0)), {"right": count})


def _run_as_fold(
    interpreter: FunctionInterpreter, node: _ForLoop, items: Symbol, names_before: Mapping[str, Symbol]
) -> bool:
    """Interpret a loop as a FOLD: each iteration needs what the one before it made of a single name.

    Return True if it is such a loop, and is understood. `names_before` are the names when the loop began.
    """
    carried = loop_carried_names(node.body)
    if len(carried) != 1:
        return False
    (name,) = carried
    captures = Captures(interpreter)
    body = captures.make_body()
    body.frame.names |= dict.fromkeys(assigned_names(node.body), UNKNOWN_VALUE) | {name: Ref(CARRY)}
    assign_names(body, node.target, Ref(ITEM))
    block_exit = body.run_block(node.body)
    if captures.record_mutations(body):
        interpreter.mutations.add_items(items)
    if captures.changes_environment(body):
        return False
    try:
        output = body.to_ref(body.frame.names[name])
        item_refs = interpreter.to_ref(as_list(items))
        initial = interpreter.to_ref(names_before.get(name, UNKNOWN_VALUE))
    except NotUnderstood:
        return False
    if block_exit is not BlockExit.FALLS_THROUGH or body.finish_body(output) != (output, True):
        return False
    component_name = interpreter.draft.name(f"{interpreter.name}.each", *DERIVED)
    template = body.draft.template(output, component_name)
    interpreter.draft.absorb(body.draft)
    inputs = (("items", item_refs), ("init", initial), *captures.inputs.items())
    ref = interpreter.draft.add(Component(component_name, Role.FOLD, inputs, body=template))
    interpreter.append_span(Span((component_name,), (component_name,)))
    interpreter.frame.names[name] = ref
    return True


# ------------------------------------------------------------ lists and texts that grow


@dataclass(frozen=True, slots=True)
class Accumulators:
    """Names to which iterations of a loop add something, and which the loop does not use otherwise."""

    statements: Sequence[ast.stmt]
    """The body of the loop, in which what is added to a text is appended to a list of its pieces."""
    initial: Mapping[str, Symbol]
    """The values of the names when the loop begins."""

    @staticmethod
    def of_loop(interpreter: FunctionInterpreter, body: Sequence[ast.stmt]) -> Accumulators:
        """Find the accumulators of a loop, each of which one statement of the body adds to."""
        additions = [_find_addition(interpreter, node) for node in body]
        conditional = [
            name for node in body if isinstance(node, ast.If) for name in dict.fromkeys(_appended_names(node))
        ]
        other_code: list[ast.AST] = [addition[1] for addition in additions if addition is not None]
        for node, addition in zip(body, additions, strict=True):
            if addition is None:
                other_code += _code_without_appends(node)
        used_otherwise = assigned_names(other_code) | names_in(other_code)
        candidates = [*(addition[0] for addition in additions if addition is not None), *conditional]
        names = {name for name in candidates if name not in used_otherwise and candidates.count(name) == 1}
        statements = [
            node if addition is None or addition[0] not in names else _append_statement(*addition, node)
            for node, addition in zip(body, additions, strict=True)
        ]
        return Accumulators(statements, {name: interpreter.frame.read(name) for name in sorted(names)})

    def added_items(self, names_after: Mapping[str, Symbol]) -> dict[str, Item]:
        """Return what one iteration adds to each name, where that is known, by the names after it.

        It is a `Spread` where the number of items is not always one.
        """
        added: dict[str, Item] = {}
        for name in self.initial:
            value = names_after.get(name, UNKNOWN_VALUE)
            item = value.items[0] if isinstance(value, ItemList) and len(value.items) == 1 else Spread(value)
            if not isinstance(symbol_of_item(item), Unknown):
                added[name] = item
        return added

    def output(self, added: Mapping[str, Item]) -> Symbol:
        """Return what one iteration adds to all names, as one value."""
        if not added or len(added) < len(self.initial):
            return UNKNOWN_VALUE
        symbols = {name: symbol_of_item(item) for name, item in added.items()}
        return next(iter(symbols.values())) if len(symbols) == 1 else Fields(symbols)

    def final_values(
        self, interpreter: FunctionInterpreter, added: Mapping[str, Item], lists: Mapping[str, Symbol]
    ) -> dict[str, Symbol]:
        """Return the values after the loop. `lists` are what the iterations have added to each name."""
        values: dict[str, Symbol] = {}
        for name, items in lists.items():
            if isinstance(added[name], Spread):
                expression = interpreter.to_expression(items)
                items = UNKNOWN_VALUE if expression is None else _flatten(expression, "")
            values[name] = _extend(interpreter, self.initial[name], items)
        return values


def _find_addition(interpreter: FunctionInterpreter, node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the name and what is added to it, for `text += piece` and `name.append(item)`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
        return (node.target.id, node.value) if is_text(interpreter.frame.read(node.target.id)) else None
    return _find_append(node)


def _find_append(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the name and the item of `name.append(item)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name):
        return func.value.id, call.args[0]
    return None


def _appended_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names to which a statement appends, or may append."""
    if isinstance(node, ast.If):
        for inner in (*node.body, *node.orelse):
            yield from _appended_names(inner)
    elif (addition := _find_append(node)) is not None:
        yield addition[0]


def _code_without_appends(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the code of a statement, but for the names to which it may append."""
    if isinstance(node, ast.If):
        yield node.test
        for inner in (*node.body, *node.orelse):
            addition = _find_append(inner)
            yield from _code_without_appends(inner) if addition is None else [addition[1]]
    else:
        yield node


def _append_statement(name: str, value: ast.expr, node: ast.stmt) -> ast.stmt:
    method = ast.Attribute(ast.Name(name, ast.Load()), "append", ast.Load())
    return ast.fix_missing_locations(ast.copy_location(ast.Expr(ast.Call(method, [value], [])), node))


def _extend(interpreter: FunctionInterpreter, initial: Symbol, added: Symbol) -> Symbol:
    """Return a text or a list with what a loop has added to it."""
    if is_text(initial):
        expression = interpreter.to_expression(added)
        if expression is None:
            return make_text((initial, UNKNOWN_VALUE))
        join = ast.Attribute(ast.Constant(""), "join", ast.Load())
        code = ast.Call(join, [expression.code], [])
        return make_text((initial, Expression(code, expression.refs, expression.objects)))
    if isinstance(initial, (ItemList, Ref)) or (isinstance(initial, KnownValue) and type(initial.value) is list):
        return make_list([*items_of(initial), Spread(added)])
    return UNKNOWN_VALUE


# ------------------------------------------------------------ comprehensions


def flatten_field(lists: Ref, key: str) -> Expression:
    """Return `[item for one in lists for item in one[key]]`."""
    name = f"{NAME_PREFIX}lists{next(_name_numbers)}"
    return _flatten(Expression(ast.Name(name, ast.Load()), {name: lists}), key)


def _flatten(lists: Expression, key: str) -> Expression:
    """Return `[item for one in lists for item in one[key]]`; without a key, the items of the lists themselves."""
    names = [f"{NAME_PREFIX}one{next(_name_numbers)}" for _ in range(2)]
    one, item = (ast.Name(name, ast.Load()) for name in names)
    stored = [ast.Name(name, ast.Store()) for name in names]
    inner: ast.expr = ast.Subscript(one, ast.Constant(key), ast.Load()) if key else one
    loops = [ast.comprehension(stored[0], lists.code, [], 0), ast.comprehension(stored[1], inner, [], 0)]
    return Expression(ast.ListComp(item, loops), lists.refs, lists.objects)


def _read_each(interpreter: FunctionInterpreter, results: Ref, key: str) -> Symbol:
    """Return `[one[key] for one in results]`; without a key, the results themselves.

    `results` is the list that the MAP of a `for` loop gives, one value per iteration. If the loop adds items to
    several names, each value is a dictionary by name, and `key` is one of the names.
    """
    expression = interpreter.to_expression(results)
    if not key or expression is None:
        return results
    loop = ast.comprehension(ast.Name("one", ast.Store()), expression.code, [], 0)
    element = ast.Subscript(ast.Name("one", ast.Load()), ast.Constant(key), ast.Load())
    return Expression(ast.ListComp(element, [loop]), expression.refs)


def _to_comprehensions(loop: MapLoop, added: Mapping[str, Item]) -> dict[str, Symbol]:
    """Return the lists of what a loop adds as comprehensions; only those that are certainly pure."""
    comprehensions: dict[str, Symbol] = {}
    for name, item in added.items():
        try:
            comprehension = _to_comprehension(loop, symbol_of_item(item))
            compile_pure(comprehension)
        except NotUnderstood:
            continue
        comprehensions[name] = comprehension
    return comprehensions


def _to_comprehension(loop: MapLoop, symbol: Symbol) -> Expression:
    """Return `[symbol for item in items]`. Raise `NotUnderstood` if a component of the body is needed for it."""
    element, items = loop.body.to_expression(symbol), loop.outer.to_expression(as_list(loop.items))
    if element is None or items is None or not is_small(element.code):
        raise NotUnderstood("a loop that does more than compute")
    outer_refs: dict[str, Ref] = {}
    item_paths: dict[str, Path] = {}
    for name, ref in element.refs.items():
        captured = loop.captures.inputs.get(ref.producer[1:]) if ref.external else None
        if ref.producer == ITEM:
            item_paths[name] = ref.path
        elif captured is not None:
            outer_refs[name] = captured.at(*ref.path)
        else:
            raise NotUnderstood("a value that is made in the loop")
    variable = f"{NAME_PREFIX}one{next(_name_numbers)}"
    code = _ReadItem(variable, item_paths).visit(copy_code(element.code))
    comprehension = ast.ListComp(code, [ast.comprehension(ast.Name(variable, ast.Store()), items.code, [], 0)])
    return Expression(comprehension, {**items.refs, **outer_refs}, {**items.objects, **element.objects})


class _ReadItem(ast.NodeTransformer):
    """Replaces names that stand for parts of the item by the parts, read from the loop's variable."""

    def __init__(self, variable: str, paths: Mapping[str, Path]) -> None:
        self._variable, self._paths = variable, paths

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name that stands for a part of the item by code that reads this part from the loop's variable."""
        if node.id not in self._paths:
            return node
        code: ast.expr = ast.Name(self._variable, ast.Load())
        for key in self._paths[node.id]:
            assert isinstance(key, (str, int))
            code = ast.Subscript(code, ast.Constant(key), ast.Load())
        return code
