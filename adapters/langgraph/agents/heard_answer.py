"""One answer of an agent's model: what is begun for its calls, from its first token to the next call of the model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Protocol

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig

from teola_plugin.adapters.langchain.listening import ModelCall
from teola_plugin.adapters.langgraph.agents.arguments import Given, given
from teola_plugin.adapters.langgraph.agents.eager_tools import EagerTool, EagerTools
from teola_plugin.adapters.langgraph.agents.next_prompt import NextPrompt
from teola_plugin.adapters.langgraph.agents.tool_prefetch import ToolPrefetch
from teola_plugin.adapters.plain_data import own_copy
from teola_plugin.adapters.snapshots import NotCopied, exactly, snapshot
from teola_plugin.adapters.tool_calls import Call
from teola_plugin.runtime.query_run import PartRun, QueryRun


class Agent(Protocol):
    """Whose answer it is."""

    eager: EagerTools
    run: QueryRun

    @property
    def has_loop(self) -> bool: ...

    def prefetch_of(self, eager: EagerTool, method: str, arguments: Given) -> ToolPrefetch | None: ...

    def start(self, prefetch: ToolPrefetch, config: RunnableConfig, *, on_loop: bool) -> bool: ...

    def keep(self, answer: HeardAnswer, ids: list[str]) -> None: ...


@dataclass(slots=True, eq=False)
class Begun:
    """What was begun early for one call that the model wrote."""

    call: Call
    part: PartRun | None = None
    """Of its engine work."""
    prefetch: ToolPrefetch | None = None
    """Of its function, if that runs."""

    def end(self, run: QueryRun) -> None:
        """The call has been made in its place, or will not be."""
        if self.prefetch is not None:
            self.prefetch.close(run)
        if self.part is not None:
            self.part.close()


class HeardAnswer:
    """Hears the answer where the model is called; its tools end where they run."""

    def __init__(self, agent: Agent, call: ModelCall, config: RunnableConfig) -> None:
        self._agent, self._call, self._config = agent, call, config
        self._begun: list[Begun] = []
        self._by_id: dict[str, Begun] = {}
        self._others = False
        """Whether a tool was called that may change something: what is read after it is read in its place."""
        self._next: NextPrompt | None = None

    # ------------------------------------------------------------ while it is written

    def called(self, index: int, call: Call) -> None:
        eager = self._agent.eager.tools.get(call.name)
        if eager is None:
            self._others = True
            return
        self._others = self._others or not eager.reads
        if any(_same(one.call, call) for one in self._begun):  # the second of two equal calls is the plain one's own
            return
        begun = Begun(call)
        self._begin(eager, begun)
        if begun.prefetch is not None or begun.part is not None:
            self._begun.append(begun)

    def _begin(self, eager: EagerTool, begun: Begun) -> None:
        if not self._others and eager.may_run_early(self._config):
            begun.prefetch = self._started(eager, begun)
        if begun.prefetch is None and eager.work is not None:
            with contextlib.suppress(Exception):  # arguments that the tool does not take
                begun.part = eager.work.begin(self._agent.run, own_copy(begun.call.args))

    def _started(self, eager: EagerTool, begun: Begun) -> ToolPrefetch | None:
        """Prefetch the call with what the model wrote; None where it has to wait for its place."""
        method = eager.method(has_loop=self._agent.has_loop)
        if method is None:
            return None
        try:
            arguments = given(eager.tool, own_copy(begun.call.args))
            prefetch = None if arguments is None else self._agent.prefetch_of(eager, method, snapshot(arguments))
        except (NotCopied, TypeError, ValueError):  # arguments that the tool refuses, or that cannot be compared
            return None
        starts = prefetch is not None and self._agent.start(prefetch, self._config, on_loop=method == "_arun")
        return prefetch if starts else None

    # ------------------------------------------------------------ when it is whole

    def answered(self, message: AIMessage) -> None:
        self._name(message)
        if not message.tool_calls:
            return
        if self._agent.eager.returns.issuperset(one["name"] for one in message.tool_calls):
            self._next = NextPrompt(self._call, message, self._takes_time)
        self._agent.keep(self, [one["id"] for one in message.tool_calls if one["id"]])
        if self._next is not None:
            self._next.begin()

    def _name(self, message: AIMessage) -> None:
        """What was begun gets the ids of its calls; guesses that the whole answer does not bear out end."""
        left = list(self._begun)
        for made in message.tool_calls:
            call = Call(made["name"], made["args"])
            found = next((one for one in left if _same(one.call, call)), None)
            if found is not None and made["id"]:
                left.remove(found)
                self._by_id[made["id"]] = found
        for one in left:
            one.end(self._agent.run)
        self._begun = list(self._by_id.values())

    def _takes_time(self, tool_call: str) -> bool:
        """Whether a call that is yet to be made will take its time there; not where most of it is done."""
        found = self._by_id.get(tool_call)
        return found is None or (found.prefetch is not None and not found.prefetch.over.done())

    def failed(self) -> None:
        self.close()

    def close(self) -> None:
        """Nobody will come for what is left."""
        for one in self._begun:
            one.end(self._agent.run)
        if self._next is not None:
            self._next.close()

    def continued_by(self, call: ModelCall) -> bool:
        """Whether a call of the model goes on from this answer."""
        return self._next is not None and self._next.continued_by(call.prompt)

    # ------------------------------------------------------------ its tools

    def begun(self, tool_call: str) -> Begun | None:
        return self._by_id.get(tool_call)

    def ended(self, tool_call: str, result: Any) -> None:
        """A tool call has been made in its place."""
        found = self._by_id.get(tool_call)
        if found is not None:
            found.end(self._agent.run)
        if self._next is not None:
            self._next.result(result)


def _same(one: Call, other: Call) -> bool:
    return one.name == other.name and exactly(one.args, other.args)
