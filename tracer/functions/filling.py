"""Texts, messages and lists of which something is known: built for real once the values are there.

As far as they are there, for a prompt that is to be warmed up: what is made ends with the first that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import StringPromptValue

from teola_plugin.graph import PromptPart, Ref, UnfitValue
from teola_plugin.requests.payloads import UNKNOWN
from teola_plugin.tracer.functions.reading import is_a
from teola_plugin.tracer.functions.values import Built, Fields, Known, Series, Spread, Symbol, Text
from teola_plugin.tracer.purity.purity import is_plain
from teola_plugin.tracer.symbols import NotUnderstood, Prompted

Made = tuple[Any, bool]
"""A value, and whether it is whole."""
Fill = Callable[[Mapping[str, Any]], Made]
_ROLES = {"human": "user", "ai": "assistant"}


@dataclass(slots=True)
class Filling:
    """What is known of a value, and how the rest is put in."""

    ref: Callable[[Symbol], Ref]
    """What is not known yet, as a ref. May raise `NotUnderstood`."""
    inputs: dict[str, Ref] = field(default_factory=dict)
    parts: list[PromptPart] = field(default_factory=list)

    def of(self, symbol: Symbol) -> Fill:
        """Fills in the symbol, whatever it is."""
        if isinstance(symbol, Known):
            return self._known(symbol.value)
        if isinstance(symbol, Text):
            return self._text(symbol)
        if isinstance(symbol, Series):
            return self._series(symbol)
        if isinstance(symbol, Fields):
            return self._fields(symbol)
        if isinstance(symbol, Built):
            return self._built(symbol)
        return self._value(symbol)

    def prompt(self, symbol: Symbol) -> Fill:
        """Fills in what a model is called with: a text, or messages."""
        if not isinstance(symbol, Series):
            return self.of(symbol)
        fill = self._messages(symbol)
        self._literal("\nassistant: ")
        return fill

    # ------------------------------------------------------------ pieces

    def _known(self, value: Any) -> Fill:
        if type(value) is str:
            self._literal(value)
        elif not is_plain(value):
            raise NotUnderstood("an object of the user's own")
        return lambda given: (list(value) if type(value) is list else value, True)

    def _value(self, symbol: Symbol) -> Fill:
        key = self._key(symbol)
        self.parts.append(PromptPart.var(key))
        return lambda given: (given[key], True) if key in given else (UNKNOWN, False)

    def _key(self, symbol: Symbol) -> str:
        ref = self.ref(symbol)
        for key, known in self.inputs.items():
            if known == ref:
                return key
        last = next((part for part in reversed(ref.path) if isinstance(part, str)), ref.producer.strip("$"))
        base = last.rsplit(".", 1)[-1] or "value"
        key, count = base, 1
        while key in self.inputs:
            count += 1
            key = f"{base}{count}"
        self.inputs[key] = ref
        return key

    def _literal(self, text: str) -> None:
        if self.parts and not self.parts[-1].variable:
            text = self.parts.pop().text + text
        if text:
            self.parts.append(PromptPart.literal(text))

    def _text(self, symbol: Text) -> Fill:
        fills = [self._known(piece) if isinstance(piece, str) else self.of(piece) for piece in symbol.pieces]

        def fill(given: Mapping[str, Any]) -> Made:
            made = ""
            for one in fills:
                value, whole = one(given)
                if not whole:
                    return made + (value if type(value) is str else UNKNOWN), False
                made += _written(value)
            return made, True

        return fill

    # ------------------------------------------------------------ containers

    def _series(self, symbol: Series) -> Fill:
        fills = [(isinstance(item, Spread), self.of(_inner(item))) for item in symbol.items]
        return lambda given: _put_together(symbol.kind, fills, given)

    def _fields(self, symbol: Fields) -> Fill:
        base = None if symbol.base is None else self._value(symbol.base)
        fills = {key: self.of(inner) for key, inner in symbol.items.items()}

        def fill(given: Mapping[str, Any]) -> Made:
            made, whole = ({}, True) if base is None else base(given)
            if whole and type(made) is not dict:
                raise UnfitValue("keys are added to what is no dictionary")
            found = dict(made) if whole else {}
            for key, one in fills.items():
                found[key], there = one(given)
                whole = whole and there
            return found, whole

        return fill

    def _built(self, symbol: Built) -> Fill:
        fills = {key: self.of(inner) for key, inner in symbol.fields.items()}

        def fill(given: Mapping[str, Any]) -> Made:
            made = {key: one(given) for key, one in fills.items()}
            if not all(is_plain(value) for value, _ in made.values()):
                raise UnfitValue("a message is made of objects whose methods are not known")
            return symbol.kind(**{key: value for key, (value, _) in made.items()}), all(w for _, w in made.values())

        return fill

    # ------------------------------------------------------------ prompts

    def _messages(self, symbol: Series) -> Fill:
        fills: list[tuple[bool, Fill]] = []
        for item in symbol.items:
            inner = _inner(item)
            self._literal(f"\n{_role(inner)}: " if not isinstance(item, Spread) else "")
            fills.append((isinstance(item, Spread), self._message(inner)))
        return lambda given: _put_together(list, fills, given, _stand_in)

    def _message(self, symbol: Symbol) -> Fill:
        if isinstance(symbol, Known) and is_a(symbol.value, BaseMessage):
            message = symbol.value
            self._literal(message.text)
            return lambda given: (message, True)
        if isinstance(symbol, Series):  # ("system", "...")
            if len(symbol.items) != 2 or symbol.kind is not tuple or any(isinstance(i, Spread) for i in symbol.items):
                raise NotUnderstood("a message that is a list")
            role, content = (_inner(item) for item in symbol.items)
            if not isinstance(role, Known):
                raise NotUnderstood("a message of a role that is not known")
            fill = self.of(content)
            return lambda given: _paired(role.value, fill(given))
        return self.of(symbol)


def _paired(role: Any, content: Made) -> Made:
    return (role, content[0]), content[1]


def _put_together(
    kind: type, fills: list[tuple[bool, Fill]], given: Mapping[str, Any], stand_in: Callable[[Any], Any] = lambda x: x
) -> Made:
    """As far as the items are whole, and the first that is not."""
    made: list[Any] = []
    for spread, one in fills:
        value, whole = one(given)
        if not whole:
            made.append(stand_in(value))
            return kind(made), False
        if spread and type(value) not in (list, tuple):
            raise UnfitValue("a list is made of items of something else")
        made += value if spread else [value]
    return kind(made), True


def _stand_in(value: Any) -> Any:
    """For a message of which something is missing."""
    return HumanMessage(content=UNKNOWN) if type(value) is str and value == UNKNOWN else value


def _inner(item: Any) -> Symbol:
    return item.of if isinstance(item, Spread) else item  # type: ignore[no-any-return]


def _role(symbol: Symbol) -> str:
    """Of a message, as engines call it."""
    role: Any = "human"
    if isinstance(symbol, Known) and is_a(symbol.value, BaseMessage):
        role = symbol.value.type
    elif isinstance(symbol, Built):
        role = next((field.default for name, field in _model_fields(symbol.kind) if name == "type"), "human")
    elif isinstance(symbol, Series) and symbol.items and isinstance(symbol.items[0], Known):
        role = symbol.items[0].value
    elif isinstance(symbol, Fields) and isinstance(symbol.items.get("role"), Known):
        role = symbol.items["role"].value  # type: ignore[union-attr]
    return _ROLES.get(str(role), str(role))


def _model_fields(kind: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(kind, "model_fields", {}).items()


def _written(value: Any) -> str:
    """As an f-string writes it. Raises `TypeError` for a value whose methods are not known."""
    if type(value) is str:
        return value
    if not is_plain(value):
        raise UnfitValue("a text is made of an object whose methods are not known")
    return format(value)


def as_prompt(symbol: Symbol, ref: Callable[[Symbol], Ref]) -> Prompted:
    """What a model is called with. Raises `NotUnderstood`."""
    if isinstance(symbol, Prompted):
        return symbol
    filling = Filling(ref)
    fill = filling.prompt(symbol)
    return Prompted(tuple(filling.inputs.items()), tuple(filling.parts), lambda given: _prompt_value(fill(given)[0]))


def as_text(symbol: Text, ref: Callable[[Symbol], Ref]) -> Prompted:
    """A text for a variable of a prompt, in its pieces. Raises `NotUnderstood`."""
    filling = Filling(ref)
    fill = filling.of(symbol)
    return Prompted(tuple(filling.inputs.items()), tuple(filling.parts), lambda given: fill(given)[0], is_text=True)


def _prompt_value(made: Any) -> Any:
    return StringPromptValue(text=made) if isinstance(made, str) else made
