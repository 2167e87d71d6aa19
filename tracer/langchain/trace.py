"""LangChain Runnable -> workflow template. Nothing runs: symbolic values flow through the tree instead.

What is not understood becomes an OPAQUE component: it runs as it always did, and the graph learns its value from the
plain run (`Traced.watched`). See `symbols` for the values, `report` for what the user reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.tools import BaseTool

from teola_plugin.graph import INPUT, ITEM, Attributes, Component, Ref, Role, named, on_loop, simple
from teola_plugin.shims.langchain import handlers_in, streams
from teola_plugin.tracer.draft import DERIVED, Draft, Names, Span, TraceResult, mark_fallible
from teola_plugin.tracer.langchain import paths
from teola_plugin.tracer.langchain.classes import (
    changed,
    check_runnable,
    emits_own_run,
    is_accelerated,
    leaf_of,
    pool_backed_inside,
    reason,
    short_name,
    silent,
)
from teola_plugin.tracer.langchain.equivalents import AsDict, Computed, SequentialEach, beginning, equivalent
from teola_plugin.tracer.langchain.leaves import lower_leaf, lower_parser
from teola_plugin.tracer.langchain.lookahead import begun_early, choice
from teola_plugin.tracer.langchain.prompts import bind, understand
from teola_plugin.tracer.langchain.stores import written
from teola_plugin.tracer.leaf import GenerationLeaf, WrappedLeaf
from teola_plugin.tracer.purity.purity import AttributeGetter, Purity, analyze_callable, call_on_plain, plain_size
from teola_plugin.tracer.report import Level, TraceNode
from teola_plugin.tracer.symbols import (
    NotUnderstood,
    Record,
    Value,
    merge,
    read_key,
    refs_of,
    simplify,
    with_unique_names,
)

__all__ = ["TraceResult", "trace", "walk_into"]

Node = Runnable[Any, Any]


Leaves = Callable[[Node, Mapping[str, Any], str], WrappedLeaf | None]
"""(node, bound arguments, path) -> its leaf, for objects that are not pool-backed."""


def trace(runnable: object, leaves: Leaves | None = None) -> TraceResult:
    """The template, callables, sizes, watched paths and report of a Runnable. Runs no user code, changes nothing.

    `leaves` says which of the user's own objects are leaves; without it, or by its None, they run as they always did.
    Raises `TraceError` for an object that is no Runnable.
    """
    check_runnable(runnable, "chain")
    assert isinstance(runnable, Runnable)
    draft = Draft()
    value, _ = _Walk(draft, leaves).visit(runnable, Ref(INPUT), _Place())
    return draft.finish(draft.materialize(value, "output", ()), "chain")


def walk_into(
    draft: Draft, node: Node, value: Value, prefix: str, path: str, kwargs: Mapping[str, Any], *, streamed: bool = False
) -> tuple[Value, Span]:
    """What `node` returns when user code calls it with `value`; its components go into `draft`. Nothing is watched.

    `prefix` leads their names, `path` says in the report where the call stands. `streamed`: the call may make models
    stream. Raises `TraceError` for an object that is no Runnable.
    """
    place = _Place(path, prefix=prefix, alone=False, watched=False, kwargs=kwargs, streamed=streamed)
    return _Walk(draft).visit(node, value, place)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node stands."""

    path: str = "chain"
    """For the report."""
    tags: Names = ()
    """Node path of its run, see `paths`."""
    prefix: str = ""
    """Key path that names its components."""
    alone: bool = True
    """Whether it is all there is under its prefix, so that it may take the prefix as its name."""
    watched: bool = True
    """False inside `.map()`, where runs cannot be told apart."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments bound to it."""
    streamed: bool = False
    """Whether models in it may stream, whatever its query does."""

    def name(self, word: str) -> str:
        return self.prefix if self.alone and self.prefix else self.part(word)

    def part(self, word: str) -> str:
        """A name that leaves the prefix to the component that matters there."""
        return f"{self.prefix}.{word}" if self.prefix else word

    def key(self, key: str) -> _Place:
        path = f'{self.path}.steps__["{key}"]'
        return replace(self, path=path, tags=(*self.tags, paths.key(key)), prefix=self.part(key), alone=True)

    def step(self, index: int, *, alone: bool) -> _Place:
        return replace(
            self,
            path=f"{self.path}.steps[{index}]",
            tags=(*self.tags, paths.step(index)),
            alone=alone,
            kwargs=self.kwargs if index == 0 else {},
        )


Lowered = tuple[Value, Span]


class _Walk:
    """Walks one template's part of the tree; a `.map()` body has a walk of its own."""

    def __init__(self, draft: Draft, leaves: Leaves | None = None) -> None:
        self._draft = draft
        self._leaves = leaves
        # (class, whether it takes bound arguments, how it is lowered), the first match counts
        self._rules: tuple[tuple[type, bool, Callable[[Any, Value, _Place], Lowered]], ...] = (
            (RunnableSequence, True, self._sequence),
            (RunnableAssign, False, self._assign),
            (RunnableParallel, False, self._parallel),
            (RunnableBinding, True, self._binding),
            (RunnableEach, True, self._each),
            (RunnableLambda, False, self._lambda),
            (RunnablePassthrough, False, self._passthrough),
            (RunnablePick, False, self._pick),
            (BasePromptTemplate, True, self._prompt),
            (BaseOutputParser, False, self._parser),
        )

    def visit(self, node: Node, value: Value, place: _Place) -> Lowered:
        """The symbolic value of `node` for the symbolic input `value`, and the span of its components."""
        check_runnable(node, place.path)
        try:
            return self._lowered(node, value, place)
        except NotUnderstood as why:
            made = self._opaque(node, value, place, str(why))
        self._look_ahead(node, value, place)
        return made

    def _lowered(self, node: Node, value: Value, place: _Place) -> Lowered:
        leaf = leaf_of(node, place.kwargs)
        if isinstance(leaf, str):
            raise NotUnderstood(leaf)
        like = None if leaf is not None or place.kwargs else equivalent(node)
        hidden = "" if like is None else self._hidden(like, place)
        if like is not None and not hidden:
            return self._like(node, like, value, place)
        if leaf is None and self._leaves is not None:
            leaf = self._leaves(node, place.kwargs, place.path)
        if leaf is not None:
            with_leaf = leaf
            if place.streamed and isinstance(leaf, GenerationLeaf):
                with_leaf = leaf.with_unknown_form()
            return self._leaf(node, place, lambda: lower_leaf(self._draft, with_leaf, value, place.name, place.tags))
        if not place.kwargs and (first := beginning(node)) is not None:
            return self._begun(node, first, value, place)
        if hidden:
            raise NotUnderstood(hidden)
        for known, takes_kwargs, lower in self._rules:
            if isinstance(node, known):
                if not issubclass(known, (BasePromptTemplate, BaseOutputParser)) and (other := changed(node, known)):
                    raise NotUnderstood(f"{other} overrides what {known.__name__} does")
                if place.kwargs and not takes_kwargs:
                    raise NotUnderstood("has bound arguments, which its code may read")
                return lower(node, value, place)
        raise NotUnderstood(reason(node))

    # Structure

    def _sequence(self, node: RunnableSequence[Any, Any], value: Value, place: _Place) -> Lowered:
        alone = place.alone and sum(not silent(step) for step in node.steps) <= 1
        whole = Span()
        for i, step in enumerate(node.steps):
            value, span = self.visit(step, value, place.step(i, alone=alone))
            whole = self._draft.in_sequence(whole, span)
        return value, whole

    def _parallel(self, node: RunnableParallel[Any], value: Value, place: _Place) -> Lowered:
        items: dict[str, Value] = {}
        heads: Names = ()
        tails: Names = ()
        for key, step in node.steps__.items():
            items[key], span = self.visit(step, value, place.key(key))
            heads, tails = heads + span.heads, tails + span.tails
        return Record(items), Span(heads, tails)

    def _assign(self, node: RunnableAssign, value: Value, place: _Place) -> Lowered:
        if other := changed(node.mapper, RunnableParallel):
            raise NotUnderstood(f"{other} overrides what RunnableParallel does")
        record = merge(value, {})  # it takes nothing but a dictionary, so keys are known to be keys
        inner = replace(place, path=f"{place.path}.mapper", tags=(*place.tags, paths.UNTAGGED))
        made, span = self._parallel(node.mapper, record, inner)
        assert isinstance(made, Record)
        return merge(record, made.items), span

    def _binding(self, node: RunnableBinding[Any, Any], value: Value, place: _Place) -> Lowered:
        streamed = place.streamed or streams(handlers_in(node.config.get("callbacks")))
        kwargs = {**node.kwargs, **place.kwargs}
        inner = replace(place, path=f"{place.path}.bound", kwargs=kwargs, streamed=streamed)
        return self.visit(node.bound, value, inner)

    def _each(self, node: RunnableEach[Any, Any], value: Value, place: _Place) -> Lowered:
        value = simplify(value)
        if not isinstance(value, Ref):
            raise NotUnderstood("maps over a dictionary or a prompt")
        body = self._draft.body()
        wanted = place.name("each")
        tags = (*place.tags, paths.UNTAGGED)
        inner = _Place(f"{place.path}.bound", tags, wanted, False, False, place.kwargs, place.streamed)
        inside, _ = _Walk(body, self._leaves).visit(node.bound, Ref(ITEM), inner)
        hidden = next((n for n in body.nodes if n.level != "lowered"), None)
        if hidden is not None:
            raise NotUnderstood(f"{hidden.path} is not understood, so what it maps is not either: {hidden.reason}")
        name = self._draft.name(wanted, *DERIVED)
        template = body.template(body.materialize(inside, name, place.tags), name)
        row = len(self._draft.nodes)
        self._draft.absorb(body)
        self._row(node, place, "lowered", (name,), at=row)
        said = Attributes(beside=isinstance(node, SequentialEach))
        component = Component(name, Role.MAP, named(items=value), scope=place.tags, body=template, attributes=said)
        return self._draft.add(component), Span((name,), (name,))

    def _hidden(self, like: Node, place: _Place) -> str:
        """Why not all of `like` is lowered: nothing inside can be watched, for the plain object is another."""
        trial = Draft()
        _Walk(trial, self._leaves).visit(like, Ref(INPUT), replace(place, watched=False))
        row = next((n for n in trial.nodes if n.level != "lowered"), None)
        return "" if row is None else f"its {row.class_name} is not understood: {row.reason}"

    def _like(self, node: Node, like: Node, value: Value, place: _Place) -> Lowered:
        """As `like` is lowered, all of which is."""
        rows, before = len(self._draft.nodes), len(self._draft.components)
        made = self.visit(like, simplify(value), replace(place, watched=False))
        del self._draft.nodes[rows:]
        self._row(node, place, "lowered", tuple(self._draft.components)[before:])
        return made

    def _begun(self, node: Node, first: Node, value: Value, place: _Place) -> Lowered:
        """What it asks for first is known; the rest is its own code, in its place."""
        if hidden := self._hidden(first, place):
            raise NotUnderstood(hidden)
        rows = len(self._draft.nodes)
        made, _ = self._like(node, first, value, place)
        after = self._opaque(node, Record({"given": simplify(value), "first": made}), place, "")
        names = tuple(name for row in self._draft.nodes[rows:] for name in row.components)
        del self._draft.nodes[rows:]
        self._row(node, place, "joined", names, "its first requests are known; the rest of it joins the query")
        return after

    def _look_ahead(self, node: Node, value: Value, place: _Place) -> None:
        """What it may choose asks engines for things that are known before."""
        found = choice(node) if place.watched and not place.kwargs else None
        if found is None:
            return
        inner, drafts = replace(place, watched=False, alone=False, prefix=place.part("ahead")), []
        value = read_key(value, found.key) if found.key else value
        for part in found.parts:
            drafts.append(Draft(names=self._draft.names))
            _Walk(drafts[-1]).visit(part, value, inner)
        for component in begun_early(drafts, found.certain):
            self._draft.add(component)
        for draft in drafts:
            self._draft.calls |= draft.calls
            self._draft.list_spellings |= {
                name: how for name, how in draft.list_spellings.items() if name in self._draft.components
            }

    # Leaves

    def _lambda(self, node: RunnableLambda[Any, Any], value: Value, place: _Place) -> Lowered:
        if isinstance(node, AsDict) and isinstance(value, Record):
            return self._silently(node, place, value)
        reads = Purity(None) if isinstance(node, Computed) else analyze_callable(vars(node).get("func"))
        if reads is None or "afunc" in vars(node):
            raise NotUnderstood(reason(node))
        if isinstance(reads, Purity):
            return self._pure(node, reads, value, place)
        if isinstance(reads, AttributeGetter):
            return self._attributes(node, reads, value, place)
        if len(reads.keys) == 1:
            return self._silently(node, place, self._looked_up(value, reads.keys))
        read = [read_key(value, key) for key in reads.keys]
        return self._leaf(node, place, lambda: self._tuple(read, place))

    def _looked_up(self, value: Value, keys: tuple[str | int, ...]) -> Value:
        for key in keys:
            value = read_key(value, key)
        if isinstance(value, Ref) and value.path:
            self._draft.required_keys.append(value)
        return value

    def _pure(self, node: RunnableLambda[Any, Any], reads: Purity, value: Value, place: _Place) -> Lowered:
        if reads.path is not None:
            return self._silently(node, place, self._looked_up(value, reads.path))
        keys = None if reads.keys is None else {key: read_key(value, key) for key in reads.keys}
        return self._leaf(node, place, lambda: self._computed(node, reads, keys, value, place))

    def _computed(
        self,
        node: RunnableLambda[Any, Any],
        reads: Purity,
        keys: Mapping[str, Value] | None,
        value: Value,
        place: _Place,
    ) -> Ref:
        """A CALL of the user's pure function, on what it reads."""
        func, name = node.func, self._draft.name(place.name(short_name(node)))
        read = {"value": value} if keys is None else keys
        inputs = tuple((key, self._draft.materialize(one, name, place.tags)) for key, one in read.items())
        self._draft.list_spellings[name] = ""
        component = Component(name, Role.CALL, inputs, scope=place.tags)

        def call(**given: Any) -> Any:
            return call_on_plain(func, given["value"] if keys is None else given, reads.degree)

        marked = simple(plain_size)(call) if reads.degree == 1 else call
        return self._draft.add(component, marked if isinstance(node, Computed) else mark_fallible(marked))

    def _tuple(self, read: list[Value], place: _Place) -> Ref:
        name = self._draft.name(place.part("items"))
        inputs = {str(i): self._draft.materialize(one, name, place.tags) for i, one in enumerate(read)}
        pack = on_loop(lambda **given: tuple(given[key] for key in inputs))
        return self._draft.call(name, pack, place.tags, **inputs)

    def _attributes(self, node: Node, reads: AttributeGetter, value: Value, place: _Place) -> Lowered:
        value = simplify(value)
        if not isinstance(value, Ref):
            raise NotUnderstood("reads an attribute of a dictionary or a prompt")

        def emit() -> Ref:
            name = self._draft.name(place.part("attribute"))
            self._draft.list_spellings[name] = ""
            get = mark_fallible(lambda value: reads.get(value))
            return self._draft.call(name, get, place.tags, value=value)

        return self._leaf(node, place, emit)

    def _passthrough(self, node: RunnablePassthrough[Any], value: Value, place: _Place) -> Lowered:
        if node.func is None and node.afunc is None:
            return self._silently(node, place, value)
        why = "passes its input on, and calls your function beside: a side effect"
        _, span = self._opaque(node, value, place, why)
        return value, span

    def _pick(self, node: RunnablePick, value: Value, place: _Place) -> Lowered:
        if isinstance(node.keys, str):
            return self._silently(node, place, read_key(value, node.keys))
        known = [k for k in node.keys if not isinstance(value, Record) or value.base is not None or k in value.items]
        if not known:
            raise NotUnderstood("picks nothing that the dictionary before it has")
        return self._silently(node, place, Record({key: read_key(value, key) for key in known}))

    def _prompt(self, node: BasePromptTemplate[Any], value: Value, place: _Place) -> Lowered:
        shape = understand(node)
        if isinstance(value, Ref) and len(shape.required) == 1:
            self._draft.required_variables.append(value.at(shape.required[0]))
        return self._silently(node, place, bind(shape, value))

    def _parser(self, node: BaseOutputParser[Any], value: Value, place: _Place) -> Lowered:
        return self._leaf(node, place, lambda: lower_parser(self._draft, node, value, place.name, place.tags))

    def _silently(self, node: Node, place: _Place, value: Value) -> Lowered:
        self._row(node, place, "lowered")
        return value, Span()

    def _leaf(self, node: Node, place: _Place, emit: Callable[[], Ref]) -> Lowered:
        before = len(self._draft.components)
        value = emit()
        names = tuple(self._draft.components)[before:]
        self._row(node, place, "lowered", names)
        return value, self._draft.span(names)

    def _opaque(self, node: Node, value: Value, place: _Place, why: str) -> Lowered:
        wanted = place.part if silent(node) else place.name
        name = self._draft.name(wanted(short_name(node)))
        said = Attributes(slow=isinstance(node, (BaseRetriever, BaseLanguageModel, BaseTool)))
        effects = written(vars(node).get("func")) if isinstance(node, RunnableLambda) else ()
        inputs = with_unique_names(refs_of(value))
        self._draft.add(Component(name, Role.OPAQUE, inputs, effects=effects, scope=place.tags, attributes=said))
        if isinstance(node, (RunnableLambda, RunnableGenerator, BaseOutputParser)):
            self._draft.list_spellings[name] = ""
        if place.watched and emits_own_run(node):
            self._draft.watched[place.tags] = name
        inside = list(pool_backed_inside(node, place.path))
        self._row(node, place, "joined" if inside else "original", (name,), why)
        for path, one in inside:
            if path != place.path:
                joins = "joins the query when it is called"
                what = type(one).__name__
                why = f"{joins}, with a plan of its own" if is_accelerated(one) else joins
                self._draft.nodes.append(TraceNode(path, what, "joined", reason=why))
        return Ref(name), Span((name,), (name,))

    def _row(
        self,
        node: Node,
        place: _Place,
        level: Level,
        components: Names = (),
        why: str = "",
        at: int | None = None,
    ) -> None:
        row = TraceNode(place.path, type(node).__name__, level, components, why)
        self._draft.nodes.insert(len(self._draft.nodes) if at is None else at, row)
