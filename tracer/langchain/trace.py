"""The tracer of LangChain Runnables. Nothing runs: symbolic values flow through the tree instead.

A node that is not understood becomes an OPAQUE component: it runs as it always did, and the graph learns its value from
the run of the original (`TraceResult.watched`). See `symbols` for the values, `report` for what the user reads.
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
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.retry import RunnableRetry
from langchain_core.tools import BaseTool

from teola_plugin.graph import (
    INPUT,
    ITEM,
    Attributes,
    Component,
    Ref,
    Role,
    items_of,
    named,
    on_loop,
    read_path,
    simple,
)
from teola_plugin.shims.langchain import handlers_in, is_structured_output_parser, streams
from teola_plugin.tracer.draft import DERIVED, Draft, Names, Span, TraceResult, mark_fallible
from teola_plugin.tracer.langchain.classes import (
    check_runnable,
    children,
    choice_of,
    find_override,
    find_pool_backed,
    functions_of,
    has_own_run,
    is_accelerated,
    is_transparent,
    leaf_of,
    reason_not_lowered,
    short_name,
    store_effects,
    unwrap_accelerated,
)
from teola_plugin.tracer.langchain.equivalents import (
    InputAsDict,
    PureStep,
    SequentialEach,
    equivalent_beginning,
    equivalent_chain,
)
from teola_plugin.tracer.langchain.leaves import lower_leaf, lower_parser
from teola_plugin.tracer.langchain.prompts import bind_prompt, prompt_shape
from teola_plugin.tracer.leaf import PERMISSION, GenerationLeaf, WrappedLeaf
from teola_plugin.tracer.lookahead import lookahead_of_choice
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

Node = Runnable[Any, Any]
FindLeaf = Callable[[Node, Mapping[str, Any], str], WrappedLeaf | None]
"""(node, bound arguments, path) -> its leaf, for objects that are not pool-backed."""
ReadFunction = Callable[[Draft, Any, Ref, str, bool | None], Names]
"""(draft, function, its argument, name, True if only a loop runs it or False if none does) -> adds what the user's
function asks engines for. Returns the first of it."""
Lowered = tuple[Value, Span]
RunPath = tuple[str, ...]
"""The tags of a run and of the runs around it, outermost first: where in the chain the run belongs.

LangChain tags the child runs of a composite: `seq:step:2` (from 1), `map:key:context`. A `RunnableAssign` has a run of
its own with one untagged child, its mapper; a `RunnableBinding` has none; the children of `.map()` are untagged and
many, so nothing inside them can be told apart; an alternative of a `RunnableWithFallbacks` reports beside it, under the
same tag, with the same value. The tags are the same for invoke, ainvoke, stream and astream.
"""
UNTAGGED = "mapper"
"""Element of a run path for a child without a tag of its own."""


def trace(
    runnable: object, find_leaf: FindLeaf | None = None, read_function: ReadFunction | None = None
) -> TraceResult:
    """Trace a Runnable. Run no user code, change nothing.

    `find_leaf` says which of the user's own objects are leaves; any other one runs as it always did. `read_function`
    reads the source of the user's functions; without it their calls are not known. Raise `TraceError` for an object
    that is no Runnable.
    """
    check_runnable(runnable, "chain")
    assert isinstance(runnable, Runnable)
    draft = Draft()
    value, _ = _ChainTracer(draft, find_leaf, read_function).lower(runnable, Ref(INPUT), _Location())
    return draft.finish(draft.materialize(value, "output", ()), "chain")


def trace_into(
    draft: Draft,
    node: Node,
    value: Value,
    prefix: str,
    path: str,
    kwargs: Mapping[str, Any],
    *,
    may_stream: bool = False,
    find_leaf: FindLeaf | None = None,
) -> tuple[Value, Span]:
    """Add the components of a call of `node` by user code to `draft`. Return the symbolic result, and their span.

    `prefix` begins their names; `path` is the call's location in the report. `may_stream`: the call may make models
    stream. `find_leaf`: see `trace`. No run is watched. Raise `TraceError` for an object that is no Runnable.
    """
    location = _Location(path, prefix=prefix, owns_prefix=False, is_watched=False, kwargs=kwargs, may_stream=may_stream)
    return _ChainTracer(draft, find_leaf).lower(node, value, location)


@dataclass(frozen=True, slots=True)
class _Location:
    """The location of a node in the chain."""

    path: str = "chain"
    """Path of attributes, for the report."""
    run_path: RunPath = ()
    prefix: str = ""
    """Path of keys, which names the node's components."""
    owns_prefix: bool = True
    """True if nothing else has the same prefix, so that the node's component may take the prefix as its name."""
    is_watched: bool = True
    """False inside `.map()`, where runs cannot be told apart."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are bound to the node."""
    may_stream: bool = False
    """True if models in it may stream even if the query's entry point does not."""

    def name(self, word: str) -> str:
        """Return the preferred name of the node's main component."""
        return self.prefix if self.owns_prefix and self.prefix else self.part_name(word)

    def part_name(self, word: str) -> str:
        """Return a name that leaves the prefix to another component."""
        return f"{self.prefix}.{word}" if self.prefix else word

    def at_key(self, key: str) -> _Location:
        run_path = (*self.run_path, f"map:key:{key}")
        path = f'{self.path}.steps__["{key}"]'
        return replace(self, path=path, run_path=run_path, prefix=self.part_name(key), owns_prefix=True)

    def at_step(self, index: int, *, owns_prefix: bool) -> _Location:
        """Return the location of a sequence's step at this index. Bound arguments go to the first step alone."""
        return replace(
            self,
            path=f"{self.path}.steps[{index}]",
            run_path=(*self.run_path, f"seq:step:{index + 1}"),
            owns_prefix=owns_prefix,
            kwargs=self.kwargs if index == 0 else {},
        )


class _ChainTracer:
    """A walk through the nodes of one template; the body of a `.map()` has a tracer of its own."""

    def __init__(
        self, draft: Draft, find_leaf: FindLeaf | None = None, read_function: ReadFunction | None = None
    ) -> None:
        self._draft = draft
        self._find_leaf, self._read_function = find_leaf, read_function
        # (class, whether it takes bound arguments, how it is lowered); the first match counts
        self._rules: tuple[tuple[type, bool, Callable[[Any, Value, _Location], Lowered]], ...] = (
            (RunnableSequence, True, self._lower_sequence),
            (RunnableAssign, False, self._lower_assign),
            (RunnableParallel, False, self._lower_parallel),
            (RunnableBinding, True, self._lower_binding),
            (RunnableEach, True, self._lower_each),
            (RunnableRetry, True, self._lower_first_try),
            (RunnableWithFallbacks, True, self._lower_first_try),
            (RunnableLambda, False, self._lower_lambda),
            (RunnablePassthrough, False, self._lower_passthrough),
            (RunnablePick, False, self._lower_pick),
            (BasePromptTemplate, True, self._lower_prompt),
            (BaseOutputParser, False, self._lower_parser),
        )

    def lower(self, node: Node, value: Value, location: _Location) -> Lowered:
        """Return the symbolic result of `node` for the symbolic input `value`, and the span of its components."""
        check_runnable(node, location.path)
        try:
            return self._lower_by_rules(node, value, location)
        except NotUnderstood as reason:
            heads = self._add_calls_of_function(node, value, location)
            opaque, span = self._add_opaque(node, value, location, str(reason))
        self._add_lookahead(node, value, location)
        return opaque, Span(heads + span.heads, span.tails)

    def _lower_by_rules(self, node: Node, value: Value, location: _Location) -> Lowered:
        """Lower a node by the first rule that fits: a pool-backed object, an equivalent chain, or a known class.

        Raise `NotUnderstood` with the reason, for the report, if no rule fits or its class overrides what the rule
        relies on.
        """
        leaf = leaf_of(node, location.kwargs)
        if isinstance(leaf, str):
            raise NotUnderstood(leaf)
        equivalent = None if leaf is not None or location.kwargs else equivalent_chain(node)
        problem = "" if equivalent is None else self._find_problem(equivalent, location)
        if equivalent is not None and not problem:
            return self._lower_as(node, equivalent, value, location)
        if leaf is None and self._find_leaf is not None:
            leaf = self._find_leaf(node, location.kwargs, location.path)
        if leaf is not None:
            if location.may_stream and isinstance(leaf, GenerationLeaf):
                leaf = leaf.with_unknown_form()
            before = len(self._draft.components)
            result = lower_leaf(self._draft, leaf, value, location.name, location.run_path)
            return self._finish_leaf(node, location, result, before)
        if not location.kwargs and (beginning := equivalent_beginning(node)) is not None:
            return self._lower_beginning(node, beginning, value, location)
        if problem:
            raise NotUnderstood(problem)
        for base, takes_kwargs, lower in self._rules:
            if isinstance(node, base):
                is_checked_later = issubclass(base, (BasePromptTemplate, BaseOutputParser))
                if not is_checked_later and (override := find_override(node, base)):
                    raise NotUnderstood(f"{override} overrides what {base.__name__} does")
                if location.kwargs and not takes_kwargs:
                    raise NotUnderstood("has bound arguments, which its code may read")
                return lower(node, value, location)
        raise NotUnderstood(reason_not_lowered(node))

    # ------------------------------------------------------------ composites

    def _lower_sequence(self, node: RunnableSequence[Any, Any], value: Value, location: _Location) -> Lowered:
        """Add the components of a sequence's steps, in order. Return the symbolic result of the last step."""
        owns_prefix = location.owns_prefix and sum(not is_transparent(step) for step in node.steps) <= 1
        sequence_span = Span()
        for i, step in enumerate(node.steps):
            value, span = self.lower(step, value, location.at_step(i, owns_prefix=owns_prefix))
            sequence_span = self._draft.in_sequence(sequence_span, span)
        return value, sequence_span

    def _lower_parallel(self, node: RunnableParallel[Any], value: Value, location: _Location) -> Lowered:
        """Add the components of steps that all get the same input. Return a dictionary of their symbolic results."""
        items: dict[str, Value] = {}
        heads: Names = ()
        tails: Names = ()
        for key, step in node.steps__.items():
            items[key], span = self.lower(step, value, location.at_key(key))
            heads, tails = heads + span.heads, tails + span.tails
        return Record(items), Span(heads, tails)

    def _lower_assign(self, node: RunnableAssign, value: Value, location: _Location) -> Lowered:
        """Add the components of steps that add keys to a dictionary. Return the dictionary with these keys."""
        if override := find_override(node.mapper, RunnableParallel):
            raise NotUnderstood(f"{override} overrides what RunnableParallel does")
        record = merge(value, {})  # it takes nothing but a dictionary, so keys are known to be keys
        run_path = (*location.run_path, UNTAGGED)
        mapper_location = replace(location, path=f"{location.path}.mapper", run_path=run_path)
        assigned, span = self._lower_parallel(node.mapper, record, mapper_location)
        assert isinstance(assigned, Record)
        return merge(record, assigned.items), span

    def _lower_binding(self, node: RunnableBinding[Any, Any], value: Value, location: _Location) -> Lowered:
        """Add the components of a bound Runnable. Callbacks in the binding's config may make its models stream."""
        may_stream = location.may_stream or streams(handlers_in(node.config.get("callbacks")))
        kwargs = {**node.kwargs, **location.kwargs}
        bound_location = replace(location, path=f"{location.path}.bound", kwargs=kwargs, may_stream=may_stream)
        return self.lower(node.bound, value, bound_location)

    def _lower_first_try(self, node: Node, value: Value, location: _Location) -> Lowered:
        """Lower what a retry, or a node with fallbacks, calls first: that call of the user's own model is certain.

        Raises `NotUnderstood` for parts on engines, whose plan goes on with what another try gives.
        """
        if self._find_leaf is None or next(find_pool_backed(node, location.path), None) is not None:
            raise NotUnderstood(reason_not_lowered(node))
        (suffix, part), *_ = children(node)
        assert isinstance(part, Runnable)
        kwargs = {**node.kwargs, **location.kwargs} if isinstance(node, RunnableRetry) else location.kwargs
        run_path = (*location.run_path, UNTAGGED)
        part_location = replace(
            location, path=location.path + suffix, run_path=run_path, is_watched=False, kwargs=kwargs
        )
        return self.lower(part, value, part_location)

    def _lower_each(self, node: RunnableEach[Any, Any], value: Value, location: _Location) -> Lowered:
        """Lower `.map()` as a MAP whose body is lowered once for any item.

        Raise `NotUnderstood` if a part of the body is not lowered, since runs inside it cannot be watched.
        """
        value = simplify(value)
        if not isinstance(value, Ref):
            raise NotUnderstood("maps over a dictionary or a prompt")
        body = self._draft.new_body()
        preferred_name = location.name("each")
        body_location = _Location(
            f"{location.path}.bound",
            (*location.run_path, UNTAGGED),
            prefix=preferred_name,
            owns_prefix=False,
            is_watched=False,
            kwargs=location.kwargs,
            may_stream=location.may_stream,
        )
        body_result, _ = _ChainTracer(body, self._find_leaf).lower(node.bound, Ref(ITEM), body_location)
        for row in body.nodes:
            if row.level != "lowered":
                raise NotUnderstood(
                    f"a map is planned only if its whole body is understood, and {row.path} is not: {row.reason}"
                )
        name = self._draft.name(preferred_name, *DERIVED)
        value = self._with_keys(value, body, name, location)
        template = body.template(body.materialize(body_result, name, location.run_path), name)
        self._add_row(node, location, "lowered", (name,))
        self._draft.absorb(body)
        component = Component(
            name,
            Role.MAP,
            named(items=value),
            scope=location.run_path,
            body=template,
            attributes=Attributes(is_parallel=isinstance(node, SequentialEach)),
        )
        return self._draft.add(component), Span((name,), (name,))

    def _with_keys(self, items: Ref, body: Draft, name: str, location: _Location) -> Ref:
        """Return the items that a body is run for: if own models are certain to be called in it, all items must have
        what it reads of them, as the original makes all prompts before the first call."""
        is_certain = any(PERMISSION in component.effects for component in body.components.values())
        refs = [ref for component in body.components.values() for _, ref in component.inputs] + body.required_keys
        keys = tuple(dict.fromkeys(ref.path for ref in refs if ref.producer == ITEM and ref.path))
        variables = tuple(ref.path for ref in body.required_variables if ref.producer == ITEM)
        if not is_certain or not (keys or variables):
            return items

        def check(items: Any) -> Any:
            """Return the items unchanged. Raise for a missing key, as the original would before its first call."""
            for item in items_of(items):
                for path in keys + (variables if isinstance(item, dict) else ()):
                    read_path(item, path)
            return items

        return self._draft.call(f"{name}.items", mark_fallible(check), location.run_path, items=items)

    # ------------------------------------------------------------ equivalents and lookahead

    def _find_problem(self, equivalent: Node, location: _Location) -> str:
        """Return the reason why not all of an equivalent is lowered, "" if all is.

        No run inside of it can be watched, because the original has other runs.
        """
        trial = Draft()
        _ChainTracer(trial, self._find_leaf).lower(equivalent, Ref(INPUT), replace(location, is_watched=False))
        row = next((row for row in trial.nodes if row.level != "lowered"), None)
        return "" if row is None else f"its {row.class_name} is not understood: {row.reason}"

    def _lower_as(self, node: Node, equivalent: Node, value: Value, location: _Location) -> Lowered:
        """Lower a node as its equivalent is lowered, all of which is known to be understood."""
        row_count, component_count = len(self._draft.nodes), len(self._draft.components)
        lowered = self.lower(equivalent, simplify(value), replace(location, is_watched=False))
        del self._draft.nodes[row_count:]
        self._add_row(node, location, "lowered", tuple(self._draft.components)[component_count:])
        return lowered

    def _lower_beginning(self, node: Node, beginning: Node, value: Value, location: _Location) -> Lowered:
        """Lower the first requests of a node; the rest is its own code, in its place."""
        if problem := self._find_problem(beginning, location):
            raise NotUnderstood(problem)
        row_count = len(self._draft.nodes)
        result, _ = self._lower_as(node, beginning, value, location)
        lowered = self._add_opaque(node, Record({"given": simplify(value), "first": result}), location, "")
        names = tuple(name for row in self._draft.nodes[row_count:] for name in row.components)
        del self._draft.nodes[row_count:]
        reason = "its first requests are known; the rest of it joins the query"
        self._add_row(node, location, "joined", names, reason)
        return lowered

    def _add_lookahead(self, node: Node, value: Value, location: _Location) -> None:
        """Add what the parts that an opaque composite may choose ask engines for, if it is known before the choice."""
        choice = choice_of(node) if location.is_watched and not location.kwargs else None
        if choice is None:
            return
        prefix = location.part_name("ahead")
        part_location = replace(location, is_watched=False, owns_prefix=False, prefix=prefix)
        value = read_key(value, choice.input_key) if choice.input_key else value
        drafts: list[Draft] = []
        for part in choice.parts:
            drafts.append(self._draft.new_body())
            _ChainTracer(drafts[-1]).lower(part, value, part_location)
        for component in lookahead_of_choice(drafts, choice.is_certain):
            self._draft.add(component)
        for draft in drafts:
            self._draft.adopt_calls(draft)

    # ------------------------------------------------------------ functions, prompts, parsers

    def _lower_lambda(self, node: RunnableLambda[Any, Any], value: Value, location: _Location) -> Lowered:
        """Lower a function in a chain that is certainly pure: as the keys that it reads, or as a CALL that computes it.

        Raise `NotUnderstood` for any other function.
        """
        if isinstance(node, InputAsDict) and isinstance(value, Record):
            return self._without_component(node, location, value)
        if is_structured_output_parser(vars(node).get("func")):
            return self._lower_structured_output(node, value, location)
        reads = Purity(None) if isinstance(node, PureStep) else analyze_callable(vars(node).get("func"))
        if reads is None or "afunc" in vars(node):
            raise NotUnderstood(reason_not_lowered(node))
        before = len(self._draft.components)
        if isinstance(reads, Purity):
            if reads.path is not None:
                return self._without_component(node, location, self._read_path(value, reads.path))
            result = self._call_pure(node, reads, value, location)
        elif isinstance(reads, AttributeGetter):
            result = self._get_attribute(reads, value, location)
        elif len(reads.keys) == 1:
            return self._without_component(node, location, self._read_path(value, reads.keys))
        else:
            result = self._pack_tuple([read_key(value, key) for key in reads.keys], location)
        return self._finish_leaf(node, location, result, before)

    def _add_calls_of_function(self, node: Node, value: Value, location: _Location) -> Names:
        """Add the calls that a function of the user's certainly makes, and return the first component of them.

        They begin where the function does: once its argument is there, and all calls before it have ended.
        """
        if self._read_function is None or location.kwargs or not location.is_watched:
            return ()
        draft, inner, preferred_name = self._draft, self._draft.new_body(), location.name(short_name(node))
        name = draft.name(f"{preferred_name}.argument")
        heads: Names = ()
        for on_loop_only, function in functions_of(node).items():
            heads += self._read_function(inner, function, Ref(name), preferred_name, on_loop_only)
        if not heads:
            return ()
        inputs = named(value=draft.materialize(value, name, location.run_path))
        begin = Component(name, Role.CALL, inputs, effects=(replace(PERMISSION, writes=True),), scope=location.run_path)
        draft.add(begin, on_loop(lambda value: value))
        draft.components |= inner.components
        draft.order += [*inner.order, *((name, head) for head in heads)]
        draft.nodes += inner.nodes
        draft.adopt_calls(inner)
        return (name,)

    def _read_path(self, value: Value, keys: tuple[str | int, ...]) -> Value:
        """Return the value under several keys, one inside the other, and note that the original needs them."""
        for key in keys:
            value = read_key(value, key)
        if isinstance(value, Ref) and value.path:
            self._draft.required_keys.append(value)
        return value

    def _call_pure(self, node: RunnableLambda[Any, Any], reads: Purity, value: Value, location: _Location) -> Ref:
        """Add a CALL of the user's pure function, on what it reads of its argument."""
        keys = None if reads.keys is None else {key: read_key(value, key) for key in reads.keys}
        func, name = node.func, self._draft.name(location.name(short_name(node)))
        arguments = {"value": value} if keys is None else keys
        inputs = {key: self._draft.materialize(item, name, location.run_path) for key, item in arguments.items()}
        self._draft.list_spellings[name] = ""

        def call(**values: Any) -> Any:
            return call_on_plain(func, values["value"] if keys is None else values, reads.degree)

        marked = simple(plain_size)(call) if reads.degree == 1 else call
        component = Component(name, Role.CALL, tuple(inputs.items()), scope=location.run_path)
        return self._draft.add(component, marked if isinstance(node, PureStep) else mark_fallible(marked))

    def _lower_structured_output(self, node: RunnableLambda[Any, Any], value: Value, location: _Location) -> Lowered:
        """Add a CALL of the framework's function that reads the parsed object from a message."""
        value = simplify(value)
        if not isinstance(value, Ref):
            raise NotUnderstood("parses a dictionary or a prompt, which it does not take")
        before, func = len(self._draft.components), node.func
        name = self._draft.name(location.name("parse"))
        self._draft.list_spellings[name] = ""
        result = self._draft.call(name, mark_fallible(lambda value: func(value)), location.run_path, value=value)
        return self._finish_leaf(node, location, result, before)

    def _pack_tuple(self, items: list[Value], location: _Location) -> Ref:
        """Add a CALL that makes a tuple of several values, as `itemgetter` with several keys returns it."""
        name = self._draft.name(location.part_name("items"))
        inputs = {str(i): self._draft.materialize(item, name, location.run_path) for i, item in enumerate(items)}
        pack = on_loop(lambda **values: tuple(values[key] for key in inputs))
        return self._draft.call(name, pack, location.run_path, **inputs)

    def _get_attribute(self, getter: AttributeGetter, value: Value, location: _Location) -> Ref:
        """Add a CALL that reads an attribute of a value. Raise `NotUnderstood` for a dictionary or a prompt."""
        value = simplify(value)
        if not isinstance(value, Ref):
            raise NotUnderstood("reads an attribute of a dictionary or a prompt")
        name = self._draft.name(location.part_name("attribute"))
        self._draft.list_spellings[name] = ""
        call = mark_fallible(lambda value: getter.get(value))
        return self._draft.call(name, call, location.run_path, value=value)

    def _lower_passthrough(self, node: RunnablePassthrough[Any], value: Value, location: _Location) -> Lowered:
        """Return the input unchanged. A function that is called with it, for its side effects, becomes OPAQUE."""
        if node.func is None and node.afunc is None:
            return self._without_component(node, location, value)
        reason = "passes its input on, and calls your function beside: a side effect"
        _, span = self._add_opaque(node, value, location, reason)
        return value, span

    def _lower_pick(self, node: RunnablePick, value: Value, location: _Location) -> Lowered:
        """Return the value of a key, or a dictionary of several keys. Raise `NotUnderstood` if none is there."""
        if isinstance(node.keys, str):
            return self._without_component(node, location, read_key(value, node.keys))
        keys = [k for k in node.keys if not isinstance(value, Record) or value.base is not None or k in value.items]
        if not keys:
            raise NotUnderstood("picks nothing that the dictionary before it has")
        return self._without_component(node, location, Record({key: read_key(value, key) for key in keys}))

    def _lower_prompt(self, node: BasePromptTemplate[Any], value: Value, location: _Location) -> Lowered:
        """Return the prompt that a template makes of its input; the model that reads it gets the template's parts."""
        shape = prompt_shape(node)
        if isinstance(value, Ref) and len(shape.required) == 1:
            self._draft.required_variables.append(value.at(shape.required[0]))
        return self._without_component(node, location, bind_prompt(shape, value))

    def _lower_parser(self, node: BaseOutputParser[Any], value: Value, location: _Location) -> Lowered:
        before = len(self._draft.components)
        result = lower_parser(self._draft, node, value, location.name, location.run_path)
        return self._finish_leaf(node, location, result, before)

    # ------------------------------------------------------------ rows and components

    def _without_component(self, node: Node, location: _Location, value: Value) -> Lowered:
        self._add_row(node, location, "lowered")
        return value, Span()

    def _finish_leaf(self, node: Node, location: _Location, result: Ref, before: int) -> Lowered:
        """Add the row of a node whose components are those after the first `before` ones. Return its lowered form."""
        names = tuple(self._draft.components)[before:]
        self._add_row(node, location, "lowered", names)
        return result, self._draft.span(names)

    def _add_opaque(self, node: Node, value: Value, location: _Location, reason: str) -> Lowered:
        """Add a component that only stands for a node that is not understood, and its row in the report, with the
        `reason`.

        Its value is taken from the original's run of the node. Pool-backed objects inside the node get rows of their
        own.
        """
        to_name = location.part_name if is_transparent(node) else location.name
        name = self._draft.name(to_name(short_name(node)))
        component = Component(
            name,
            Role.OPAQUE,
            with_unique_names(refs_of(value)),
            effects=store_effects(vars(node).get("func")) if isinstance(node, RunnableLambda) else (),
            scope=location.run_path,
            attributes=Attributes(slow=isinstance(node, (BaseRetriever, BaseLanguageModel, BaseTool))),
        )
        self._draft.add(component)
        if isinstance(node, (RunnableLambda, RunnableGenerator, BaseOutputParser)):
            self._draft.list_spellings[name] = ""
        if location.is_watched and has_own_run(node):
            self._draft.watched[location.run_path] = name
        pool_backed = list(find_pool_backed(node, location.path))
        self._add_row(node, location, "joined" if pool_backed else "original", (name,), reason)
        for path, part in pool_backed:
            if path != location.path:
                reason = "joins the query when it is called"
                if is_accelerated(part):
                    reason += ", with a plan of its own"
                kind = type(unwrap_accelerated(part)).__name__
                self._draft.nodes.append(TraceNode(path, kind, "joined", reason=reason))
        return Ref(name), Span((name,), (name,))

    def _add_row(self, node: Node, location: _Location, level: Level, components: Names = (), reason: str = "") -> None:
        self._draft.nodes.append(TraceNode(location.path, type(node).__name__, level, components, reason))
