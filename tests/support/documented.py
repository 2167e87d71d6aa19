"""The texts that ARCHITECTURE.md shows, made from the code: a test compares them, so they cannot grow old."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from textwrap import dedent
from typing import Any, TypedDict

from langchain_core.documents import Document
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from support import report_tables
from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cli.demo import app as demo
from teola_plugin.cli.demo.measure import run_case
from teola_plugin.cli.main import main
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
    ProvisionalAnswers,
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
        return fast.report, fast.plan(QUESTION), fast.last_trace()


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
        traced = fast._teola.plans.traced("search", {"state": QUESTION, "argument": None}, pushed=False)
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


def reranked() -> Graph:
    texts = Primitive("texts", K.CALL, inputs=named(found=Ref(INPUT)))
    scores = Primitive("scores", K.RERANKING, "reranker", named(texts=Ref("texts")), batchable=True)
    best = Primitive("best", K.CALL, inputs=named(texts=Ref("texts"), scores=Ref("scores")))
    prompt = (PromptPart("...", tokens=60), PromptPart.var("passages"))
    made = Primitive("answer", K.PREFILLING, "llm", named(passages=Ref("best")), prompt=prompt)
    return Graph([texts, scores, best, made], Ref("answer"))


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


# ------------------------------------------------------------ README

ROOT = Path(__file__).parents[2]
_APPS = {
    "advanced/sequential": "upload, expand, search, rerank, refine: steps one after the other",
    "advanced/parallel": "the same, upload and expansion written in parallel",
    "naive": "upload, three passages, an answer for each, combined",
}


def results() -> str:
    """The table of the committed run of benchmarks.single_query."""
    found = json.loads((ROOT / "benchmarks" / "results" / "single_query.json").read_text())
    rows = ["| app | answer tokens | runs | plain | accelerated | speed-up | possible |", "|---|" + "--:|" * 6]
    for case in found["cases"]:
        times = [f"{case[key]['median']:.2f}" for key in ("plain_s", "accelerated_s")]
        ratios = [f"{case[key]:.2f}" for key in ("speedup", "possible")]
        rows.append(
            "| "
            + " | ".join([_APPS[case["app"]], str(case["answer_tokens"]), str(case["plain_s"]["n"]), *times, *ratios])
            + " |"
        )
    idle = found["nothing_to_gain"]
    plain = idle["plain_ms"]["median"] / 1000
    sooner = plain + idle["behind_ms"]["median"] / 1000
    last = [
        "retrieve, prompt, answer: nothing to gain",
        "10",
        str(idle["plain_ms"]["n"]),
        f"{plain:.2f}",
        f"{sooner:.2f}",
        f"{plain / sooner:.2f}",
    ]
    return "\n".join([*rows, "| " + " | ".join([*last, "none"]) + " |"])


def copied() -> str:
    """Answers that copy, of the committed run of benchmarks.single_query."""
    found = json.loads((ROOT / "benchmarks" / "results" / "single_query.json").read_text())["drafts"]
    rows = [
        "| app | answer tokens | copied | plain | plain with drafts | accelerated | speed-up | virtual | possible "
        "| over drafts | possible | tokens a step, plain | accelerated | ideal |",
        "|---|" + "--:|" * 13,
    ]
    for row, exact in zip(found["rows"], found["virtual"], strict=True):
        seconds = [f"{row[f'{way}_s']['median']:.2f}" for way in ("plain", "plain_same_engine", "accelerated")]
        bases = ("", "_same_engine")
        ratios = [f"{row[f'{name}{base}']:.2f}" for base in bases for name in ("speedup", "possible_runs")]
        steps = [f"{row['tokens_per_step'][way]:.2f}" for way in ("plain_same_engine", "accelerated", "ideal_runs")]
        ratios.insert(1, f"{exact['plain_s'] / exact['accelerated_s']:.2f}")
        named = [row["app"].replace("/", ", "), str(row["answer_tokens"]), f"{row['copied']:.0%}"]
        rows.append("| " + " | ".join([*named, *seconds, *ratios, *steps]) + " |")
    return "\n".join(rows)


def real_engines() -> str:
    """The sentence below the README's first chain, of the committed run of benchmarks.real_engines."""
    one = json.loads((ROOT / "benchmarks" / "results" / "real_engines.json").read_text())["cases"]["one_line"]
    seconds = f"{one['plain_s']:.2f} s plain, {one['accelerated_s']:.2f} s accelerated"
    return (
        "A model behind an API takes as long for three answers as for one. "
        "A small one on a real vLLM server with one CPU core does not: "
        f"{seconds}, **{one['speedup']:.2f} times faster**, with that one line."
    )


_REAL = {
    "one_line": "one line: three independent questions",
    "stock": "own classes: RAG over an uploaded document",
    "pool": "on engines: the same",
    "nothing_to_gain": "own classes: retrieve, prompt, answer",
}


def real_engines_table() -> str:
    """The same run as a table."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "real_engines.json").read_text())["cases"]
    rows = ["| app | runs | plain, s | accelerated, s | times faster |", "|---|" + "--:|" * 4]
    for name, case in cases.items():
        figures = [f"{case[key]:.2f}" for key in ("plain_s", "accelerated_s", "speedup")]
        rows.append("| " + " | ".join([_REAL[name], str(case["runs"]), *figures]) + " |")
    return "\n".join(rows)


def overhead() -> str:
    """The table of the committed run of benchmarks.overhead."""
    found = json.loads((ROOT / "benchmarks" / "results" / "overhead.json").read_text())
    per, planned = found["per_primitive_ms"], found["planning"]
    figures = {
        "per primitive, a chain": (per["chain"], "ms"),
        "per primitive, a fan-out": (per["fan_out"], "ms"),
        "per primitive, 16 queries at once": (per["queries"], "ms"),
        "tracing a chain, once": (planned["trace_ms"], "ms"),
        "planning, all passes": (planned["optimise_ms"], "ms"),
        "planning, cached": (planned["optimise_cached_ms"], "ms"),
        "`import teola_plugin`": (found["import"], "s"),
    }
    rows = ["| figure | median | 95 % interval of the median |", "|---|--:|--:|"]
    rows += [
        f"| {name} | {one['median']:.3f} {unit} | {one['interval'][0]:.3f} to {one['interval'][1]:.3f} {unit} |"
        for name, (one, unit) in figures.items()
    ]
    return "\n".join(rows)


def patterns() -> str:
    """The table of the committed run of benchmarks.langchain_patterns."""
    found = json.loads((ROOT / "benchmarks" / "results" / "langchain_patterns.json").read_text())
    by_name: dict[str, dict[str, Any]] = {}
    for case in found["cases"]:
        by_name.setdefault(case["pattern"], {})[case["objects"]] = case
    shown = {
        "pool": ("speedup", "speedup_sync", "speedup_all"),
        "mixed": ("speedup", "speedup_all"),
        "own": ("speedup", "speedup_sync"),
    }
    kinds = [(objects, key) for objects, keys in shown.items() for key in keys]
    rows = ["| pattern | pool | pool, sync | pool, all | possible | mixed | mixed, all | own | own, sync | ms behind |"]
    rows.append("|---|" + "--:|" * 9)
    for name, cases in by_name.items():
        behind = max((case["behind_ms"] for case in cases.values() if "behind_ms" in case), default=None)
        figures = [f"{cases[objects][key]:.2f}" for objects, key in kinds]
        figures.insert(3, f"{cases['pool']['possible']:.2f}" if "possible" in cases["pool"] else "")
        rows.append("| " + " | ".join([name, *figures, "" if behind is None else f"{behind:.1f}"]) + " |")
    return "\n".join(rows)


def llamaindex_patterns(run: str = "llamaindex_patterns") -> str:
    """The table of a committed run of benchmarks.llamaindex_patterns."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{run}.json").read_text())
    rows = [
        "| engine | `query` s | `aquery` s | accelerated `query` over `query` | over better | possible | ms behind |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for case in found["cases"]:
        seconds = {way: case["seconds"][way]["median"] for way in ("plain sync", "plain async", "auto sync")}
        over = seconds["plain sync"] / seconds["auto sync"]
        behind = f"{case['behind_ms']:.1f}" if "behind_ms" in case else ""
        figures = [
            f"{seconds['plain sync']:.3f}",
            f"{seconds['plain async']:.3f}",
            f"{over:.2f}",
            f"{case['speedup_sync']:.2f}",
            f"{case['possible']:.2f}" if case.get("possible") else "",
        ]
        rows.append("| " + " | ".join([case["pattern"], *figures, behind]) + " |")
    return "\n".join(rows)


def stock_real() -> str:
    """The table of the committed run of benchmarks.stock_real: median seconds of each way."""
    found = json.loads((ROOT / "benchmarks" / "results" / "stock_real.json").read_text())
    ways = [f"{mode} {way}" for mode in ("plain", "bare", "served") for way in ("sync", "async")]
    rows = ["| app | " + " | ".join(ways) + " |", "|---|" + "--:|" * len(ways)]
    for case in found["cases"]:
        seconds = [f"{case['seconds'][way]['median']:.3f}" for way in ways]
        rows.append("| " + " | ".join([case["app"], *seconds]) + " |")
    return "\n".join(rows)


def routing() -> str:
    """The table of the committed run of benchmarks.routing: mean and 99th percentile by each way."""
    found = json.loads((ROOT / "benchmarks" / "results" / "routing.json").read_text())
    ways = list(found["cases"][0]["ways"])
    rows = [f"| workload, requests/s on instances | {' | '.join(ways)} |", "|---|" + "--:|" * len(ways)]
    for case in found["cases"]:
        times = [f"{case['ways'][way]['mean_s']:.2f} ({case['ways'][way]['p99_s']:.1f})" for way in ways]
        rows.append(f"| {case['workload']}, {case['rate']:g} on {case['instances']} | {' | '.join(times)} |")
    return "\n".join(rows)


def simulator() -> str:
    """The table of the committed run of benchmarks.simulator."""
    found = json.loads((ROOT / "benchmarks" / "results" / "simulator.json").read_text())
    rows = [
        "| app, accelerated | queries/s | mean, s: wall clock | simulated | p95, s: wall clock | simulated |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for case in found["cases"]:
        times = [f"{case[way][key]:.2f}" for key in ("mean", "p95") for way in ("wall", "simulated")]
        rows.append(f"| {case['app']} | {case['rate']:g} | {' | '.join(times)} |")
    return "\n".join(rows)


def policies() -> str:
    """The table of the committed run of benchmarks.policies."""
    found = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())
    rows = [
        "| queries/s | policy | mean, s | p99, s | in time | mean, times topology-aware |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for case in found["cases"]:
        low, high = case["mean_ratio"]["interval"]
        ratio = f"{case['mean_ratio']['median']:.2f} ({low:.2f} to {high:.2f})"
        figures = f"{case['mean']:.1f} | {case['p99']:.1f} | {case['within_slo']:.0%} | {ratio}"
        rows.append(f"| {case['rate']:g} | {case['policy']} | {figures} |")
    return "\n".join(rows)


def ray_overhead() -> str:
    """The table of the committed run of benchmarks.ray_overhead."""
    found = json.loads((ROOT / "benchmarks" / "results" / "ray_overhead.json").read_text())
    names = {
        "chain": "same engine",
        "alternating": "alternating between two engines",
        "fan_out": "20 side by side",
        "queries": "16 chains at once, same engine",
        "alternating_queries": "16 chains at once, alternating",
        "load": "64 chains at once, same engine",
    }
    rows = ["| | ms a primitive | times a bare call |", "|---|--:|--:|"]
    rows.append(f"| bare call of a Ray actor, there and back | {found['bare_round_trip_ms']:.2f} | 1.0 |")
    for name, said in names.items():
        rows.append(f"| {said} | {found['per_primitive_ms'][name]['median']:.2f} | {found['ratios'][name]:.1f} |")
    return "\n".join(rows)


def memory() -> str:
    """The table of the committed run of benchmarks.memory."""
    found = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())["cases"]
    names = {
        "queries": "{count:,} short queries, one after the other",
        "open query": "one query that stays open through {count:,} requests, with 1,000 parts of its own plan",
    }
    rows = ["| case | resident after warm-up | at the end |", "|---|--:|--:|"]
    for name, said in names.items():
        resident = found[name]["resident_mib"]
        times = [f"{resident[key]:.1f} MiB" for key in ("after_warm_up", "end")]
        rows.append(f"| {said.format(count=found[name]['count'])} | {' | '.join(times)} |")
    return "\n".join(rows)


def provisional() -> str:
    """The table of the committed run of benchmarks.provisional: without drafts, and with them."""
    found = json.loads((ROOT / "benchmarks" / "results" / "provisional.json").read_text())["cases"]
    rows = [
        "| the guess is | passages reranked | answer tokens | times faster | first token | with drafts | first token |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    drafted = {_case(one): one for one in found if one["drafts"]}
    for one in found:
        if not one["drafts"]:
            both = (one, drafted[_case(one)])
            figures = [f"{case[key]:.2f}" for case in both for key in ("speedup", "first_piece_sooner")]
            rows.append("| " + " | ".join([*map(str, _case(one)), *figures]) + " |")
    return "\n".join(rows)


def _case(one: dict[str, Any]) -> tuple[str, int, int]:
    return one["guess"], one["passages"], one["answer_tokens"]


def five_apps() -> str:
    """The table of the committed run of benchmarks.apps: how many times as long each baseline takes."""
    apps = json.loads((ROOT / "benchmarks" / "results" / "apps.json").read_text())["apps"]
    schemes = list(dict.fromkeys(name for app in apps.values() for name in app["speedup_low"]))
    rows = [f"| application | accelerated, s | {' | '.join(schemes)} |", "|---|--:|" + "--:|" * len(schemes)]
    for name, app in apps.items():
        found = [app["speedup_low"].get(scheme) for scheme in schemes]
        ratios = ["" if one is None else f"{one['median']:.2f}" for one in found]
        seconds = f"{app['seconds']['accelerated']['median']:.2f}"
        rows.append(f"| {name.replace('_', ' ')} | {seconds} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def apps_under_load() -> str:
    """The table of the committed run of benchmarks.apps --ground simulated."""
    apps = json.loads((ROOT / "benchmarks" / "results" / "apps_simulated.json").read_text())["apps"]
    names = list(dict.fromkeys(name for app in apps.values() for name in app["speedup_low"]))
    rows = [f"| application | load | {' | '.join(names)} |", "|---|---|" + "--:|" * len(names)]
    for app, found in apps.items():
        for label, key, at in (("low", "speedup_low", 0), ("high", "speedup_high", -1)):
            ratios = [found[key].get(name) for name in names]
            cells = ["" if one is None else f"{one['median']:.2f}" for one in ratios]
            rows.append(f"| {app.replace('_', ' ')} | {label}, {found['rates'][at]:g}/s | {' | '.join(cells)} |")
        goodput = [found["goodput"].get(name) for name in names]
        cells = ["" if one is None else f"{one:.2f}" for one in goodput]
        rows.append(f"| | goodput; accelerated {found['goodput']['accelerated']:.2f}/s | {' | '.join(cells)} |")
    return "\n".join(rows)


def neighbours() -> str:
    """The table of the committed run of benchmarks.neighbours."""
    found = json.loads((ROOT / "benchmarks" / "results" / "neighbours.json").read_text())
    names = {"pure function": "a pure function on a long text", "JSON parser": "a JSON parser", "upload": "an upload"}
    rows = ["| heavy chain | beside the plain one | beside the accelerated one |", "|---|--:|--:|"]
    for case in found["longest_wait_ms"]:
        times = [f"{case[key]['median']:.1f} ms" for key in ("plain", "accelerated")]
        rows.append(f"| {names[case['chain']]} | {' | '.join(times)} |")
    return "\n".join(rows)


def example(script: str, name: str) -> str:
    """The source of a class of an example; with `Class.method`, up to the end of that method."""
    text = (ROOT / "examples" / f"{script}.py").read_text()
    wanted, _, last = name.partition(".")
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == wanted)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    ends = {getattr(node, "name", ""): node.end_lineno for node in found.body}
    return "\n".join(text.splitlines()[first - 1 : ends.get(last, found.end_lineno)])


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```"


def demo_diff() -> str:
    """The demo's app, and what is added to it, from the source of both."""
    own, pool, case = (inspect.getsource(f) for f in (demo.make_app, demo.make_pool, run_case))
    plain = own[own.index("    llm = ") : own.index("    bind = ")]
    call = next(line for line in case.splitlines(keepends=True) if "= accelerate(" in line)
    bind = own[own.index("    bind = ") : own.index("    return")]
    made = pool[pool.index("    pool = ") : pool.index("    return")].replace(", drafts=drafts", "")
    added = made + bind + call
    lines = [(" ", line) for line in plain.splitlines()] + [("+", line) for line in added.splitlines()]
    return fenced("\n".join(sign + line.removeprefix("    ") for sign, line in lines), "diff")


def simulated() -> str:
    """What the command of docs/simulation.md prints."""
    said = io.StringIO()
    app, pool = "examples.capacity.app:support_desk", str(Path(__file__).parents[2] / "examples/capacity/pool.yaml")
    with contextlib.redirect_stdout(said):
        main(["simulate", pool, "--app", app, "--rate", "0.5,1,2", "--queries", "30"])
    return said.getvalue().rstrip()


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
    "provisional-answers": lambda: fenced(rewrite(ProvisionalAnswers(), reranked())),
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
    "provisional": provisional,
    "five apps": five_apps,
    "apps under load": apps_under_load,
    **report_tables.TABLES,
    **{
        f"example {script} {name}": (lambda script=script, name=name: fenced(example(script, name), "python"))  # type: ignore[misc]
        for script, name in (("03_custom_engine", "WordOverlap.execute"), ("04_custom_pass", "NoWarmUps"))
    },
}
"""Block name -> its text. In a document it stands between `<!-- generated: NAME -->` and `<!-- end -->`."""
