"""The facts about a graph's nodes that `explain()` shows: read from its plans, and from what its nodes hold."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.constants import END, START

from teola_plugin.adapters.early_work import forms_matter
from teola_plugin.adapters.explain import only_whole
from teola_plugin.adapters.langgraph.agents.agent_tools import AgentTools
from teola_plugin.adapters.langgraph.explain import (
    FIRST,
    MIN_TOKENS,
    PREFILLED,
    CallFacts,
    Choice,
    NodeFacts,
    ToolFacts,
)
from teola_plugin.adapters.langgraph.plans import PlanKey, Plans
from teola_plugin.adapters.langgraph.pools import pools_by_node
from teola_plugin.graph import INPUT, Component, PromptPart, Ref, Role
from teola_plugin.shims.langchain_agents import AgentModel, agent_model, tool_node_parts
from teola_plugin.shims.langgraph import functions_of
from teola_plugin.tracer.draft import Draft, TraceResult
from teola_plugin.tracer.functions import Fields, FindLeaves, Symbol
from teola_plugin.tracer.functions.pruning import uses_engine
from teola_plugin.tracer.functions.symbols import Unknown
from teola_plugin.tracer.langchain.classes import leaf_of
from teola_plugin.tracer.langgraph.lookahead import EMPTY_NODE, STATE, LoweredNode, lookahead, lower_node
from teola_plugin.tracer.langgraph.shape import ROOT, Branch, GraphShape, NodeShape, shape_of
from teola_plugin.tracer.leaf import GenerationLeaf
from teola_plugin.tracer.report import Level

_YOUR_CODE = "your code: runs once, in its place"
_JOINS = "pool-backed objects that it calls join the query"
_NOT_ALL_UNDERSTOOD = "not all of its code is understood"


@dataclass(frozen=True)
class GraphFacts:
    """The facts about one accelerated graph. Nothing of it runs."""

    graph: Any
    """The graph with the objects on engines that are bound in it."""
    plans: Plans | None
    tools: AgentTools | None

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
                    tools=_tools_of(runnable, self.tools),
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
        """The conditional edges from the start."""
        start = None if self._shape is None else self._shape.nodes.get(START)
        return () if start is None else tuple(_choice(branch, START) for branch in start.branches)

    # ------------------------------------------------------------ one node

    @cached_property
    def _shape(self) -> GraphShape | None:
        return shape_of(self.graph) if self.plans is None else self.plans.shape

    def _node(self, node: NodeShape, has_pool: bool) -> NodeFacts:
        draft, visited = self._visited[node.name]
        components = [component for component in draft.components.values() if uses_engine(component)]
        calls = tuple(self._call(node, component, component is components[0]) for component in components)
        level, reason = _level(node, draft, visited, has_pool)
        if self._agent is not None and self._agent.node == node.name:
            calls, level = (_agent_call(self._agent, is_prefilled=self.tools is not None),), "joined"
            middleware = "; middleware may change what it is asked" if self._agent.wrapped else ""
            reason = f"an agent's model{middleware}"
        return NodeFacts(
            node.name,
            _kind(node.bound),
            level,
            reason,
            node.successors,
            node.joins,
            tuple(_choice(branch, node.name) for branch in node.branches),
            calls,
            _tools_of(node.bound, self.tools),
        )

    @cached_property
    def _visited(self) -> dict[str, tuple[Draft, LoweredNode]]:
        """The calls and the updates of each node, whatever the state is."""
        visited: dict[str, tuple[Draft, LoweredNode]] = {}
        for name, node in {} if self._shape is None else self._shape.nodes.items():
            draft = Draft()
            state = Ref(INPUT).at(STATE)
            fields: Symbol = state.at(ROOT)
            if node.reads is not None:
                fields = Fields({field: state.at(field) for field in node.reads}, attributes=True)
            lowered = EMPTY_NODE
            if node.bound is not None:
                lowered = lower_node(draft, node.bound, fields, name, find_leaves=self._find_leaves)
            visited[name] = draft, lowered
        return visited

    @property
    def _find_leaves(self) -> FindLeaves | None:
        return None if self.plans is None else self.plans.code_sites.find_leaves

    # ------------------------------------------------------------ calls

    def _call(self, node: NodeShape, call: Component, is_first: bool) -> CallFacts:
        """Return the facts about a call. `is_first`: it is the first one of its node."""
        sources = {variable: _source_name(reference) for variable, reference in call.inputs}
        prompt = tuple(
            replace(part, variable=sources.get(part.variable, part.variable)) if part.variable else part
            for part in call.prompt
        )
        start = self._start(node, call.name, is_first)
        reason = "" if start else self._reason_in_place(node, call.name, is_first)
        return CallFacts(call.name, call.engine or call.embedder, prompt, start, reason, self._only_whole(call))

    def _only_whole(self, call: Component) -> bool:
        """Return True if a request of the call for a whole answer is no request for a streamed one."""
        if self.plans is None:
            return False
        body = () if call.body is None else call.body.components
        return forms_matter(call, self.plans.pool) or any(map(self._only_whole, body))

    @cached_property
    def _agent(self) -> AgentModel | None:
        """The model of the agent, if the graph is one and the model is on an engine."""
        agent = agent_model(self.graph)
        return agent if agent is not None and _engine_of(agent.model) else None

    def _start(self, node: NodeShape, call: str, is_first: bool) -> str:
        """Say with which node a call starts, the one for whose plan it waits least; "" if it starts in its place."""
        starts: list[tuple[int, str]] = []
        component = self._visited[node.name][0].components[call]
        if is_first and component.attributes.beside and self.plans is not None:  # a loop
            starts.append((len(self._visited), "all items at once, when its node begins"))
        for name in self._visited:
            if self.plans is None or (name == node.name and is_first):
                continue
            plan = self.plans.traced(PlanKey(name), None)
            components = {} if plan is None else {component.name: component for component in plan.template.components}
            if plan is None or call not in components:
                continue
            waits = _waits_of(plan, call)
            if any(self._is_left(components[one]) for one in (call, *waits)):
                continue
            start = f"when {'its node' if name == node.name else name} begins"
            if name == START:
                start = "when the graph begins"
            if _user_code(plan).isdisjoint(waits):
                after = f", once {' and '.join(waits)} {'have' if len(waits) > 1 else 'has'} ended" if waits else ""
                starts.append((len(waits), start + after))
            elif (tokens := _known_tokens(plan, call)) >= MIN_TOKENS:
                starts.append((len(self._visited), f"its first {tokens} tokens, {start}"))
        return min(starts)[1] if starts else ""

    def _is_left(self, call: Component) -> bool:
        """Return True for a call that starts in its place in every query, since its answer may be streamed."""
        body = () if call.body is None else call.body.components
        is_unknown = call.attributes.form == "unknown" and self._only_whole(call)
        return is_unknown or any(map(self._is_left, body))

    def _reason_in_place(self, node: NodeShape, call: str, is_first: bool) -> str:
        """Say why a call starts in its place."""
        assert self._shape is not None
        component = self._visited[node.name][0].components.get(call)
        if component is not None and self._is_left(component):
            return only_whole([call])
        previous = [one for one in self._shape.nodes.values() if node.name in _successors(one) and one.name != START]
        if not previous or node.name in self.first_nodes:
            return FIRST
        if node.skippable:
            return "its node may not run: a result may be in a cache, or somebody is asked before"
        if all(one.pauses for one in previous):
            return "the graph is interrupted before its node"
        needs = [waits for one in previous if (waits := self._waits_from(one.name, call))]
        if needs:
            return f"it needs what {' and '.join(needs[0])} {'give' if len(needs[0]) > 1 else 'gives'}"
        opaque = [one.name for one in previous if self._visited[one.name][1].updates is None]
        if opaque:
            return f"what {' and '.join(opaque)} will write is not known"
        if node.name not in {name for one in previous for name in (*one.successors, *self._visited[one.name][1].goto)}:
            return "its node may be chosen or not, and a call for nothing is not made on a guess"
        return "what it reads is known when its node begins" if is_first else "it waits for what stands before it"

    def _waits_from(self, name: str, call: str) -> list[str]:
        """Return what a call would wait for that started with a node; nothing if that would be of no use."""
        assert self._shape is not None
        try:
            plan = lookahead(self._shape, name, pushed=False, find_leaves=self._find_leaves)
        except Exception:  # nothing is known of the nodes from there on
            return []
        is_planned = any(component.name == call for component in plan.template.components)
        waits = _waits_of(plan, call) if is_planned else []
        return waits if _user_code(plan).isdisjoint(waits) else []


# ------------------------------------------------------------ nodes


def _kind(runnable: Any) -> str:
    if tool_node_parts(runnable) is not None:
        return type(runnable).__name__
    functions = functions_of(runnable)
    function = None if functions is None else functions.func or functions.afunc
    name = getattr(function, "__name__", "") or getattr(function, "name", "")
    return name if type(name) is str and name else type(runnable).__name__


def _level(node: NodeShape, draft: Draft, visited: LoweredNode, has_pool: bool) -> tuple[Level, str]:
    if functions_of(node.bound) is None:
        row = next((row for row in draft.nodes if row.level != "lowered"), None)
        return ("lowered", "") if row is None else (row.level, row.reason)
    if visited.updates is not None and not any(isinstance(value, Unknown) for value in visited.updates.values()):
        return "lowered", ""
    if any(map(uses_engine, draft.components.values())):
        return "joined", f"{_NOT_ALL_UNDERSTOOD}; {_JOINS}" if has_pool else _NOT_ALL_UNDERSTOOD
    return _opaque_level(node.bound, has_pool)


def _opaque_level(runnable: Any, has_pool: bool) -> tuple[Level, str]:
    code = "each tool runs once" if tool_node_parts(runnable) is not None else _YOUR_CODE
    return ("joined", f"{code}; {_JOINS}") if has_pool else ("original", code)


def _choice(branch: Branch, node: str) -> Choice:
    nodes = tuple("the end" if name == END else name for name in branch.nodes)
    return Choice(nodes, node if branch.path is None else _kind(branch.path))


def _successors(node: NodeShape) -> set[str]:
    return {*node.successors, *node.joins, *(name for branch in node.branches for name in branch.nodes)}


# ------------------------------------------------------------ plans


def _source_name(reference: Ref) -> str:
    """Return the name of what fills a variable of a prompt: a channel of the state, or another call."""
    if reference.producer != INPUT:
        return reference.producer
    path = [str(key) for key in reference.path if key not in (STATE, ROOT)]
    return ".".join(path) or "state"


def _waits_of(plan: TraceResult, call: str) -> list[str]:
    """Return the calls of engines, and the user code, that a call in a plan waits for directly."""
    components = {component.name: component for component in plan.template.components}
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
    return {component.name for component in plan.template.components if component.role is Role.OPAQUE}


def _known_tokens(plan: TraceResult, call: str) -> int:
    """Return how many tokens of a prompt stand before the first variable that waits for user code."""
    component = next(component for component in plan.template.components if component.name == call)
    code = _user_code(plan)
    unknown = {variable for variable, ref in component.inputs if ref.producer in code}
    last = next((i for i, part in enumerate(component.prompt) if part.variable in unknown), len(component.prompt))
    return sum(part.tokens for part in component.prompt[:last])


# ------------------------------------------------------------ agents and tools


def _agent_call(agent: AgentModel, *, is_prefilled: bool) -> CallFacts:
    """Return the facts about the calls of an agent's model. `is_prefilled`: its next prompts are, while tools run."""
    texts = [*map(_tool_text, agent.tools), *([] if agent.system_message is None else [agent.system_message.text])]
    prompt = (*(PromptPart.literal(text) for text in texts if text), PromptPart.var("messages"))
    reason = "nothing stands before its first call" + (f"; {PREFILLED}" if is_prefilled else "")
    return CallFacts(agent.node, _engine_of(agent.model), prompt, reason=reason)


def _engine_of(model: Any) -> str:
    """Return the engine that a model is on; empty for none."""
    leaf = leaf_of(model, {})
    return leaf.engine if isinstance(leaf, GenerationLeaf) else ""


def _tool_text(tool: Any) -> str:
    """Return about what a model is told of a tool."""
    try:
        return json.dumps(convert_to_openai_tool(tool))
    except Exception:  # it has no description that the framework can make
        return ""


def _tools_of(runnable: Any, tools: AgentTools | None) -> tuple[ToolFacts, ...]:
    """Return the facts about the tools of a node that runs tools; none for any other node."""
    parts = tool_node_parts(runnable)
    if parts is None:
        return ()
    return tuple(_tool(name, tools, name in parts.injected, parts.wrapped) for name in parts.tools)


def _tool(name: str, tools: AgentTools | None, is_injected: bool, is_wrapped: bool) -> ToolFacts:
    tool = None if tools is None else tools.tools.get(name)
    if tool is not None:
        work = "it runs" if tool.is_callable_early else "its engine work begins"
        return ToolFacts(name, start=f"{work} when the model has written its call")
    if is_wrapped:
        return ToolFacts(name, reason="its calls are handed to middleware, which may hold them back")
    if is_injected:
        return ToolFacts(name, reason="it takes what only its place can give it: state, a store, the id of its call")
    if tools is None:
        return ToolFacts(name, reason="somebody may decide before it, or nothing runs ahead")
    return ToolFacts(name, reason="it is not declared read-only, and is no retriever of the pool's alone")
