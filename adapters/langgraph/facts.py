"""The facts about a graph's nodes that `explain()` shows: read from its plans, and from what its nodes hold."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from langgraph.constants import END, START

from teola_plugin.adapters.explain import created_models, explain_undedicated, left_rows
from teola_plugin.adapters.langchain.call_sites import CodeSites
from teola_plugin.adapters.langchain.prefetch_plan import own_calls
from teola_plugin.adapters.langgraph.agents.agent_tools import AgentTools, text_of_tool
from teola_plugin.adapters.langgraph.explain import MIN_TOKENS, Choice, NodeFacts
from teola_plugin.adapters.langgraph.plans import Plans
from teola_plugin.adapters.langgraph.pools import pools_by_node
from teola_plugin.adapters.plan_report import CallRow, Explanation, OwnCalls, Reason, Status, leaves_of
from teola_plugin.adapters.plan_summary import (
    SPECULATIVE_START,
    AnswerForms,
    component_of,
    lookahead_starts,
    prefetch_starts,
)
from teola_plugin.adapters.planned_queries import forms_matter
from teola_plugin.graph import INPUT, Component, PromptPart, Ref, Role
from teola_plugin.passes.decoding_pipelining import leaf_primitives
from teola_plugin.shims.langchain_agents import AgentModel, ToolNodeParts, agent_model, tool_node_parts
from teola_plugin.shims.langgraph import functions_of
from teola_plugin.shims.mcp import mcp_tool
from teola_plugin.tracer.draft import Draft, TraceResult
from teola_plugin.tracer.functions import Fields, FindLeaves, Symbol
from teola_plugin.tracer.functions.frames import to_plain_function
from teola_plugin.tracer.functions.lookup import is_framework_code
from teola_plugin.tracer.functions.pruning import uses_engine
from teola_plugin.tracer.functions.pure_expressions import STATE, Answer, Condition
from teola_plugin.tracer.functions.symbols import Unknown
from teola_plugin.tracer.langchain.classes import leaf_of
from teola_plugin.tracer.langgraph.lookahead import ARGUMENT, lookahead, lower_node
from teola_plugin.tracer.langgraph.shape import ROOT, Branch, GraphShape, NodeShape, shape_of
from teola_plugin.tracer.langgraph.updates import EMPTY_NODE, LoweredNode
from teola_plugin.tracer.leaf import GenerationLeaf, is_user_code
from teola_plugin.tracer.report import Level
from teola_plugin.tracer.source import source_of

_YOUR_CODE = "your code: runs once, at its usual time"
_JOINS = "pool-backed objects that it calls join the query"
_CALLS_OF_TOOLS = "its calls of models that do not need each other's answers start together when it is called"
OTHER_SETTINGS = "; with other settings from their second call on"
"""Added to the start of calls where settings of the call decide what is called."""
_NOT_ALL_UNDERSTOOD = "not all of its code is understood"


@dataclass(frozen=True)
class GraphFacts:
    """The facts about one accelerated graph. Nothing of it runs."""

    graph: Any
    """The graph with the objects on engines that are bound in it."""
    plans: Plans | None
    tools: AgentTools | None
    code_sites: CodeSites
    """The calls of the user's own models in functions."""
    is_off: bool = False
    """True if nothing is prefetched (`speculate="off"`)."""
    _nodes_with_settings: set[str] = field(default_factory=set)
    """The nodes in which settings of the call decide what is called."""

    @cached_property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """The facts about each node."""
        pools, shape = pools_by_node(self.graph), self._shape
        names = [name for name in self.graph.nodes if name != START]
        if shape is None:
            runnables = ((name, self.graph.nodes[name].bound) for name in names)
            return tuple(
                NodeFacts(
                    name,
                    _kind(runnable),
                    *_opaque_level(runnable, name in pools),
                    tools=tuple(self._tools(name, runnable)),
                )
                for name, runnable in runnables
            )
        return tuple(self._node(shape.nodes[name], name in pools) for name in names)

    @property
    def first_nodes(self) -> tuple[str, ...]:
        """Nodes that the static edges from the start lead to."""
        edges = getattr(getattr(self.graph, "builder", None), "edges", ())
        return tuple(sorted(end for start, end in edges if start == START and end in self.graph.nodes))

    @property
    def first_choices(self) -> tuple[Choice, ...]:
        """The conditional edges from the start, which `explain()` lists."""
        start = None if self._shape is None else self._shape.nodes.get(START)
        return () if start is None else tuple(_choice(branch, START) for branch in start.branches)

    # ------------------------------------------------------------ one node

    @cached_property
    def _shape(self) -> GraphShape | None:
        """Return the shape that the report's facts are read from; None for a graph without edges.

        It is that of the plans, if there are plans.
        """
        return shape_of(self.graph) if self.plans is None else self.plans.shape

    def _node(self, node: NodeShape, has_pool: bool) -> NodeFacts:
        """Collect what the report says of one node: how much of it was understood, its calls, tools and edges.

        `has_pool`: the node holds pool-backed objects.
        """
        draft, visited = self._visited[node.name]
        calls = (*self._rows(node, draft), *self._router_rows(node))
        level, reason = _level(node, draft, visited, has_pool)
        agent = agent_model(self.graph)
        if agent is not None and agent.node == node.name:
            calls = (_agent_call(agent, is_prefilled=self.tools is not None),)
        elif not calls and visited.runs_user_code and (explanation := _unknown_code(node)) is not None:
            source = draft.sources.get(f"{node.name}.code", "")
            calls = (CallRow(node.name, Status.NOT_SEEN, source=source, explanation=explanation),)
        if agent is not None and agent.node == node.name and _engine_of(agent.model):
            middleware = "; middleware may change what it is asked" if agent.wrapped else ""
            level, reason = "joined", f"an agent's model{middleware}"
        return NodeFacts(
            node.name,
            _kind(node.bound),
            level,
            reason,
            node.successors,
            node.joins,
            tuple(_choice(branch, node.name) for branch in node.branches),
            calls,
            tuple(self._tools(node.name, node.bound)),
        )

    def _tools(self, node: str, runnable: Any) -> Iterator[CallRow]:
        """Yield the rows for the tools of a node that runs tools; none for any other node."""
        parts = tool_node_parts(runnable)
        for name, tool in () if parts is None else parts.tools.items():
            assert parts is not None
            row = _tool_row(name, tool, self.tools, parts)
            is_in_place = row.status is Status.IN_PLACE and self.plans is not None and not self.is_off
            if is_in_place and self.plans is not None and self.plans.has_plan_of_tool(node, name):
                row = CallRow(name, Status.PREFETCHED, "tool", start=_CALLS_OF_TOOLS)
            yield row

    @cached_property
    def _visited(self) -> dict[str, tuple[Draft, LoweredNode]]:
        """The calls and the updates of each node, whatever the state is."""
        visited: dict[str, tuple[Draft, LoweredNode]] = {}
        for name, node in {} if self._shape is None else self._shape.nodes.items():
            draft = Draft()
            state = Ref(INPUT).at(STATE)
            fields: Symbol = state.at(ROOT)
            if self._shape is not None and self._shape.is_function:
                fields = Ref(INPUT).at(ARGUMENT)
            elif node.reads is not None:
                fields = Fields({field: state.at(field) for field in node.reads}, attributes=True)
            lowered = EMPTY_NODE
            if node.bound is not None:
                decide = partial(self._decide, node=name)
                find_leaves = self._find_leaves
                reads_tasks = self._shape is None or not self._shape.caches_tasks
                options = {"has_environment": True, "reads_tasks": reads_tasks}
                lowered = lower_node(draft, node.bound, fields, name, decide, find_leaves, **options)
            visited[name] = draft, lowered
        return visited

    @cached_property
    def _input(self) -> dict[str, Any] | None:
        return None if self.plans is None else self.plans.input_of_report()

    def _decide(self, condition: Condition, node: str = "") -> Answer:
        """Answer a condition on settings by those of the last call. Note that they count in this node."""
        answer = condition.answer(self._input)
        if answer is not None:
            self._nodes_with_settings.add(node)
        return answer

    @property
    def _find_leaves(self) -> FindLeaves:
        return self.code_sites.find_leaves

    # ------------------------------------------------------------ calls

    def _rows(self, node: NodeShape, draft: Draft) -> Iterator[CallRow]:
        """Yield a row for each place in a node that makes calls."""
        yield from self._call_rows(node, draft)
        left = self.code_sites.left.items()
        names = f"{node.name}:", f"{node.name}.", f"graph.{node.name}."
        node_rows = {path: one for path, one in left if path.startswith(names)}
        yield from left_rows({**node_rows, **created_models(draft.created_models)}, draft.sources)

    def _router_rows(self, node: NodeShape) -> Iterator[CallRow]:
        """Yield a row for each call of the functions of the node's conditional edges, which run behind the node."""
        shape, draft = self._shape, Draft()
        if shape is None or shape.is_function:
            return
        state = Ref(INPUT).at(STATE)
        fields = Fields({field: state.at(field) for field in shape.update_rules}, attributes=True)
        for branch in node.branches:
            if branch.path is not None:
                decide = partial(self._decide, node=node.name)
                lower_node(draft, branch.path, fields, f"{node.name}.next", decide, self._find_leaves)
        yield from self._call_rows(node, draft, is_router=True)

    def _call_rows(self, node: NodeShape, draft: Draft, *, is_router: bool = False) -> Iterator[CallRow]:
        """Yield a row for each call in a draft: of a node, or of the functions that choose what runs behind it."""
        components = [component for component in draft.components.values() if uses_engine(component)]
        for component in components:
            is_first = component is components[0] and not is_router
            start, explanation = self._start(node, component, is_first)
            status = Status.PREFETCHED
            if not start and explanation is None:
                start, status = self._speculative_start(component.name), Status.SPECULATIVE
            if not start and explanation is None:
                explanation = (
                    self._reason_of_router(node, component)
                    if is_router
                    else self._reason_in_place(node, component.name, is_first)
                )
            if start and node.name in self._nodes_with_settings:
                start += OTHER_SETTINGS
            if start and self.is_off:
                start, explanation = "", Explanation(Reason.SWITCHED_OFF)
            for leaf in leaves_of(component):
                site = self.code_sites.sites.get(leaf.attributes.wrapped)
                yield CallRow(
                    leaf.name,
                    status if start else Status.IN_PLACE,
                    leaf.engine or leaf.embedder if site is None else type(site.provider).__name__,
                    draft.sources.get(leaf.name, ""),
                    start,
                    explanation,
                    self._only_whole(component),
                    self._named_prompt(component) if leaf is component else (),
                    None if site is None else site.counts,
                )

    def _named_prompt(self, call: Component) -> tuple[PromptPart, ...]:
        """Return the prompt of a generation, with variables by the names of what fills them."""
        sources = {variable: _source_name(reference) for variable, reference in call.inputs}
        return tuple(
            replace(part, variable=sources.get(part.variable, part.variable)) if part.variable else part
            for part in call.prompt
        )

    def _only_whole(self, call: Component) -> bool:
        """Return True if a request of the call for a whole answer is no request for a streamed one."""
        if self.plans is None:
            return False
        body = () if call.body is None else call.body.components
        return forms_matter(call, self.plans.pool) or any(map(self._only_whole, body))

    def _start(self, node: NodeShape, call: Component, is_first: bool) -> tuple[str, Explanation | None]:
        """Say with which node a call starts, the one for whose plan it waits least; "" if it starts in its place.

        Also return the reason for that, if it is the object that is called.
        """
        explanation = self._reason_for_all(call)
        if self.plans is None or explanation is not None:
            return "", explanation
        starts: list[tuple[int, int, str]] = []
        blocking: set[str] = set()
        targets = self._one_by_one
        limited = {
            type(target).__name__ for leaf in leaves_of(call) if (target := targets.get(leaf.attributes.wrapped))
        }
        if is_first and call.attributes.is_parallel and limited:
            blocking |= limited
        elif is_first and call.attributes.is_parallel:  # a loop
            starts.append((len(self._visited), 0, "all items at once, when its node begins"))
        for name in self._visited:
            if name == node.name and is_first:
                continue
            plan = self.plans.traced(self.plans.key(name), self._input)
            components = {} if plan is None else {component.name: component for component in plan.template.components}
            if plan is None or call.name not in components:
                continue
            waits = _waits_of(components, call.name)
            if any(self._is_left(components[one]) for one in (call.name, *waits)):
                continue
            begins = _sooner(self.plans.optimised(plan), targets)
            if call.name not in begins:
                blocking |= limited if call.name in _sooner(self.plans.optimised(plan), {}) else set()
                continue
            start = f"when {'its node' if name == node.name else name} begins"
            if name == START:
                start = "when the graph begins"
            distance = -self.plans.distances.get(name, 0)
            if _user_code(plan).isdisjoint(waits):
                after = f", once {' and '.join(waits)} {'have' if len(waits) > 1 else 'has'} ended" if waits else ""
                starts.append((len(waits), distance, start + after))
            elif (tokens := _known_tokens(plan, call.name)) >= MIN_TOKENS:
                starts.append((len(self._visited), distance, f"its first {tokens} tokens, {start}"))
        if not starts and blocking:
            return "", Explanation(Reason.ONE_AT_A_TIME, tuple(sorted(blocking)))
        return (min(starts)[2] if starts else ""), None

    def _speculative_start(self, call: str, as_dedicated: Collection[str] = ()) -> str:
        """Say with which node a call starts that the graph may choose or not; "" if it starts in its place.

        `as_dedicated`: engines that are taken as declared dedicated.
        """
        plans, starts = self.plans, list[tuple[int, str]]()
        for name in self._visited if plans is not None else ():
            assert plans is not None
            plan = plans.traced(plans.key(name), self._input)
            if as_dedicated and self._shape is not None:
                with contextlib.suppress(Exception):  # nothing is known of the nodes from there on
                    plan = self._lookahead(self._shape, name)
            if plan is None:
                continue
            graph = plans.optimised(plan, as_dedicated).graph
            if lookahead_starts(graph, AnswerForms.of(graph, plans.pool)).get(call) == SPECULATIVE_START:
                when = "the graph" if name == START else name
                starts.append((-plans.distances.get(name, 0), f"when {when} begins, {SPECULATIVE_START}"))
        return min(starts)[1] if starts else ""

    def _lookahead(self, shape: GraphShape, node: str) -> TraceResult:
        pushed = shape.is_function
        return lookahead(shape, node, pushed=pushed, decide=self._decide, find_leaves=self._find_leaves)

    def _reason_for_all(self, call: Component) -> Explanation | None:
        """Return what keeps calls of this kind in their place wherever they stand."""
        sites = {
            leaf.attributes.wrapped: site
            for leaf in leaves_of(call)
            if (site := self.code_sites.sites.get(leaf.attributes.wrapped))
        }
        explanations = own_calls(sites, frozenset(), {}).explanations
        return next(iter(explanations.values()), None)

    @cached_property
    def _one_by_one(self) -> Mapping[str, Any]:
        return own_calls(self.code_sites.sites, frozenset(), {}).one_by_one

    def _is_left(self, call: Component) -> bool:
        """Return True for a call that starts in its place in every query, since its answer may be streamed."""
        body = () if call.body is None else call.body.components
        is_unknown = call.attributes.form == "unknown" and self._only_whole(call)
        return is_unknown or any(map(self._is_left, body))

    def _reason_in_place(self, node: NodeShape, call: str, is_first: bool) -> Explanation:
        """Say why a call starts in its place."""
        shape = self._shape
        assert shape is not None
        component = self._visited[node.name][0].components.get(call)
        if component is not None and self._is_left(component):
            return Explanation(Reason.STREAMED)
        draft = self._visited[node.name][0]
        waits = _waits_of(draft.components, call) if component is not None else []
        computed_values = [one for one in waits if _is_run_time_value(draft.components[one])]
        if computed_values:
            return Explanation(Reason.PROMPT_AT_RUN_TIME, source=draft.sources.get(computed_values[0], ""))
        previous = [one for one in shape.nodes.values() if node.name in _successors(one) and one.name != START]
        if not previous or node.name in self.first_nodes:
            return self._reason_in_first_node(draft, call, waits)
        if node.skippable:
            is_cached = getattr(self.graph.nodes[node.name], "cache_policy", None) or self.graph.cache_policy
            return (
                Explanation(Reason.NODE_CACHE, (repr(node.name),))
                if is_cached
                else Explanation(Reason.INTERRUPTED_BEFORE)
            )
        if all(one.pauses or self._visited[one.name][1].pauses for one in previous):
            return Explanation(Reason.INTERRUPTED_BEFORE)
        changing = [one.name for one in previous if self._visited[one.name][1].changes_objects]
        if changing:
            return Explanation(Reason.OBJECTS_CHANGED, tuple(changing))
        needs = [waits for one in previous if (waits := self._waits_from(one.name, call))]
        if needs:
            return Explanation(Reason.NEEDS_RESULTS, tuple(needs[0]))
        opaque = [one.name for one in previous if self._visited[one.name][1].updates is None]
        if opaque:
            sources = self._visited[opaque[0]][0].sources
            return Explanation(Reason.UNKNOWN_UPDATES, tuple(opaque), sources.get(f"{opaque[0]}.code", ""))
        if node.name not in {name for one in previous for name in (*one.successors, *self._visited[one.name][1].goto)}:
            return self._explain_undedicated(call) or Explanation(Reason.MAY_BE_SKIPPED)
        reads = shape.nodes[node.name].reads or ()
        reduced = [name for name in reads if shape.update_rules.get(name) == "unknown"]
        if reduced and any(name in (self._visited[one.name][1].updates or ()) for one in previous for name in reduced):
            return Explanation(Reason.REDUCER, tuple(reduced))
        return Explanation(Reason.IN_ITS_NODE if is_first else Reason.BEHIND_OTHERS)

    def _reason_of_router(self, node: NodeShape, call: Component) -> Explanation:
        """Say why a call of a conditional edge's function starts in its place."""
        if self._is_left(call):
            return Explanation(Reason.STREAMED)
        visited = self._visited[node.name][1]
        if visited.pauses:
            return Explanation(Reason.INTERRUPTED_BEFORE)
        if visited.changes_objects:
            return Explanation(Reason.OBJECTS_CHANGED, (node.name,))
        if needs := self._waits_from(node.name, call.name):
            return Explanation(Reason.NEEDS_RESULTS, tuple(needs))
        if visited.updates is None:
            source = self._visited[node.name][0].sources.get(f"{node.name}.code", "")
            return Explanation(Reason.UNKNOWN_UPDATES, (node.name,), source)
        return Explanation(Reason.BEHIND_OTHERS)

    def _reason_in_first_node(self, draft: Draft, call: str, waits: Sequence[str]) -> Explanation:
        """Say why a call starts in its place whose node is the first. `waits`: what it waits for directly."""
        calls = [name for name in waits if uses_engine(draft.components[name])]
        if calls:
            return Explanation(Reason.NEEDS_RESULTS, tuple(calls))
        names = list(draft.components)
        code = [name for name in names[: names.index(call)] if is_user_code(draft.components[name])]
        if code:
            return Explanation(Reason.BEHIND_CODE, (code[-1],), draft.sources.get(code[-1], ""))
        return Explanation(Reason.FIRST)

    def _explain_undedicated(self, call: str) -> Explanation | None:
        """Return which engines keep a call in its place by not being dedicated; None if that is not the reason."""
        if self.plans is None:
            return None
        plan_saves_time = partial(self._speculative_start, call)
        return explain_undedicated(self.plans.pool, lambda engines: bool(engines and plan_saves_time(engines)))

    def _waits_from(self, name: str, call: str) -> list[str]:
        """Return what a call would wait for that started with a node; nothing if that would be of no use."""
        assert self._shape is not None
        try:
            plan = self._lookahead(self._shape, name)
        except Exception:  # nothing is known of the nodes from there on
            return []
        components = {component.name: component for component in plan.template.components}
        waits = _waits_of(components, call) if call in components else []
        return waits if _user_code(plan).isdisjoint(waits) else []


# ------------------------------------------------------------ nodes


def _kind(runnable: Any) -> str:
    """Return the name of what a node or a condition runs: its function, else its class."""
    if tool_node_parts(runnable) is not None:
        return type(runnable).__name__
    functions = functions_of(runnable)
    function = None if functions is None else functions.func or functions.afunc
    name = getattr(function, "__name__", "") or getattr(function, "name", "")
    return name if type(name) is str and name else type(runnable).__name__


def _level(node: NodeShape, draft: Draft, visited: LoweredNode, has_pool: bool) -> tuple[Level, str]:
    """Return how much of a node was understood, and the reason if not all of it was."""
    if functions_of(node.bound) is None:
        row = next((row for row in draft.nodes if row.level != "lowered"), None)
        return ("lowered", "") if row is None else (row.level, row.reason)
    if visited.updates is not None and not any(isinstance(value, Unknown) for value in visited.updates.values()):
        return "lowered", ""
    if any(map(uses_engine, draft.components.values())):
        return "joined", f"{_NOT_ALL_UNDERSTOOD}; {_JOINS}" if has_pool else _NOT_ALL_UNDERSTOOD
    return _opaque_level(node.bound, has_pool)


def _unknown_code(node: NodeShape) -> Explanation | None:
    """Return why the calls of a function are not seen: it has no source, or code of it is not understood.

    Return None for what is no function, or the framework's.
    """
    functions = functions_of(node.bound)
    function = None if functions is None else functions.func or functions.afunc
    plain, _ = (None, ()) if function is None else to_plain_function(function, ())
    if plain is None or is_framework_code(plain) or tool_node_parts(node.bound) is not None:
        return None
    return (
        Explanation(Reason.NO_SOURCE, (node.name,))
        if source_of(plain.__code__) is None
        else Explanation(Reason.UNKNOWN_CODE)
    )


def _opaque_level(runnable: Any, has_pool: bool) -> tuple[Level, str]:
    code = "each tool runs once" if tool_node_parts(runnable) is not None else _YOUR_CODE
    return ("joined", f"{code}; {_JOINS}") if has_pool else ("original", code)


def _choice(branch: Branch, node: str) -> Choice:
    nodes = tuple("the end" if name == END else name for name in branch.nodes)
    return Choice(nodes, node if branch.path is None else _kind(branch.path))


def _successors(node: NodeShape) -> set[str]:
    """Return the names of the nodes that the edges and known conditional edges of a node lead to.

    `_reason_in_place` finds the nodes before a given one by it, to explain in the report why a call of that node is
    not prefetched.
    """
    return {*node.successors, *node.joins, *(name for branch in node.branches for name in branch.nodes)}


# ------------------------------------------------------------ plans


def _source_name(reference: Ref) -> str:
    """Return the name of what fills a variable of a prompt: a channel of the state, or another call."""
    if reference.producer != INPUT:
        return reference.producer
    path = [str(key) for key in reference.path if key not in (STATE, ROOT)]
    return ".".join(path) or "state"


def _sooner(optimised: Any, one_by_one: Mapping[str, Any]) -> set[str]:
    """Return the components of a plan, and what holds them, that start before their place."""
    names = prefetch_starts(optimised, OwnCalls(_every_site(optimised), one_by_one))
    holders = {
        component_of(p.id)
        for p in optimised.graph
        if {component_of(one.id) for one in leaf_primitives(p)} & names.keys()
    }
    return {*names, *holders}


def _every_site(optimised: Any) -> frozenset[str]:
    return frozenset(one.attributes.wrapped for p in optimised.graph for one in leaf_primitives(p))


def _is_run_time_value(component: Component) -> bool:
    """Return True for a value that only the run can tell, and that code without side effects computes."""
    return component.role is Role.OPAQUE and not is_user_code(component)


def _waits_of(components: Mapping[str, Component], call: str) -> list[str]:
    """Return the calls of engines, and the user code, that a call among these components waits for directly."""
    waits, pending, seen = dict[str, None](), [ref.producer for _, ref in components[call].inputs], set[str]()
    while pending:
        name = pending.pop(0)
        if name not in components or name in seen:
            continue
        seen.add(name)
        if uses_engine(components[name]) or components[name].role is Role.OPAQUE:
            waits[name] = None
        else:
            pending += [ref.producer for _, ref in components[name].inputs]
    return list(waits)


def _user_code(plan: TraceResult) -> set[str]:
    """Return the names of the components that are user code, of which the tracer knows nothing."""
    return {component.name for component in plan.template.components if component.role is Role.OPAQUE}


def _known_tokens(plan: TraceResult, call: str) -> int:
    """Return how many tokens of a prompt stand before the first variable that waits for user code."""
    component = next(component for component in plan.template.components if component.name == call)
    code = _user_code(plan)
    unknown = {variable for variable, ref in component.inputs if ref.producer in code}
    last = next((i for i, part in enumerate(component.prompt) if part.variable in unknown), len(component.prompt))
    return sum(part.tokens for part in component.prompt[:last])


# ------------------------------------------------------------ agents and tools


def _agent_call(agent: AgentModel, *, is_prefilled: bool) -> CallRow:
    """Return the row for the calls of an agent's model. `is_prefilled`: its next prompts are, while tools run."""
    texts = [*map(text_of_tool, agent.tools), *([] if agent.system_message is None else [agent.system_message.text])]
    prompt = (*(PromptPart.literal(text) for text in texts if text), PromptPart.var("messages"))
    engine, explanation = _engine_of(agent.model), Explanation(Reason.PREFILLED if is_prefilled else Reason.AGENT)
    return CallRow(
        agent.node,
        Status.IN_PLACE,
        engine or type(agent.model).__name__,
        explanation=explanation,
        prompt=prompt if engine else (),
    )


def _engine_of(model: Any) -> str:
    """Return the engine that a model is on; empty for none."""
    leaf = leaf_of(model, {})
    return leaf.engine if isinstance(leaf, GenerationLeaf) else ""


def _tool_row(name: str, original: Any, tools: AgentTools | None, parts: ToolNodeParts) -> CallRow:
    """Return the report's row for one tool: when it starts, or the reason why it runs in its place."""
    tool = None if tools is None else tools.tools.get(name)
    if tool is not None:
        work = "it runs" if tool.can_be_prefetched else "its engine work begins"
        return CallRow(name, Status.PREFETCHED, "tool", start=f"{work} when the model has written its call")
    reason, names = Reason.TOOL_BEHIND_PERSON if tools is None else Reason.NOT_READ_ONLY, (name,)
    server = mcp_tool(original)
    if parts.wrapped:
        reason = Reason.WRAPPED_TOOL
    elif server is not None and server.has_callbacks:
        reason = Reason.MCP_CALLBACKS
    elif name in parts.injected and server is None:
        reason = Reason.TOOL_WITH_STATE
    elif reason is Reason.NOT_READ_ONLY and server is not None and server.read_only_hint and server.server_name:
        reason, names = Reason.HINTED_READ_ONLY, (server.server_name,)
    return CallRow(name, Status.IN_PLACE, "tool", explanation=Explanation(reason, names))
