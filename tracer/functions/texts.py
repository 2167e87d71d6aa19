"""Texts of functions that are interpreted: f-strings, `join`, `format`, `%` and the like, on symbols."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Formatter, Template

from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.pure_expressions import (
    computed_at_run_time,
    is_small,
)
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    Expression,
    Instance,
    Item,
    ItemList,
    KnownValue,
    Piece,
    Spread,
    Symbol,
    Text,
    Unknown,
    is_constant,
    is_known_in_parts,
    merge_inputs,
)


def make_text(pieces: Iterable[Piece]) -> Symbol:
    """Return the text of these pieces, one after the other, with constants written out."""
    merged: list[Piece] = []
    for piece in _flatten_pieces(pieces):
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        elif piece != "":
            merged.append(piece)
    if all(isinstance(piece, str) for piece in merged):
        return KnownValue("".join(map(str, merged)))
    return Text(tuple(merged))


def _flatten_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of a text with the pieces of inner texts in their place, and constants as text."""
    for piece in pieces:
        if isinstance(piece, Text):
            yield from piece.pieces
        elif isinstance(piece, KnownValue) and is_constant(piece.value):
            yield format(piece.value)
        else:
            yield piece


def is_text(symbol: Symbol) -> bool:
    """Return True if the value is known to be a text."""
    return isinstance(symbol, Text) or (isinstance(symbol, KnownValue) and type(symbol.value) is str)


def format_f_string(interpreter: FunctionInterpreter, node: ast.JoinedStr) -> Symbol:
    """Return the text of an f-string. What has a conversion or a format becomes an expression of its own."""
    return make_text(_format_part(interpreter, part) for part in node.values)


def written_value(interpreter: FunctionInterpreter, value: Symbol) -> Symbol:
    """Return what `str` makes of an object of which the framework's rules say it, and any other value as it is."""
    find_method = interpreter.shared.find_method
    rule = find_method(value, "__str__") if find_method is not None and isinstance(value, Instance) else None
    return value if rule is None else rule(interpreter, None)


def _format_part(interpreter: FunctionInterpreter, part: ast.expr) -> Piece:
    """Return one part of an f-string: a literal text, a value, or an expression for a field with a format."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    value = interpreter.evaluate(part.value)
    spec = part.format_spec
    if part.conversion == -1 and spec is None:
        return written_value(interpreter, value)
    expression = interpreter.to_expression(value)
    spec_parts = spec.values if isinstance(spec, ast.JoinedStr) else [] if spec is None else [spec]
    if not all(isinstance(spec_part, ast.Constant) for spec_part in spec_parts):
        return UNKNOWN_VALUE
    if expression is None:
        return computed_at_run_time((value,))
    code = ast.JoinedStr([ast.FormattedValue(expression.code, part.conversion, spec)])
    return Expression(code, expression.refs, expression.objects)


def call_text_method(
    interpreter: FunctionInterpreter,
    text: Symbol,
    name: str,
    arguments: Sequence[Symbol],
    keywords: Mapping[str, Symbol],
) -> Symbol | None:
    """Return what a method of a text returns; None if an expression is all that can be said of it."""
    if not is_text(text):
        return None
    if name == "join" and len(arguments) == 1 and isinstance(arguments[0], ItemList):
        return _join(interpreter, text, arguments[0])
    if name in ("strip", "lstrip", "rstrip") and not arguments and isinstance(text, Text):
        return _strip(text, name)
    if name == "format" and isinstance(text, KnownValue):
        return _format(text.value, arguments, keywords)
    return None


def _join(interpreter: FunctionInterpreter, separator: Symbol, items: ItemList) -> Symbol | None:
    """Return `separator.join(items)`.

    A list of known length is joined item by item. Of any other list, parts that are known together become one piece
    each, with the separator between it and the parts before.
    """
    if not any(isinstance(item, Spread) for item in items.items):
        pairs = [[separator, item] for item in items.items if not isinstance(item, Spread)]
        return make_text([piece for pair in pairs for piece in pair][1:])
    if not is_known_in_parts(items):
        return None
    pieces: list[Piece] = []
    items_before: list[Item] = []
    for group in _group_by_time(interpreter, items.items):
        pieces.append(_join_after(interpreter, separator, group, items_before))
        items_before += group
    return make_text(pieces)


def _group_by_time(interpreter: FunctionInterpreter, items: Sequence[Item]) -> list[list[Item]]:
    """Group neighbouring items that are known as soon as the first of their group."""
    groups: list[list[Item]] = []
    available: set[str] | None = None
    for item in items:
        expression = interpreter.to_expression(ItemList((item,)))
        producers = None
        if expression is not None:
            producers = {ref.producer for ref in expression.refs.values() if not ref.external}
        if groups and producers is not None and available is not None and producers <= available:
            groups[-1].append(item)
        else:
            groups.append([item])
            available = None if producers is None else (available or set()) | producers
    return groups


def _join_after(
    interpreter: FunctionInterpreter, separator: Symbol, items: list[Item], items_before: list[Item]
) -> Symbol:
    """Return the joined items, led by a separator if any items stand before them."""
    separator_expression = interpreter.to_expression(separator)
    items_list = interpreter.to_expression(ItemList(tuple(items)))
    before_list = interpreter.to_expression(ItemList(tuple(items_before)))
    if separator_expression is None or items_list is None or before_list is None:
        return UNKNOWN_VALUE
    assert isinstance(items_list.code, ast.List) and isinstance(before_list.code, ast.List)
    empty_text = ast.IfExp(before_list.code, ast.List([ast.Constant("")], ast.Load()), ast.List([], ast.Load()))
    lead = [ast.Starred(empty_text, ast.Load())] if items_before else []
    join = ast.Attribute(separator_expression.code, "join", ast.Load())
    code = ast.Call(join, [ast.List([*lead, *items_list.code.elts], ast.Load())], [])
    inputs = merge_inputs((separator_expression, items_list, before_list))
    return Expression(code, *inputs) if is_small(code) else UNKNOWN_VALUE


def _strip(text: Text, name: str) -> Symbol | None:
    """Return the text without the space around it; None if a piece at an end is not a constant with more than space."""
    pieces = list(text.pieces)
    for end, method in ((0, "lstrip"), (-1, "rstrip")):
        if name not in ("strip", method):
            continue
        piece = pieces[end]
        if not isinstance(piece, str) or not piece.strip():
            return None
        pieces[end] = piece.lstrip() if method == "lstrip" else piece.rstrip()
    return make_text(pieces)


def _format(template: str, arguments: Sequence[Symbol], keywords: Mapping[str, Symbol]) -> Symbol | None:
    """Return `template.format(*arguments, **keywords)`; None unless all its fields are plain names or numbers."""
    pieces: list[Piece] = []
    next_index = 0
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
            index, next_index = (int(name) if name else next_index), next_index + 1
            value: Symbol = arguments[index] if index < len(arguments) else UNKNOWN_VALUE
        else:
            value = keywords.get(name, UNKNOWN_VALUE)
        if isinstance(value, Unknown) and not name.isidentifier() and name and not name.isdigit():
            return None
        pieces.append(value)
    return make_text(pieces)


def substitute(template: str, keywords: Mapping[str, Symbol]) -> Symbol | None:
    """Return `string.Template(template).substitute(**keywords)`; None if the original will raise."""
    pieces: list[Piece] = []
    end = 0
    for match in Template.pattern.finditer(template):  # type: ignore[attr-defined]
        name = match["named"] or match["braced"]
        if match["invalid"] is not None or (name is not None and name not in keywords):
            return None
        pieces += [template[end : match.start()], "$" if name is None else keywords[name]]
        end = match.end()
    return make_text([*pieces, template[end:]])


def format_percent(template: Symbol, argument: Symbol) -> Symbol | None:
    """Return `template % argument`; None unless the template is known and has nothing but `%s`."""
    if not isinstance(template, KnownValue) or type(template.value) is not str:
        return None
    literals = template.value.split("%s")
    if any("%" in literal for literal in literals):
        return None
    values = list(argument.items) if isinstance(argument, ItemList) and argument.kind is tuple else [argument]
    if len(values) != len(literals) - 1 or any(isinstance(value, Spread) for value in values):
        return None
    pieces: list[Piece] = [literals[0]]
    for value, literal in zip(values, literals[1:], strict=True):
        assert not isinstance(value, Spread)
        pieces += [value, literal]
    return make_text(pieces)
