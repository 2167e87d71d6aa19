"""Random chains on pool-backed objects and on the user's own.

They use every composite, user code that fails or changes its input, engines that fail, and every entry point.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

from generated.nodes import Node, sequence
from generated.seeing import WAYS, Program

QUESTIONS = ("where is the apple oven?", "how far is the river?", "is the poison safe?", "who sails a copper boat?")
MODELS = ("llm", "llm", "llm", "hosted", "hosted", "local")
COST = {"D": 1, "T": 1, "R": 2, "L": 2}


class _Making:
    """`D` is the state, `T` a text, `R` documents, `L` a list of texts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys = 0
        self.texts: list[str] = []

    def key(self) -> str:
        self.keys += 1
        return f"k{self.keys}"

    def pick(self, *forms: str) -> str:
        return self.random.choice(forms)

    def make(self, sort: str, depth: int) -> Node:
        """Return a random node of this sort: a plain form, or sometimes one that contains others."""
        holders = {"D>D": self.states, "D>T": self.of_state, "T>T": self.of_text}.get(sort)
        if holders is not None and depth < 3 and self.random.random() < 0.45 - 0.1 * depth:
            return self.composed(sort, depth)
        kinds: dict[str, Callable[[int], Node]] = {
            "D>D": self.states,
            "D>T": self.of_state,
            "T>T": self.of_text,
            "D>R": lambda deep: self.through("D", "T", "R", deep),
            "D>L": lambda deep: self.through("D", "T", "L", deep),
            "T>R": self.documents,
            "R>T": lambda deep: Node("R>T", self.pick("joined", "RunnableLambda(joined)", "tells('documents')")),
            "T>L": lambda deep: Node(
                "T>L", self.pick("listed('Two for {x}')", "RunnableLambda(lambda t: t.split(' ')[:2])")
            ),
            "L>T": lambda deep: Node("L>T", self.pick("RunnableLambda(lambda l: ' and '.join(l))", "tells('list')")),
        }
        return kinds[sort](depth)

    def through(self, *sorts_and_depth: str | int) -> Node:
        *sorts, depth = sorts_and_depth
        steps = [self.make(f"{a}>{b}", int(depth) + 1) for a, b in pairwise(sorts)]
        return Node(f"{sorts[0]}>{sorts[-1]}", " | ".join(["%s"] * len(steps)), tuple(steps))

    # ------------------------------------------------------------ leaves

    def prompt(self, variable: str) -> str:
        word = self.random.choice(("Rewrite", "Shorten", "Explain", "Translate"))
        if self.random.random() < 0.04:
            word = "poison"
        return f'"{word} {{{variable}}}"'

    def ask(self, variable: str) -> str:
        model = self.random.choice(MODELS)
        return f"ask({self.prompt(variable)})" if model == "llm" else f"ask({self.prompt(variable)}, {model})"

    def states(self, depth: int) -> Node:
        if self.random.random() < 0.6:
            return self.assigned(depth)
        forms = (
            'does(change_question, "today")',
            'does(remember, "seen")',
            'does(allow, "copper")',
            'does(extend, "more")',
            'does(put, "b", "apple river")',
            "RunnableLambda(lambda d: {**d, 'question': d['question'] + ' again'})",
            "assign(seen=RunnableLambda(lambda d: d['history']))",
            'assign(w=did(remember, "here"))',
            'assign(w=did(correct, "there"))',
            'assign(w=did(allow, "copper"))',
            'assign(w=did(allow, "river"))',
            'assign(w=did(change_question, "now"))',
            "assign(n=itemgetter('nothing'))",
        )
        return Node("D>D", self.random.choice(forms))

    def assigned(self, depth: int) -> Node:
        sorts = [self.pick("D>T", "D>T", "D>T", "D>R", "D>L") for _ in range(self.random.choice((1, 1, 1, 2)))]
        parts = tuple(self.make(sort, depth + 1) for sort in sorts)
        keys = [self.key() for _ in sorts]
        self.texts += [key for key, sort in zip(keys, sorts, strict=True) if sort == "D>T"]
        inner = ", ".join(f"{key}=%s" for key in keys)
        if self.random.random() < 0.15:
            kept = ", ".join(f"{key}=itemgetter('{key}')" for key in ("question", "docs", "history", "messages"))
            self.texts = [key for key, sort in zip(keys, sorts, strict=True) if sort == "D>T"]
            return Node("D>D", f"RunnableParallel({kept}, {inner})", parts)
        return Node("D>D", f"assign({inner})", parts)

    def of_state(self, depth: int) -> Node:
        variable = self.random.choice(["question", "question", *self.texts[-2:]])
        forms = [self.ask(variable)] * 5 + [self.ask("history")]
        forms += [f"get('messages') | {model} | StrOutputParser()" for model in ("hosted", "llm")]
        forms += [f"get('{variable}')", f"RunnableLambda(lambda d: d['{variable}'] + ' please')", "tells('state')"]
        if depth < 2 and self.random.random() < 0.5:
            return self.random.choice(
                [
                    lambda: self.through("D", "T", "R", "T", depth),
                    lambda: self.through("D", "T", "T", depth),
                    lambda: self.through("D", "T", "L", "T", depth),
                    lambda: self.mapped(depth),
                ]
            )()
        return Node("D>T", self.random.choice(forms))

    def mapped(self, depth: int) -> Node:
        items, each = self.make("D>L", depth + 1), self.make("T>T", depth + 1)
        return Node("D>T", "%s | (%s).map() | RunnableLambda(lambda l: ' + '.join(l))", (items, each))

    def of_text(self, depth: int) -> Node:
        forms = [self.ask("x")] * 4 + ["RunnableLambda(lambda t: t.upper())", "tells('text')", "refuses('oven')"]
        return Node("T>T", self.random.choice(forms))

    def documents(self, depth: int) -> Node:
        if self.random.random() < 0.2:
            found = Node("T>R", self.pick("retriever", "notes"))
            return Node("T>R", "(RunnableParallel(query=passthrough, documents=%s) | rerank)", (found,))
        return Node("T>R", self.pick("retriever", "retriever", "notes", "retrieve_uploads"))

    # ------------------------------------------------------------ holders

    def composed(self, sort: str, depth: int) -> Node:
        text = "d['question']" if sort[0] == "D" else "t"
        name = sort[0].lower()
        forms = [
            (f"RunnableBranch((lambda {name}: 'oven' in {text}, %s), %s)", 2),
            (f"RunnableBranch((lambda {name}: tells_length({text}) > 24, %s), %s)", 2),
            ("(%s).with_fallbacks([%s])", 2),
            ("(%s).with_retry(stop_after_attempt=2, wait_exponential_jitter=False)", 1),
            (f"RunnableLambda(lambda {name}: %s)", 1),
            ("nested(%s)", 1),
            ("(%s).with_config(tags=['inner'], run_name='named')", 1),
        ]
        if sort == "D>T":
            arms = (self.make("D>T", depth + 1), self.make("T>T", depth + 1), self.make("T>T", depth + 1))
            router = "RunnableParallel(key=RunnableLambda(lambda d: 'ab'[len(d['question']) %% 2]), input=%s)"
            if self.random.random() < 0.2:
                return Node(sort, f'({router} | RouterRunnable({{"a": %s, "b": %s}}))', arms)
        form, count = self.random.choice(forms)
        parts = []
        for _ in range(count):
            known = list(self.texts)
            steps = [self.make(sort, depth + 1)]
            if sort[0] == sort[-1] and self.random.random() < 0.4:
                steps.append(self.make(sort, depth + 1))
            parts.append(sequence(sort, steps))
            self.texts = known
        return Node(sort, form, tuple(parts))

    def program(self) -> Node:
        flat = 2 if self.random.random() < 0.5 else 0  # many small steps, or composites of composites
        steps = [self.make("D>D", flat) for _ in range(self.random.randrange(1, 6 + flat))]
        return sequence("D>D", steps)


def tree(seed: int) -> Node:
    return _Making(seed).program()


def program(seed: int, made: Node) -> Program:
    draw = random.Random(seed + 1)
    options = {"speculate": draw.choice(("auto",) * 6 + ("all", "off"))}
    config = draw.choice(
        ({}, {}, {"max_concurrency": 1}, {"max_concurrency": 2}, {"tags": ["a", "b"]}, {"run_name": "mine"})
    )
    given = f"""given = {{
    "question": "{draw.choice(QUESTIONS)}",
    "docs": [Document(page_content="apple trees grow", metadata={{"n": 0}})],
    "history": ["hello"],
    "messages": [HumanMessage("hello")],
}}"""
    return Program(seed, f"chain = (\n    passthrough\n    | {made}\n)\n{given}", draw.choice(WAYS), config, options)
