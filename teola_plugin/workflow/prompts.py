"""Prompts of components: literal text and variables, filled in as far as the variables are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PromptPart
from teola_plugin.requests import payloads
from teola_plugin.workflow.values import text_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with `{variables}`: `text` for the user's message, `system` for the message before it.

    `{{` and `}}` stand for braces. Put text that is known early first: it is prefilled while the rest is computed.
    Raises RegistrationError for a text that cannot be parsed.
    """

    text: str
    system: str = ""

    def __post_init__(self) -> None:
        for text in (self.system, self.text):
            _segments(text)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables in the order in which they stand, each once."""
        names = [name for text in (self.system, self.text) for _, name in _segments(text) if name]
        return tuple(dict.fromkeys(names))

    def with_(self, **known: Any) -> Prompt:
        """A prompt in which these variables are written out."""
        return Prompt(_filled(self.text, known), _filled(self.system, known))

    def parts(self, tokens: Mapping[str, int]) -> tuple[PromptPart, ...]:
        """Return the parts of the prompt for the graph. `tokens` are expected lengths of variables, if known."""
        parts = []
        for text in (self.system, self.text):
            for literal, name in _segments(text):
                parts += [PromptPart.literal(literal)] if literal else []
                parts += [PromptPart.var(name, tokens.get(name, 0))] if name else []
        return tuple(parts)

    def rendered(self, values: Mapping[str, Any]) -> payloads.Prompt:
        """Return the prompt with these values; a variable without a value becomes a placeholder."""
        texts = {name: text_of(values[name]) if name in values else payloads.UNKNOWN for name in self.variables}
        messages = [("system", self.system), ("user", self.text)]
        return payloads.Prompt(
            tuple([payloads.Message(role, _rendered(text, texts)) for role, text in messages if text])
        )


def as_prompt(value: Any) -> Prompt:
    """A prompt, from a text or from JSON (`{"text": ..., "system": ...}`). Raises `TypeError` for anything else."""
    if isinstance(value, Prompt):
        return value
    if isinstance(value, str):
        return Prompt(value)
    fits = isinstance(value, Mapping) and {"text"} <= set(value) <= {"text", "system"}
    if fits and all(isinstance(text, str) for text in value.values()):
        return Prompt(**value)
    raise TypeError("expected a text, or text and system")


def _segments(text: str) -> list[tuple[str, str]]:
    """Literals, and the variable behind each; empty for none."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise RegistrationError(
            f"the prompt {text!r:.80} cannot be read: {error}.", hint="write {{ and }} for braces"
        ) from None
    for _, name, form, conversion in parsed:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise RegistrationError(
                f"the prompt {text!r:.80} has the variable {{{name}}}, which is no plain name.",
                hint="write {name} for a variable, {{ and }} for braces",
            )
    return [(literal, name or "") for literal, name, _, _ in parsed]


def _rendered(text: str, values: Mapping[str, str]) -> str:
    return "".join(literal + (values[name] if name else "") for literal, name in _segments(text))


def _filled(text: str, values: Mapping[str, Any]) -> str:
    """The template, with some variables written out."""
    filled = ""
    for literal, name in _segments(text):
        filled += _escaped(literal)
        if name:
            filled += _escaped(str(values[name])) if name in values else f"{{{name}}}"
    return filled


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
