"""Statements of a function's source: what they assign, and where control goes. Rules for loops are in `loops`.

Of a condition that is not known yet, both branches are interpreted on drafts of their own. If the condition is pure,
it becomes a BRANCH, of which one side runs as soon as the condition is known. If it waits for an engine or for user
code, requests of both sides are made before, as speculation, if any of them is cheap enough, and not both of them ask a
model.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.graph import Component, Ref, Role
from teola_plugin.tracer.draft import DERIVED, Draft, Span
from teola_plugin.tracer.functions.bodies import Captures
from teola_plugin.tracer.functions.calls import find_assignment, may_write
from teola_plugin.tracer.functions.expressions import define_function
from teola_plugin.tracer.functions.frames import BlockExit, MethodRule
from teola_plugin.tracer.functions.framework_calls import Arguments
from teola_plugin.tracer.functions.interpreter import MAX_NESTING, FunctionInterpreter
from teola_plugin.tracer.functions.lookup import read_object_attribute
from teola_plugin.tracer.functions.loops import run_for, run_while
from teola_plugin.tracer.functions.mutations import (
    assigned_names,
    has_statement,
    is_mutable_container,
    nonlocal_names,
    root_name,
)
from teola_plugin.tracer.functions.operations import assign_names, compose
from teola_plugin.tracer.functions.pruning import uses_engine
from teola_plugin.tracer.functions.pure_expressions import copy_code
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    Expression,
    Fields,
    KnownValue,
    Symbol,
    Unknown,
    known_value,
    producers,
)
from teola_plugin.tracer.functions.texts import is_text
from teola_plugin.tracer.lookahead import lookahead_of_choice
from teola_plugin.tracer.symbols import NotUnderstood

Statements = Sequence[ast.stmt]


def run_block(interpreter: FunctionInterpreter, statements: Statements) -> BlockExit:
    """Interpret statements, one after the other."""
    for index, node in enumerate(statements):
        ends_block, interpreter.line = False, node.lineno
        if isinstance(node, ast.If):
            block_exit, ends_block = _run_if(interpreter, node, statements[index + 1 :])
        elif (rule := _RULES.get(type(node))) is not None:
            block_exit = rule(interpreter, node)
        else:
            block_exit = BlockExit.UNKNOWN
        if ends_block or block_exit is not BlockExit.FALLS_THROUGH:
            return block_exit
    return BlockExit.FALLS_THROUGH


# ------------------------------------------------------------ assignments


def _run_assign(interpreter: FunctionInterpreter, node: ast.Assign) -> BlockExit:
    """Interpret `target = value`, also with several targets."""
    value = interpreter.evaluate(node.value)
    for target in node.targets:
        _assign(interpreter, target, value)
    return BlockExit.FALLS_THROUGH


def _run_annotated_assign(interpreter: FunctionInterpreter, node: ast.AnnAssign) -> BlockExit:
    if node.value is not None:
        _assign(interpreter, node.target, interpreter.evaluate(node.value))
    return BlockExit.FALLS_THROUGH


def _run_augmented_assign(interpreter: FunctionInterpreter, node: ast.AugAssign) -> BlockExit:
    """Interpret `name += value` and the like, which changes a list, a dictionary or a set in place."""
    if isinstance(node.target, ast.Name):
        name = ast.Name(node.target.id, ast.Load())
        old_value = interpreter.evaluate(name)
        new_value = interpreter.evaluate(ast.BinOp(name, node.op, node.value))
        if is_mutable_container(old_value) or is_mutable_container(new_value):
            interpreter.mutations.add(old_value)
    else:
        new_value = _augmented_field(interpreter, node, copy_code(node.target))
    _assign(interpreter, node.target, new_value)
    return BlockExit.FALLS_THROUGH


def _augmented_field(interpreter: FunctionInterpreter, node: ast.AugAssign, target: ast.expr) -> Symbol:
    """Return what `owner.name += value` assigns, unknown unless the framework has a rule for it.

    Numbers and texts have a new value. Any other may be a list or the like, which is changed in place.
    """
    assert isinstance(target, (ast.Attribute, ast.Subscript))
    added = interpreter.evaluate(node.value)
    old_value = interpreter.evaluate(target)
    is_simple = is_text(added) or (isinstance(added, KnownValue) and type(added.value) in (int, float))
    if not is_simple or find_assignment(interpreter, target) is None:
        interpreter.mutations.add(old_value)
        return UNKNOWN_VALUE
    template = ast.BinOp(ast.Constant(0), node.op, ast.Constant(0))
    return compose(interpreter, template, {"left": old_value, "right": added})


def _assign(interpreter: FunctionInterpreter, target: ast.expr, value: Symbol) -> None:
    """Assign to a name, to several, to a key or to an attribute."""
    if isinstance(target, (ast.Name, ast.Tuple, ast.List)):
        assign_names(interpreter, target, value)
        for part in ast.walk(target):
            if isinstance(part, (ast.Subscript, ast.Attribute)) and not isinstance(part.ctx, ast.Load):
                _assign(interpreter, part, UNKNOWN_VALUE)
    elif isinstance(target, (ast.Subscript, ast.Attribute)) and _assign_by_rule(interpreter, target, value):
        return
    elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        _assign_key(interpreter, target, target.value.id, value)
    elif isinstance(target, ast.Subscript):
        interpreter.mutations.add(interpreter.evaluate(target.value))
    elif isinstance(target, ast.Attribute):
        owner = interpreter.evaluate(target.value)
        interpreter.mutations.add(owner)
        if isinstance(owner, KnownValue):
            interpreter.attribute_values[id(owner.value), target.attr] = value
            interpreter.shared.sets_attributes = True
        else:
            interpreter.frame.names |= dict.fromkeys(root_name(target), UNKNOWN_VALUE)


def _assign_by_rule(interpreter: FunctionInterpreter, target: ast.Subscript | ast.Attribute, value: Symbol) -> bool:
    """Assign to a key or an attribute by the framework's rule, which returns the changed object. False without one."""
    rule = find_assignment(interpreter, target)
    if rule is None:
        return False
    name = KnownValue(target.attr) if isinstance(target, ast.Attribute) else interpreter.evaluate(target.slice)
    changed = rule(interpreter, Arguments((name, value), {}))
    interpreter.mutations.add(interpreter.evaluate(target.value))
    assert isinstance(target.value, ast.Name)
    interpreter.frame.names[target.value.id] = changed
    return True


def _assign_key(interpreter: FunctionInterpreter, target: ast.Subscript, name: str, value: Symbol) -> None:
    """Assign to `name[key]`: the name stands for a dictionary with that key from now on."""
    owner, (is_known, key) = interpreter.evaluate(target.value), known_value(interpreter.evaluate(target.slice))
    interpreter.mutations.add(owner)
    if isinstance(owner, Fields) and is_known and type(key) is str:
        interpreter.frame.names[name] = replace(owner, items={**owner.items, key: value})
    else:
        interpreter.frame.names[name] = UNKNOWN_VALUE


def _run_delete(interpreter: FunctionInterpreter, node: ast.Delete) -> BlockExit:
    """Interpret `del`: deleted names become unknown, and objects that lose a key or attribute count as changed."""
    for target in node.targets:
        if isinstance(target, (ast.Subscript, ast.Attribute)):
            interpreter.mutations.add(interpreter.evaluate(target.value))
    interpreter.forget_names([node])
    return BlockExit.FALLS_THROUGH


def _run_import(interpreter: FunctionInterpreter, node: ast.Import | ast.ImportFrom) -> BlockExit:
    """Interpret an import: a module that is imported already is known, any other may run any code."""
    for alias in node.names:
        name = alias.asname or alias.name.split(".", 1)[0]
        if isinstance(node, ast.Import):
            module = sys.modules.get(alias.name if alias.asname else name)
            value: Symbol = UNKNOWN_VALUE if module is None else KnownValue(module)
        else:
            module = sys.modules.get(node.module or "") if not node.level else None
            value = UNKNOWN_VALUE if module is None else read_object_attribute(module, alias.name)
        interpreter.frame.names[name] = value
        if isinstance(value, Unknown):
            interpreter.add_user_code()
    return BlockExit.FALLS_THROUGH


def _run_declaration(interpreter: FunctionInterpreter, node: ast.Global | ast.Nonlocal) -> BlockExit:
    """Interpret `global` and `nonlocal`: other functions read what is assigned to these names from here on."""
    interpreter.frame.declared_names |= set(node.names)
    return BlockExit.FALLS_THROUGH


def _run_definition(
    interpreter: FunctionInterpreter, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
) -> BlockExit:
    """Interpret the definition of a function, which later calls may interpret, or of a class, which stays unknown."""
    frame = interpreter.frame
    frame.assigned_by_inner_functions |= nonlocal_names(node)
    frame.names[node.name] = UNKNOWN_VALUE if isinstance(node, ast.ClassDef) else define_function(interpreter, node)
    return BlockExit.FALLS_THROUGH


# ------------------------------------------------------------ control flow


def _run_expression(interpreter: FunctionInterpreter, node: ast.Expr | ast.Assert) -> BlockExit:
    interpreter.evaluate(node.test if isinstance(node, ast.Assert) else node.value)
    return BlockExit.FALLS_THROUGH


def _run_return(interpreter: FunctionInterpreter, node: ast.Return) -> BlockExit:
    interpreter.frame.return_value = KnownValue(None) if node.value is None else interpreter.evaluate(node.value)
    return BlockExit.LEAVES


def _run_try(interpreter: FunctionInterpreter, node: ast.Try) -> BlockExit:
    """Interpret a `try` statement as if nothing was raised."""
    shared, catching_blocks = interpreter.shared, interpreter.shared.catching_blocks
    shared.catching_blocks += bool(node.handlers)
    try:
        block_exit = interpreter.run_block(node.body)
    finally:
        shared.catching_blocks = catching_blocks
    if block_exit is BlockExit.FALLS_THROUGH:
        block_exit = interpreter.run_block(node.orelse)
    if block_exit is not BlockExit.UNKNOWN and node.finalbody:
        final_exit = interpreter.run_block(node.finalbody)
        block_exit = block_exit if final_exit is BlockExit.FALLS_THROUGH else final_exit
    return block_exit


def _run_with(interpreter: FunctionInterpreter, node: ast.With | ast.AsyncWith) -> BlockExit:
    """Interpret a `with` statement whose context managers the framework has rules for."""
    find_method = interpreter.shared.find_method
    exits: list[tuple[MethodRule, ast.expr | None]] = []
    for item in node.items:
        manager = interpreter.evaluate(item.context_expr)
        enter = None if find_method is None else find_method(manager, "__enter__")
        leave = None if find_method is None else find_method(manager, "__exit__")
        if enter is None or leave is None or not isinstance(item.optional_vars, (ast.Name, type(None))):
            return BlockExit.UNKNOWN
        value = enter(interpreter, Arguments((), {}))
        if item.optional_vars is not None:
            assign_names(interpreter, item.optional_vars, value)
        exits.append((leave, item.optional_vars))
    block_exit = interpreter.run_block(node.body)
    if block_exit is not BlockExit.UNKNOWN:
        for leave, variable in reversed(exits):
            value = UNKNOWN_VALUE if variable is None else interpreter.evaluate(copy_code(variable))
            leave(interpreter, Arguments((value,), {}))
    return block_exit


def _run_if(interpreter: FunctionInterpreter, node: ast.If, rest: Statements) -> tuple[BlockExit, bool]:
    """Interpret an `if` statement. `rest` are the statements after it.

    Returns how it exits, and whether that is how the whole block does: if a branch may leave the function, what comes
    after the `if` was interpreted as a part of both branches.
    """
    interpreter.line = node.lineno
    test = interpreter.evaluate(node.test)
    truth = interpreter.decide_condition(test)
    if truth is not None:
        return interpreter.run_block(node.body if truth else node.orelse), False
    is_caught = interpreter.shared.catching_blocks > 0
    for body, other in ((node.body, node.orelse), (node.orelse, node.body)):
        if any(isinstance(inner, ast.Raise) for inner in body) and not is_caught:
            return interpreter.run_block(other), False  # as if nothing went wrong
    both = [*node.body, *node.orelse]
    may_leave = has_statement(both, (ast.Return, ast.Continue, *((ast.Raise,) if is_caught else ())))
    may_break = has_statement(both, (ast.Break,))
    if may_break or interpreter.nesting >= MAX_NESTING:
        interpreter.is_incomplete = True
        interpreter.forget_names(both)
        if may_write(interpreter, both):
            interpreter.add_user_code()
        return (BlockExit.UNKNOWN if may_leave or may_break else BlockExit.FALLS_THROUGH), False
    branches: tuple[Statements, Statements] = (node.body, node.orelse)
    if may_leave:
        branches = ([*node.body, *rest], [*node.orelse, *rest])
    names = assigned_names(branches[0]) | assigned_names(branches[1])
    block_exit = _run_branches(interpreter, test, branches, names)
    if block_exit is BlockExit.LEAVES and not may_leave:
        block_exit = BlockExit.UNKNOWN  # code in one of them always raises
    return block_exit, may_leave


# ------------------------------------------------------------ branches of a condition that is not known yet


def _run_branches(
    interpreter: FunctionInterpreter, test: Symbol, branches: tuple[Statements, Statements], names: set[str]
) -> BlockExit:
    """Interpret both branches. `names` are assigned in one of them."""
    component_names = set(interpreter.draft.names)
    trials: list[FunctionInterpreter] = []
    exits: list[BlockExit] = []
    for statements in branches:
        trial = interpreter.fork(component_names)
        trials.append(trial)
        exits.append(trial.run_block(statements))
    block_exit = _run_tried_branches(interpreter, test, branches, names, trials, _common_exit(exits))
    for trial in trials:
        interpreter.mutations.update(trial.mutations)
        interpreter.forget_attributes(trial)
    return block_exit


def _run_tried_branches(
    interpreter: FunctionInterpreter,
    test: Symbol,
    branches: tuple[Statements, Statements],
    names: set[str],
    trials: Sequence[FunctionInterpreter],
    block_exit: BlockExit,
) -> BlockExit:
    """Interpret branches that each were interpreted as if they were certain, which `trials` have done."""
    if not any(uses_engine(component) for trial in trials for component in trial.draft.components.values()):
        _merge_trials(interpreter, test, trials, block_exit, names)
        return block_exit
    condition = _condition_ref(interpreter, test)
    generating = [any(c.role is Role.GENERATION for c in trial.draft.components.values()) for trial in trials]
    speculative = lookahead_of_choice([trial.draft for trial in trials], False)
    needs_no_engine = condition is not None and not _waits_for_engine(interpreter.draft, condition)
    if condition is not None and (needs_no_engine or all(generating) or not speculative):
        return _BranchBuilder(interpreter, condition).run(branches, names)
    interpreter.frame.names |= dict.fromkeys(names, UNKNOWN_VALUE)
    interpreter.is_incomplete = True
    _add_speculative_components(interpreter.draft, speculative, [trial.draft for trial in trials])
    _take_over_user_code(interpreter, trials)
    return BlockExit.UNKNOWN if block_exit is not BlockExit.FALLS_THROUGH else block_exit


def _common_exit(exits: Sequence[BlockExit]) -> BlockExit:
    if all(block_exit is BlockExit.FALLS_THROUGH for block_exit in exits):
        return BlockExit.FALLS_THROUGH
    return BlockExit.UNKNOWN if BlockExit.UNKNOWN in exits else BlockExit.LEAVES


def _take_over_user_code(interpreter: FunctionInterpreter, branches: Sequence[FunctionInterpreter]) -> None:
    interpreter.is_incomplete = interpreter.is_incomplete or any(branch.is_incomplete for branch in branches)
    if any(branch.runs_user_code for branch in branches):
        interpreter.add_user_code()


def _add_speculative_components(draft: Draft, components: Sequence[Component], branch_drafts: Sequence[Draft]) -> None:
    """Add the components of both branches that are cheap enough to be prefetched before the condition is known."""
    for component in components:
        draft.add(component)
    for branch_draft in branch_drafts:
        draft.names |= branch_draft.names
        draft.adopt_calls(branch_draft)


def _merge_trials(
    interpreter: FunctionInterpreter,
    test: Symbol,
    trials: Sequence[FunctionInterpreter],
    block_exit: BlockExit,
    names: set[str],
) -> None:
    """Take over the results of branches that use no engine: as conditional expressions, or as unknown values."""
    frame = interpreter.frame
    for name in names:
        frame.names[name] = _merge_values(interpreter, test, [trial.frame.read(name) for trial in trials], trials)
    if block_exit is BlockExit.LEAVES:
        return_values = [trial.frame.return_value for trial in trials]
        frame.return_value = _merge_values(interpreter, test, return_values, trials)
    _take_over_user_code(interpreter, trials)


def _merge_values(
    interpreter: FunctionInterpreter, test: Symbol, values: Sequence[Symbol], trials: Sequence[FunctionInterpreter]
) -> Symbol:
    """Return `values[0] if test else values[1]`; unknown if it depends on a component of a trial."""
    body, orelse = values
    if body is orelse:
        return body
    no_base = isinstance(body, Fields) and isinstance(orelse, Fields) and body.base is None and orelse.base is None
    if isinstance(body, Fields) and isinstance(orelse, Fields) and no_base and not body.fields_only:
        keys = body.items.keys() if body.items.keys() == orelse.items.keys() else ()
        items = {key: _merge_values(interpreter, test, (body.items[key], orelse.items[key]), trials) for key in keys}
        return Fields(items, None, body.attributes) if items else UNKNOWN_VALUE
    if isinstance(body, KnownValue) and isinstance(orelse, KnownValue) and body.value is orelse.value:
        return body
    trial_components = {name for trial in trials for name in trial.draft.components}
    if not trial_components.isdisjoint(producers(body) | producers(orelse)):
        return UNKNOWN_VALUE  # checked first: a CALL that builds the value would read a component of another draft
    template = ast.IfExp(ast.Constant(None), ast.Constant(None), ast.Constant(None))
    merged = compose(interpreter, template, {"test": test, "body": body, "orelse": orelse})
    return merged if isinstance(merged, (Expression, Unknown)) else UNKNOWN_VALUE


def _condition_ref(interpreter: FunctionInterpreter, test: Symbol) -> Ref | None:
    """Return the truth of a condition as a ref; None if it is not certain to be pure."""
    try:
        expression = None if isinstance(test, Unknown) else interpreter.to_expression(test)
        if expression is None:
            return None
        code = ast.Call(ast.Name("bool", ast.Load()), [expression.code], [])
        return interpreter.to_ref(Expression(code, expression.refs, expression.objects))
    except NotUnderstood:
        return None


def _waits_for_engine(draft: Draft, ref: Ref) -> bool:
    """Return True if the value waits for an engine, or for a component of another draft."""
    if ref.external:
        return False
    producer = draft.components.get(ref.producer)
    if producer is None or uses_engine(producer):
        return True
    return any(_waits_for_engine(draft, input_ref) for _, input_ref in producer.inputs)


_RETURN_KEY = "returned"
"""The key, in the output of a BRANCH, of what the function returns, or the beginning of its keys."""


class _BranchBuilder:
    """Makes a BRANCH: a component that runs one of two bodies, by a condition."""

    def __init__(self, interpreter: FunctionInterpreter, condition: Ref) -> None:
        self._interpreter = interpreter
        self._condition = condition
        self._captures = Captures(interpreter)

    def run(self, branches: tuple[Statements, Statements], names: set[str]) -> BlockExit:
        """Interpret both branches, and add the component. `names` are assigned in one of them."""
        frame = self._interpreter.frame
        bodies = [self._captures.make_body() for _ in branches]
        exits = [body.run_block(statements) for body, statements in zip(bodies, branches, strict=True)]
        block_exit = _common_exit(exits)
        outputs = [self._outputs(body, block_exit, names) for body in bodies]
        shared_keys = [key for key in outputs[0] if key in outputs[1]]
        ref = self._add_component(bodies, [{key: output[key] for key in shared_keys} for output in outputs])
        frame.names |= dict.fromkeys(names, UNKNOWN_VALUE)
        if ref is not None:
            frame.names |= {key: ref.at(key) for key in shared_keys if key in names}
        if block_exit is BlockExit.LEAVES:
            frame.return_value = self._return_value(ref, bodies, shared_keys)
        _take_over_user_code(self._interpreter, bodies)
        return block_exit

    def _outputs(self, body: FunctionInterpreter, block_exit: BlockExit, names: set[str]) -> dict[str, Ref]:
        """Return the values of a branch by name, as far as they are known: what it assigns, or what it returns."""
        symbols: dict[str, Symbol] = {}
        if block_exit is BlockExit.FALLS_THROUGH:
            symbols = {name: body.frame.read(name) for name in sorted(names)}
        elif block_exit is BlockExit.LEAVES:
            value = body.frame.return_value
            symbols = {_RETURN_KEY: value}
            if isinstance(value, Fields) and value.base is None and not value.attributes:
                symbols = {f"{_RETURN_KEY}.{key}": item for key, item in value.items.items()}
        refs: dict[str, Ref] = {}
        for name, symbol in symbols.items():
            try:
                refs[name] = body.to_ref(symbol)
            except NotUnderstood:
                continue
        return refs

    def _add_component(self, bodies: Sequence[FunctionInterpreter], outputs: Sequence[dict[str, Ref]]) -> Ref | None:
        """Add the BRANCH, if any of it can be prefetched. Return its ref if both bodies give all outputs, else None."""
        interpreter = self._interpreter
        condition = Ref("$condition")
        output_refs = [
            body.to_ref(Fields(output)) if output else condition for body, output in zip(bodies, outputs, strict=True)
        ]
        pruned = [body.finish_body(ref) for body, ref in zip(bodies, output_refs, strict=True)]
        if all(body_output is None for body_output in pruned):
            return None
        name = interpreter.draft.name(f"{interpreter.name}.branch", *DERIVED)
        templates = []
        for body, ref in zip(bodies, output_refs, strict=True):
            is_left = ref.external or ref.producer in body.draft.components
            templates.append(body.draft.template(ref if is_left else condition, name))
            interpreter.draft.absorb(body.draft)
        inputs = (("condition", self._condition), *self._captures.inputs.items())
        component = Component(name, Role.BRANCH, inputs, body=templates[0], otherwise=templates[1])
        branch_ref = interpreter.draft.add(component)
        interpreter.append_span(Span((name,), (name,)))
        is_complete = all(template.output.producer != condition.producer for template in templates)
        return branch_ref if is_complete else None

    @staticmethod
    def _return_value(ref: Ref | None, bodies: Sequence[FunctionInterpreter], shared_keys: Sequence[str]) -> Symbol:
        """Return what the function returns, by the outputs of the BRANCH."""
        if ref is None:
            return UNKNOWN_VALUE
        if _RETURN_KEY in shared_keys:
            return ref.at(_RETURN_KEY)
        values = [body.frame.return_value for body in bodies]
        keys = [key for value in values if isinstance(value, Fields) for key in value.items]
        if not all(isinstance(value, Fields) for value in values):
            return UNKNOWN_VALUE
        names = {key: f"{_RETURN_KEY}.{key}" for key in keys}
        return Fields({key: ref.at(name) if name in shared_keys else UNKNOWN_VALUE for key, name in names.items()})


_RULES: Mapping[type[ast.stmt], Callable[[FunctionInterpreter, Any], BlockExit]] = {
    ast.Expr: _run_expression,
    ast.Assign: _run_assign,
    ast.AnnAssign: _run_annotated_assign,
    ast.AugAssign: _run_augmented_assign,
    ast.Delete: _run_delete,
    ast.Return: _run_return,
    ast.Raise: lambda interpreter, node: BlockExit.LEAVES,
    ast.Continue: lambda interpreter, node: BlockExit.LEAVES,
    ast.Pass: lambda interpreter, node: BlockExit.FALLS_THROUGH,
    ast.Assert: _run_expression,
    ast.Import: _run_import,
    ast.ImportFrom: _run_import,
    ast.FunctionDef: _run_definition,
    ast.AsyncFunctionDef: _run_definition,
    ast.ClassDef: _run_definition,
    ast.Global: _run_declaration,
    ast.Nonlocal: _run_declaration,
    ast.Try: _run_try,
    ast.With: _run_with,
    ast.AsyncWith: _run_with,
    ast.For: run_for,
    ast.AsyncFor: run_for,
    ast.While: run_while,
}
"""What an interpreter does with each kind of statement, `if` aside."""
