"""Reads the source of a workflow's steps: which calls of models and retrievers of the user's own are certain.

The function is read by `tracer.functions`, with the rules of LlamaIndex's objects that are given here. The input of the
template has the values of the first step's event and, by key, those that the context's store has when that begins.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, NoneType
from typing import Any, cast, get_args, get_origin

from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import LLM
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow
from pydantic import BaseModel

from teola_plugin.graph import INPUT, Ref, UnfitValue, on_loop, read_path
from teola_plugin.shims.llamaindex.engines import QueriedIndexParts, SettingsParts, make_query_engine
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.llamaindex.workflows import WorkflowStep
from teola_plugin.shims.pydantic import validated_field
from teola_plugin.tracer.draft import Draft, TraceResult
from teola_plugin.tracer.functions import (
    UNKNOWN_VALUE,
    Fields,
    Instance,
    ItemList,
    KnownValue,
    Spread,
    Symbol,
    materialize,
    summarize_function,
)
from teola_plugin.tracer.functions.frames import OutOfFuel
from teola_plugin.tracer.functions.framework_calls import Arguments
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import DataGuards, is_framework_code, is_instance, is_subclass
from teola_plugin.tracer.functions.mutations import MUTATING_METHODS, Mutations
from teola_plugin.tracer.functions.pruning import EMPTY_SPAN
from teola_plugin.tracer.functions.pure_expressions import Decide, compile_pure
from teola_plugin.tracer.functions.symbols import AwaitableValue, Expression, is_constant, known_value, word_set
from teola_plugin.tracer.functions.texts import is_text
from teola_plugin.tracer.llamaindex.engines import try_lower_query
from teola_plugin.tracer.llamaindex.lowering import ElementsGuard, Guard, Lowering
from teola_plugin.tracer.llamaindex.model_calls import OwnModels
from teola_plugin.tracer.llamaindex.own_code import QueryBundles, drop_behind_code
from teola_plugin.tracer.llamaindex.retrieval import lower_retriever
from teola_plugin.tracer.llamaindex.step_data import (
    EventRules,
    Rule,
    StoreRules,
    StoreStandIn,
    attribute_of,
    code_of,
)
from teola_plugin.tracer.llamaindex.step_models import (
    LLM_METHODS,
    TEXT,
    Answer,
    ModelRules,
    UnreadCall,
    compute,
    text_if_any,
)
from teola_plugin.tracer.source import source_of
from teola_plugin.tracer.symbols import NotUnderstood

_HARMLESS_METHODS = ("write_event_to_stream", "retry_info")
_HARMLESS_ATTRIBUTES = frozenset(("store", "write_event_to_stream", "wait_for_event", "get", "set"))
"""Attributes of a context that send no event to a step."""
_VALIDATORS = ("validators", "field_validators", "root_validators", "model_validators")
_ARGUMENTS = "**"
"""Key of the arguments of an event that a step makes, which are not its fields before they are validated."""
_CALLING_METHODS = LLM_METHODS | word_set(
    "query aquery chat_with_tools achat_with_tools predict_and_call apredict_and_call retrieve aretrieve synthesize",
    "asynthesize get_response aget_response postprocess_nodes apostprocess_nodes run arun call acall create invoke",
    "ainvoke generate agenerate get_text_embedding aget_text_embedding get_query_embedding aget_query_embedding",
)
"""Names of methods that call models, or run what may call some."""
MAX_STEPS = 24
"""Length of the longest path of steps, one after the other, that is traced."""


class _ContextStandIn:
    """Stands for a step's context."""

    def __init__(self) -> None:
        self.store = StoreStandIn()
        self.is_running = True


Classes = Callable[[Any], Sequence[type]]
"""Computes classes of events from the template's input. Raises what computing them raises."""
MAX_COLLECTED = 16
"""Collected events for which a template is made."""
Collected = tuple[tuple[str, tuple[type, ...]], ...]
"""The classes of the events that a step has got before it begins, by parameters or by the numbers of collections."""


@dataclass(frozen=True, slots=True)
class StepSituation:
    """The known facts of the run in which a step begins."""

    is_alone: bool = False
    """True if nothing else is under way, so that the steps after it are traced as well: as long as one step alone
    accepts the event that the step before it is sure to return."""
    changing: frozenset[str] | None = frozenset()
    """Keys of the store that other steps may change while it runs; None if that may be any."""
    changing_after_sending: frozenset[str] | None = None
    """The same from when it has sent an event."""
    changing_attributes: frozenset[str] = frozenset()
    """Attributes of the workflow that steps may change."""
    collected: Collected = ()


@dataclass(frozen=True, slots=True)
class Collection:
    """A call of `collect_events` in a step."""

    key: str
    """Its key among the collected events of the template's input."""
    buffer: str
    expected: Classes
    """Returns the classes of the events that it waits for, by the template's input."""


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """The template of a step and of those that certainly come next, and what it depends on."""

    calls: Mapping[str, tuple[str, ...]]
    """The components of each step, by the names of the steps in their order."""
    traced: TraceResult
    guards: tuple[Guard, ...]
    data: DataGuards
    """The data of globals, closures and attributes."""
    collections: tuple[Collection, ...]
    """The calls of `collect_events` whose events are not known; if they are, another template may have more."""
    unread_calls: Mapping[str, UnreadCall]
    """Calls that are not read, by `file:line`."""


def trace_steps(
    steps: Mapping[str, WorkflowStep],
    name: str,
    own_models: OwnModels,
    state_class: type[BaseModel],
    situation: StepSituation,
    decide: Decide | None = None,
) -> TracedSteps:
    """Return the template of a step, and of those that certainly come next. Runs none of their code.

    `decide`: answers conditions on the template's input.
    """
    store = StoreRules(state_class, situation.changing)
    reader, data, draft = StepReader(ModelRules(own_models), store, situation), DataGuards(), Draft()
    step: WorkflowStep | None = steps[name]
    arguments = reader.first_events(steps[name])
    calls: dict[str, tuple[str, ...]] = {}
    span = EMPTY_SPAN
    with data.recording():
        while step is not None and step.name not in calls and len(calls) < MAX_STEPS:
            calls_before = len(draft.calls)
            if step.context_name:
                arguments[step.context_name] = KnownValue(_ContextStandIn())
            summary = summarize_function(
                step.function,
                arguments,
                draft,
                step.name,
                decide=decide,
                find_method=reader.find_method,
                unknown_attributes=reader.unknown_attributes(step),
            )
            span = draft.in_sequence(span, summary.span)
            calls[step.name] = tuple(draft.calls)[calls_before:]
            returned, last_name, step = summary.value, step.name, None
            is_certain = summary.certain and not (summary.runs_user_code or summary.changes_objects)
            goes_on = situation.is_alone and is_certain and not reader.sends_events
            if goes_on and isinstance(returned, Instance) and (step := _next_step(steps, returned.kind)) is not None:
                store.forget_changed(summary.mutations, draft)
                event = _fields_of_event(draft, returned, last_name, summary.mutations)
                symbol = UNKNOWN_VALUE if event is None else reader.events.add(event, returned.kind)
                arguments = {step.event_name: symbol}
    drop_behind_code(draft)
    last = next(reversed(draft.components), INPUT)
    traced = draft.finish(Ref(last), name)
    return TracedSteps(
        calls, traced, tuple(reader.models.guards), data, tuple(reader.collections), reader.models.unread_calls
    )


def _next_step(steps: Mapping[str, WorkflowStep], kind: type) -> WorkflowStep | None:
    """Return the step that runs after an event of this class; None if there is none, or another one may run, too."""
    accepting = [step for step in steps.values() if step.accepts(kind)]
    is_certain = len(accepting) == 1 and accepting[0].takes_one_event and not issubclass(kind, StopEvent)
    return accepting[0] if is_certain else None


def runs_alone(steps: Mapping[str, WorkflowStep], name: str) -> bool:
    """Return True if nothing else is under way when a step begins, unless it comes from outside the workflow.

    Steps are the first one of a run, or those of workflows in which every step sends one event, to one step.
    """
    first = [step for step in steps.values() if any(issubclass(kind, StartEvent) for kind in step.accepted_events)]
    if len(first) == 1 and first[0].name == name:
        return True
    kinds = [kind for step in steps.values() for kind in step.accepted_events]
    is_linear = len(set(kinds)) == len(kinds) and not any(step.sends_list for step in steps.values())
    return is_linear and all(map(_sends_one_event, steps.values()))


def _sends_one_event(step: WorkflowStep) -> bool:
    """Return True if a step sends no event but the one that it returns, as far as its source shows its context."""
    attributes = _context_attributes(step)
    return attributes is not None and _HARMLESS_ATTRIBUTES.issuperset(attributes)


def _sends_events(step: WorkflowStep) -> bool:
    """Return True if the source of a step names `send_event`, or does not show what it does with its context."""
    attributes = _context_attributes(step)
    return attributes is None or "send_event" in attributes


def _context_attributes(step: WorkflowStep) -> list[str] | None:
    """Return the attributes of its context that a step reads; None if its source does not show all uses of it."""
    code = code_of(step.function)
    definition = None if code is None else source_of(code)
    if definition is None:
        return None
    parts = list(ast.walk(definition))
    uses = [one for one in parts if isinstance(one, ast.Name) and one.id == step.context_name]
    attributes = [one.attr for one in parts if isinstance(one, ast.Attribute) and one.value in uses]
    return attributes if len(attributes) == len(uses) else None


def _fields_of_event(draft: Draft, event: Instance, name: str, mutations: Mutations) -> Fields | None:
    """Return an event as the step that gets it reads it: with values as the fields of its class validate them."""
    values, kind = event.fields.get(_ARGUMENTS), cast("type[Event]", event.kind)
    if not isinstance(values, Fields) or kind.__init__ is not Event.__init__:
        return None
    if any(getattr(kind.__pydantic_decorators__, name) for name in _VALIDATORS):
        return None
    fields: dict[str, Symbol] = {}
    for key, value in values.items.items():
        if mutations.has_inside(value) or key in kind.__private_attributes__:
            continue
        field_info = kind.model_fields.get(key)
        if field_info is None or field_info.annotation is Any:
            fields[key] = value
        elif not field_info.metadata and _is_plain_annotation(field_info.annotation):
            fields[key] = _validated(draft, kind, key, value, name)
    return Fields(_with_defaults(kind, fields, values.items), attributes=True, fields_only=True)


_PLAIN_TYPES = (str, int, float, bool, NoneType, Any, list, dict, tuple, set)


def _is_plain_annotation(annotation: Any) -> bool:
    """Return True for a type of built-in types and the framework's classes: no code of the user's validates it."""
    inner, origin = get_args(annotation), get_origin(annotation)
    if inner and getattr(origin, "__module__", "") in ("builtins", "types", "typing"):
        return all(one is Ellipsis or _is_plain_annotation(one) for one in inner)
    return annotation in _PLAIN_TYPES or (isinstance(annotation, type) and is_framework_code(annotation))


def _with_defaults(kind: Any, fields: Mapping[str, Symbol], names: Iterable[str]) -> dict[str, Symbol]:
    """Return the fields of an event, with the constant defaults of those that are not among `names`, which are set."""
    defaults = {name: info.default for name, info in kind.model_fields.items() if info.default_factory is None}
    constants = {name: KnownValue(value) for name, value in defaults.items() if is_constant(value)}
    return {name: value for name, value in constants.items() if name not in names} | dict(fields)


def _validated(draft: Draft, kind: Any, key: str, value: Symbol, name: str) -> Symbol:
    """Return a value as it is after it was set as a field of an event."""
    if kind.model_fields[key].annotation is str and is_text(value) and kind.model_config == Event.model_config:
        return value
    ref = materialize(draft, value, f"{name}.{key}")
    if ref is None:
        return UNKNOWN_VALUE

    def validated(value: Any) -> Any:
        return validated_field(kind, key, value)

    return draft.call(draft.name(f"{name}.{key}"), on_loop(validated), (), value=ref)


@dataclass(slots=True)
class StepReader:
    """The rules by which LlamaIndex's objects are read, and what they have come to."""

    models: ModelRules
    store: StoreRules
    situation: StepSituation
    events: EventRules = field(default_factory=EventRules)
    bundles: QueryBundles = field(default_factory=QueryBundles)
    sends_events: bool = False
    """True once a step sends events in other ways than by returning one."""
    collections: list[Collection] = field(default_factory=list)
    _number_of_collections: int = 0
    _changed_lists: frozenset[str] = frozenset()
    """Attributes of the workflow whose lists the steps so far have changed."""

    def first_events(self, step: WorkflowStep) -> dict[str, Symbol]:
        """Return the events in the template's input, by the parameters of the step that gets them."""
        if not step.collected:
            return {step.event_name: self.events.first_event()}
        kinds = dict(self.situation.collected)
        arguments: dict[str, Symbol] = {}
        for name, is_list in step.collected:
            events = [self.events.collected_event(name, index, kind) for index, kind in enumerate(kinds.get(name, ()))]
            arguments[name] = UNKNOWN_VALUE if name not in kinds else ItemList(tuple(events)) if is_list else events[0]
        return arguments

    def unknown_attributes(self, step: WorkflowStep) -> dict[int, frozenset[str]]:
        """Return the attributes of the workflow that nobody knows when the step comes to them, by the object's id."""
        workflow = getattr(step.function, "__self__", None)
        stays_alone = self.situation.is_alone and not _sends_events(step)
        self._changed_lists |= changed_lists(step)
        changed_by_others = frozenset[str]() if stays_alone else self.situation.changing_attributes
        return {} if workflow is None else {id(workflow): self._changed_lists | changed_by_others}

    def find_method(self, owner: Symbol, name: str) -> Rule | None:
        """See `FindMethod`."""
        rule = self.events.find(owner, name) or self.store.find(owner, name) or self.models.find(owner, name)
        if rule is not None:
            return rule
        if isinstance(owner, Ref):
            return partial(_read_content, owner, name) if name in ("get_content", "get_text") else None
        if not isinstance(owner, KnownValue):
            return None
        target = owner.value
        if name == "__call__":
            is_event = is_instance(target, type) and is_subclass(target, Event)
            return partial(_make_event, target) if is_event else None
        if type(target) is _ContextStandIn:
            rules: dict[str, Rule] = {"send_event": self._send_event, "collect_events": self._collect}
            return rules.get(name, _ignore if name in _HARMLESS_METHODS else self._wait)
        if is_instance(target, Workflow) and name == "run":
            return partial(self._run_workflow, type(target).__name__)
        if type(target) is VectorStoreIndex and name in ("as_query_engine", "as_retriever"):
            return partial(self._make_part, target, name)
        if is_instance(target, BaseRetriever) and name in ("retrieve", "aretrieve"):
            return partial(self._lower_query_call, target, name)
        if is_instance(target, BaseQueryEngine) and name in ("query", "aquery"):
            return partial(self._lower_query_call, target, name)
        return None

    # ------------------------------------------------------------ the context

    def _send_event(self, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Note that other steps begin, which may change what the store has."""
        self.sends_events, self.store.changing = True, self.situation.changing_after_sending
        return KnownValue(None)

    def _wait(self, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Stop where the step may wait for an event, after which it begins anew."""
        self.models.note_unread(interpreter, UnreadCall())
        raise OutOfFuel

    def _run_workflow(self, class_name: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret the run of a workflow or an agent, whose steps and tools may do anything."""
        self.models.note_unread(interpreter, UnreadCall(class_name))
        interpreter.add_user_code()
        for item in arguments.all_items():
            interpreter.mutations.add(item.iterable if isinstance(item, Spread) else item)
        return UNKNOWN_VALUE

    def _collect(self, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret `collect_events`, whose events are known if they were there when the step began."""
        is_known, buffer = known_value(arguments.get("buffer_id", 2) or KnownValue(None))
        key = str(self._number_of_collections)
        self._number_of_collections += 1
        kinds = dict(self.situation.collected).get(key)
        if interpreter.is_body or interpreter.nesting or not is_known or not self.events.is_first(arguments.get("ev")):
            return UNKNOWN_VALUE
        if kinds is not None:
            return ItemList(tuple(self.events.collected_event(key, i, kind) for i, kind in enumerate(kinds)))
        expected = _expected_classes(arguments.get("expected", 1))
        if expected is not None:
            self.collections.append(Collection(key, buffer or "default", expected))
        return UNKNOWN_VALUE

    # ------------------------------------------------------------ retrievers and engines

    def _make_part(
        self, index: VectorStoreIndex, name: str, interpreter: FunctionInterpreter, arguments: Arguments
    ) -> Symbol:
        """Make the engine or retriever that the step makes of an index: one that asks the same objects the same."""
        values = {key: known_value(symbol) for key, symbol in arguments.keywords.items()}
        all_known = arguments.complete and not arguments.positional and all(is_known for is_known, _ in values.values())
        options = {key: value for key, (_, value) in values.items()}
        lowering = Lowering(own_models=self.models.own_models)
        try:
            node_ids = lowering.read_parts(QueriedIndexParts, index).index_struct.nodes_dict
            llm = options.pop("llm", None) or lowering.read_parts(SettingsParts, Settings).llm
            if not all_known or not (name == "as_retriever" or is_instance(llm, LLM)):
                return UNKNOWN_VALUE
            part = index.as_retriever(**options) if name == "as_retriever" else make_query_engine(index, llm, options)
        except Exception:  # the original raises it as well, or it is not understood
            return UNKNOWN_VALUE
        self.models.guards += [*lowering.guards, ElementsGuard(node_ids, tuple(node_ids.values()))]
        return KnownValue(part)

    def _lower_query_call(self, part: Any, name: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret a query of a retriever or an engine, which is lowered as it is in a query of its own."""
        is_async = name.startswith("a")
        query = arguments.get("str_or_query_bundle")
        if query is None or len(arguments.all_items()) != 1:
            return UNKNOWN_VALUE
        draft = interpreter.draft
        before = set(draft.components)
        lowering = Lowering(
            draft=draft,
            own_models=self.models.own_models,
            runs_in_loop=is_async,
            is_body=interpreter.is_body,
            make_reader=make_reader,
        )
        result: Symbol = UNKNOWN_VALUE
        try:
            symbolic_query = self.bundles.resolve(interpreter, lowering, part, query)
            path = f"{interpreter.name}.{name}"
            if is_instance(part, BaseRetriever):
                result = lower_retriever(lowering, part, symbolic_query, path, path) or UNKNOWN_VALUE
            elif (answer := try_lower_query(lowering, part, symbolic_query, path)).text is not None:
                texts = {"text": answer.text}
                response = compute(interpreter, "response", on_loop(text_if_any), texts)
                written = compute(interpreter, "text", on_loop(lambda text: text or "None"), texts)
                fields = {"response": response, "source_nodes": answer.nodes or UNKNOWN_VALUE, TEXT: written}
                result = Instance(Answer, fields)
        except (NotUnderstood, Unreadable):
            self.models.note_unread(interpreter, UnreadCall(type(part).__name__, name))
        self.models.guards += lowering.guards
        interpreter.append_span(draft.span(tuple(key for key in draft.components if key not in before)))
        return AwaitableValue(result) if is_async else result


# ------------------------------------------------------------ events and nodes


def make_reader(own_models: OwnModels) -> StepReader:
    """Return the reader of a method of the user's that is no step, such as `custom_query`."""
    return StepReader(ModelRules(own_models), StoreRules(BaseModel, None), StepSituation())


def _expected_classes(symbol: Symbol | None) -> Classes | None:
    """Return what computes a list of events' classes from the template's input; None if more is needed than that."""
    is_known, value = known_value(UNKNOWN_VALUE if symbol is None else symbol)
    if is_known:
        return lambda input: list(value)
    if not isinstance(symbol, Expression) or any(ref.producer != INPUT for ref in symbol.refs.values()):
        return None
    return _classes_of_code(symbol, symbol.code)


def _classes_of_code(symbol: Expression, code: ast.expr) -> Classes | None:
    """Return what computes a part of such a list: `[A, B]`, `[A] * count`, and sums of them."""
    if isinstance(code, ast.List) and all(isinstance(item, ast.Name) for item in code.elts):
        objects = [symbol.objects.get(item.id) for item in code.elts if isinstance(item, ast.Name)]
        kinds = [kind for kind in objects if isinstance(kind, type)]
        return (lambda input: kinds) if len(kinds) == len(code.elts) else None
    if not isinstance(code, ast.BinOp) or not isinstance(code.op, (ast.Add, ast.Mult)):
        return None
    left, right = _classes_of_code(symbol, code.left), _classes_of_code(symbol, code.right)
    if isinstance(code.op, ast.Add):
        return None if left is None or right is None else lambda input: [*left(input), *right(input)]
    repeated, count = (left, code.right) if right is None else (right, code.left)
    try:
        computed = compile_pure(Expression(count, symbol.refs, symbol.objects))
    except NotUnderstood:
        return None
    if repeated is None:
        return None

    def classes(input: Any) -> Sequence[type]:
        count = computed(**{name: read_path(input, ref.path) for name, ref in computed.inputs.items()})
        if type(count) is not int or count > MAX_COLLECTED:
            raise UnfitValue("no template is made for so many events")
        return [*repeated(input)] * count

    return classes


def _ignore(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    return UNKNOWN_VALUE


def _make_event(kind: type, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    is_known = arguments.complete and not arguments.positional
    return Instance(kind, {_ARGUMENTS: Fields(arguments.keywords) if is_known else UNKNOWN_VALUE})


def _read_content(owner: Ref, name: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    """Interpret `node.get_content()` or `get_text()` as a text that is read at run time, from LlamaIndex's nodes."""
    options = {key: value.value for key, value in arguments.keywords.items() if isinstance(value, KnownValue)}
    are_modes = all(key == "metadata_mode" and type(mode) is MetadataMode for key, mode in options.items())
    if arguments.positional or not arguments.complete or len(options) < len(arguments.keywords) or not are_modes:
        return UNKNOWN_VALUE

    def content(node: Any) -> str:
        is_node = isinstance(node, (NodeWithScore, BaseNode)) and is_framework_code(type(node))
        if not is_node or not is_framework_code(type(getattr(node, "node", node))):
            raise UnfitValue(f"a {type(node).__name__} is no node of LlamaIndex's")
        return str(getattr(node, name)(**options))

    return compute(interpreter, "content", on_loop(content), {"node": owner})


# ------------------------------------------------------------ what methods of a workflow use


@dataclass(frozen=True, slots=True)
class _MethodUses:
    """The names that the source of a method of a workflow uses."""

    changed_by_method: frozenset[str]
    """Attributes of the workflow whose values it changes by a method, as `append` does."""
    own_calls: frozenset[str]
    """Methods of the workflow that it calls."""
    all_calls: frozenset[str]
    """Functions and methods of any object that it calls."""


@lru_cache(maxsize=1024)
def _method_uses(code: CodeType) -> _MethodUses | None:
    """Return the names that the source of a method uses; None if it has none."""
    definition, owner = source_of(code), "".join(code.co_varnames[:1])
    if definition is None:
        return None
    calls = [node.func for node in ast.walk(definition) if isinstance(node, ast.Call)]
    methods = [func for func in calls if isinstance(func, ast.Attribute)]
    changed = [func.value for func in methods if func.attr in MUTATING_METHODS]
    return _MethodUses(
        frozenset(name for value in changed for name in attribute_of(value, owner)),
        frozenset(func.attr for func in methods if isinstance(func.value, ast.Name) and func.value.id == owner),
        frozenset(func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls),
    )


def changed_lists(step: WorkflowStep) -> frozenset[str]:
    """Return the attributes of a workflow with lists and the like that a step changes by a method, as `append` does.

    The step may do so itself, or in functions and methods of the user's that it calls.
    """
    values = getattr(getattr(step.function, "__self__", None), "__dict__", {})
    names = [name for uses in _uses_of_methods(step) for name in uses.changed_by_method]
    return frozenset(name for name in names if type(values.get(name)) in (list, dict, set))


def may_call_models(step: WorkflowStep) -> bool:
    """Return False if the names of what a step calls, also in functions of the user's, show no call of a model."""
    uses = list(_uses_of_methods(step))
    return not uses or any(not one.all_calls.isdisjoint(_CALLING_METHODS) for one in uses)


def _uses_of_methods(step: WorkflowStep) -> Iterator[_MethodUses]:
    """Yield what a step does, and each function and method of the user's that it calls, as far as names show them."""
    kind = type(getattr(step.function, "__self__", None))
    pending, seen = [step.function], set[CodeType]()
    while pending:
        function = getattr(function := pending.pop(), "__func__", function)
        code = code_of(function)
        uses = None if code is None or code in seen or is_framework_code(function) else _method_uses(code)
        if uses is not None and code is not None:
            seen.add(code)
            yield uses
            pending += [inspect.getattr_static(kind, name, None) for name in uses.own_calls]
            pending += [getattr(function, "__globals__", {}).get(name) for name in uses.all_calls]
