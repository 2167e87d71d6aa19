"""Random functions from a seed: they call models, search, loop and branch, as nodes of graphs do."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

HELPER = "def helper(value):\n    return value.replace('o', '0')[:40]\n"
_INDENT = "    "
Lines = list[str]


@dataclass
class Expressions:
    """Expressions that may be used so far, by the type of their value."""

    texts: Lines = field(default_factory=lambda: ["state['question']", "state['answer']"])
    lists: Lines = field(default_factory=lambda: ["state['queries']"])
    documents: Lines = field(default_factory=lambda: ["state['documents']"])


class Program:
    """The source of one function `node(state)`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._awaits = seed % 3 == 0
        self._expressions = Expressions()
        self._count = 0

    def source(self) -> str:
        body = [
            *self._block(0),
            *self._block(0),
            f"return {{'answer': {self._text()}, 'found': {self._expressions.lists[-1]}}}",
        ]
        head = "async def node(state):" if self._awaits else "def node(state):"
        return "\n".join([HELPER, head, *(_INDENT + line for line in body), ""])

    # ------------------------------------------------------------ expressions

    def _name(self) -> str:
        self._count += 1
        return f"x{self._count}"

    def _text(self, depth: int = 0) -> str:
        text = self._random.choice(self._expressions.texts)
        if depth > 1:
            return text
        forms: list[Callable[[], str]] = [
            lambda: text,
            lambda: f"({self._text(depth + 1)} + ' and ' + {self._text(depth + 1)})",
            lambda: f"{self._text(depth + 1)}.strip().{self._random.choice(['upper', 'lower', 'title'])}()",
            lambda: f"formatted({self._random.choice(self._expressions.documents)})",
            lambda: f"', '.join({self._random.choice(self._expressions.lists)})",
            lambda: f"{self._random.choice(self._expressions.lists)}[{self._random.choice([0, -1])}]",
            lambda: f"helper({self._text(depth + 1)})",
            lambda: f"({self._text(depth + 1)} if {self._condition()} else {self._text(depth + 1)})",
            lambda: "'Of {}, {}?'.format(" + f"{self._text(depth + 1)}, {text})",
        ]
        return self._random.choice(forms)()

    def _condition(self) -> str:
        text = self._random.choice(self._expressions.texts)
        tests = [f"len({text}) > {self._random.randrange(5, 60)}", f"'o' in {text}", f"{text}.startswith('so')"]
        return self._random.choice([*tests, "state['tries'] > 2", "not state['documents']"])

    def _invocation(self, target: str, argument: str) -> str:
        return f"(await {target}.ainvoke({argument}))" if self._awaits else f"{target}.invoke({argument})"

    def _model_reply(self) -> str:
        """Return code for the reply of a model, as a text."""
        messages = f"[SystemMessage(content=RULES), HumanMessage(content={self._text()})]"
        history = f"[('system', RULES), *state['messages'], {self._text()}]"
        prompt = self._random.choice([self._text(), messages, history])
        forms = [
            self._invocation("llm", prompt) + ".content",
            self._invocation("chain", f"{{'context': {self._text()}, 'question': {self._text()}}}"),
            self._invocation("grader", f"{{'document': {self._text()}, 'question': {self._text()}}}") + ".grade",
        ]
        return self._random.choice(forms)

    # ------------------------------------------------------------ statements

    def _block(self, depth: int) -> Lines:
        return [line for _ in range(self._random.randrange(1, 4)) for line in self._statement(depth)]

    def _inner(self, depth: int, last: Callable[[], str], **more: str) -> Lines:
        """Return an indented block that ends with the line `last`. The variables that it defines end with it."""
        before, self._expressions = self._expressions, deepcopy(self._expressions)
        self._expressions.texts += more.values()
        lines = [*self._block(depth + 1), last()]
        self._expressions = before
        return [_INDENT + line for line in lines]

    def _statement(self, depth: int) -> Lines:
        plain = [self._asks, self._asks, self._searches, self._computes, self._plans]
        around = [self._comprehends, self._loops, self._chooses, self._refines] if depth < 2 else []
        ends = [self._returns] if depth == 0 else []
        return self._random.choice([*plain, *around, *ends])(depth)

    def _asks(self, depth: int) -> Lines:
        reply, name = self._model_reply(), self._name()
        self._expressions.texts.append(name)
        return [f"{name} = {reply}"]

    def _searches(self, depth: int) -> Lines:
        search, name = self._invocation("retriever", self._text()), self._name()
        self._expressions.documents.append(name)
        return [f"{name} = {search}"]

    def _computes(self, depth: int) -> Lines:
        text, name = self._text(), self._name()
        self._expressions.texts.append(name)
        return [f"{name} = {text}"]

    def _plans(self, depth: int) -> Lines:
        plan, name = self._invocation("planner", self._text()), self._name()
        self._expressions.lists.append(name)
        return [f"{name} = {plan}.queries"]

    def _comprehends(self, depth: int) -> Lines:
        items, item, name = self._random.choice(self._expressions.lists), self._name(), self._name()
        self._expressions.texts.append(item)
        element = self._model_reply()
        self._expressions.texts.remove(item)
        self._expressions.lists.append(name)
        return [f"{name} = [{element} for {item} in {items}]"]

    def _loops(self, depth: int) -> Lines:
        items, item, name = self._random.choice(self._expressions.lists), self._name(), self._name()
        body = self._inner(depth, lambda: f"{name}.append({self._text()})", item=item)
        self._expressions.lists.append(name)
        return [f"{name} = []", f"for {item} in {items}:", *body]

    def _chooses(self, depth: int) -> Lines:
        condition, name = self._condition(), self._name()
        one, other = (self._inner(depth, lambda: f"{name} = {self._text()}") for _ in range(2))
        self._expressions.texts.append(name)
        return [f"if {condition}:", *one, "else:", *other]

    def _refines(self, depth: int) -> Lines:
        items, item, name = self._random.choice(self._expressions.lists), self._name(), self._name()
        reply = self._invocation("llm", f"f'Refine {{{name}}} with {{{item}}}'")
        lines = [f"{name} = {self._text()}", f"for {item} in {items}:", f"{_INDENT}{name} = {reply}.content"]
        self._expressions.texts.append(name)
        return lines

    def _returns(self, depth: int) -> Lines:
        return [f"if {self._condition()}:", *self._inner(depth, lambda: f"return {{'answer': {self._text()}}}")]
