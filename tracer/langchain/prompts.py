"""Prompt templates: which literals and variables they render, in order; rendering stays the framework's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.prompts import (
    BasePromptTemplate,
    ChatMessagePromptTemplate,
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.prompts.chat import (
    AIMessagePromptTemplate,
    BaseStringMessagePromptTemplate,
    HumanMessagePromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.prompts.string import StringPromptTemplate

from teola_plugin.graph import MissingValue, PromptPart, Ref, UnfitValue
from teola_plugin.requests.payloads import UNKNOWN
from teola_plugin.tracer.langchain.classes import changed
from teola_plugin.tracer.langchain.few_shot import messages_of, template_of
from teola_plugin.tracer.purity.purity import is_plain
from teola_plugin.tracer.symbols import BASE, NotUnderstood, Prompted, Record, Value

_ROLES: tuple[tuple[type, str], ...] = (
    (SystemMessagePromptTemplate, "system"),
    (HumanMessagePromptTemplate, "user"),
    (AIMessagePromptTemplate, "assistant"),
)
_TEXTS = (PromptTemplate, FewShotPromptTemplate)
_KNOWN = (ChatPromptTemplate, FewShotChatMessagePromptTemplate, *_TEXTS)


@dataclass(frozen=True, slots=True)
class _Segment:
    text: str = ""
    variable: str = ""
    default: str | None = None
    """Text of a partial, for a variable that the input may override."""
    messages: bool = False


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What a template renders, in order."""

    template: BasePromptTemplate[Any]
    segments: tuple[_Segment, ...]

    @property
    def required(self) -> list[str]:
        """Variables that the input must bring, in rendered order."""
        known = set(self.template.input_variables)
        rendered = [s.variable for s in self.segments if s.variable in known]
        return list(dict.fromkeys([*rendered, *self.template.input_variables]))

    @property
    def optional(self) -> list[str]:
        """Partials and optional placeholders: the input may bring them."""
        required = set(self.required)
        return list(dict.fromkeys(s.variable for s in self.segments if s.variable and s.variable not in required))

    def unknown(self, name: str) -> Any:
        """What stands for a variable that is not known yet."""
        return [HumanMessage(content=UNKNOWN)] if self.takes_messages(name) else UNKNOWN

    def takes_messages(self, name: str) -> bool:
        """Whether a variable stands for messages anywhere."""
        return any(s.variable == name and s.messages for s in self.segments)

    def parts(self, inputs: Mapping[str, tuple[PromptPart, ...]]) -> tuple[PromptPart, ...]:
        """Prompt parts; `inputs` maps variables to what brings them, others render their default."""
        made: list[PromptPart] = []
        text = ""
        for segment in self.segments:
            if segment.variable not in inputs:
                text += segment.text or segment.default or ""
                continue
            for part in inputs[segment.variable]:
                if part.variable:
                    made += [PromptPart.literal(text)] if text else []
                    made.append(part)
                text = "" if part.variable else text + part.text
        return (*made, *([PromptPart.literal(text)] if text else []))


def understand(template: BasePromptTemplate[Any]) -> PromptShape:
    """The shape of a prompt template. Raises `NotUnderstood` for one that does more than fill variables in."""
    if not isinstance(template, _KNOWN):
        raise NotUnderstood(f"{type(template).__name__} is not known to be pure")
    return PromptShape(template, tuple(_segments(template, {})))


def _segments(template: Any, partials: Mapping[str, Any]) -> Iterator[_Segment]:
    known = next(cls for cls in _KNOWN if isinstance(template, cls))
    if other := changed(template, known):
        raise NotUnderstood(f"{other} overrides how the prompt is made")
    partials = {**template.partial_variables, **partials}
    if any(callable(value) for value in partials.values()):
        raise NotUnderstood("a partial variable is a function, called for every prompt")
    if isinstance(template, StringPromptTemplate):
        yield from _text(template, partials)
        return
    for message in template.messages if isinstance(template, ChatPromptTemplate) else (template,):
        yield from _message(message, partials)
    yield _Segment("\nassistant: ")


def _text(template: Any, partials: Mapping[str, Any]) -> Iterator[_Segment]:
    known = next((cls for cls in _TEXTS if isinstance(template, cls)), None)
    if known is None or changed(template, known):
        raise NotUnderstood(f"{type(template).__name__} inside the prompt is not known to be pure")
    if template.template_format != "f-string":
        raise NotUnderstood(f"a {template.template_format} template may run code")
    if any(callable(value) for value in template.partial_variables.values()):
        raise NotUnderstood("a partial variable is a function, called for every prompt")
    defaults = {**template.partial_variables, **partials}
    for text, variable, _, _ in _parsed(template):
        if text:
            yield _Segment(text)
        if variable:
            yield _Segment(variable=variable, default=str(defaults[variable]) if variable in defaults else None)


def _parsed(template: Any) -> list[tuple[str, str | None, str | None, str | None]]:
    """Literals and variables. Raises `NotUnderstood`."""
    if isinstance(template, PromptTemplate):
        return list(Formatter().parse(template.template))
    list(_text(template.example_prompt, {}))  # or it is not known to be pure
    try:
        return list(Formatter().parse(template_of(template)))
    except ValueError as error:
        raise NotUnderstood(f"with its examples it is no template: {error}") from None


def _message(message: Any, partials: Mapping[str, Any]) -> Iterator[_Segment]:
    if isinstance(message, BaseMessage):
        yield _Segment(f"\n{message.type}: {message.text}")
    elif isinstance(message, ChatPromptTemplate):
        yield from _segments(message, partials)
    elif type(message) is FewShotChatMessagePromptTemplate:
        list(_message(message.example_prompt, {}))  # or it is not known to be pure
        for one in messages_of(message):
            yield from _message(one, {})
    elif type(message) is MessagesPlaceholder:
        given = partials.get(message.variable_name, [])
        default = "\n".join(str(one) for one in given) if isinstance(given, list) else str(given)
        yield _Segment(variable=message.variable_name, default=default, messages=True)
    else:
        yield from _templated(message, partials)


def _templated(message: Any, partials: Mapping[str, Any]) -> Iterator[_Segment]:
    role = next((name for cls, name in _ROLES if type(message) is cls), "")
    if type(message) is ChatMessagePromptTemplate:
        role = message.role
    if not role:
        raise NotUnderstood(f"{type(message).__name__} inside the prompt is not known to be pure")
    yield _Segment(f"\n{role}: ")
    several = isinstance(message.prompt, list) and not isinstance(message, BaseStringMessagePromptTemplate)
    for prompt in message.prompt if several else [message.prompt]:
        yield from _text(prompt, partials)


def bind(shape: PromptShape, value: Value) -> Prompted:
    """The prompt for a symbolic input. Raises `NotUnderstood` where the template would."""
    required = shape.required
    if isinstance(value, Ref) and len(required) == 1:
        return _whole(shape, required[0], value)
    if isinstance(value, Prompted):
        raise NotUnderstood("formats another prompt's value")
    record = value if isinstance(value, Record) else Record({}, value)
    inputs: dict[str, Value] = {}
    for name in (*required, *shape.optional):
        if name in record.items:
            inputs[name] = record.items[name]
        elif name in required and record.base is None:
            raise NotUnderstood(f"its variable {name!r} is missing from the dictionary before it")
        elif name in required and record.base is not None:
            inputs[name] = record.base.at(name)
    maybe = [name for name in shape.optional if name not in inputs] if record.base is not None else []
    if maybe and record.base is not None:
        inputs[BASE] = record.base
    sources: dict[str, tuple[PromptPart, ...]] = {name: (PromptPart.var(name),) for name in inputs}
    sources |= dict.fromkeys(maybe, (PromptPart.var(BASE),))
    texts = {name: _Text.of(name, one) for name, one in inputs.items() if isinstance(one, Prompted) and one.is_text}
    texts = {name: text for name, text in texts.items() if not shape.takes_messages(name)}
    sources |= {name: text.parts for name, text in texts.items()}
    every = {key: one for name, value in inputs.items() for key, one in _in_pieces(name, value, texts)}

    def render(given: Mapping[str, Any]) -> Any:
        known = {name: given[name] for name in inputs if name in given and name != BASE and name not in texts}
        absent = [name for name in inputs if name not in known and name != BASE and name not in texts]
        if maybe and BASE not in given:
            absent += maybe
        elif maybe:
            known |= {name: given[BASE][name] for name in maybe if name in given[BASE]}
        known |= {name: text.render(given) for name, text in texts.items()}
        complete = not absent and all(text.whole(given) for text in texts.values())
        return _rendered(shape, known | {name: shape.unknown(name) for name in absent}, complete=complete)

    return Prompted(tuple(every.items()), shape.parts(sources), render)


@dataclass(frozen=True, slots=True)
class _Text:
    """A variable that is a text in pieces, which become inputs of the prompt."""

    text: Prompted
    names: Mapping[str, str]
    """The pieces' names in the prompt, by those in the text."""

    @staticmethod
    def of(variable: str, text: Prompted) -> _Text:
        return _Text(text, {key: f"{variable}.{key}" for key, _ in text.inputs})

    @property
    def parts(self) -> tuple[PromptPart, ...]:
        return tuple(PromptPart.var(self.names[part.variable]) if part.variable else part for part in self.text.parts)

    def whole(self, given: Mapping[str, Any]) -> bool:
        return all(name in given for name in self.names.values())

    def render(self, given: Mapping[str, Any]) -> Any:
        return self.text.render({key: given[name] for key, name in self.names.items() if name in given})


def _in_pieces(name: str, value: Value, texts: Mapping[str, _Text]) -> Iterator[tuple[str, Value]]:
    if name in texts:
        yield from ((texts[name].names[key], one) for key, one in texts[name].text.inputs)
    else:
        yield name, value


def _whole(shape: PromptShape, name: str, value: Ref) -> Prompted:
    """A template of one variable also takes that variable's value bare, so it gets whatever comes."""
    every = (name, *shape.optional)

    def render(given: Mapping[str, Any]) -> Any:
        if name in given:
            return _rendered(shape, given[name], complete=True)
        return _rendered(shape, {one: shape.unknown(one) for one in every}, complete=False)

    return Prompted(((name, value),), shape.parts(dict.fromkeys(every, (PromptPart.var(name),))), render)


def _formatted(template: BasePromptTemplate[Any], value: Any) -> Any:
    """As `template.invoke(value)`, which also tells handlers.

    Raises `KeyError` for a dictionary that lacks a key, `TypeError` for a value that user code may have to write out.
    """
    given = value if isinstance(value, dict) else {template.input_variables[0]: value}
    missing = [name for name in template.input_variables if name not in given]
    if missing:
        raise MissingValue(missing[0])
    for name in (*template.input_variables, *template.optional_variables, *template.partial_variables):
        if name in given and not is_plain(given[name]):
            raise UnfitValue(f"the prompt's {name} is an object whose methods are not known")
    return template.format_prompt(**given)


def _rendered(shape: PromptShape, value: Any, *, complete: bool) -> Any:
    """The framework's prompt value, without events; ends with the first message that is not wholly known."""
    made = _formatted(shape.template, value)
    if complete or not isinstance(made, ChatPromptValue):
        return made
    messages = list(made.messages)
    end = next((i for i, message in enumerate(messages, 1) if UNKNOWN in message.text), len(messages))
    return ChatPromptValue(messages=messages[:end])
