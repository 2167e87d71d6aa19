"""One walk through a LlamaIndex object: what every lowering needs.

Values are refs. None stands for a value that the graph does not make: what reads it is not run ahead, and the plain
object computes it as it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from teola_plugin.graph import Attributes, Component, DraftText, Ref, Role
from teola_plugin.graph.refs import Inputs
from teola_plugin.shims.llamaindex.engines import runs_in_loop
from teola_plugin.shims.llamaindex.models import rate_limiter
from teola_plugin.shims.llamaindex.records import Parts, Unreadable
from teola_plugin.tracer.draft import DERIVED, Draft, Names, label_forms
from teola_plugin.tracer.llamaindex import classes, model_calls
from teola_plugin.tracer.llamaindex.model_calls import OwnModels, ask_own_llm
from teola_plugin.tracer.report import Level, TraceNode
from teola_plugin.tracer.symbols import NotUnderstood

Read = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class AttributeGuard:
    """An attribute that the plan rests on."""

    node: Any
    name: str
    value: Any

    @property
    def holds(self) -> bool:
        return _same(getattr(self.node, self.name, None), self.value)


@dataclass(frozen=True, slots=True)
class PartsGuard:
    """What an object was made of when it was read."""

    node: Any
    values: tuple[tuple[Read, Any], ...]
    """How each of its parts is read, and what it was."""

    @property
    def holds(self) -> bool:
        try:
            return all(_same(read(self.node), before) for read, before in self.values)
        except Unreadable:
            return False


@dataclass(frozen=True, slots=True)
class ElementsGuard:
    """A list or dictionary that the plan rests on: its elements, in order."""

    container: Any
    elements: tuple[Any, ...]

    @property
    def holds(self) -> bool:
        now = tuple(_elements(self.container))
        return len(now) == len(self.elements) and all(a is b for a, b in zip(now, self.elements, strict=True))


Guard = AttributeGuard | PartsGuard | ElementsGuard


def _same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, (str, int, float, bool)) and bool(now == before))


def _elements(container: Any) -> Sequence[Any]:
    return list(container.values()) if isinstance(container, Mapping) else container


def guards_of(node: Any, parts: Parts) -> Iterator[Guard]:
    """Of an object and the lists in it."""
    values = tuple((read, getattr(parts, name)) for name, read in parts.readers())
    yield PartsGuard(node, values)
    for _, value in values:
        if isinstance(value, (list, tuple, dict)):
            yield ElementsGuard(value, tuple(_elements(value)))


# ------------------------------------------------------------ the lowering


Value = Ref | None
P = TypeVar("P", bound=Parts)


@dataclass(frozen=True, slots=True)
class SymbolicQuery:
    """A query as the graph passes it on: refs of its texts."""

    text: Ref
    texts: tuple[Ref, ...]
    """What is embedded for it; the vectors' mean is searched with."""


@dataclass(frozen=True, slots=True)
class SymbolicAnswer:
    """What a query engine gives: refs, or None for what the graph does not make."""

    text: Value = None
    """`str(response)`"""
    nodes: Value = None
    """Its source nodes."""


@dataclass(slots=True)
class Walk:
    """The draft of one template, and what it rests on. A body has a walk of its own."""

    draft: Draft = field(default_factory=Draft)
    guards: list[Guard] = field(default_factory=list)
    guarded: set[tuple[type, int]] = field(default_factory=set)
    lowered: set[int] = field(default_factory=set)
    """Ids of the engines and retrievers that the graph does the work of, wherever they are called."""
    scope: Names = ()
    forms: tuple[DraftText, ...] = ()
    """What all that is asked for may be answered with, where a reader understands nothing else."""
    may_stream: bool = False
    """Whether an LLM may be asked to stream what it is asked for."""
    own_models: OwnModels | None = None
    """Models and stores of the user's own that the graph may call; None where only the pool's are looked at."""
    runs_in_loop: bool = False
    """Whether the original makes the calls here side by side, in a loop of its own."""

    def body(self) -> Walk:
        return replace(self, draft=self.draft.body())

    def llm(self, llm: Any) -> Any:
        """Return an LLM whose calls may be in the graph: one on the pool, or of the user's own.

        Raises `NotUnderstood` for others.
        """
        if is_pool_llm(llm) or self.own_models is None:
            return pool_llm(llm)
        return self.own_models.require_llm(llm)

    @contextmanager
    def in_loop_of(self, part: object) -> Iterator[None]:
        """Lower in the body what `part` does in a loop of its own, if that is how it is set up."""
        before = self.runs_in_loop
        self.runs_in_loop = before or (self.own_models is not None and runs_in_loop(part))
        try:
            yield
        finally:
            self.runs_in_loop = before

    # ------------------------------------------------------------ guards, and the report

    def read(self, node: Any, *names: str) -> None:
        """Public attributes that decide what the graph looks like, as `parts` does it."""
        self.guards += [AttributeGuard(node, name, getattr(node, name)) for name in names]

    def parts(self, kind: type[P], node: Any) -> P:
        """What `node` is made of. A plan is made anew when that has changed. Raises `Unreadable`."""
        found = kind.of(node)
        if (kind, id(node)) not in self.guarded:
            self.guarded.add((kind, id(node)))
            self.guards += guards_of(node, found)
        return found

    def note(self, path: str, node: object, level: Level, components: Sequence[str] = (), reason: str = "") -> None:
        self.draft.nodes.append(TraceNode(path, type(node).__name__, level, tuple(components), reason))

    @contextmanager
    def noting(self, path: str, node: object) -> Iterator[list[str]]:
        """The body lowers `node`, or raises `NotUnderstood` before anything is added: noted, and passed over.

        It gets a list, for the reasons why some of it is left to the plain object.
        """
        before, reasons = set(self.draft.components), list[str]()
        try:
            with classes.as_made():
                yield reasons
        except NotUnderstood as why:
            for name in set(self.draft.components) - before:
                del self.draft.components[name]
            self.note(path, node, classes.level(node), reason=str(why))
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
        run: model_calls.Run,
        inputs: Mapping[str, Ref],
        *,
        value: Callable[[str, Mapping[str, Any]], Any] | None = None,
        blanks: model_calls.Blanks | None = None,
        items: str = "",
        expected: int | None = None,
        forms: tuple[DraftText, ...] = (),
        in_sync_code: bool = False,
    ) -> Ref:
        """One call of an LLM by `run`, the framework's code; the ref of what `run` returns.

        `value` says that of the LLM's text and the inputs, where it takes less than running `run` again. `items` says
        how the text spells the list that `run` returns, `expected` how many there are; `forms`: see `Attributes`.
        `in_sync_code`: the original uses sync methods here, also in a loop.
        """
        if not is_pool_llm(llm):
            return ask_own_llm(self, wanted, llm, run, inputs, value, in_sync_code=in_sync_code)
        names, blanks = tuple(inputs), blanks or {}
        name = self.name(wanted, *DERIVED, "parsed")
        component = Component(
            name,
            Role.GENERATION,
            tuple(inputs.items()),
            llm.engine,
            prompt=model_calls.parts(llm, run, names, blanks),
            expected=expected,
            scope=self.scope,
            attributes=Attributes(items=items, forms=forms or self.forms, form=self._form_of(llm)),
        )
        made = self.draft.add(component, lambda given: model_calls.captured(llm, run, given, blanks, names))
        if items:
            self.draft.list_spellings[f"{name}.parsed"] = items

        def parsed(generation: Any, **given: Any) -> Any:
            if value is not None:
                return value(llm.text_of(generation), given)
            return model_calls.replayed(llm, run, given, [generation])

        return self.draft.call(f"{name}.parsed", parsed, self.scope, generation=made, **inputs)

    @contextmanager
    def answered_with(self, *labels: str) -> Iterator[None]:
        """What is asked for in the body is read by what understands only these answers."""
        before, self.forms = self.forms, label_forms(labels)
        try:
            yield
        finally:
            self.forms = before

    def _form_of(self, llm: Any) -> Literal["", "whole", "unknown"]:
        """Return how the original asks the LLM for an answer; see `Attributes.form`."""
        if not getattr(llm, "sends_own_requests", False):
            return ""
        return "unknown" if self.may_stream else "whole"

    @contextmanager
    def streaming(self, streams: bool) -> Iterator[None]:
        """If `streams`, the answers to what is asked in the body may be streamed."""
        before, self.may_stream = self.may_stream, self.may_stream or streams
        try:
            yield
        finally:
            self.may_stream = before

    def hold(self, wanted: str, role: Role, inputs: Inputs, body: Walk, output: Ref, **more: Any) -> Ref:
        """A component that holds the body's template."""
        name = self.name(wanted)
        self.draft.absorb(body.draft)
        inner = body.draft.template(output, name)
        if role is Role.MAP:  # in `query`, one item comes after the other
            more.setdefault("attributes", Attributes(beside=not self.runs_in_loop))
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


def is_pool_llm(llm: Any) -> bool:
    """Return True for an LLM on an engine of a pool."""
    return hasattr(llm, "payload_of_template")


def pool_llm(llm: Any) -> Any:
    """The LLM if it is pool-backed and its calls are LlamaIndex's. Raises `NotUnderstood`."""
    if not is_pool_llm(llm):
        raise NotUnderstood(f"its LLM, a {type(llm).__name__}, is not on the pool")
    if llm.output_parser is not None:
        raise NotUnderstood("its LLM parses what it writes")
    if rate_limiter(llm) is not None:
        raise NotUnderstood("a rate limiter says when its LLM is called")
    return llm
