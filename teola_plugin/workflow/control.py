"""Components that hold others: one of two ways, the same for every item, again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.errors import GraphError, unknown_name
from teola_plugin.graph import CARRY, ITEM, Attributes, Ref, Role, named, on_loop, simple
from teola_plugin.graph import Component as Part
from teola_plugin.workflow.component import Component, check_name
from teola_plugin.workflow.decomposition import Body, Decomposition, last_of
from teola_plugin.workflow.flow import Flow, Joinable
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

    def decompose(self, made: Decomposition) -> Value:
        part = Part(made.part(), Role.CONDITION, named(value=made.ref("value")))
        return Value(made.add(part, self._tested()), Kind.FLAG)

    def _tested(self) -> Callable[[Any], bool]:
        own, yes = self.test, self.yes.lower()
        if own is not None:
            test = own
            return called(lambda value: bool(test(value)))

        @simple(text_size)
        def holds(value: Any) -> bool:
            if not isinstance(value, str):
                return bool(value)
            words = value.lower().split()
            return bool(words) and words[0].strip(".,:;!\"'*`") == yes

        return holds


@dataclass(frozen=True, kw_only=True)
class Holding(Component):
    """The base class of components with bodies. A body can read all values that the component itself can read."""

    def bodies(self) -> tuple[Flow, ...]:
        found = (getattr(self, f.name) for f in dataclasses.fields(self))
        return tuple(one for one in found if isinstance(one, Flow))

    def own_names(self) -> tuple[str, ...]:
        """Return the names that only its bodies can read."""
        return ()

    def needs(self) -> tuple[str, ...]:
        inside = [name for body in self.bodies() for name in free_names(body)]
        found = [*self.sources().values(), *(name for name in inside if name not in self.own_names())]
        return tuple(dict.fromkeys(found))

    def configured(self, values: Mapping[str, Mapping[str, Any]]) -> Component:
        made = super().configured(values)
        held = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
        changed: dict[str, Any] = {n: configured(flow, values) for n, flow in held.items() if isinstance(flow, Flow)}
        return dataclasses.replace(made, **changed) if changed != {name: held[name] for name in changed} else made


def configured(flow: Flow, values: Mapping[str, Mapping[str, Any]]) -> Flow:
    """The flow, with other settings."""
    return Flow(tuple(one.configured(values) for one in flow), flow.order)


def moved(flow: Flow, renamed: Callable[[str, str], str]) -> Flow:
    """The flow, in other collections: `renamed(engine, collection)`."""
    return Flow(tuple(_moved(one, renamed) for one in flow), flow.order)


def _moved(component: Component, renamed: Callable[[str, str], str]) -> Component:
    held = {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}
    changed: dict[str, Any] = {name: moved(flow, renamed) for name, flow in held.items() if isinstance(flow, Flow)}
    own = held.get("collection")
    if isinstance(own, str) and own != PER_QUERY and isinstance(held.get("engine"), str):
        changed["collection"] = renamed(held["engine"], own)
    return dataclasses.replace(component, **changed) if changed else component


def free_names(flow: Flow) -> list[str]:
    """Return the names that a flow reads and none of its components provides."""
    own = {one.name for one in flow}
    return [name for one in flow for name in one.needs() if name not in own]


@dataclass(frozen=True, kw_only=True)
class Branch(Holding):
    """One of two ways: `then` where the condition holds, else `otherwise`, which may be the name of a value.

    Without `otherwise`, its value is None there.
    """

    condition: str = reads("", Kind.FLAG, Kind.ANY)
    then: Joinable = ()
    otherwise: Joinable | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "then", body_of(self.then, f"{self.name}.then"))
        if not isinstance(self.otherwise, (str, type(None))):
            object.__setattr__(self, "otherwise", body_of(self.otherwise, f"{self.name}.otherwise"))

    def sources(self) -> dict[str, str]:
        found = super().sources()
        return found | ({"otherwise": self.otherwise} if isinstance(self.otherwise, str) else {})

    def decompose(self, made: Decomposition) -> Value:
        assert isinstance(self.then, Flow)
        then, other = made.body(self.then), self._other(made)
        kind, condition = then.kind if then.kind is other.kind else Kind.ANY, made.ref("condition")
        arms = (("then", then), ("else", other))
        early = tuple(name for name, arm in arms if arm.only_searches) if made.waits_for_engines(condition) else ()
        said = Attributes(early_arms=early)
        ref = made.hold("", Role.BRANCH, named(condition=condition), then, otherwise=other, attributes=said)
        return Value(ref, kind)

    def _other(self, made: Decomposition) -> Body:
        if isinstance(self.otherwise, Flow):
            return made.body(self.otherwise)
        given = made.read("otherwise") if isinstance(self.otherwise, str) else None

        def as_it_is(body: Decomposition) -> Value:
            if given is None:
                return Value(body.call("nothing", _nothing), Kind.ANY)
            return Value(body.call("as_it_is", _same, value=body.read("otherwise").ref), given.kind)

        return made.made_by_hand(as_it_is)


@on_loop
def _nothing() -> None:
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

    def decompose(self, made: Decomposition) -> Value:
        assert isinstance(self.flow, Flow)
        over = made.read("over")
        width = over.width if isinstance(over.width, int) else None
        body = made.body(self.flow, **{self.each: Value(Ref(ITEM), _ONE.get(over.kind, Kind.ANY))})
        ref = made.hold("", Role.MAP, named(items=over.ref), body, expected=width)
        return Value(ref, _MANY.get(body.kind, Kind.LIST), over.width)


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
    max_rounds: int = setting(3, "rounds at most", least=1, most=64)

    def __post_init__(self) -> None:
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
        assert isinstance(self.flow, Flow)
        rest = tuple(one for one in self.flow if one.name != self.until)
        names = {one.name for one in rest}
        order = tuple(pair for pair in self.flow.order if names.issuperset(pair))
        return self.result or last_of(Flow(rest, order), f"{self.name}.flow")

    def decompose(self, made: Decomposition) -> Value:
        assert isinstance(self.flow, Flow)
        flow, most, init, until = self.flow, self.max_rounds, made.read("init"), self.until
        carried: list[Value] = []

        def round_of(body: Decomposition) -> Value:
            draft = body.call("draft", _draft, state=Ref(CARRY))
            values = body.lower(flow, **{self.carry: Value(draft, init.kind)})
            result = values[self._result()]
            carried.append(result)
            ends = {"until": _flag(body, values[until])} if until else {}
            return Value(body.call("state", _next(most), state=Ref(CARRY), value=result.ref, **ends), Kind.ANY)

        body = made.made_by_hand(round_of)
        begin = made.call("begin", _begin, value=init.ref)
        last = made.hold("rounds", Role.LOOP, named(init=begin), body)
        return Value(made.call("", _draft, state=last), carried[0].kind)


def _flag(body: Decomposition, value: Value) -> Ref:
    """Return the flag that ends the loop."""
    return value.ref if value.kind is Kind.FLAG else body.call("until", Condition("until")._tested(), value=value.ref)


@on_loop
def _begin(value: Any) -> dict[str, Any]:
    return {"value": value, "rounds": 0}


@on_loop
def _draft(state: Mapping[str, Any]) -> Any:
    return state["value"]


def _next(most: int) -> Callable[..., dict[str, Any]]:
    @on_loop
    def state(state: Mapping[str, Any], value: Any, until: Any = False) -> dict[str, Any]:
        rounds = state["rounds"] + 1
        return {"carry": {"value": value, "rounds": rounds}, "again": rounds < most and until is not True}

    return state


def body_of(given: Any, what: str) -> Flow:
    """A flow that is held. Raises `GraphError` for one that is empty or ends in several components."""
    flow = Flow.of(given)
    if not flow.components:
        raise GraphError(f"{what} holds no component.", hint="give it a component, or several joined by >>")
    return flow
