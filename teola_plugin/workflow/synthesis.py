"""An answer from passages: all of them refined one by one, packed together, or put together as a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import CARRY, ITEM, Ref, Role, Slice, named, simple
from teola_plugin.workflow.decomposition import Decomposition
from teola_plugin.workflow.generation import Asking, check_variables
from teola_plugin.workflow.prompts import Prompt
from teola_plugin.workflow.settings import PromptField, reads, setting
from teola_plugin.workflow.values import Kind, Value, text_of, text_size

ANSWER = Prompt(
    "Answer the question from the context below, and from nothing else.\n\nQuestion: {question}\n\n"
    "Context:\n{context}\n\nAnswer:"
)
REFINE = Prompt(
    "There is an answer to the question below, and more context. Improve the answer with it; where the context does "
    "not help, repeat the answer as it is.\n\nQuestion: {question}\n\nAnswer so far: {answer}\n\n"
    "Context:\n{context}\n\nBetter answer:"
)
COMBINE = Prompt(
    "Several answers to the question below were given, each from another part of the sources. Write one answer from "
    "all of them.\n\nQuestion: {question}\n\nAnswers:\n{answers}\n\nOne answer:"
)
_CHARACTERS = 4
"""Of a token, about."""


@dataclass(frozen=True, kw_only=True)
class Synthesis(Asking):
    """A question and passages -> an answer.

    `refine`: answered from the first passage, then refined with each other one. `compact`: the same, with as many
    passages together as fit into `context_tokens`. `tree`: answered from each passage, then `fanout` answers at a
    time are put together until one is left. Without a passage, the model is asked with an empty context.
    """

    question: str = reads("question", Kind.TEXT)
    context: str = reads("passages", Kind.PASSAGES, Kind.CHUNKS, Kind.TEXTS, Kind.LIST, Kind.TEXT, Kind.DOCUMENTS)
    mode: str = setting("compact", "how passages become an answer", choices=("refine", "compact", "tree"))
    prompt: PromptField = setting(ANSWER, "to answer from passages; has {question} and {context}", type="prompt")
    refine_prompt: PromptField = setting(
        REFINE, "to better an answer; has {question}, {answer} and {context}", type="prompt"
    )
    combine_prompt: PromptField = setting(
        COMBINE, "to make one of several answers; has {question} and {answers}", type="prompt"
    )
    context_tokens: int = setting(2048, "compact: about what the passages of one prompt may have", minimum=1)
    fanout: int = setting(8, "tree: answers that are put together at a time", minimum=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_variables(f"{self.name}.prompt", self.prompt, {"question", "context"})
        check_variables(f"{self.name}.refine_prompt", self.refine_prompt, {"question", "answer", "context"})
        check_variables(f"{self.name}.combine_prompt", self.combine_prompt, {"question", "answers"})

    def decompose(self, decomposition: Decomposition) -> Value:
        context = decomposition.read("context")
        budget = _CHARACTERS * self.context_tokens if self.mode == "compact" else 0
        texts = decomposition.call("texts", packer(budget), passages=context.ref)
        question = decomposition.read("question")
        answer = (
            self._tree(decomposition, question, texts, context)
            if self.mode == "tree"
            else self._refine(decomposition, question, texts)
        )
        return Value(answer, Kind.TEXT)

    def _refine(self, decomposition: Decomposition, question: Value, texts: Ref) -> Ref:
        first = {"question": question, "context": Value(texts.at(0), Kind.TEXT)}
        answer = self.write(decomposition, self.prompt, first, "first")

        def refined(body: Decomposition) -> Value:
            values = {"question": body.read("question"), "answer": _text(CARRY), "context": _text(ITEM)}
            return Value(self.write(body, self.refine_prompt, values, "refined"), Kind.TEXT)

        inputs = named(items=texts.at(Slice(1, None)), init=answer)
        return decomposition.hold("refine", Role.FOLD, inputs, decomposition.made_by_hand(refined))

    def _tree(self, decomposition: Decomposition, question: Value, texts: Ref, context: Value) -> Ref:
        def leaf(body: Decomposition) -> Value:
            values = {"question": body.read("question"), "context": _text(ITEM)}
            return Value(self.write(body, self.prompt, values, "leaf"), Kind.TEXT)

        width = context.width if isinstance(context.width, int) else None
        leaves = decomposition.hold(
            "leaves", Role.MAP, named(items=texts), decomposition.made_by_hand(leaf), expected=width
        )
        if width is not None and width <= self.fanout:  # one round puts all of them together
            values = {"question": question, "answers": Value(leaves, Kind.TEXTS)}
            return self.write(decomposition, self.combine_prompt, values)
        level = decomposition.made_by_hand(self._level)
        last = decomposition.hold("levels", Role.LOOP, named(init=leaves), level)
        return decomposition.call("root", _first, answers=last)

    def _level(self, body: Decomposition) -> Value:
        """One round: groups of answers, one answer for each."""

        def combined(inner: Decomposition) -> Value:
            values = {"question": inner.read("question"), "answers": Value(Ref(ITEM), Kind.TEXTS)}
            return Value(self.write(inner, self.combine_prompt, values, "combined"), Kind.TEXT)

        groups = body.call("groups", grouper(self.fanout), answers=Ref(CARRY))
        answers = body.hold("level", Role.MAP, named(items=groups), body.made_by_hand(combined))
        return Value(body.call("again", _next_level, answers=answers), Kind.ANY)


def _text(producer: str) -> Value:
    return Value(Ref(producer), Kind.TEXT)


@simple(text_size)
def _first(answers: Sequence[str]) -> str:
    return answers[0]


@simple(text_size)
def _next_level(answers: Sequence[str]) -> Mapping[str, Any]:
    return {"carry": answers, "again": len(answers) > 1}


def grouper(size: int) -> Callable[..., list[list[str]]]:
    @simple(text_size)
    def groups(answers: Sequence[str]) -> list[list[str]]:
        return [list(answers[at : at + size]) for at in range(0, len(answers), size)]

    return groups


def packer(budget: int) -> Callable[..., list[str]]:
    """Passages -> texts, at least one; with a budget, as many together as have so many characters."""

    @simple(text_size)
    def texts(passages: Any) -> list[str]:
        several = isinstance(passages, (list, tuple))
        passage_texts = [text_of(one) for one in (passages if several else [passages])]
        packed: list[str] = []
        for text in passage_texts:
            if packed and len(packed[-1]) + 2 + len(text) <= budget:
                packed[-1] += f"\n\n{text}"
            else:
                packed.append(text)
        return packed or [""]

    return texts
