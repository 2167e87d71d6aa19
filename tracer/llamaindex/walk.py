"""One walk through a LlamaIndex object: what every lowering needs.

Values are refs. None stands for a value that the graph does not make: what reads it is not run ahead, and the plain
object computes it as it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.graph import Attributes, Component, Ref, Role
from teola_plugin.graph.attributes import NOTHING_SAID
from teola_plugin.graph.refs import Inputs
from teola_plugin.tracer.draft import DERIVED, Draft, Names
from teola_plugin.tracer.llamaindex import known, stand_ins
from teola_plugin.tracer.report import Level, TraceNode
from teola_plugin.tracer.symbols import NotUnderstood

Value = Ref | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A query as it is passed on."""

    text: Ref
    texts: tuple[Ref, ...]
    """What is embedded for it; the vectors' mean is searched with."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query engine gives."""

    text: Value = None
    """`str(response)`"""
    nodes: Value = None
    """Its source nodes."""


@dataclass(frozen=True, slots=True)
class Read:
    """An attribute that the plan rests on."""

    node: Any
    name: str
    value: Any

    @property
    def holds(self) -> bool:
        now = getattr(self.node, self.name, None)
        return now is self.value or (isinstance(now, (str, int, float, bool)) and bool(now == self.value))


@dataclass(frozen=True, slots=True)
class Listed:
    """A list or dictionary that the plan rests on: its elements, in order."""

    container: Any
    elements: tuple[Any, ...]

    @property
    def holds(self) -> bool:
        now = tuple(_elements(self.container))
        return len(now) == len(self.elements) and all(a is b for a, b in zip(now, self.elements, strict=True))


Premise = Read | Listed


def _elements(container: Any) -> Sequence[Any]:
    return list(container.values()) if isinstance(container, Mapping) else container


@dataclass(slots=True)
class Walk:
    """The draft of one template, and what it rests on. A body has a walk of its own."""

    draft: Draft = field(default_factory=Draft)
    premises: list[Premise] = field(default_factory=list)
    lowered: set[int] = field(default_factory=set)
    """Ids of the engines and retrievers that the graph does the work of, wherever they are called."""
    scope: Names = ()

    def body(self) -> Walk:
        return Walk(self.draft.body(), self.premises, self.lowered, self.scope)

    # ------------------------------------------------------------ premises and the report

    def read(self, node: Any, *names: str) -> list[Any]:
        """Attributes that decide what the graph looks like. A plan is made anew when one of them has changed."""
        found = []
        for name in names:
            value = getattr(node, name)
            self.premises.append(Read(node, name, value))
            if isinstance(value, (list, tuple, dict)):
                self.premises.append(Listed(value, tuple(_elements(value))))
            found.append(value)
        return found

    def template(self, node: Any, name: str) -> Any:
        """A prompt template of `node`, to be formatted beside the original."""
        [template] = self.read(node, name)
        return stand_ins.own_template(known.plain_template(template))

    def note(self, path: str, node: object, level: Level, components: Sequence[str] = (), reason: str = "") -> None:
        self.draft.nodes.append(TraceNode(path, type(node).__name__, level, tuple(components), reason))

    @contextmanager
    def noting(self, path: str, node: object) -> Iterator[list[str]]:
        """The body lowers `node`, or raises `NotUnderstood` before anything is added: noted, and passed over.

        It gets a list, for the reasons why some of it is left to the plain object.
        """
        before, reasons = set(self.draft.components), list[str]()
        try:
            with known.as_made():
                yield reasons
        except NotUnderstood as why:
            for name in set(self.draft.components) - before:
                del self.draft.components[name]
            self.note(path, node, known.level(node), reason=str(why))
        else:
            added = [name for name in self.draft.components if name not in before]
            self.note(path, node, "lowered", added, "; ".join(reasons))

    @contextmanager
    def owning(self, node: object) -> Iterator[None]:
        """Where the body puts calls of an LLM into the graph, nobody is to ask for them once more.

        So `node` is not planned by itself, even if not all that it does is known.
        """
        before = set(self.draft.components)
        try:
            yield
        finally:
            if any(_asks(c) for name, c in self.draft.components.items() if name not in before):
                self.lowered.add(id(node))

    def forget(self, lowered: Set[int]) -> None:
        """What was lowered beyond these is not in the graph after all."""
        self.lowered.intersection_update(lowered)

    # ------------------------------------------------------------ components

    def name(self, wanted: str, *parts: str) -> str:
        return self.draft.name(wanted, *parts)

    def user_code(self, wanted: str, **inputs: Ref) -> None:
        """A call of the user's own LLM: what needs no answer of it need not wait for it."""
        self.draft.add(Component(self.name(wanted), Role.OPAQUE, tuple(inputs.items()), scope=self.scope))

    def call(self, wanted: str, call: Callable[..., Any], **inputs: Ref) -> Ref:
        """The framework's own pure code."""
        return self.draft.call(self.name(wanted), call, self.scope, **inputs)

    def ask(
        self,
        wanted: str,
        llm: Any,
        run: stand_ins.Run,
        inputs: Mapping[str, Ref],
        *,
        value: Callable[[str, Mapping[str, Any]], Any] | None = None,
        blanks: stand_ins.Blanks | None = None,
        items: str = "",
        expected: int | None = None,
    ) -> Ref:
        """One call of a pool-backed LLM by `run`, the framework's code; the ref of what `run` returns.

        `value` says that of the LLM's text and the inputs, where it takes less than running `run` again. `items` says
        how the text spells the list that `run` returns, `expected` how many there are.
        """
        names, blanks = tuple(inputs), blanks or {}
        name = self.name(wanted, *DERIVED, "parsed")
        component = Component(
            name,
            Role.GENERATION,
            tuple(inputs.items()),
            llm.engine,
            prompt=stand_ins.parts(llm, run, names, blanks),
            expected=expected,
            scope=self.scope,
            attributes=Attributes(items=items),
        )
        made = self.draft.add(component, lambda given: stand_ins.asked(llm, run, given, blanks, names))
        if items:
            self.draft.lists[f"{name}.parsed"] = items

        def parsed(generation: Any, **given: Any) -> Any:
            if value is not None:
                return value(llm.text_of(generation), given)
            return stand_ins.answered(llm, run, given, [generation])

        return self.draft.call(f"{name}.parsed", parsed, self.scope, generation=made, **inputs)

    def hold(self, wanted: str, role: Role, inputs: Inputs, body: Walk, output: Ref, **more: Any) -> Ref:
        """A component that holds the body's template."""
        name = self.name(wanted)
        self.draft.absorb(body.draft)
        inner = body.draft.template(output, name)
        if role is Role.MAP:  # in `query`, one item comes after the other
            more["attributes"] = more.get("attributes", NOTHING_SAID).with_(beside=True)
        return self.draft.add(Component(name, role, inputs, body=inner, scope=self.scope, **more))

    # ------------------------------------------------------------ the order of the plain code

    @contextmanager
    def step(self, after: Names = ()) -> Iterator[list[str]]:
        """Components added in the body come after those of `after`, as in the plain code; their names are collected."""
        before = set(self.draft.components)
        names: list[str] = []
        yield names
        names += [name for name in self.draft.components if name not in before]
        earlier, later = self.draft.span(tuple(after)), self.draft.span(tuple(names))
        self.draft.order += [(tail, head) for tail in earlier.tails for head in later.heads]


def _asks(c: Component) -> bool:
    """Whether an LLM writes something for it."""
    return c.role is Role.GENERATION or (c.body is not None and any(_asks(inner) for inner in c.body.components))


def pool_llm(llm: Any) -> Any:
    """The LLM if it is pool-backed and its calls are LlamaIndex's. Raises `NotUnderstood`."""
    if not hasattr(llm, "payload_of_template"):
        raise NotUnderstood(f"its LLM, a {type(llm).__name__}, is not on the pool")
    if llm.output_parser is not None:
        raise NotUnderstood("its LLM parses what it writes")
    if llm.rate_limiter is not None:
        raise NotUnderstood("a rate limiter says when its LLM is called")
    return llm
