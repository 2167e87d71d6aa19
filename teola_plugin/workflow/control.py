"""Components that hold others: one of two ways, the same for every item, again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.errors import GraphError, unknown_name
from teola_plugin.graph import CARRY, ITEM, Attributes, Ref, Role, named, on_loop, simple
from teola_plugin.graph import Component as Part
from teola_plugin.workflow.component import Component, Flow, Joinable, check_name
from teola_plugin.workflow.decomposition import Body, Decomposition, last_of
from teola_plugin.workflow.functions import called
from teola_plugin.workflow.indexing import PER_QUERY
from teola_plugin.workflow.settings import reads, setting
from teola_plugin.workflow.values import Kind, Value, text_size

_ONE = {Kind.TEXTS: Kind.TEXT, Kind.VECTORS: Kind.VECTOR}
_MANY = {Kind.TEXT: Kind.TEXTS, Kind.VECTOR: Kind.VECTORS}


@dataclass(frozen=True, kw_only=True)
class Condition(Component):
    """A test of a value, e.g. of a model's answer.

    `test` is a pure function of the value. Without one, a text is true if its first word is `yes`, in any case, and any
    other value if it is not empty.
    """

    value: str = reads("verdict")
    yes: str = "yes"
    test: Callable[[Any], Any] | None = None

    def decompose(self, decomposition: Decomposition) -> Value:
        part = Part(decomposition.part(), Role.CONDITION, named(value=decomposition.ref("value")))
        return Value(decomposition.add(part, self._tested()), Kind.FLAG)

    def _tested(self) -> Callable[[Any], bool]:
        """Return the function that gives the truth of a value: the user's test, or a look at its first word."""
        given_test, yes = self.test, self.yes.lower()
        if given_test is not None:
            test = given_test
            return called(lambda value: bool(test(value)))

        @simple(text_size)
        def holds(value: Any) -> bool:
            """Return True for a text whose first word is `yes`, and for any other value that is not empty."""
            if not isinstance(value, str):
                return bool(value)
            words = value.lower().split()
            return bool(words) and words[0].strip(".,:;!\"'*`") == yes

        return holds


@dataclass(frozen=True, kw_only=True)
class Holding(Component):
    """The base class of components with bodies. A body can read all values that the component itself can read."""

    def bodies(self) -> tuple[Flow, ...]:
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return tuple(one for one in values if isinstance(one, Flow))

    def own_names(self) -> tuple[str, ...]:
        """Return the names that only its bodies can read."""
        return ()

    def needs(self) -> tuple[str, ...]:
        """Return the names of the values that a holder reads, each once: its own sources, and what its bodies need."""
        inner_names = [name for body in self.bodies() for name in free_names(body)]
        names = [*self.sources().values(), *(name for name in inner_names if name not in self.own_names())]
        return tuple(dict.fromkeys(names))

    def configured(self, values: Mapping[str, Mapping[str, Any]]) -> Component:
        """Return a copy with the settings in `values`, for itself and the components in its bodies."""
        component = super().configured(values)
        fields = {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}
        changed: dict[str, Any] = {n: configured(flow, values) for n, flow in fields.items() if isinstance(flow, Flow)}
        return (
            dataclasses.replace(component, **changed)
            if changed != {name: fields[name] for name in changed}
            else component
        )


def configured(flow: Flow, values: Mapping[str, Mapping[str, Any]]) -> Flow:
    """The flow, with other settings."""
    return Flow(tuple(one.configured(values) for one in flow), flow.order)


def moved(flow: Flow, renamed: Callable[[str, str], str]) -> Flow:
    """The flow, in other collections: `renamed(engine, collection)`."""
    return Flow(tuple(_moved(one, renamed) for one in flow), flow.order)


def _moved(component: Component, renamed: Callable[[str, str], str]) -> Component:
    """Return a component that uses other collections, as do those in its bodies. One of each query's own stays."""
    fields = {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}
    changed: dict[str, Any] = {name: moved(flow, renamed) for name, flow in fields.items() if isinstance(flow, Flow)}
    collection = fields.get("collection")
    if isinstance(collection, str) and collection != PER_QUERY and isinstance(fields.get("engine"), str):
        changed["collection"] = renamed(fields["engine"], collection)
    return dataclasses.replace(component, **changed) if changed else component


def free_names(flow: Flow) -> list[str]:
    """Return the names that a flow reads and none of its components provides."""
    provided = {one.name for one in flow}
    return [name for one in flow for name in one.needs() if name not in provided]


@dataclass(frozen=True, kw_only=True)
class Branch(Holding):
    """One of two ways: `then` where the condition holds, else `otherwise`, which may be the name of a value.

    Without `otherwise`, its value is None there.
    """

    condition: str = reads("", Kind.FLAG, Kind.ANY)
    then: Joinable = ()
    otherwise: Joinable | str | None = None

    def __post_init__(self) -> None:
        """Convert both ways to flows. Raise GraphError for an empty one."""
        super().__post_init__()
        object.__setattr__(self, "then", body_of(self.then, f"{self.name}.then"))
        if not isinstance(self.otherwise, (str, type(None))):
            object.__setattr__(self, "otherwise", body_of(self.otherwise, f"{self.name}.otherwise"))

    def sources(self) -> dict[str, str]:
        sources = super().sources()
        return sources | ({"otherwise": self.otherwise} if isinstance(self.otherwise, str) else {})

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the branch with both arms. Arms that only search may begin before an engine has decided which runs."""
        assert isinstance(self.then, Flow)
        then_body, else_body = decomposition.new_body(self.then), self._other(decomposition)
        kind = then_body.kind if then_body.kind is else_body.kind else Kind.ANY
        condition = decomposition.ref("condition")
        arms = (("then", then_body), ("else", else_body))
        speculative_arms = (
            tuple(name for name, arm in arms if arm.only_searches) if decomposition.waits_for_engines(condition) else ()
        )
        attributes = Attributes(speculative_arms=speculative_arms)
        ref = decomposition.hold(
            "", Role.BRANCH, named(condition=condition), then_body, otherwise=else_body, attributes=attributes
        )
        return Value(ref, kind)

    def _other(self, decomposition: Decomposition) -> Body:
        """Lower the second arm: a flow, a value that is read as it is, or None."""
        if isinstance(self.otherwise, Flow):
            return decomposition.new_body(self.otherwise)
        value = decomposition.read("otherwise") if isinstance(self.otherwise, str) else None

        def as_it_is(body: Decomposition) -> Value:
            if value is None:
                return Value(body.call("nothing", _none), Kind.ANY)
            return Value(body.call("as_it_is", _same, value=body.read("otherwise").ref), value.kind)

        return decomposition.made_by_hand(as_it_is)


@on_loop
def _none() -> None:
    return None


@on_loop
def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Map(Holding):
    """The same flow for every item of a list, side by side; a list of what they give.

    The flow reads the item as `item`, or by the name that `each` says.
    """

    over: str = reads("", Kind.LIST, Kind.TEXTS, Kind.CHUNKS, Kind.PASSAGES, Kind.VECTORS, Kind.DOCUMENTS)
    flow: Joinable = ()
    each: str = "item"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.each, "item's")
        object.__setattr__(self, "flow", body_of(self.flow, f"{self.name}.flow"))

    def own_names(self) -> tuple[str, ...]:
        return (self.each,)

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the map with its flow as body, which reads one item of the list."""
        assert isinstance(self.flow, Flow)
        items = decomposition.read("over")
        width = items.width if isinstance(items.width, int) else None
        body = decomposition.new_body(self.flow, **{self.each: Value(Ref(ITEM), _ONE.get(items.kind, Kind.ANY))})
        ref = decomposition.hold("", Role.MAP, named(items=items.ref), body, expected=width)
        return Value(ref, _MANY.get(body.kind, Kind.LIST), items.width)


@dataclass(frozen=True, kw_only=True)
class Loop(Holding):
    """The same flow again and again, each round with what the one before gave, until `until` holds.

    The flow reads what is carried as `draft`, or by the name that `carry` says; `init` is what it begins with.
    `until` names a component of the flow, and holds as a `Condition` does; there are `max_rounds` at most. Its value
    is that of `result` in the last round, by default of the last component but `until`.
    """

    init: str = reads("", Kind.ANY)
    flow: Joinable = ()
    until: str = ""
    carry: str = "draft"
    result: str = ""
    max_rounds: int = setting(3, "rounds at most", minimum=1, maximum=64)

    def __post_init__(self) -> None:
        """Convert the body to a flow. Raise RegistrationError if `until` or `result` names no component of it."""
        super().__post_init__()
        check_name(self.carry, "carried value's")
        flow = body_of(self.flow, f"{self.name}.flow")
        object.__setattr__(self, "flow", flow)
        names = [one.name for one in flow]
        for field_name in ("until", "result"):
            value = getattr(self, field_name)
            if value and value not in names:
                raise unknown_name(f"component of {self.name}.flow, as {field_name},", value, names)

    def own_names(self) -> tuple[str, ...]:
        return (self.carry,)

    def _result(self) -> str:
        """Return the component of the flow whose value a round gives."""
        assert isinstance(self.flow, Flow)
        rest = tuple(one for one in self.flow if one.name != self.until)
        names = {one.name for one in rest}
        order = tuple(pair for pair in self.flow.order if names.issuperset(pair))
        return self.result or last_of(Flow(rest, order), f"{self.name}.flow")

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the loop with its flow as body, and read the carried value of its last round."""
        assert isinstance(self.flow, Flow)
        flow, max_rounds, init, until = self.flow, self.max_rounds, decomposition.read("init"), self.until
        carried: list[Value] = []

        def round_of(body: Decomposition) -> Value:
            """Lower one round: its carried value is what the flow reads, and its result is carried on."""
            draft = body.call("draft", _draft, state=Ref(CARRY))
            values = body.lower(flow, **{self.carry: Value(draft, init.kind)})
            result = values[self._result()]
            carried.append(result)
            ends = {"until": _flag(body, values[until])} if until else {}
            return Value(body.call("state", _next(max_rounds), state=Ref(CARRY), value=result.ref, **ends), Kind.ANY)

        body = decomposition.made_by_hand(round_of)
        begin = decomposition.call("begin", _begin, value=init.ref)
        last = decomposition.hold("rounds", Role.LOOP, named(init=begin), body)
        return Value(decomposition.call("", _draft, state=last), carried[0].kind)


def _flag(body: Decomposition, value: Value) -> Ref:
    """Return the flag that ends the loop."""
    return value.ref if value.kind is Kind.FLAG else body.call("until", Condition("until")._tested(), value=value.ref)


@on_loop
def _begin(value: Any) -> dict[str, Any]:
    return {"value": value, "rounds": 0}


@on_loop
def _draft(state: Mapping[str, Any]) -> Any:
    return state["value"]


def _next(max_rounds: int) -> Callable[..., dict[str, Any]]:
    """Return the function that makes the state after a round, which says if there is to be another one."""

    @on_loop
    def state(state: Mapping[str, Any], value: Any, until: Any = False) -> dict[str, Any]:
        rounds = state["rounds"] + 1
        return {"carry": {"value": value, "rounds": rounds}, "again": rounds < max_rounds and until is not True}

    return state


def body_of(joinable: Any, owner: str) -> Flow:
    """Return the flow that a holder, such as a branch, holds. Raise `GraphError` for one without components.

    `owner` is the holder's name for the error.
    """
    flow = Flow.of(joinable)
    if not flow.components:
        raise GraphError(f"{owner} holds no component.", hint="give it a component, or several joined by >>")
    return flow
