"""Conditions that are not known yet: what runs on one of two ways.

Where the condition is pure, a BRANCH decides it and one way's work begins. Where it waits for an engine, or for user
code, the work of both ways is begun before (see `lookahead`), as long as one of them at most asks a model.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from teola_plugin.graph import Component, Ref, Role
from teola_plugin.tracer.draft import DERIVED, Draft, Span
from teola_plugin.tracer.functions.capturing import Captures
from teola_plugin.tracer.functions.composing import composed
from teola_plugin.tracer.functions.live import asks
from teola_plugin.tracer.functions.machine import Flow, Walker
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE, Computed, Fields, Known, Symbol, Unknown
from teola_plugin.tracer.langchain.lookahead import begun_early
from teola_plugin.tracer.symbols import NotUnderstood

Statements = Sequence[ast.stmt]
_NONE = ast.Constant(None)
RETURNED = "returned"


def both_ways(walk: Walker, test: Symbol, ways: tuple[Statements, Statements], names: set[str]) -> Flow:
    """Walks through both ways. `names` are assigned on one of them; both end the function, or neither does."""
    taken = set(walk.draft.names)
    tried = [_tried(walk, statements, taken) for statements in ways]
    flow = _taken(walk, test, ways, names, tried)
    for trial, _ in tried:
        walk.in_place.update(trial.in_place)
    return flow


def _taken(
    walk: Walker,
    test: Symbol,
    ways: tuple[Statements, Statements],
    names: set[str],
    tried: Sequence[tuple[Walker, Flow]],
) -> Flow:
    flow = _together([flow for _, flow in tried])
    if not any(asks(c) for trial, _ in tried for c in trial.draft.components.values()):
        return _merged(walk, test, [trial for trial, _ in tried], flow, names)
    condition = _condition(walk, test)
    asking = sum(any(c.role is Role.GENERATION for c in trial.draft.components.values()) for trial, _ in tried)
    if condition is not None and (asking > 1 or not _waits(walk.draft, condition)):
        return _Branch(walk, condition).walked(ways, names)
    _forget(walk, names)
    walk.left_out = True
    _begun(walk, [trial.draft for trial, _ in tried])
    _note_user_code(walk, [trial for trial, _ in tried])
    return Flow.STOPPED if flow is not Flow.NEXT else flow


def _tried(walk: Walker, statements: Statements, taken: set[str]) -> tuple[Walker, Flow]:
    """The way as it would be walked if it were certain, on a draft of its own."""
    trial = walk.trial(taken)
    return trial, trial.block(statements)


def _together(flows: Sequence[Flow]) -> Flow:
    if all(flow is Flow.NEXT for flow in flows):
        return Flow.NEXT
    return Flow.STOPPED if any(flow is Flow.STOPPED for flow in flows) else Flow.ENDED


def _forget(walk: Walker, names: set[str]) -> None:
    for name in names:
        walk.frame.names[name] = UNKNOWN_VALUE


def _note_user_code(walk: Walker, ways: Sequence[Walker]) -> None:
    walk.left_out = walk.left_out or any(way.left_out for way in ways)
    if any(way.runs_user_code for way in ways):
        walk.user_code()


def _begun(walk: Walker, drafts: list[Draft]) -> None:
    """What either way asks for, as far as that costs little."""
    for component in begun_early(drafts, False):
        walk.draft.add(component)
    for draft in drafts:
        walk.draft.names |= draft.names
        walk.draft.calls |= draft.calls
        walk.draft.lists |= {name: how for name, how in draft.lists.items() if name in walk.draft.components}


# ------------------------------------------------------------ values of either way


def _merged(walk: Walker, test: Symbol, ways: Sequence[Walker], flow: Flow, names: set[str]) -> Flow:
    """Neither way asks for anything: what comes of them is an expression, or unknown."""
    for name in names:
        walk.frame.names[name] = _either(walk, test, [way.frame.read(name) for way in ways], ways)
    if flow is Flow.ENDED:
        walk.frame.returned = _either(walk, test, [way.frame.returned for way in ways], ways)
    _note_user_code(walk, ways)
    return flow


def _either(walk: Walker, test: Symbol, values: Sequence[Symbol], ways: Sequence[Walker]) -> Symbol:
    one, other = values
    if one is other:
        return one
    if isinstance(one, Fields) and isinstance(other, Fields) and one.base is None and other.base is None:
        keys = one.items.keys() if one.items.keys() == other.items.keys() else ()
        items = {key: _either(walk, test, (one.items[key], other.items[key]), ways) for key in keys}
        return Fields(items, None, one.attributes) if items else UNKNOWN_VALUE
    if isinstance(one, Known) and isinstance(other, Known) and one.value is other.value:
        return one
    shape = ast.IfExp(_NONE, _NONE, _NONE)
    made = composed(walk, shape, {"test": test, "body": one, "orelse": other})
    inside = {name for way in ways for name in way.draft.components}
    if isinstance(made, Computed) and inside.isdisjoint(ref.producer for ref in made.refs.values()):
        return made
    return UNKNOWN_VALUE


# ------------------------------------------------------------ BRANCH


def _condition(walk: Walker, test: Symbol) -> Ref | None:
    """Whether it holds, as a value; None for one that is not certain to be pure."""
    if isinstance(test, Unknown):
        return None
    try:
        code = walk.code(test)
        whole = None if code is None else ast.Call(ast.Name("bool", ast.Load()), [code.code], [])
        return None if code is None or whole is None else walk.ref(Computed(whole, code.refs, code.objects))
    except NotUnderstood:
        return None


def _waits(draft: Draft, ref: Ref) -> bool:
    """Whether the value waits for an engine, or for what is made elsewhere."""
    if ref.external:
        return False
    maker = draft.components.get(ref.producer)
    return maker is None or asks(maker) or any(_waits(draft, one) for _, one in maker.inputs)


class _Branch:
    """A BRANCH in the making."""

    def __init__(self, walk: Walker, condition: Ref) -> None:
        self._walk = walk
        self._condition = condition
        self._captures = Captures(walk)

    def walked(self, ways: tuple[Statements, Statements], names: set[str]) -> Flow:
        bodies = [self._captures.body() for _ in ways]
        flow = _together([body.block(statements) for body, statements in zip(bodies, ways, strict=True)])
        values = [self._values(body, flow, names) for body in bodies]
        shared = [key for key in values[0] if key in values[1]]
        made = self._component(bodies, [{key: one[key] for key in shared} for one in values])
        _forget(self._walk, names)
        if made is not None:
            self._walk.frame.names |= {key: made.at(key) for key in shared if key in names}
        if flow is Flow.ENDED:
            self._walk.frame.returned = self._returned(made, bodies, shared)
        _note_user_code(self._walk, bodies)
        return flow

    def _values(self, body: Walker, flow: Flow, names: set[str]) -> dict[str, Ref]:
        """What a way gives, as far as it is known, by name."""
        wanted: dict[str, Symbol] = {}
        if flow is Flow.NEXT:
            wanted = {name: body.frame.read(name) for name in sorted(names)}
        elif flow is Flow.ENDED:
            returned = body.frame.returned
            wanted = {RETURNED: returned}
            if isinstance(returned, Fields) and returned.base is None and not returned.attributes:
                wanted = {f"{RETURNED}.{key}": one for key, one in returned.items.items()}
        found: dict[str, Ref] = {}
        for name, symbol in wanted.items():
            try:
                found[name] = body.ref(symbol)
            except NotUnderstood:
                continue
        return found

    def _component(self, bodies: Sequence[Walker], values: Sequence[dict[str, Ref]]) -> Ref | None:
        """The BRANCH; None where nothing can run ahead in it."""
        walk = self._walk
        outputs = []
        for body, found in zip(bodies, values, strict=True):
            output = body.ref(Fields(found)) if found else Ref("$condition")
            outputs.append((body.finished(output), output))
        if all(done is None for done, _ in outputs):
            return None
        name = walk.draft.name(f"{walk.name}.branch", *DERIVED)
        templates = []
        for body, (_, output) in zip(bodies, outputs, strict=True):
            kept = output if output.external or output.producer in body.draft.components else Ref("$condition")
            templates.append(body.draft.template(kept, name))
            walk.draft.absorb(body.draft)
        whole = all(template.output.producer != "$condition" for template in templates)
        inputs = (("condition", self._condition), *self._captures.inputs.items())
        made = walk.draft.add(Component(name, Role.BRANCH, inputs, body=templates[0], otherwise=templates[1]))
        walk.emitted(Span((name,), (name,)))
        return made if whole else None

    @staticmethod
    def _returned(made: Ref | None, bodies: Sequence[Walker], shared: Sequence[str]) -> Symbol:
        if made is None:
            return UNKNOWN_VALUE
        if RETURNED in shared:
            return made.at(RETURNED)
        returned = [body.frame.returned for body in bodies]
        keys = [key for one in returned if isinstance(one, Fields) for key in one.items]
        if not all(isinstance(one, Fields) for one in returned):
            return UNKNOWN_VALUE
        names = {key: f"{RETURNED}.{key}" for key in keys}
        return Fields({key: made.at(name) if name in shared else UNKNOWN_VALUE for key, name in names.items()})
