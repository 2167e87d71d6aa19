"""The texts that ARCHITECTURE.md shows, made from the code: a test compares them, so they cannot grow old."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import itemgetter
from textwrap import dedent
from typing import Any, TypedDict

from langchain_core.documents import Document
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from support import report_tables
from support.documented_results import (
    apps_under_load,
    copied,
    demo_diff,
    example,
    fenced,
    five_apps,
    llamaindex_patterns,
    memory,
    neighbours,
    overhead,
    patterns,
    policies,
    public_apps_table,
    ray_overhead,
    real_engines,
    real_engines_table,
    results,
    routing,
    simulated,
    simulator,
    stock_real,
)
from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.adapters.langgraph.plans import PlanKey
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import (
    INPUT,
    ITEM,
    Effect,
    Fragment,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Ref,
    named,
)
from teola_plugin.observe import QueryTrace, timeline_text
from teola_plugin.passes import (
    DecodingPipelining,
    Pass,
    PassContext,
    PrefillingSplit,
    PruneDependencies,
    StageDecomposition,
)
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling import engine_events, events, graph_events, graph_scheduler

K = PrimitiveKind
TWO = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
QUESTION = {"question": "what do lambs eat?"}


def chain(pool: EnginePool) -> Runnable[Any, str]:
    """The chain of the section about the life of a query."""
    llm = ChatTeola(pool=pool, max_tokens=16)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    expand = ChatPromptTemplate.from_template("Two questions like {question}, as JSON")
    answer = ChatPromptTemplate.from_template("Answer from the passages. " * 10 + "{question} {found}")
    return (
        RunnablePassthrough.assign(queries=expand | llm.bind(json_schema=TWO) | JsonOutputParser())
        | RunnablePassthrough.assign(found=itemgetter("queries") | store.as_retriever().map())
        | answer
        | llm
        | StrOutputParser()
    )


async def _query() -> tuple[Any, Any, QueryTrace]:
    async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
        fast = accelerate(chain(pool))
        await fast.ainvoke(QUESTION)
        return fast.report().parts, fast.plan(QUESTION), fast.last_trace()


@functools.cache
def life() -> dict[str, str]:
    """One query, moment by moment, in virtual time."""
    report, plan, trace = run_virtual(_query())
    return {
        "report": str(report),
        "p-graph": str(plan.source),
        "e-graph": str(plan.graph),
        "timeline": _timeline(trace, 96),
    }


def _timeline(trace: QueryTrace, width: int) -> str:
    lines = timeline_text(trace, width=width).splitlines()
    lines[0] = f"the query: {trace.outcome} in {lines[0].rpartition(' in ')[2]}"  # ids depend on what ran before
    return "\n".join(line.rstrip() for line in lines)


# ------------------------------------------------------------ a graph


class State(TypedDict, total=False):
    question: str
    found: list[Document]
    answer: str


def graph(llm: ChatTeola, retriever: Runnable[str, list[Document]], rules: str) -> CompiledStateGraph[Any, Any, Any]:
    """The graph of the section about graphs."""

    async def search(state: State) -> State:
        query = await llm.ainvoke(f"Write a query for {state['question']}")
        return {"found": await retriever.ainvoke(query.text)}

    async def answer(state: State) -> State:
        passages = "\n".join(document.page_content for document in state["found"])
        reply = await llm.ainvoke(f"{rules} {state['question']} {passages}")
        return {"answer": reply.text}

    return StateGraph(State).add_sequence([search, answer]).add_edge(START, "search").compile()


async def _graph_query() -> tuple[str, QueryTrace]:
    async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
        llm = ChatTeola(pool=pool, max_tokens=16)
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
        fast = accelerate(graph(llm, store.as_retriever(), "Answer from the passages. " * 10))
        traced = fast._teola.plans.traced(PlanKey("search"), {"state": QUESTION, "argument": None})
        plan = pool.plan(traced.template, None).graph
        await fast.ainvoke(QUESTION)
        return str(plan), fast.last_trace()


@functools.cache
def life_of_a_graph() -> dict[str, str]:
    """A graph of two nodes, what is planned when the first begins, and one call of it in virtual time."""
    plan, trace = run_virtual(_graph_query())
    source = inspect.getsource(graph)
    nodes = dedent(source[source.index("    async def search") : source.index("    return StateGraph")]).rstrip()
    return {"graph": nodes, "graph plan": plan, "graph timeline": _timeline(trace, 96)}


# ------------------------------------------------------------ passes


def titles() -> Graph:
    title = Primitive("title", K.EMBEDDING, "embedder", named(texts=Ref(INPUT, ("title",))), size=1)
    body = Primitive("body", K.EMBEDDING, "embedder", named(texts=Ref(INPUT, ("body",))), after=("title",), size=1)
    return Graph([title, body, Primitive("pair", K.CALL, inputs=named(a=Ref("title"), b=Ref("body")))], Ref("pair"))


def upload() -> Graph:
    chunks = Primitive("chunks", K.CHUNKING, inputs=named(documents=Ref(INPUT)))
    vectors = Primitive("vectors", K.EMBEDDING, "embedder", named(texts=Ref("chunks")), batchable=True, size=200)
    write = (Effect("collection:docs", writes=True),)
    inputs = named(chunks=Ref("chunks"), vectors=Ref("vectors"))
    rows = Primitive("rows", K.INGESTION, "store", inputs, batchable=True, size=200, effects=write)
    return Graph([chunks, vectors, rows], Ref("rows"))


def answer() -> Graph:
    vector = Primitive("vector", K.EMBEDDING, "embedder", named(texts=Ref(INPUT)), size=1)
    hits = Primitive("hits", K.SEARCHING, "store", named(vectors=Ref("vector")), size=1)
    prompt = (PromptPart("...", tokens=60), PromptPart.var("question", 12), PromptPart.var("passages"))
    inputs = named(question=Ref(INPUT), passages=Ref("hits"))
    return Graph([vector, hits, Primitive("answer", K.PREFILLING, "llm", inputs, prompt=prompt)], Ref("answer"))


def questions() -> Graph:
    embedding = Primitive("vector", K.EMBEDDING, "embedder", named(texts=Ref(ITEM)), size=1)
    body = Fragment(Graph([embedding], Ref("vector")), Ref("vector"))
    lead = Primitive("lead", K.PREFILLING, "llm", named(question=Ref(INPUT)))
    text = Primitive("text", K.DECODING, "llm", named(lead=Ref("lead")), splittable=True, size=2)
    items = Primitive("list", K.CALL, inputs=named(text=Ref("text")))
    return Graph(
        [lead, text, items, Primitive("each", K.MAP, inputs=named(items=Ref("list")), fragment=body)], Ref("each")
    )


def rewrite(one: Pass, graph: Graph) -> str:
    after = one.run(graph, PassContext(rtx3090()))
    assert after is not graph, f"{one.name} has nothing to do in its own example"
    return f"before\n{_indented(graph)}\nafter\n{_indented(after)}"


def _indented(graph: Graph) -> str:
    return "\n".join(f"  {line}" for line in str(graph).splitlines())


# ------------------------------------------------------------ schedulers

G, E = graph_events, engine_events

UNSAID = {
    "DepthChanged": "Depths of queued primitives that have changed.",
    "InstanceUp": "The instance can take work, again or for the first time.",
    "CancelRunning": "Stop these requests at the instance.",
}


def table(*kinds: type) -> str:
    """A Markdown table of events or instructions: name, fields, what its docstring says."""
    rows = ["| name | carries | meaning |", "|---|---|---|"]
    for kind in kinds:
        common = ("at", "query") if issubclass(kind, (G.QueryEvent, G.QueryInstruction)) else ()
        common = ("at",) if issubclass(kind, events.Event) and not common else common
        fields = ", ".join(f"`{name}`" for name in inspect.signature(kind).parameters if name not in common)
        said = (kind.__doc__ or "").split("\n")[0]
        meaning = UNSAID[kind.__name__] if said.startswith(kind.__name__ + "(") else said
        rows.append(f"| `{kind.__name__}` | {fields} | {meaning} |")
    return "\n".join(rows)


def states() -> str:
    drawn = (graph_scheduler.__doc__ or "").split("::\n\n")[1]
    return "\n".join(line.removeprefix("    ") for line in drawn.rstrip().splitlines())


GENERATED: dict[str, Callable[[], str]] = {
    "simulate": lambda: fenced(simulated()),
    "the demo's diff": demo_diff,
    **{name: (lambda name=name: fenced(life()[name])) for name in ("report", "p-graph", "e-graph", "timeline")},  # type: ignore[misc]
    "graph": lambda: fenced(life_of_a_graph()["graph"], "py"),
    **{
        name: (lambda name=name: fenced(life_of_a_graph()[name]))  # type: ignore[misc]
        for name in ("graph plan", "graph timeline")
    },
    "prune-dependencies": lambda: fenced(rewrite(PruneDependencies(), titles())),
    "stage-decomposition": lambda: fenced(rewrite(StageDecomposition(), upload())),
    "prefilling-split": lambda: fenced(rewrite(PrefillingSplit(), answer())),
    "decoding-pipelining": lambda: fenced(rewrite(DecodingPipelining(), questions())),
    "graph events": lambda: table(
        G.Admit,
        G.Started,
        G.Finished,
        G.Unused,
        G.PrimitiveFailed,
        G.Expanded,
        G.ItemClosed,
        G.PartBegun,
        G.PartEnded,
        G.CancelQuery,
        G.Close,
    ),
    "graph instructions": lambda: table(
        G.Dispatch, G.RunCall, G.Await, G.Expand, G.Collect, G.Release, G.Cancel, G.Reprioritise, G.End, events.WakeAt
    ),
    "engine events": lambda: table(
        E.Enqueue,
        E.PrefillEnded,
        E.RequestsEnded,
        E.Retried,
        E.CancelRequests,
        E.DepthChanged,
        E.InstanceUp,
        E.InstanceDrained,
        E.InstanceDown,
        E.CacheStored,
        E.CacheRemoved,
        E.CacheCleared,
        E.CacheUse,
    ),
    "engine instructions": lambda: table(E.RunBatch, E.CancelRunning, E.Dropped, E.Reject),
    "states": lambda: fenced(states()),
    "results": results,
    "copied": copied,
    "public apps table": public_apps_table,
    "real engines": real_engines,
    "real engines table": real_engines_table,
    "overhead": overhead,
    "patterns": patterns,
    "llamaindex patterns": llamaindex_patterns,
    "llamaindex patterns, own models": lambda: llamaindex_patterns("llamaindex_patterns_own"),
    "stock real": stock_real,
    "routing": routing,
    "policies": policies,
    "simulator": simulator,
    "ray overhead": ray_overhead,
    "memory": memory,
    "neighbours": neighbours,
    "five apps": five_apps,
    "five apps, real": lambda: five_apps("apps_real"),
    **report_tables.TABLES,
    "apps under load": apps_under_load,
    **{
        f"example {script} {name}": (lambda script=script, name=name: fenced(example(script, name), "python"))  # type: ignore[misc]
        for script, name in (("03_custom_engine", "WordOverlap.execute"), ("04_custom_pass", "NoWarmUps"))
    },
}
"""Block name -> its text. In a document it stands between `<!-- generated: NAME -->` and `<!-- end -->`."""
