"""Components that are code of the user's: functions, and tools that reach out of the process."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from teola_plugin.errors import GraphError
from teola_plugin.graph import Component as Part
from teola_plugin.graph import Effect, PrimitiveKind, Role, on_loop, own_thread
from teola_plugin.requests.payloads import CallTool, Hit
from teola_plugin.workflow.component import Component
from teola_plugin.workflow.decomposition import Decomposition
from teola_plugin.workflow.generation import check_reads
from teola_plugin.workflow.values import Kind, Value

_KINDS: dict[Any, Kind] = {str: Kind.TEXT, list[str]: Kind.TEXTS, bool: Kind.FLAG, list[Hit]: Kind.PASSAGES}


@dataclass(frozen=True, kw_only=True)
class Calling(Component):
    """The base class of functions and tools. It reads the values that its parameters, or `reads`, name."""

    function: Callable[..., Any] = field(default=None, kw_only=False)  # type: ignore[assignment]
    reads: Mapping[str, str] = field(default_factory=dict, hash=False)
    gives: Kind | None = None
    """What it returns, where its annotation (`str`, `list[str]`, `bool`, `list[Hit]`) does not say it."""

    def __post_init__(self) -> None:
        """Raise GraphError if there is neither a function nor an engine, and RegistrationError for wrong `reads`."""
        super().__post_init__()
        if not callable(self.function) and not getattr(self, "engine", ""):
            raise GraphError(
                f"{self.name} has {self.function!r:.80} for a function.",
                hint=f"give it one: {type(self).__name__}({self.name!r}, function)",
            )
        check_reads(self.name, self.reads, self._parameters(), "parameter of its function")

    def _parameters(self) -> list[str]:
        """Return the names of the required parameters, and of those that `reads` names."""
        if self.function is None:
            return list(self.reads)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):
            return list(self.reads)
        relevant = [one for one in parameters if one.kind in kinds]
        return [one.name for one in relevant if one.default is one.empty or one.name in self.reads]

    def sources(self) -> dict[str, str]:
        return {name: self.reads.get(name, name) for name in self._parameters()}

    def returned(self) -> Kind:
        """Return the kind of its value: `gives`, else the kind of the function's annotation."""
        if self.gives is not None:
            return self.gives
        try:
            return _KINDS.get(get_type_hints(self.function).get("return"), Kind.ANY)
        except Exception:  # names that only type checkers know
            return Kind.ANY

    def part(self, decomposition: Decomposition, role: Role, effects: tuple[Effect, ...] = ()) -> Value:
        """Add the call of the function as one primitive of this role, and return its value."""
        inputs = tuple((name, decomposition.ref(name)) for name in self.sources())
        return Value(
            decomposition.add(Part(decomposition.part(), role, inputs, effects=effects), called(self.function)),
            self.returned(),
        )


@dataclass(frozen=True, kw_only=True)
class Function(Calling):
    """A function of yours, sync or async; its value is what it returns.

    It runs once, behind all that comes before it. A `pure` one may run early, and more than once: it changes nothing,
    and equal arguments give equal values. `effects` say what one that is not pure touches, where that is known
    (`Effect("collection:store/documents", writes=True)`); else what comes after it waits for it.
    """

    pure: bool = False
    effects: tuple[Effect, ...] = ()

    def decompose(self, decomposition: Decomposition) -> Value:
        return self.part(decomposition, Role.CALL if self.pure else Role.OPAQUE, self.effects)


@dataclass(frozen=True, kw_only=True)
class Tool(Calling):
    """A call that reaches outside: a look-up, an order, a page to fetch. It runs once, when its turn comes.

    It calls a `function` of yours, or the tool of an `engine` (`ToolEngine`), which limits the number of concurrent
    calls. The tool's name is `tool`; without one, the name of `function`, which then only declares the parameters;
    without that, the component's name, and `reads` names all arguments. A `read_only` function may be prefetched, also
    for an item or an arm that turns out not to be used.
    """

    tool: str = ""
    engine: str = ""
    read_only: bool = False

    def engines(self) -> dict[str, tuple[PrimitiveKind, ...]]:
        return {self.engine: (PrimitiveKind.TOOL,)} if self.engine else {}

    def decompose(self, decomposition: Decomposition) -> Value:
        """Add the tool: a request to its engine, or a call of the user's function."""
        if not self.engine:
            return self.part(decomposition, Role.CALL if self.read_only else Role.TOOL)
        tool, read_only = self.tool or getattr(self.function, "__name__", self.name), self.read_only

        @on_loop
        def payload(arguments: Mapping[str, Any]) -> CallTool:
            return CallTool(tool, dict(arguments), read_only)

        inputs = tuple((name, decomposition.ref(name)) for name in self.sources())
        return Value(
            decomposition.add(Part(decomposition.part(), Role.TOOL, inputs, self.engine), payload), self.returned()
        )


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as the runtime calls it on a thread; a coroutine runs on a loop of its own there."""

    @functools.wraps(function, updated=())
    def call(**arguments: Any) -> Any:
        value = function(**arguments)
        return _awaited(value) if inspect.iscoroutine(value) else value

    return own_thread(call)


def _awaited(coroutine: Any) -> Any:
    """Run a coroutine to its end and return its value, on a thread of its own if a loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:  # on the caller's own loop, as in virtual time
        return thread.submit(asyncio.run, coroutine).result()
