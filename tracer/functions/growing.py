"""Lists and texts that grow in each round of a loop: `found.append(item)`, `text += item`."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from teola_plugin.graph import ITEM, Path, Ref
from teola_plugin.tracer.functions.assigning import assigned, names_read
from teola_plugin.tracer.functions.composing import series, spread
from teola_plugin.tracer.functions.loops import Items, listed
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.pure import MADE, is_small, proven
from teola_plugin.tracer.functions.texts import is_text, text
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Computed,
    Fields,
    Item,
    Known,
    Series,
    Spread,
    Symbol,
)
from teola_plugin.tracer.symbols import NotUnderstood

_NUMBERS = itertools.count()
"""Items of comprehensions that are made of loops have names of their own: one may stand inside another."""


@dataclass(frozen=True, slots=True)
class Growing:
    """Names to which rounds of a loop add something, and of which nothing else is known to happen there."""

    statements: Sequence[ast.stmt]
    """Of a round; what is added to a text is appended to a list of its pieces."""
    before: Mapping[str, Symbol]
    """What they were when the loop began."""

    @staticmethod
    def of(walk: Walker, body: Sequence[ast.stmt]) -> Growing:
        added = {place: found for place, node in enumerate(body) if (found := _added(walk, node)) is not None}
        maybe = [name for node in body if isinstance(node, ast.If) for name in dict.fromkeys(_appended(node))]
        others: list[ast.AST] = [value for _, value in added.values()]
        others += [one for place, node in enumerate(body) if place not in added for one in _others(node)]
        taken = assigned(others) | names_read(others)
        once = [*(name for name, _ in added.values()), *maybe]
        names = {name for name in once if name not in taken and once.count(name) == 1}
        statements = [
            _append(*added[place], node) if place in added and added[place][0] in names else node
            for place, node in enumerate(body)
        ]
        return Growing(statements, {name: walk.frame.read(name) for name in sorted(names)})

    @property
    def begun(self) -> dict[str, Symbol]:
        """As a round begins."""
        return {name: Series(()) for name in self.before}

    def added(self, after: Mapping[str, Symbol]) -> dict[str, Item]:
        """What a round has added, where that is known; a `Spread` of it where that is not always one thing."""
        found: dict[str, Item] = {}
        for name in self.before:
            one = after.get(name, UNKNOWN_VALUE)
            item = one.items[0] if isinstance(one, Series) and len(one.items) == 1 else Spread(one)
            if _of(item) is not UNKNOWN_VALUE:
                found[name] = item
        return found

    def output(self, added: Mapping[str, Item]) -> Symbol:
        """Of a round, as one value."""
        if not added or len(added) < len(self.before):
            return UNKNOWN_VALUE
        made = {name: _of(one) for name, one in added.items()}
        return next(iter(made.values())) if len(made) == 1 else Fields(made)

    def grown(self, walk: Walker, added: Mapping[str, Item], lists: Mapping[str, Symbol]) -> dict[str, Symbol]:
        """After the loop, by the lists of what each round has added."""
        return {
            name: _longer(walk, self.before[name], _flat(walk, one) if isinstance(added[name], Spread) else one)
            for name, one in lists.items()
        }


def _of(item: Item) -> Symbol:
    return item.of if isinstance(item, Spread) else item


def _added(walk: Walker, node: ast.stmt) -> tuple[str, ast.expr] | None:
    """The name, and what is added to it."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
        return (node.target.id, node.value) if is_text(walk.frame.read(node.target.id)) else None
    return _append_call(node)


def _append_call(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """The name and the item of `name.append(item)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) and len(call.args) == 1 and not call.keywords else None
    if isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name):
        return func.value.id, call.args[0]  # type: ignore[union-attr]
    return None


def _appended(node: ast.stmt) -> Iterator[str]:
    """Names to which it appends, or may append."""
    if isinstance(node, ast.If):
        for one in (*node.body, *node.orelse):
            yield from _appended(one)
    elif (found := _append_call(node)) is not None:
        yield found[0]


def _others(node: ast.stmt) -> Iterator[ast.AST]:
    """What there is in it beside names to which it may append."""
    if isinstance(node, ast.If):
        yield node.test
        for one in (*node.body, *node.orelse):
            found = _append_call(one)
            yield from _others(one) if found is None else [found[1]]
    else:
        yield node


def _append(name: str, value: ast.expr, node: ast.stmt) -> ast.stmt:
    method = ast.Attribute(ast.Name(name, ast.Load()), "append", ast.Load())
    return ast.fix_missing_locations(ast.copy_location(ast.Expr(ast.Call(method, [value], [])), node))


def _flat(walk: Walker, lists: Symbol) -> Symbol:
    """`[item for one in lists for item in one]`."""
    code = walk.code(lists)
    return UNKNOWN_VALUE if code is None else _flattened(code, "")


def every_item(lists: Ref, key: str) -> Computed:
    """`[item for one in lists for item in one[key]]`."""
    name = f"{MADE}lists{next(_NUMBERS)}"
    return _flattened(Computed(ast.Name(name, ast.Load()), {name: lists}), key)


def _flattened(lists: Computed, key: str) -> Computed:
    names = [f"{MADE}one{next(_NUMBERS)}" for _ in range(2)]
    one, item = (ast.Name(name, ast.Load()) for name in names)
    stored = [ast.Name(name, ast.Store()) for name in names]
    inner: ast.expr = ast.Subscript(one, ast.Constant(key), ast.Load()) if key else one
    loops = [ast.comprehension(stored[0], lists.code, [], 0), ast.comprehension(stored[1], inner, [], 0)]
    return Computed(ast.ListComp(item, loops), lists.refs, lists.objects)


def _longer(walk: Walker, before: Symbol, added: Symbol) -> Symbol:
    if is_text(before):
        return text((before, _joined(walk, added)))
    if isinstance(before, (Series, Ref)) or (isinstance(before, Known) and type(before.value) is list):
        return series([*spread(before), Spread(added)])
    return UNKNOWN_VALUE


def _joined(walk: Walker, pieces: Symbol) -> Symbol:
    """As one text."""
    code = walk.code(pieces)
    if code is None:
        return UNKNOWN_VALUE
    join = ast.Attribute(ast.Constant(""), "join", ast.Load())
    return Computed(ast.Call(join, [code.code], []), code.refs, code.objects)


def taken(walk: Walker, made: Ref, key: str) -> Symbol:
    """`[one[key] for one in made]`; the list itself without a key."""
    code = walk.code(made)
    if not key or code is None:
        return made
    one = ast.comprehension(ast.Name("one", ast.Store()), code.code, [], 0)
    element = ast.Subscript(ast.Name("one", ast.Load()), ast.Constant(key), ast.Load())
    return Computed(ast.ListComp(element, [one]), code.refs)


# ------------------------------------------------------------ loops that ask for nothing


def written_out(items: Items, added: Mapping[str, Item]) -> dict[str, Symbol]:
    """The lists of what is added, as comprehensions; only those that are certainly pure."""
    found: dict[str, Symbol] = {}
    for name, symbol in added.items():
        try:
            made = _comprehension(items, _of(symbol))
            proven(made)
        except NotUnderstood:
            continue
        found[name] = made
    return found


def _comprehension(items: Items, symbol: Symbol) -> Computed:
    element, every = items.body.code(symbol), items.outer.code(listed(items.items))
    if element is None or every is None or not is_small(element.code):
        raise NotUnderstood("a loop that does more than compute")
    outside: dict[str, Ref] = {}
    inside: dict[str, Path] = {}
    for name, ref in element.refs.items():
        held = items.captures.inputs.get(ref.producer[1:]) if ref.external else None
        if ref.producer == ITEM:
            inside[name] = ref.path
        elif held is not None:
            outside[name] = held.at(*ref.path)
        else:
            raise NotUnderstood("a value that is made in the loop")
    one = f"{MADE}one{next(_NUMBERS)}"
    code = _OfItem(one, inside).visit(ast.parse(ast.unparse(ast.fix_missing_locations(element.code)), mode="eval").body)
    whole = ast.ListComp(code, [ast.comprehension(ast.Name(one, ast.Store()), every.code, [], 0)])
    return Computed(whole, {**every.refs, **outside}, {**every.objects, **element.objects})


class _OfItem(ast.NodeTransformer):
    """Reads in the item what stood for its parts."""

    def __init__(self, one: str, paths: Mapping[str, Path]) -> None:
        self._one, self._paths = one, paths

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._paths:
            return node
        found: ast.expr = ast.Name(self._one, ast.Load())
        for key in self._paths[node.id]:
            assert isinstance(key, (str, int))
            found = ast.Subscript(found, ast.Constant(key), ast.Load())
        return found
