"""Prompt templates: the literals and variables that they render, in order. The framework's own code renders them."""

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
from teola_plugin.tracer.langchain.classes import find_override
from teola_plugin.tracer.purity.purity import is_plain
from teola_plugin.tracer.symbols import BASE, NotUnderstood, Prompted, Record, Value

_ROLES: tuple[tuple[type, str], ...] = (
    (SystemMessagePromptTemplate, "system"),
    (HumanMessagePromptTemplate, "user"),
    (AIMessagePromptTemplate, "assistant"),
)
_TEXT_TEMPLATES = (PromptTemplate, FewShotPromptTemplate)
_TEMPLATES = (ChatPromptTemplate, FewShotChatMessagePromptTemplate, *_TEXT_TEMPLATES)
_PLAIN_TYPES = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Segment:
    """A literal text, or a variable, of a prompt template."""

    text: str = ""
    variable: str = ""
    default: str | None = None
    """Text of a partial, for a variable that the input may override."""
    is_messages: bool = False
    """True if the variable stands for a list of messages."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A prompt template, and what it renders, in order."""

    template: BasePromptTemplate[Any]
    segments: tuple[_Segment, ...]

    @property
    def required(self) -> list[str]:
        """The variables that the input must bring, in rendered order."""
        rendered = [s.variable for s in self.segments if s.variable in self.template.input_variables]
        return list(dict.fromkeys([*rendered, *self.template.input_variables]))

    @property
    def optional(self) -> list[str]:
        """The variables that the input may bring: partials and optional placeholders."""
        required = set(self.required)
        return list(dict.fromkeys(s.variable for s in self.segments if s.variable and s.variable not in required))

    def unknown(self, name: str) -> Any:
        """Return the value that stands for a variable that is not known yet."""
        return [HumanMessage(content=UNKNOWN)] if self.takes_messages(name) else UNKNOWN

    def takes_messages(self, name: str) -> bool:
        """Return True if a variable stands for messages in any segment."""
        return any(s.variable == name and s.is_messages for s in self.segments)

    def parts(self, sources: Mapping[str, tuple[PromptPart, ...]]) -> tuple[PromptPart, ...]:
        """Return the prompt's parts; `sources` maps variables to their parts, other variables have their default."""
        parts: list[PromptPart] = []
        text = ""
        for segment in self.segments:
            if segment.variable not in sources:
                text += segment.text or segment.default or ""
                continue
            for part in sources[segment.variable]:
                if part.variable:
                    parts += [PromptPart.literal(text)] if text else []
                    parts.append(part)
                text = "" if part.variable else text + part.text
        return (*parts, *([PromptPart.literal(text)] if text else []))


def prompt_shape(template: BasePromptTemplate[Any]) -> PromptShape:
    """Return the shape of a prompt template. Raise `NotUnderstood` for one that does more than fill variables in."""
    if not isinstance(template, _TEMPLATES):
        raise NotUnderstood(f"{type(template).__name__} is not known to be pure")
    return PromptShape(template, tuple(_segments(template, {})))


def _segments(template: Any, partials: Mapping[str, Any]) -> Iterator[_Segment]:
    """Yield the literals and variables of a text or chat template, in the order in which it renders them.

    `partials`: values of variables that a template around it has set. Raise `NotUnderstood` for a template that may run
    user code.
    """
    base = next(cls for cls in _TEMPLATES if isinstance(template, cls))
    if override := find_override(template, base):
        raise NotUnderstood(f"{override} overrides how the prompt is made")
    partials = {**template.partial_variables, **partials}
    _check_partials(partials)
    if isinstance(template, StringPromptTemplate):
        yield from _text_segments(template, partials)
        return
    for message in template.messages if isinstance(template, ChatPromptTemplate) else (template,):
        yield from _message_segments(message, partials)
    yield _Segment("\nassistant: ")


def _check_partials(partials: Mapping[str, Any]) -> None:
    if any(callable(value) for value in partials.values()):
        raise NotUnderstood("a partial variable is a function, called for every prompt")


def _text_segments(template: Any, partials: Mapping[str, Any]) -> Iterator[_Segment]:
    """Yield the literals and variables of a text template. Raise `NotUnderstood` unless it only fills variables in."""
    base = next((cls for cls in _TEXT_TEMPLATES if isinstance(template, cls)), None)
    if base is None or find_override(template, base):
        raise NotUnderstood(f"{type(template).__name__} inside the prompt is not known to be pure")
    if template.template_format != "f-string":
        raise NotUnderstood(f"a {template.template_format} template may run code")
    _check_partials(template.partial_variables)
    defaults = {**template.partial_variables, **partials}
    if isinstance(template, PromptTemplate):
        fields = list(Formatter().parse(template.template))
    else:
        fields = _few_shot_fields(template)
    for text, variable, _, _ in fields:
        if text:
            yield _Segment(text)
        if variable:
            yield _Segment(variable=variable, default=str(defaults[variable]) if variable in defaults else None)


def _few_shot_fields(template: FewShotPromptTemplate) -> list[tuple[str, str | None, str | None, str | None]]:
    """Return the fields of prefix, examples and suffix, the text that the template formats."""
    prompt = template.example_prompt
    list(_text_segments(prompt, {}))  # raises unless it is known to be pure
    try:
        _check_examples(template)
        examples = [
            prompt.format(**{key: example[key] for key in prompt.input_variables})
            for example in template.examples or ()
        ]
        pieces = (template.prefix, *examples, template.suffix)
        return list(Formatter().parse(template.example_separator.join(piece for piece in pieces if piece)))
    except ValueError as error:
        raise NotUnderstood(f"with its examples it is no template: {error}") from None


def _check_examples(template: Any) -> None:
    """Raise `NotUnderstood` unless the examples are the same for every query, and can be formatted."""
    if template.example_selector is not None or template.examples is None:
        raise NotUnderstood("an example selector chooses the examples, for every prompt")
    variables = template.example_prompt.input_variables
    for example in template.examples:
        if missing := [name for name in variables if name not in example]:
            raise NotUnderstood(f"an example lacks {missing[0]!r}")
        if not all(type(example[name]) in _PLAIN_TYPES for name in variables):
            raise NotUnderstood("an example has values other than texts and numbers")


def _message_segments(message: Any, partials: Mapping[str, Any]) -> Iterator[_Segment]:
    """Yield the literals and variables of one message, message template, placeholder or template of several messages.

    A message begins with its role. Raise `NotUnderstood` for a kind that is not known to be pure.
    """
    if isinstance(message, BaseMessage):
        yield _Segment(f"\n{message.type}: {message.text}")
    elif isinstance(message, ChatPromptTemplate):
        yield from _segments(message, partials)
    elif type(message) is FewShotChatMessagePromptTemplate:
        list(_message_segments(message.example_prompt, {}))  # raises unless it is known to be pure
        _check_examples(message)
        for example in message.format_messages():
            yield from _message_segments(example, {})
    elif type(message) is MessagesPlaceholder:
        messages = partials.get(message.variable_name, [])
        default = "\n".join(map(str, messages)) if isinstance(messages, list) else str(messages)
        yield _Segment(variable=message.variable_name, default=default, is_messages=True)
    else:
        role = next((name for cls, name in _ROLES if type(message) is cls), "")
        if type(message) is ChatMessagePromptTemplate:
            role = message.role
        if not role:
            raise NotUnderstood(f"{type(message).__name__} inside the prompt is not known to be pure")
        yield _Segment(f"\n{role}: ")
        has_parts = isinstance(message.prompt, list) and not isinstance(message, BaseStringMessagePromptTemplate)
        for prompt in message.prompt if has_parts else [message.prompt]:
            yield from _text_segments(prompt, partials)


def bind_prompt(shape: PromptShape, value: Value) -> Prompted:
    """Return the prompt for a symbolic input. Raise `NotUnderstood` where the template would raise."""
    required = shape.required
    if isinstance(value, Ref) and len(required) == 1:
        return _bind_single_variable(shape, required[0], value)
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
    possible = [name for name in shape.optional if name not in inputs] if record.base is not None else []
    if possible and record.base is not None:
        inputs[BASE] = record.base
    texts = {
        name: _TextVariable(item, {key: f"{name}.{key}" for key, _ in item.inputs})
        for name, item in inputs.items()
        if isinstance(item, Prompted) and item.is_text and not shape.takes_messages(name)
    }
    sources: dict[str, tuple[PromptPart, ...]] = {name: (PromptPart.var(name),) for name in inputs}
    sources |= dict.fromkeys(possible, (PromptPart.var(BASE),))
    sources |= {name: text.parts for name, text in texts.items()}
    prompt_inputs: dict[str, Value] = {}
    for name, item in inputs.items():
        prompt_inputs |= texts[name].inputs if name in texts else {name: item}
    direct = [name for name in inputs if name != BASE and name not in texts]

    def render(values: Mapping[str, Any]) -> Any:
        """Return the framework's prompt for these values; messages after the first incomplete one are left out."""
        variables = {name: values[name] for name in direct if name in values}
        unknown = [name for name in direct if name not in variables]
        if possible and BASE not in values:
            unknown += possible
        elif possible:
            variables |= {name: values[BASE][name] for name in possible if name in values[BASE]}
        variables |= {name: text.render(values) for name, text in texts.items()}
        is_complete = not unknown and all(text.is_complete(values) for text in texts.values())
        variables |= {name: shape.unknown(name) for name in unknown}
        return _render(shape, variables, is_complete=is_complete)

    return Prompted(tuple(prompt_inputs.items()), shape.parts(sources), render)


@dataclass(frozen=True, slots=True)
class _TextVariable:
    """A variable whose value is a text in parts, which become inputs of the prompt."""

    text: Prompted
    input_names: Mapping[str, str]
    """Name of an input of the text -> its name among the prompt's inputs."""

    @property
    def inputs(self) -> dict[str, Value]:
        return {self.input_names[key]: item for key, item in self.text.inputs}

    @property
    def parts(self) -> tuple[PromptPart, ...]:
        names = self.input_names
        return tuple(PromptPart.var(names[part.variable]) if part.variable else part for part in self.text.parts)

    def is_complete(self, values: Mapping[str, Any]) -> bool:
        return all(name in values for name in self.input_names.values())

    def render(self, values: Mapping[str, Any]) -> Any:
        return self.text.render({key: values[name] for key, name in self.input_names.items() if name in values})


def _bind_single_variable(shape: PromptShape, name: str, value: Ref) -> Prompted:
    """Return the prompt of a template that has one variable, whose value may also come bare, without a dictionary."""
    names = (name, *shape.optional)

    def render(values: Mapping[str, Any]) -> Any:
        if name in values:
            return _render(shape, values[name], is_complete=True)
        return _render(shape, {variable: shape.unknown(variable) for variable in names}, is_complete=False)

    return Prompted(((name, value),), shape.parts(dict.fromkeys(names, (PromptPart.var(name),))), render)


def _render(shape: PromptShape, value: Any, *, is_complete: bool) -> Any:
    """Return the framework's prompt value, without events; it ends with the first message that is not all known."""
    prompt_value = _format(shape.template, value)
    if is_complete or not isinstance(prompt_value, ChatPromptValue):
        return prompt_value
    messages = list(prompt_value.messages)
    end = next((i for i, message in enumerate(messages, 1) if UNKNOWN in message.text), len(messages))
    return ChatPromptValue(messages=messages[:end])


def _format(template: BasePromptTemplate[Any], value: Any) -> Any:
    """Return what `template.invoke(value)` returns, without its events.

    Raise `MissingValue` for a dictionary that lacks a key, `UnfitValue` for a value that user code may have to print.
    """
    variables = value if isinstance(value, dict) else {template.input_variables[0]: value}
    missing = [name for name in template.input_variables if name not in variables]
    if missing:
        raise MissingValue(missing[0])
    for name in (*template.input_variables, *template.optional_variables, *template.partial_variables):
        if name in variables and not is_plain(variables[name]):
            raise UnfitValue(f"the prompt's {name} is an object whose methods are not known")
    return template.format_prompt(**variables)
