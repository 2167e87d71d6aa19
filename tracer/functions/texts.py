"""Texts that are put together of constants and values: f-strings, `+`, `format`, `%`, `join`, `strip`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Formatter

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.pure import is_small
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Computed,
    Item,
    Known,
    Piece,
    Series,
    Spread,
    Symbol,
    Text,
    Unknown,
    in_pieces,
    is_constant,
)


def f_string(walk: Walker, node: ast.JoinedStr) -> Symbol:
    """Whatever is formatted in a special way is a value of its own."""
    return text(piece for part in node.values for piece in _formatted(walk, part))


def _formatted(walk: Walker, part: ast.expr) -> Iterator[Piece]:
    if isinstance(part, ast.Constant):
        yield str(part.value)
        return
    assert isinstance(part, ast.FormattedValue)
    value = walk.evaluate(part.value)
    if part.conversion == -1 and part.format_spec is None:
        yield value
        return
    spec = part.format_spec
    code = walk.code(value)
    if code is None or (spec is not None and not all(isinstance(one, ast.Constant) for one in _specs(spec))):
        yield UNKNOWN_VALUE
        return
    whole = ast.JoinedStr([ast.FormattedValue(code.code, part.conversion, spec)])
    yield Computed(whole, code.refs, code.objects)


def _specs(spec: ast.expr) -> list[ast.expr]:
    return spec.values if isinstance(spec, ast.JoinedStr) else [spec]


def text(pieces: Iterable[Piece]) -> Symbol:
    """The pieces one after the other; constants are written out."""
    found: list[Piece] = []
    for piece in _flat(pieces):
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece != "":
            found.append(piece)
    if all(isinstance(piece, str) for piece in found):
        return Known("".join(map(str, found)))
    return Text(tuple(found))


def _flat(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        if isinstance(piece, Text):
            yield from piece.pieces
        elif isinstance(piece, Known) and is_constant(piece.value):
            yield format(piece.value)
        else:
            yield piece


def is_text(symbol: Symbol) -> bool:
    return isinstance(symbol, Text) or (isinstance(symbol, Known) and type(symbol.value) is str)


def added(one: Symbol, other: Symbol) -> Symbol | None:
    """`one + other`, where one of them is a text."""
    return text((one, other)) if is_text(one) or is_text(other) else None


def method(walk: Walker, of: Symbol, name: str, given: Sequence[Symbol], named: Mapping[str, Symbol]) -> Symbol | None:
    """What a method of a text gives; None for one that leaves nothing of it known."""
    if not is_text(of):
        return None
    if name == "join" and len(given) == 1 and isinstance(given[0], Series):
        return _joined(walk, of, given[0])
    if name in ("strip", "lstrip", "rstrip") and not given and isinstance(of, Text):
        return _stripped(of, name)
    if name == "format" and isinstance(of, Known):
        return _filled(of.value, given, named)
    return None


def _joined(walk: Walker, by: Symbol, items: Series) -> Symbol | None:
    """Of a list of known length, item by item; of any other, its parts with what separates them from those before."""
    if not any(isinstance(item, Spread) for item in items.items):
        pairs = [[by, item] for item in items.items if not isinstance(item, Spread)]
        return text([piece for pair in pairs for piece in pair][1:])
    if not in_pieces(items):
        return None
    pieces: list[Piece] = []
    before: list[Item] = []
    for run in _known_together(walk, items.items):
        pieces.append(_behind(walk, by, run, before))
        before += run
    return text(pieces)


def _known_together(walk: Walker, items: Sequence[Item]) -> list[list[Item]]:
    """Items that follow each other, and are known as soon as the first of them."""
    runs: list[list[Item]] = []
    known: set[str] | None = None
    for item in items:
        code = walk.code(Series((item,)))
        needs = None if code is None else {ref.producer for ref in code.refs.values() if not ref.external}
        if runs and needs is not None and known is not None and needs <= known:
            runs[-1].append(item)
        else:
            runs.append([item])
            known = None if needs is None else (known or set()) | needs
    return runs


def _behind(walk: Walker, by: Symbol, items: list[Item], before: list[Item]) -> Symbol:
    """The text of items that stand behind others; lists that are empty have no separator."""
    joined, own, others = walk.code(by), walk.code(Series(tuple(items))), walk.code(Series(tuple(before)))
    if joined is None or own is None or others is None:
        return UNKNOWN_VALUE
    assert isinstance(own.code, ast.List) and isinstance(others.code, ast.List)
    some = ast.IfExp(others.code, ast.List([ast.Constant("")], ast.Load()), ast.List([], ast.Load()))
    lead = [ast.Starred(some, ast.Load())] if before else []
    join = ast.Attribute(joined.code, "join", ast.Load())
    whole = ast.Call(join, [ast.List([*lead, *own.code.elts], ast.Load())], [])
    refs: dict[str, Ref] = {}
    objects: dict[str, object] = {}
    for one in (joined, own, others):
        refs, objects = {**refs, **one.refs}, {**objects, **one.objects}
    return Computed(whole, refs, objects) if is_small(whole) else UNKNOWN_VALUE


def _stripped(of: Text, name: str) -> Symbol | None:
    """Where what stands at the ends is known, and is more than space."""
    pieces = list(of.pieces)
    for end, wanted in ((0, "lstrip"), (-1, "rstrip")):
        if name not in ("strip", wanted):
            continue
        piece = pieces[end]
        if not isinstance(piece, str) or not piece.strip():
            return None
        pieces[end] = piece.lstrip() if wanted == "lstrip" else piece.rstrip()
    return text(pieces)


def _filled(template: str, given: Sequence[Symbol], named: Mapping[str, Symbol]) -> Symbol | None:
    """`template.format(*given, **named)` for a template of plain names."""
    pieces: list[Piece] = []
    count = 0
    try:
        fields = list(Formatter().parse(template))
    except ValueError:
        return None
    for literal, name, spec, conversion in fields:
        pieces.append(literal)
        if name is None:
            continue
        if spec or conversion:
            return None
        if name == "" or name.isdigit():
            place, count = (int(name) if name else count), count + 1
            found: Symbol = given[place] if place < len(given) else UNKNOWN_VALUE
        else:
            found = named.get(name, UNKNOWN_VALUE)
        if isinstance(found, Unknown) and not name.isidentifier() and name and not name.isdigit():
            return None
        pieces.append(found)
    return text(pieces)


def percent(template: Symbol, given: Symbol) -> Symbol | None:
    """`template % given` for a template with nothing but `%s`."""
    if not isinstance(template, Known) or type(template.value) is not str:
        return None
    literals = template.value.split("%s")
    if any("%" in literal for literal in literals):
        return None
    values = list(given.items) if isinstance(given, Series) and given.kind is tuple else [given]
    if len(values) != len(literals) - 1 or any(isinstance(one, Spread) for one in values):
        return None
    pieces: list[Piece] = [literals[0]]
    for value, literal in zip(values, literals[1:], strict=True):
        assert not isinstance(value, Spread)
        pieces += [value, literal]
    return text(pieces)
