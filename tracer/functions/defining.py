"""Functions that are defined inside the function."""

from __future__ import annotations

import ast
from types import CellType, CodeType, FunctionType

from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.source import Definition, standing
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE, Defined, Known, Symbol


def defined(walk: Walker, node: Definition) -> Symbol:
    """A function of its own; a real one where all that it reads is at hand."""
    code = _code_of(walk.frame.code, node)
    decorated = not isinstance(node, ast.Lambda) and node.decorator_list
    if code is None or decorated:
        return UNKNOWN_VALUE
    last = code.co_varnames[: code.co_argcount][::-1]
    defaults = dict(zip(last, [walk.evaluate(one) for one in node.args.defaults[::-1]], strict=False))
    defaults |= {
        argument.arg: walk.evaluate(value)
        for argument, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if value is not None
    }
    free = {name: walk.frame.read(name) for name in code.co_freevars}
    if all(isinstance(one, Known) for one in (*free.values(), *defaults.values())):
        return Known(_function(walk, code, free, defaults))
    return Defined(node, code, defaults, walk.frame.read)


def _code_of(around: CodeType | None, node: Definition) -> CodeType | None:
    """Its code, among the constants of the code around it."""
    if around is None:
        return None
    found = [one for one in around.co_consts if isinstance(one, CodeType)]
    here = [one for one in found if (one.co_firstlineno, one.co_name) == standing(node)]
    return here[0] if len(here) == 1 else None


def _function(walk: Walker, code: CodeType, free: dict[str, Symbol], defaults: dict[str, Symbol]) -> FunctionType:
    known = {name: one.value for name, one in (free | defaults).items() if isinstance(one, Known)}
    places = [name for name in code.co_varnames[: code.co_argcount] if name in defaults]
    cells = tuple(CellType(known[name]) for name in code.co_freevars)
    globals_ = walk.frame.around.globals
    made = FunctionType(code, globals_, code.co_name, tuple(known[name] for name in places), cells)  # type: ignore[arg-type]
    made.__kwdefaults__ = {name: known[name] for name in defaults if name not in places} or None  # type: ignore[assignment]
    return made
