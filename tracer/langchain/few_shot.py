"""Few-shot prompts whose examples are known: what they render does not depend on the query."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.prompts import FewShotChatMessagePromptTemplate, FewShotPromptTemplate

from teola_plugin.tracer.symbols import NotUnderstood

_PLAIN = (str, int, float, bool, type(None))


def messages_of(template: FewShotChatMessagePromptTemplate) -> list[BaseMessage]:
    """The examples' messages. The example prompt has to be understood. Raises `NotUnderstood`."""
    _check(template)
    return template.format_messages()


def template_of(template: FewShotPromptTemplate) -> str:
    """Prefix, examples and suffix: the text that is then formatted, as it formats it. Raises `NotUnderstood`."""
    _check(template)
    prompt = template.example_prompt
    shown = [prompt.format(**{k: one[k] for k in prompt.input_variables}) for one in template.examples or ()]
    return template.example_separator.join(piece for piece in (template.prefix, *shown, template.suffix) if piece)


def _check(template: Any) -> None:
    if template.example_selector is not None or template.examples is None:
        raise NotUnderstood("an example selector chooses the examples, for every prompt")
    wanted = template.example_prompt.input_variables
    for example in template.examples:
        if missing := [name for name in wanted if name not in example]:
            raise NotUnderstood(f"an example lacks {missing[0]!r}")
        if not all(type(example[name]) in _PLAIN for name in wanted):
            raise NotUnderstood("an example has values other than texts and numbers")
