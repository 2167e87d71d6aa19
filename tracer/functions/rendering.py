"""Builds texts, messages and lists for real once their values are known, and prompts from the values known so far.

A prompt that is to be prefilled needs only its beginning: what is built then ends with the first missing value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import StringPromptValue
from langchain_core.runnables import RunnableBinding, RunnableParallel, RunnableSequence, RunnableWithFallbacks
from langchain_core.runnables.retry import RunnableRetry

from teola_plugin.graph import PromptPart, Ref, UnfitValue
from teola_plugin.requests.payloads import UNKNOWN
from teola_plugin.tracer.functions.lookup import is_instance
from teola_plugin.tracer.functions.symbols import (
    Fields,
    Instance,
    ItemList,
    KnownValue,
    Spread,
    Symbol,
    Text,
    add_input,
    symbol_of_item,
)
from teola_plugin.tracer.purity.purity import is_plain
from teola_plugin.tracer.symbols import NotUnderstood, Prompted

Rendered = tuple[Any, bool]
"""A value, and whether it is complete."""
Render = Callable[[Mapping[str, Any]], Rendered]
"""Builds a value from the values of inputs, some of which may be missing."""
_ENGINE_ROLES = {"human": "user", "ai": "assistant"}


def to_prompt(symbol: Symbol, to_ref: Callable[[Symbol], Ref]) -> Prompted:
    """Return the prompt of a model that is called with a text or with messages. Raise `NotUnderstood`."""
    if isinstance(symbol, Prompted):
        return symbol
    renderer = Renderer(to_ref)
    render = renderer.prompt(symbol)

    def prompt_value(values: Mapping[str, Any]) -> Any:
        value = render(values)[0]
        return StringPromptValue(text=value) if isinstance(value, str) else value

    return Prompted(tuple(renderer.inputs.items()), tuple(renderer.parts), prompt_value)


def to_prompt_text(symbol: Text, to_ref: Callable[[Symbol], Ref]) -> Prompted:
    """Return a text for a variable of a prompt, in its pieces. Raise `NotUnderstood`."""
    renderer = Renderer(to_ref)
    render = renderer.value(symbol)
    inputs, parts = tuple(renderer.inputs.items()), tuple(renderer.parts)
    return Prompted(inputs, parts, lambda values: render(values)[0], is_text=True)


@dataclass(slots=True)
class Renderer:
    """Collects what is known of a value: the refs that it needs, and its parts as a prompt has them."""

    to_ref: Callable[[Symbol], Ref]
    """Returns the ref of a value that is not known yet. May raise `NotUnderstood`."""
    inputs: dict[str, Ref] = field(default_factory=dict)
    parts: list[PromptPart] = field(default_factory=list)

    def value(self, symbol: Symbol) -> Render:
        """Return the function that builds the value of a symbol."""
        if isinstance(symbol, KnownValue):
            return self._known_value(symbol.value)
        if isinstance(symbol, Text):
            return self._text(symbol)
        if isinstance(symbol, ItemList):
            items = [(isinstance(item, Spread), self.value(symbol_of_item(item))) for item in symbol.items]
            return lambda values: _render_items(symbol.kind, items, values)
        if isinstance(symbol, Fields):
            return self._dictionary(symbol)
        if isinstance(symbol, Instance):
            return self._instance(symbol)
        return self._input(symbol)

    def prompt(self, symbol: Symbol) -> Render:
        """Return the function that builds what a model is called with: a text, or messages."""
        if not isinstance(symbol, ItemList):
            return self.value(symbol)
        messages: list[tuple[bool, Render]] = []
        for item in symbol.items:
            message = symbol_of_item(item)
            self._add_literal(f"\n{_engine_role(message)}: " if not isinstance(item, Spread) else "")
            messages.append((isinstance(item, Spread), self._message(message)))
        self._add_literal("\nassistant: ")
        return lambda values: _render_items(list, messages, values, _complete_message)

    def _known_value(self, value: Any) -> Render:
        """Return the function that gives a known value. A text becomes a literal of the prompt.

        Raise `NotUnderstood` for an object whose methods are not known. A list is copied for each use.
        """
        if type(value) is str:
            self._add_literal(value)
        elif not is_plain(value):
            raise NotUnderstood("an object of the user's own")
        return lambda values: (list(value) if type(value) is list else value, True)

    def _input(self, symbol: Symbol) -> Render:
        """Read a value that is not known yet from an input."""
        key = add_input(self.inputs, self.to_ref(symbol), lambda key: key.rsplit(".", 1)[-1] or "value")
        self.parts.append(PromptPart.var(key))
        return lambda values: (values[key], True) if key in values else (UNKNOWN, False)

    def _add_literal(self, text: str) -> None:
        """Add a literal text to the prompt's parts, joined with a literal before it."""
        if self.parts and not self.parts[-1].variable:
            text = self.parts.pop().text + text
        if text:
            self.parts.append(PromptPart.literal(text))

    def _text(self, symbol: Text) -> Render:
        """Return the function that joins the pieces of a text, as far as the first value that is missing."""
        pieces = [self._known_value(p) if isinstance(p, str) else self.value(p) for p in symbol.pieces]

        def render(values: Mapping[str, Any]) -> Rendered:
            """Return the text, and True if it is complete; else it ends at the first missing value."""
            text = ""
            for piece in pieces:
                value, complete = piece(values)
                if not complete:
                    return text + (value if type(value) is str else UNKNOWN), False
                text += _format_plain(value)
            return text, True

        return render

    def _dictionary(self, symbol: Fields) -> Render:
        """Return the function that builds a dictionary, or gives the value that `symbol` adds no key to.

        Raise `NotUnderstood` if nothing but fields is known of it.
        """
        if symbol.fields_only:
            raise NotUnderstood("an object of which nothing but fields is known")
        if symbol.base is not None and not symbol.items:
            return self._input(symbol.base)
        base = None if symbol.base is None else self._input(symbol.base)
        items = {key: self.value(item) for key, item in symbol.items.items()}

        def render(values: Mapping[str, Any]) -> Rendered:
            """Return the dictionary, and True if it is complete. Raise `UnfitValue` if its base is no dictionary."""
            base_value, complete = ({}, True) if base is None else base(values)
            if complete and type(base_value) is not dict:
                raise UnfitValue("keys are added to what is no dictionary")
            dictionary = dict(base_value) if complete else {}
            for key, item in items.items():
                dictionary[key], item_complete = item(values)
                complete = complete and item_complete
            return dictionary, complete

        return render

    def _instance(self, symbol: Instance) -> Render:
        """Return the function that builds an object of a framework's class, such as a message, from the values of its
        fields.

        The field `id` is no part of a prompt's text.
        """
        message_id = symbol.fields.get("id")  # no part of a prompt's text
        fields = {key: self.value(item) for key, item in symbol.fields.items() if item is not message_id}
        if message_id is not None:
            fields["id"] = Renderer(self.to_ref, self.inputs).value(message_id)

        def render(values: Mapping[str, Any]) -> Rendered:
            """Return the object, and True if it is complete. Raise `UnfitValue` for fields that are not plain data."""
            rendered = {key: item(values) for key, item in fields.items()}
            if not all(is_plain(value) for value, _ in rendered.values()):
                raise UnfitValue("a message is made of objects whose methods are not known")
            instance = symbol.kind(**{key: value for key, (value, _) in rendered.items()})
            return instance, all(complete for _, complete in rendered.values())

        return render

    def _message(self, symbol: Symbol) -> Render:
        """Return the function that builds one message of a prompt: a known message, a pair of role and text, or any
        value.

        Raise `NotUnderstood` for other lists, and for a role that is not known.
        """
        if isinstance(symbol, KnownValue) and is_instance(symbol.value, BaseMessage):
            message = symbol.value
            self._add_literal(message.text)
            return lambda values: (message, True)
        if not isinstance(symbol, ItemList):
            return self.value(symbol)
        items = symbol.items  # ("system", "...")
        if len(items) != 2 or symbol.kind is not tuple or any(isinstance(item, Spread) for item in items):
            raise NotUnderstood("a message that is a list")
        role, content = map(symbol_of_item, items)
        if not isinstance(role, KnownValue):
            raise NotUnderstood("a message of a role that is not known")
        render_content = self.value(content)

        def render(values: Mapping[str, Any]) -> Rendered:
            text, complete = render_content(values)
            return (role.value, text), complete

        return render


def _render_items(
    kind: type,
    items: list[tuple[bool, Render]],
    values: Mapping[str, Any],
    complete_item: Callable[[Any], Any] = lambda item: item,
) -> Rendered:
    """Build a list of the items up to the first that is not complete, which `complete_item` makes an item of.

    `items` are pairs: whether all items of a list are meant, and what builds the item or that list.
    """
    rendered: list[Any] = []
    for is_spread, render in items:
        value, complete = render(values)
        if not complete:
            rendered.append(complete_item(value))
            return kind(rendered), False
        if is_spread and type(value) not in (list, tuple):
            raise UnfitValue("a list is made of items of something else")
        rendered += value if is_spread else [value]
    return kind(rendered), True


def _complete_message(value: Any) -> Any:
    """Return a message in place of one that is missing."""
    return HumanMessage(content=UNKNOWN) if type(value) is str and value == UNKNOWN else value


def _engine_role(symbol: Symbol) -> str:
    """Return the role of a message, as engines call it."""
    role: Any = "human"
    if isinstance(symbol, KnownValue) and is_instance(symbol.value, BaseMessage):
        role = symbol.value.type
    elif isinstance(symbol, Instance):
        type_field = getattr(symbol.kind, "model_fields", {}).get("type")
        role = "human" if type_field is None else type_field.default
    elif isinstance(symbol, ItemList) and symbol.items and isinstance(symbol.items[0], KnownValue):
        role = symbol.items[0].value
    elif isinstance(symbol, Fields) and isinstance(field_role := symbol.items.get("role"), KnownValue):
        role = field_role.value
    return _ENGINE_ROLES.get(str(role), str(role))


def _format_plain(value: Any) -> str:
    """Return the value as an f-string writes it. Raise `UnfitValue` for one whose methods are not known."""
    if type(value) is str:
        return value
    if not is_plain(value):
        raise UnfitValue("a text is made of an object whose methods are not known")
    return format(value)


def innermost_first(runnable: Any) -> Any:
    """Return the Runnable that gets the input, inside sequences, bindings and parallels of one step."""
    while True:
        if isinstance(runnable, RunnableSequence):
            runnable = runnable.first
        elif isinstance(runnable, (RunnableBinding, RunnableRetry)):
            runnable = runnable.bound
        elif isinstance(runnable, RunnableWithFallbacks):
            runnable = runnable.runnable
        elif isinstance(runnable, RunnableParallel) and len(runnable.steps__) == 1:
            runnable = next(iter(runnable.steps__.values()))
        else:
            return runnable
