"""Dry runs of the framework's own code, ahead of the plain object: on copies, without events, its LLM asks nobody.

`captured` finds out what a piece of framework code would ask its LLM for; `replayed` what it makes of the answer. So
prompts and their parsing are LlamaIndex's own, byte for byte.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.schema import NodeWithScore

from teola_plugin.graph import PromptPart
from teola_plugin.requests.payloads import UNKNOWN, Generate, Generation
from teola_plugin.shims.llamaindex.copies import clone, nobody
from teola_plugin.tracer.symbols import NotUnderstood

Run = Callable[[Any, Mapping[str, Any]], Any]
"""(LLM, values by name) -> what the framework's code returns; it asks the LLM once."""
Blanks = Mapping[str, Callable[[str], Any]]
"""How a text stands for a value that is not known yet, by the value's name; the text itself where nothing is said."""
_MARKS = 0xE001
"""First of the private-use characters that stand for values while the parts of a prompt are told apart."""
_OTHERS = ("stream", "stream_chat", "stream_complete", "structured_predict", "predict_and_call", "apredict", "achat")


class _Captured(Exception):
    """Ends the framework's code at its first question."""

    def __init__(self, payload: Generate) -> None:
        self.payload = payload


def captured(llm: Any, run: Run, given: Mapping[str, Any], blanks: Blanks, names: Sequence[str]) -> Generate:
    """The payload that `run` asks for; values that are missing in `given` are unknown."""
    missing = {name: blanks.get(name, str)(UNKNOWN) for name in names if name not in given}
    try:
        run(_answering_llm(llm, _capture), {**given, **missing})
    except _Captured as ended:
        return ended.payload
    raise NotUnderstood("the LLM is not asked")


def replayed(llm: Any, run: Run, given: Mapping[str, Any], generations: Sequence[Generation]) -> Any:
    """What `run` returns when the LLM answers with these, one after the other."""
    answers: Iterator[Generation] = iter(generations)

    def reply(_: Generate) -> Generation:
        for answer in answers:
            return answer
        raise NotUnderstood("the LLM is asked once more")

    return run(_answering_llm(llm, reply), given)


def _capture(payload: Generate) -> Generation:
    raise _Captured(payload)


def _answering_llm(llm: Any, reply: Callable[[Generate], Generation]) -> Any:
    """A copy of the LLM, of the same class, whose calls are answered by `reply`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotUnderstood("the LLM is asked in another way")

    return clone(
        llm,
        **dict.fromkeys(_OTHERS, refuse),
        callback_manager=nobody(),
        predict=lambda prompt, **kwargs: llm.text_of(reply(llm.payload_of_template(prompt, **kwargs))),
        complete=lambda prompt, formatted=False, **kwargs: llm.completion_of(
            reply(llm.payload_of_prompt(prompt, formatted, **kwargs))
        ),
        chat=lambda messages, **kwargs: llm.chat_of(reply(llm.payload_of_messages(messages, **kwargs)), **kwargs),
    )


def parts(llm: Any, run: Run, names: Sequence[str], blanks: Blanks) -> tuple[PromptPart, ...]:
    """Literals and variables of the prompt, in order; nothing where they cannot be told apart."""
    marks = {chr(_MARKS + i): name for i, name in enumerate(names)}
    given = {name: blanks.get(name, str)(mark) for mark, name in marks.items()}
    try:
        text = captured(llm, run, given, blanks, names).prompt.flat()
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


def own_nodes(nodes: Sequence[NodeWithScore], *, deep: bool = False) -> list[NodeWithScore]:
    """Copies: fusion and rerankers write scores into what they are given; `deep` for what writes into nodes, too."""
    return copy.deepcopy(list(nodes)) if deep else [node.model_copy() for node in nodes]
