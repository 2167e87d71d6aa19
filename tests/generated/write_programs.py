"""Random programs that write, delete, index, search, change documents in place and fail, with prefetches between."""

from __future__ import annotations

import random

from generated.nodes import Node, sequence
from generated.seeing import Program

WAYS = ("invoke", "invoke", "ainvoke", "ainvoke", "stream", "astream")
IDS = ("a", "b", "c")
THINGS = ("apple tree", "bread oven", "copper wire", "river boat", "winter coat")
GIVEN = """given = {
    "question": "where is the apple oven?",
    "docs": [
        Document(page_content="apple trees grow behind the bread oven", metadata={"n": 0}),
        Document(page_content="a copper boat on the river", metadata={"n": 1}),
    ],
}"""


class _Making:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys = 0
        self.texts: list[str] = []
        """Keys whose values are texts."""

    def key(self) -> str:
        self.keys += 1
        return f"k{self.keys}"

    def thing(self) -> str:
        return f"{self.random.choice(THINGS)} {self.random.randrange(9)}"

    def id(self) -> str:
        return self.random.choice(IDS)

    def step(self, depth: int = 0) -> Node:
        kinds = [self.early] * 7 + [self.write] * 5 + [self.outside] * 2 + [self.look] * 2 + [self.in_place] * 3
        kinds += [self.index] * 4
        if depth < 2:
            kinds += [lambda: self.composed(depth + 1)] * 3
        return self.random.choice(kinds)()

    def early(self) -> Node:
        """Return a step that plans understand and may prefetch."""
        key = self.key()
        word = self.random.choice(("Rewrite", "Shorten", "Explain"))
        forms = [
            f'assign({key}=ask("{word} {{question}}"))',
            f'assign({key}=itemgetter("question") | retriever)',
            f'assign({key}=itemgetter("question") | retriever | joined)',
            f"assign({key}=RunnableLambda(lambda d: d['question'] + ' again') | retriever)",
            f'assign({key}=listed("Two for {{question}}") | retriever.map())',
            f'assign({key}=itemgetter("question") | retrieve_uploads)',
        ]
        forms += [f'assign({key}=ask("{word} {{{other}}}"))' for other in self.texts[-1:]]
        form = self.random.choice(forms)
        if "ask(" in form:
            self.texts.append(key)
        return Node("D>D", form)

    def write(self) -> Node:
        forms = [f'put, "{self.id()}", "{self.thing()}"'] * 4
        forms += [f'drop, "{self.id()}"', 'drop, "a", "b"', "clear", "add"]
        return self._user(self.random.choice(forms))

    def outside(self) -> Node:
        forms = [f'outside_put, "{self.id()}", "{self.thing()}"'] * 3 + [f'outside_drop, "{self.id()}"']
        return self._user(self.random.choice(forms))

    def look(self) -> Node:
        key = self.key()
        forms = [f'look, "{key}", "{self.thing()}"', f'read, "{key}"']
        return self._user(self.random.choice(forms))

    def in_place(self) -> Node:
        forms = [f"stamp, {self.random.randrange(3)}", 'rewrite, "anew"', f'extend, "{self.thing()}"']
        return self._user(self.random.choice([*forms, 'change_question, "today"']))

    def index(self) -> Node:
        name = self.random.choice(("index", "index", "index_uploads"))
        return Node("D>D", f'assign({self.key()}=itemgetter("docs") | {name})')

    def _user(self, call: str) -> Node:
        if self.random.random() < 0.3:
            return Node("D>D", f"does({call})")
        return Node("D>D", f"assign({self.key()}=did({call}))")

    def failure(self) -> Node:
        """Return a step that fails, in user code or in a step that plans understand."""
        key = self.key()
        forms = [
            f'assign({key}=itemgetter("missing"))',
            f'assign({key}=ask("Say {{question}}") | JsonOutputParser())',
            f'assign({key}=ask("Say {{missing}}"))',
        ]
        if self.random.random() < 0.5:
            return Node("D>D", self.random.choice(forms))
        return self._user(self.random.choice(('fail, "mine"', 'fail_once, "mine"')))

    def composed(self, depth: int) -> Node:
        def part() -> Node:
            known = list(self.texts)
            made = sequence("D>D", [self.step(depth) for _ in range(self.random.randrange(1, 4))])
            self.texts = known  # what a branch assigns may not be there afterwards
            return Node("D>D", "(%s)", (made,))

        forms = [
            ("RunnableBranch((lambda d: 'oven' in d['question'], %s), %s)", 2),
            ("%s.with_fallbacks([%s])", 2),
            ("RunnableLambda(lambda d: %s)", 1),
            ("%s.with_retry(stop_after_attempt=2, wait_exponential_jitter=False)", 1),
            (f"assign({self.key()}=%s, {self.key()}=ask('Beside {{question}}'))", 1),
        ]
        form, count = self.random.choice(forms)
        return Node("D>D", form, tuple(part() for _ in range(count)))

    def program(self) -> Node:
        steps = [self.step() for _ in range(self.random.randrange(3, 9))]
        if self.random.random() < 0.25:
            steps.insert(self.random.randrange(1, len(steps) + 1), self.failure())
        return sequence("D>D", steps)


def tree(seed: int) -> Node:
    return _Making(seed).program()


def program(seed: int, made: Node) -> Program:
    draw = random.Random(seed + 1)
    options = {"speculate": draw.choice(("auto", "auto", "auto", "all", "off"))}
    return Program(seed, f"chain = (\n    passthrough\n    | {made}\n)\n{GIVEN}", draw.choice(WAYS), {}, options)
