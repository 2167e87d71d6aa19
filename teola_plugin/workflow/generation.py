"""Components that call a language model: an answer (also from passages), a list, other questions for a question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.errors import RegistrationError
from teola_plugin.graph import CARRY, ITEM, Attributes, PrimitiveKind, Ref, Role, Slice, named, on_loop, simple
from teola_plugin.graph import Component as Part
from teola_plugin.requests.items import ItemStream
from teola_plugin.requests.payloads import Generate, Sampling
from teola_plugin.requests.payloads import Generation as Generated
from teola_plugin.runtime.output_stream import hands_on
from teola_plugin.workflow.component import Component
from teola_plugin.workflow.decomposition import Decomposition
from teola_plugin.workflow.prompts import Prompt
from teola_plugin.workflow.settings import PromptField, Setting, TextsField, kept_with, on_engine, reads, setting
from teola_plugin.workflow.values import Kind, Value, text_of, text_size

_K = PrimitiveKind
SPELLINGS = ("", "json", "lines", "numbered", "markdown", "comma")
PASSAGE_TOKENS = 200
"""What a passage is expected to have in a prompt."""
EXPANSION = Prompt(
    "Write {n} search queries that help to answer the question below. Each asks for another aspect of it, in other "
    "words. Write one query on each line, and nothing else.\n\nQuestion: {question}\nQueries:\n"
)

QUESTION: Any = "{question}"
_PROMPT_SETTING = Setting("prompt", "what the model is told", default=QUESTION)


@dataclass(frozen=True, kw_only=True)
class Asking(Component):
    """The base class of components that ask a model: the engine and the sampling parameters."""

    engine: str = on_engine("llm", _K.PREFILLING, _K.DECODING)
    max_tokens: int = setting(256, "tokens that an answer may have", minimum=1)
    temperature: float = setting(0.0, "0 for the likeliest text, more for others", minimum=0.0)
    top_p: float = setting(1.0, "share of the likeliest tokens to choose from", minimum=0.0, maximum=1.0)
    stop: TextsField = setting((), "texts that end the answer", type="array")

    def ask(
        self,
        decomposition: Decomposition,
        prompt: Prompt,
        values: Mapping[str, Value],
        suffix: str = "",
        *,
        items: str = "",
        expected: int | None = None,
        splittable: bool = False,
        json_schema: str = "",
    ) -> Ref:
        """One request; the ref of its `Generation`. `values` are those of the prompt's variables."""
        sampling = Sampling(self.max_tokens, self.temperature, self.top_p, stop=self.stop, json_schema=json_schema)
        variables = prompt.variables

        @simple(text_size)
        def payload(inputs: Mapping[str, Any]) -> Generate:
            return Generate(prompt.rendered(inputs), sampling)

        part = Part(
            decomposition.part(suffix),
            Role.GENERATION,
            tuple((name, values[name].ref) for name in variables),
            self.engine,
            splittable=splittable,
            expected=expected,
            prompt=prompt.parts({name: _tokens(values[name]) for name in variables}),
            attributes=Attributes(items=items),
        )
        return decomposition.add(part, payload)

    def write(self, decomposition: Decomposition, prompt: Prompt, values: Mapping[str, Value], suffix: str = "") -> Ref:
        """One request; the ref of its text."""
        name = f"{suffix}.text" if suffix else "text"
        return decomposition.call(name, text_of_generation, generation=self.ask(decomposition, prompt, values, suffix))


@hands_on
@on_loop
def text_of_generation(generation: Generated) -> str:
    return generation.text


def _tokens(value: Value) -> int:
    """Return the expected number of tokens of a value in a prompt; 0 if unknown."""
    return PASSAGE_TOKENS * value.width if value.kind is Kind.PASSAGES and isinstance(value.width, int) else 0


@dataclass(frozen=True, kw_only=True)
class Generation(Asking):
    """A prompt -> the text that the model writes.

    The prompt's variables are what the component reads, each the input or component of its name, unless `reads` says
    another one (`{"context": "best"}`). With `items`, the value is a list, spelled as said (`json`, `lines`,
    `numbered`, `markdown`, `comma`), of `expected` items; what works on each item begins as it closes (`splittable`).
    """

    prompt: PromptField = field(default=QUESTION, kw_only=False, metadata=kept_with(_PROMPT_SETTING))
    reads: Mapping[str, str] = field(default_factory=dict, hash=False)
    items: str = ""
    expected: int | None = None
    splittable: bool = True
    json_schema: str = ""

    def __post_init__(self) -> None:
        """Raise RegistrationError for `reads` without a variable in the prompt, and for an unknown `items`."""
        super().__post_init__()
        check_reads(self.name, self.reads, self.prompt.variables, "variable of the prompt")
        if self.items not in SPELLINGS:
            raise RegistrationError(
                f"{self.name}.items is {self.items!r}; expected one of {', '.join(SPELLINGS[1:])}.",
                hint="say how the model spells a list, or leave items out for a text",
            )

    def sources(self) -> dict[str, str]:
        return {name: self.reads.get(name, name) for name in self.prompt.variables}

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the generation and what reads its text, or the items of its list, from the result."""
        values = {name: decomposition.read(name) for name in self.prompt.variables}
        if not self.items:
            text = self.ask(decomposition, self.prompt, values, json_schema=self.json_schema)
            return Value(decomposition.call("text", text_of_generation, generation=text), Kind.TEXT)
        listed = self.ask(
            decomposition,
            self.prompt,
            values,
            items=self.items,
            expected=self.expected,
            splittable=self.splittable,
            json_schema=self.json_schema,
        )
        return Value(
            parsed(decomposition, listed, self.items, self.expected), Kind.TEXTS, self.expected, self.splittable
        )


@dataclass(frozen=True, kw_only=True)
class QueryExpansion(Asking):
    """A question -> `n` others that help to answer it; at most `n`, as many as the model wrote.

    The prompt has `{question}`, and may have `{n}`; the model writes one query a line.
    """

    question: str = reads("question", Kind.TEXT)
    n: int = setting(3, "queries that are asked for", minimum=1)
    prompt: PromptField = setting(EXPANSION, "what the model is told; has {question}, may have {n}", type="prompt")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_variables(f"{self.name}.prompt", self.prompt, {"question"}, {"n"})

    def decompose(self, decomposition: Decomposition) -> Value:
        prompt, values = self.prompt.with_(n=self.n), {"question": decomposition.read("question")}
        text = self.ask(decomposition, prompt, values, items="lines", expected=self.n, splittable=True)
        return Value(parsed(decomposition, text, "lines", self.n), Kind.TEXTS, self.n, written=True)


def parsed(decomposition: Decomposition, generation: Ref, spelling: str, max_items: int | None) -> Ref:
    """The list that a generation spells."""

    @simple(lambda given, limit: text_size(given["generation"].text, limit))
    def items(generation: Generated) -> list[Any]:
        stream = ItemStream(spelling)
        texts = [*stream.feed(generation.text), *stream.finish()]
        return [_item(one) for one in texts[:max_items]]

    return decomposition.list_of("items", items, spelling, generation=generation)


@on_loop
def _item(one: Any) -> str:
    return one if isinstance(one, str) else text_of(one)


def check_reads(name: str, reads: Mapping[str, str], names: Sequence[str], role: str) -> None:
    """Raises `RegistrationError` for a word that nothing is read by."""
    for key in reads:
        if key not in names:
            raise RegistrationError(
                f"{name}.reads has {key!r}, which is no {role}; there are {', '.join(names) or 'none'}.",
                hint="leave it out, or correct its name",
            )


def check_variables(owner: str, prompt: Prompt, required: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Raises `RegistrationError` for a prompt that lacks a variable, or has one that nothing is known of."""
    variables = set(prompt.variables)
    wrong = sorted(variables - required - optional) or sorted(required - variables)
    if wrong:
        lacks = not variables - required - optional
        raise RegistrationError(
            f"{owner} {'lacks' if lacks else 'has'} {{{wrong[0]}}}; it has to have "
            f"{', '.join(f'{{{one}}}' for one in sorted(required))}"
            + (f", and may have {', '.join(f'{{{one}}}' for one in sorted(optional))}." if optional else "."),
            hint="write {{ and }} for braces that stand for themselves",
        )


# ------------------------------------------------------------ synthesis: an answer from passages

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
        """Raise RegistrationError for a prompt that lacks a variable, or has an unknown one."""
        super().__post_init__()
        check_variables(f"{self.name}.prompt", self.prompt, {"question", "context"})
        check_variables(f"{self.name}.refine_prompt", self.refine_prompt, {"question", "answer", "context"})
        check_variables(f"{self.name}.combine_prompt", self.combine_prompt, {"question", "answers"})

    def decompose(self, decomposition: Decomposition) -> Value:
        """Pack the passages into texts, and add the answer from these as `mode` says."""
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
        """Add an answer from the first text, and a FOLD that refines it with each further text.

        The modes `refine` and `compact` use it; they differ in how passages are packed into texts.
        """
        first = {"question": question, "context": Value(texts.at(0), Kind.TEXT)}
        answer = self.write(decomposition, self.prompt, first, "first")

        def refined(body: Decomposition) -> Value:
            values = {"question": body.read("question"), "answer": _text(CARRY), "context": _text(ITEM)}
            return Value(self.write(body, self.refine_prompt, values, "refined"), Kind.TEXT)

        inputs = named(items=texts.at(Slice(1, None)), init=answer)
        return decomposition.hold("refine", Role.FOLD, inputs, decomposition.made_by_hand(refined))

    def _tree(self, decomposition: Decomposition, question: Value, texts: Ref, context: Value) -> Ref:
        """Add an answer from each text, and rounds that combine `fanout` answers at a time until one is left."""

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
    """Return a function that cuts a list of answers into groups of `size`."""

    @simple(text_size)
    def groups(answers: Sequence[str]) -> list[list[str]]:
        return [list(answers[at : at + size]) for at in range(0, len(answers), size)]

    return groups


def packer(budget: int) -> Callable[..., list[str]]:
    """Passages -> texts, at least one; with a budget, as many together as have so many characters."""

    @simple(text_size)
    def texts(passages: Any) -> list[str]:
        """Pack the passages in their order, each into the last text if it fits there."""
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
