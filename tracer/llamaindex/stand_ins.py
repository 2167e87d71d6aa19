"""The framework's own code, run ahead of the plain object: on copies, without events, with an LLM that asks nobody.

`asked` finds out what a piece of framework code would ask its LLM for; `answered` what it makes of the answer. So
prompts and their parsing are LlamaIndex's own, byte for byte.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate
from llama_index.core.schema import NodeWithScore

from teola_plugin.graph import PromptPart
from teola_plugin.requests.payloads import UNKNOWN, Generate, Generation
from teola_plugin.tracer.symbols import NotUnderstood

Run = Callable[[Any, Mapping[str, Any]], Any]
"""(LLM, values by name) -> what the framework's code returns; it asks the LLM once."""
Blanks = Mapping[str, Callable[[str], Any]]
"""How a text stands for a value that is not known yet, by the value's name; the text itself where nothing is said."""
_MARKS = 0xE001
"""First of the private-use characters that stand for values while the parts of a prompt are told apart."""
REMEMBERED = 1024
"""Texts whose tokens are kept: a chunk is counted again for every prompt that it may fit into."""
_OTHERS = ("stream", "stream_chat", "stream_complete", "structured_predict", "predict_and_call", "apredict", "achat")


class _Noted(Exception):
    """Ends the framework's code at its first question."""

    def __init__(self, payload: Generate) -> None:
        self.payload = payload


def asked(llm: Any, run: Run, given: Mapping[str, Any], blanks: Blanks, names: Sequence[str]) -> Generate:
    """The payload that `run` asks for; values that are missing in `given` are unknown."""
    missing = {name: blanks.get(name, str)(UNKNOWN) for name in names if name not in given}
    try:
        run(_stand_in(llm, _note), {**given, **missing})
    except _Noted as noted:
        return noted.payload
    raise NotUnderstood("the LLM is not asked")


def answered(llm: Any, run: Run, given: Mapping[str, Any], generations: Sequence[Generation]) -> Any:
    """What `run` returns when the LLM answers with these, one after the other."""
    answers: Iterator[Generation] = iter(generations)

    def reply(_: Generate) -> Generation:
        for answer in answers:
            return answer
        raise NotUnderstood("the LLM is asked once more")

    return run(_stand_in(llm, reply), given)


def _note(payload: Generate) -> Generation:
    raise _Noted(payload)


def _stand_in(llm: Any, reply: Callable[[Generate], Generation]) -> Any:
    """A copy of the LLM, of the same class, whose calls are answered by `reply`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotUnderstood("the LLM is asked in another way")

    made = copy.copy(llm)
    vars(made).update(
        dict.fromkeys(_OTHERS, refuse),
        callback_manager=nobody(),
        predict=lambda prompt, **kwargs: llm.text_of(reply(llm.payload_of_template(prompt, **kwargs))),
        complete=lambda prompt, formatted=False, **kwargs: llm.completion_of(
            reply(llm.payload_of_prompt(prompt, formatted, **kwargs))
        ),
        chat=lambda messages, **kwargs: llm.chat_of(reply(llm.payload_of_messages(messages, **kwargs))),
    )
    return made


def parts(llm: Any, run: Run, names: Sequence[str], blanks: Blanks) -> tuple[PromptPart, ...]:
    """Literals and variables of the prompt, in order; nothing where they cannot be told apart."""
    marks = {chr(_MARKS + i): name for i, name in enumerate(names)}
    given = {name: blanks.get(name, str)(mark) for mark, name in marks.items()}
    try:
        text = asked(llm, run, given, blanks, names).prompt.flat()
    except Exception:  # its code wants real values
        return ()
    if any(text.count(mark) == 0 for mark in marks):
        return ()
    return tuple(_parts(text, marks))


def _parts(text: str, marks: Mapping[str, str]) -> Iterator[PromptPart]:
    literal = ""
    for char in text:
        if char not in marks:
            literal += char
            continue
        if literal:
            yield PromptPart.literal(literal)
        yield PromptPart.var(marks[char])
        literal = ""
    if literal:
        yield PromptPart.literal(literal)


# ------------------------------------------------------------ copies of the framework's objects


def raw(obj: Any, name: str) -> Callable[..., Any]:
    """A method of `obj` without the spans around it."""
    bound: Callable[..., Any] = inspect.unwrap(getattr(type(obj), name)).__get__(obj)
    return bound


def clone(obj: Any, **changes: Any) -> Any:
    """A shallow copy with other attributes; quiet, since what runs ahead prints nothing."""
    made = copy.copy(obj)
    for name in ("_verbose", "verbose"):
        if name in vars(made):
            vars(made)[name] = False
    vars(made).update(changes)
    return made


def own_template(template: BasePromptTemplate) -> BasePromptTemplate:
    """A copy that may be formatted beside the original: `partial_format` takes a template's parser off meanwhile."""
    parser = template.output_parser
    changes: dict[str, Any] = {"output_parser": None if parser is None else _silent(parser, "parse", "format")}
    if isinstance(template, SelectorPromptTemplate):
        arms = [(condition, own_template(one)) for condition, one in template.conditionals or ()]
        changes |= {"default_template": own_template(template.default_template), "conditionals": arms or None}
    return template.model_copy(update=changes)


def _silent(obj: Any, *methods: str) -> Any:
    """A copy whose methods have no spans around them."""
    made = clone(obj)
    vars(made).update({name: raw(made, name) for name in methods})
    return made


def own_helper(helper: PromptHelper) -> PromptHelper:
    """A prompt helper whose splitters tell nobody what they split, and whose tokenizer reads every text once."""
    made: PromptHelper = clone(helper)
    counter = made._token_counter
    counter = clone(counter, tokenizer=lru_cache(maxsize=REMEMBERED)(counter.tokenizer))
    counted = counter.aestimate_tokens_in_messages
    vars(counter)["estimate_tokens_in_messages"] = lambda messages: _at_once(counted(messages))
    made._token_counter = counter

    def splitter(*args: Any, **kwargs: Any) -> Any:
        return own_splitter(raw(made, "get_text_splitter_given_prompt")(*args, **kwargs))

    vars(made)["get_text_splitter_given_prompt"] = splitter
    return made


def _at_once(made: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives that waits for nothing. LlamaIndex would start a thread with a loop of its own for it."""
    try:
        made.send(None)
    except StopIteration as end:
        return end.value
    made.close()
    raise NotUnderstood("counting tokens takes waiting")


def own_splitter(splitter: Any) -> Any:
    return _silent(clone(splitter, callback_manager=nobody()), "split_text")


def nobody() -> CallbackManager:
    """A callback manager without handlers, not even the global one."""
    made = CallbackManager([])
    made.handlers = []
    return made


def own_nodes(nodes: Sequence[NodeWithScore], *, deep: bool = False) -> list[NodeWithScore]:
    """Copies: fusion and rerankers write scores into what they are given; `deep` for what writes into nodes, too."""
    return copy.deepcopy(list(nodes)) if deep else [node.model_copy() for node in nodes]
