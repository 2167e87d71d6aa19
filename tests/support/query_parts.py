"""Queries with several plans, on fake engines in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from support.recording import record
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, PromptPart, Query, Ref, named
from teola_plugin.observe import QueryTrace
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import UNKNOWN, Generate, Prompt, Request, Sampling
from teola_plugin.runtime.query_run import QueryRun, SubplanRun
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind
QUESTION = "why is the sky blue? " * 8
GENERATE = Generate(Prompt(text=QUESTION), Sampling(max_tokens=24))
PROMPT = (PromptPart.var("text"),)
Calls = dict[str, Callable[..., Any]]


def generation(name: str = "g", text: str = "$input") -> list[Primitive]:
    lead = Primitive(f"{name}.p", K.PREFILLING, "llm", named(text=Ref(text)), call="ask", prompt=PROMPT)
    return [lead, Primitive(name, K.DECODING, "llm", named(prefilling=Ref(lead.id)))]


def ask(inputs: dict[str, Any]) -> Generate:
    return Generate(Prompt(text=inputs["text"]), Sampling(max_tokens=24))


def graph(*primitives: Primitive) -> Graph:
    return Graph(primitives, Ref(primitives[-1].id))


INPUT = {"known": QUESTION * 20, "slow": "text " * 3000}
CALLS: Calls = {"ask": ask}
ONE_GENERATION = graph(*generation())
TWO_GENERATIONS = graph(
    *generation("one"), *generation("two"), Primitive("both", K.CALL, inputs=named(a=Ref("one"), b=Ref("two")))
)


class Scene:
    """A query that subplans may join, in virtual time, and the requests that reach its engines."""

    def __init__(self, pool: EnginePool, **query: Any) -> None:
        self.pool = pool
        self.requests: dict[str, list[Request]] = {name: record(pool.engine(name)) for name in pool.engine_names}
        self.run: QueryRun = pool.runtime.watch(Query({"input": None}, **query), joins=True)

    def prefetch(
        self, graph: Graph = ONE_GENERATION, calls: Calls = CALLS, value: Any = QUESTION, **more: Any
    ) -> SubplanRun:
        """Start a plan for a part of the query, before the original comes to it."""
        return self.run.begin_subplan(graph, calls, value, **{"lookahead": True, **more})

    async def call_as_original(self, payload: Generate = GENERATE, *, stream: bool = False) -> str:
        """Make a call as the original does. Return its text."""
        handle = self.run.call(K.PREFILLING, "llm", [payload], stream=stream)
        pieces = "".join([piece.text async for piece in handle.pieces]) if stream else ""
        [generation] = await handle
        assert not stream or pieces == generation.text
        return str(generation.text)

    def count(self, kind: PrimitiveKind = K.PREFILLING) -> int:
        """Return the number of requests of this kind."""
        return sum(request.kind is kind for requests in self.requests.values() for request in requests)

    def trace(self) -> QueryTrace:
        """Close the query and return its trace."""
        self.run.close()
        trace = self.run.trace.result(0)
        assert trace is not None
        return trace


def in_scene(body: Callable[[Scene], Awaitable[Any]], *, engines: Sequence[Any] = (), max_requests: int = 8) -> Any:
    """Run `body` with a `Scene` in virtual time. `engines` replace the fakes of the same names."""

    async def run() -> Any:
        profiles = rtx3090() | {"llm": replace(rtx3090()["llm"], max_requests=max_requests)}
        engines_by_name = {engine.name: engine for engine in fake_engines(profiles)} | {
            engine.name: engine for engine in engines
        }
        async with EnginePool.on_this_loop(list(engines_by_name.values())) as pool:
            scene = Scene(pool)
            return await body(scene)

    return run_virtual(run())


def warmed(**more: Any) -> Graph:
    """Return a graph of a prompt whose first part is known at once, and whose rest takes time."""
    slow = Primitive("slow", K.EMBEDDING, "embedder", named(texts=Ref("$input", ("slow",))))
    lead = Primitive(
        "w", K.PARTIAL_PREFILLING, "llm", named(text=Ref("$input", ("known",))), call="begin", prompt=PROMPT
    )
    rest = named(text=Ref("$input", ("known",)), slow=Ref("slow"))
    full = Primitive("g.p", K.FULL_PREFILLING, "llm", rest, after=("w",), call="begin", prompt=PROMPT)
    return graph(slow, lead, full, Primitive("g", K.DECODING, "llm", named(prefilling=Ref("g.p"))))


def begin(inputs: dict[str, Any]) -> Generate:
    rest = str(len(inputs["slow"])) if "slow" in inputs else UNKNOWN
    return Generate(Prompt(text=inputs["known" if "known" in inputs else "text"] + rest), Sampling(max_tokens=8))
