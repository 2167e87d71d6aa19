"""The state of lowering one LlamaIndex object into a workflow template, and the guards of the resulting plan.

Values are refs. None stands for a value that the graph does not compute: what reads it is not prefetched, and the
original computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType, ModuleType
from typing import Any, Literal, TypeVar

from teola_plugin.graph import Attributes, Component, DraftText, Ref, Role
from teola_plugin.graph.refs import Inputs
from teola_plugin.shims.llamaindex.engines import runs_in_loop
from teola_plugin.shims.llamaindex.interceptors import require_framework_methods
from teola_plugin.shims.llamaindex.models import rate_limiter
from teola_plugin.shims.llamaindex.records import Parts, Unreadable
from teola_plugin.tracer.draft import DERIVED, Draft, Names, label_forms
from teola_plugin.tracer.llamaindex import classes, model_calls
from teola_plugin.tracer.llamaindex.model_calls import OwnModels, add_own_llm_call
from teola_plugin.tracer.report import Level, TraceNode
from teola_plugin.tracer.symbols import NotUnderstood

Read = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class AttributeGuard:
    """A guard that holds while an attribute has the value that was traced."""

    node: Any
    name: str
    value: Any

    @property
    def holds(self) -> bool:
        return _is_same(getattr(self.node, self.name, None), self.value)


@dataclass(frozen=True, slots=True)
class PartsGuard:
    """A guard that holds while an object is made of the parts that were traced."""

    node: Any
    values: tuple[tuple[Read, Any], ...]
    """A reader of each part, and the value that it returned."""

    @property
    def holds(self) -> bool:
        """Return True if each part still has the value that was traced; False if one cannot be read any more."""
        try:
            return all(_is_same(read(self.node), before) for read, before in self.values)
        except Unreadable:
            return False


@dataclass(frozen=True, slots=True)
class ElementsGuard:
    """A guard that holds while a list or dictionary has the same elements in the same order."""

    container: Any
    elements: tuple[Any, ...]

    @property
    def holds(self) -> bool:
        now = tuple(_elements(self.container))
        return len(now) == len(self.elements) and all(a is b for a, b in zip(now, self.elements, strict=True))


@dataclass(frozen=True, slots=True)
class WorkerGuard:
    """A guard that holds while the same object sends the requests of a model to an engine."""

    node: Any
    worker: Any

    @property
    def holds(self) -> bool:
        return classes.pool_backed(self.node) is self.worker


@dataclass(frozen=True, slots=True)
class CodeGuard:
    """A guard that holds while the code of a user's own class is the same, and reads the same values."""

    read_function: Callable[[], Any]
    """Returns the function that was read, as it is now."""
    function: Any
    attributes: Mapping[str, Any]
    """The attributes of its object that are no plain data, which `data_holds` is about."""
    read_attributes: Callable[[], Mapping[str, Any]]
    data_holds: Callable[[], bool]

    @property
    def holds(self) -> bool:
        now = self.read_attributes()
        is_same = now.keys() == self.attributes.keys() and all(now[key] is one for key, one in self.attributes.items())
        return is_same and self.read_function() is self.function and self.data_holds()


Guard = AttributeGuard | PartsGuard | ElementsGuard | WorkerGuard | CodeGuard


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, (str, int, float, bool)) and bool(now == before))


def _elements(container: Any) -> Sequence[Any]:
    return list(container.values()) if isinstance(container, Mapping) else container


def guards_of(node: Any, parts: Parts) -> Iterator[Guard]:
    """Yield guards of an object and of the lists and dictionaries among its parts."""
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
    """A query inside the graph: refs of its texts."""

    text: Ref
    texts: tuple[Ref, ...]
    """Texts that are embedded; the search uses the mean of their vectors."""


@dataclass(frozen=True, slots=True)
class SymbolicAnswer:
    """The answer of a query engine inside the graph: refs, or None for values that the graph does not compute."""

    text: Value = None
    """`str(response)`"""
    nodes: Value = None
    """The source nodes."""


@dataclass(slots=True)
class Lowering:
    """The draft of one template, its report and its guards. The body of a branch or loop has a lowering of its own."""

    draft: Draft = field(default_factory=Draft)
    guards: list[Guard] = field(default_factory=list)
    guarded: set[tuple[type, int]] = field(default_factory=set)
    lowered: set[int] = field(default_factory=set)
    """Ids of the engines and retrievers whose model calls the graph makes, wherever they are called."""
    scope: Names = ()
    forms: tuple[DraftText, ...] = ()
    """Possible answers of the LLM calls that are added, if their reader understands no others."""
    may_stream: bool = False
    """True if the original may stream the answers of the LLM calls that are added."""
    own_models: OwnModels | None = None
    """Models and stores of the user's own that the graph calls; None for a graph that only uses the pool's."""
    runs_in_loop: bool = False
    """True if the original makes the calls of a list concurrently, in an event loop of its own."""
    is_body: bool = False
    """True for the body of a branch or a loop."""
    make_reader: Callable[[OwnModels], Any] | None = None
    """Returns the reader of methods of the user's own classes, a `StepReader`; None to read no such methods."""
    own_code: set[str] = field(default_factory=set)
    """Beginnings of the names of components that come from the source of the user's own classes."""

    def new_body(self) -> Lowering:
        return replace(self, draft=self.draft.new_body(), is_body=True)

    def written_method(self, node: object) -> MethodType | None:
        """Return the method of a user's own class that answers a query and may be read; None for all other objects."""
        if self.own_models is None or self.make_reader is None or self.is_body:
            return None
        return classes.written_method(node, is_async=self.runs_in_loop)

    def require_llm(self, llm: Any) -> Any:
        """Return an LLM whose calls may be in the graph: one on the pool, or in a graph of own models one of those.

        For a routed LLM that is its worker. Raises `NotUnderstood` for others.
        """
        return pool_llm(self.pool_backed(llm), llm) if self.own_models is None else self.own_models.require_llm(llm)

    def pool_backed(self, node: Any) -> Any:
        """Return the object that sends the requests of a model to an engine, and add a guard; None for no engine.

        The guard keeps the plan from being used once another object, or none, does so. A model that sends its own
        requests to the pool is returned as it is, without a guard.
        """
        worker = classes.pool_backed(node)
        if worker is not node:
            self.guards.append(WorkerGuard(node, worker))
        return worker

    @contextmanager
    def in_loop_of(self, part: object) -> Iterator[None]:
        """Treat calls added in the `with` body as made in an event loop if `part` is set up to use one."""
        before = self.runs_in_loop
        self.runs_in_loop = before or (self.own_models is not None and runs_in_loop(part))
        try:
            yield
        finally:
            self.runs_in_loop = before

    # ------------------------------------------------------------ guards, and the report

    def guard_attributes(self, node: Any, *names: str) -> None:
        """Add guards for public attributes that decide what the graph looks like."""
        self.guards += [AttributeGuard(node, name, getattr(node, name)) for name in names]

    def read_parts(self, kind: type[P], node: Any) -> P:
        """Return the parts of `node`, and add guards, so that a change makes the plan invalid. Raises `Unreadable`."""
        parts = kind.of(node)
        if (kind, id(node)) not in self.guarded:
            self.guarded.add((kind, id(node)))
            self.guards += guards_of(node, parts)
        return parts

    def add_report_row(
        self, path: str, node: object, level: Level, components: Sequence[str] = (), reason: str = ""
    ) -> None:
        """Add a row about one part of the object to the report that `explain()` shows.

        `path`: where the part is. `reason`: why it is not lowered, empty if it is.
        """
        self.draft.nodes.append(TraceNode(path, type(node).__name__, level, tuple(components), reason))

    @contextmanager
    def reporting(self, path: str, node: object) -> Iterator[list[str]]:
        """Add a report row for `node`, which the `with` body lowers.

        If the body raises `NotUnderstood`, the row gets the reason, and the components that were added are removed.
        The body gets a list for the reasons why part of the work is left to the original.
        """
        before, reasons = set(self.draft.components), list[str]()
        try:
            with classes.refuse_unknown_attributes():
                yield reasons
        except NotUnderstood as error:
            for name in set(self.draft.components) - before:
                del self.draft.components[name]
            self.add_report_row(path, node, classes.report_level(node), reason=str(error))
        else:
            added = [name for name in self.draft.components if name not in before]
            self.add_report_row(path, node, "lowered", added, "; ".join(reasons))

    @contextmanager
    def marking_lowered(self, node: object) -> Iterator[None]:
        """Mark `node` as lowered if the `with` body adds calls of an LLM, so that they are not planned a second time.

        This holds even if other work of `node` is not understood.
        """
        before = set(self.draft.components)
        try:
            yield
        finally:
            if any(_calls_llm(c) for name, c in self.draft.components.items() if name not in before):
                self.lowered.add(id(node))

    def restore_lowered(self, lowered: Set[int]) -> None:
        """Unmark the objects that were marked as lowered since the set `lowered` was copied.

        Called when the body of a branch or loop is not understood and is discarded: the graph does not make the model
        calls of these objects then, so they may be accelerated on their own.
        """
        self.lowered.intersection_update(lowered)

    # ------------------------------------------------------------ components

    def unique_name(self, base_name: str, *parts: str) -> str:
        return self.draft.name(base_name, *parts)

    def add_component(
        self,
        name: str,
        role: Role,
        inputs: Inputs,
        engine: str = "",
        call: Callable[..., Any] | None = None,
        **more: Any,
    ) -> Ref:
        """Add a component in the current scope; `name` comes from `unique_name`, `more` are other fields."""
        return self.draft.add(Component(name, role, inputs, engine, scope=self.scope, **more), call)

    def add_user_call(self, base_name: str, **inputs: Ref) -> None:
        """Add an opaque call of the user's own LLM; components that do not read its answer need not wait for it."""
        self.add_component(self.unique_name(base_name), Role.OPAQUE, tuple(inputs.items()))

    def add_call(self, base_name: str, call: Callable[..., Any], **inputs: Ref) -> Ref:
        """Add a call of the framework's own pure code."""
        return self.draft.call(self.unique_name(base_name), call, self.scope, **inputs)

    def add_llm_call(
        self,
        base_name: str,
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
        """Add one LLM call, made by the framework code `run`; return the ref of what `run` returns.

        `value` computes that from the LLM's text and the inputs, if this is cheaper than running `run` again.
        `items` names the format in which the text spells the list that `run` returns, `expected` is its length;
        `forms`: see `Attributes`. `in_sync_code`: the original uses sync methods here, even in an event loop.
        """
        if self.own_models is not None:
            return add_own_llm_call(self, base_name, llm, run, inputs, value, in_sync_code=in_sync_code)
        names, blanks = tuple(inputs), blanks or {}
        name = self.unique_name(base_name, *DERIVED, "parsed")
        component = Component(
            name,
            Role.GENERATION,
            tuple(inputs.items()),
            llm.engine,
            prompt=model_calls.prompt_parts(llm, run, names, blanks),
            expected=expected,
            scope=self.scope,
            attributes=Attributes(items=items, forms=forms or self.forms, form=self._form_of(llm)),
        )
        generation = self.draft.add(
            component, lambda values: model_calls.capture_payload(llm, run, values, blanks, names)
        )
        if items:
            self.draft.list_spellings[f"{name}.parsed"] = items

        def parsed(generation: Any, **values: Any) -> Any:
            if value is not None:
                return value(llm.text_of(generation), values)
            return model_calls.replay_generations(llm, run, values, [generation])

        return self.draft.call(f"{name}.parsed", parsed, self.scope, generation=generation, **inputs)

    @contextmanager
    def expecting_labels(self, *labels: str) -> Iterator[None]:
        """Declare that LLM calls added in the `with` body are read by code that understands only these answers."""
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
        """If `streams`, mark LLM calls added in the `with` body as possibly streamed."""
        before, self.may_stream = self.may_stream, self.may_stream or streams
        try:
            yield
        finally:
            self.may_stream = before

    def add_holder(self, base_name: str, role: Role, inputs: Inputs, body: Lowering, output: Ref, **more: Any) -> Ref:
        """Add a branch, map, fold or loop whose body is the template of `body`."""
        name = self.unique_name(base_name)
        self.draft.absorb(body.draft)
        inner = body.draft.template(output, name)
        if role is Role.MAP:  # the sync `query` handles one item after the other
            more.setdefault("attributes", Attributes(is_parallel=not self.runs_in_loop))
        return self.add_component(name, role, inputs, body=inner, **more)

    # ------------------------------------------------------------ the original's order

    @contextmanager
    def in_order_after(self, after: Names = ()) -> Iterator[list[str]]:
        """Order components added in the `with` body after those named `after`; yield a list that gets their names."""
        before = set(self.draft.components)
        names: list[str] = []
        yield names
        names += [name for name in self.draft.components if name not in before]
        earlier, later = self.draft.span(tuple(after)), self.draft.span(tuple(names))
        self.draft.order += [(tail, head) for tail in earlier.tails for head in later.heads]


def import_own_code() -> ModuleType:
    """Return the module that reads the user's own classes. Raise `NotUnderstood` without LangChain's core."""
    try:
        from teola_plugin.tracer.llamaindex import own_code
    except ImportError as error:
        raise NotUnderstood("its source is only read if the package langchain-core is installed") from error
    return own_code


def _calls_llm(c: Component) -> bool:
    """Return True if a component, or its body, calls an LLM."""
    return c.role is Role.GENERATION or (c.body is not None and any(_calls_llm(inner) for inner in c.body.components))


def pool_llm(llm: Any, original: Any) -> Any:
    """Return the LLM if it is pool-backed and LlamaIndex's code alone decides its calls. Raises `NotUnderstood`.

    `original`: the LLM that the user's object holds, whose worker `llm` is.
    """
    if not hasattr(llm, "payload_of_template"):
        raise NotUnderstood(f"its LLM, a {type(original).__name__}, is not on the pool")
    if llm is not original:
        require_framework_methods(type(original))
    if llm.output_parser is not None:
        raise NotUnderstood("its LLM parses what it writes")
    if rate_limiter(llm) is not None:
        raise NotUnderstood("a rate limiter says when its LLM is called")
    return llm
