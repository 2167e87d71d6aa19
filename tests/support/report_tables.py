"""The tables of docs/benchmarks.md, made from the files in benchmarks/results."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import conditions
from benchmarks.kept import ARGUMENTS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@functools.cache
def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def command(name: str) -> str:
    """Return the file of a result, and the command that makes it."""
    module = f"benchmarks.{result(name)['benchmark']}"
    for benchmark, runs in ARGUMENTS.items():
        if name in runs:
            options = [f" {value}" for value in runs[name]]
            module = "".join([f"benchmarks.{benchmark}", *options]).partition(" --kept")[0].partition(" --folder")[0]
    return f"[{name}.json](../benchmarks/results/{name}.json), `python -m {module} --json`"


def source(name: str) -> str:
    """Return the line that says which file a table is made of, by which command, and under which conditions."""
    note = f" {result(name)['note']}" if "note" in result(name) else ""
    return f"{command(name)}: {conditions(result(name)['environment'])}.{note}"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], results: Sequence[str] = (), texts: int = 1) -> str:
    """Return a table whose first `texts` columns are texts, the others numbers; in front, the sources of `results`."""
    rule = ["---" if at < texts else "--:" for at in range(len(heads))]
    lines = [f"| {' | '.join(map(str, row))} |" for row in [heads, *rows]]
    lines.insert(1, "|" + "|".join(rule) + "|")
    if not results:
        return "\n".join(lines)
    return "\n\n".join(["<br>\n".join(map(source, results)), "\n".join(lines)])


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as text, or an empty text for None."""
    return "" if value is None else f"{value:.{digits}f}"


def title(app: str) -> str:
    """Return the name of an application as the documents write it."""
    return app.replace("_", " ").replace("rag", "RAG")


def by_key(rows: Iterable[dict[str, Any]], column: str, *names: str) -> dict[tuple[Any, ...], dict[Any, Any]]:
    """Group rows by the columns of `names`; in each group, return the rows by `column`."""
    groups: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), {})[row[column]] = row
    return groups


# ------------------------------------------------------------ real engines

_REAL = {
    "one_line": "one line: three independent questions",
    "stock": "own classes, bound: RAG over an uploaded document",
    "pool": "objects of the pool: the same",
    "nothing_to_gain": "own classes, bound: retrieve, prompt, answer",
}


def real_engines() -> str:
    """Return the speed-up of the apps on real engines."""
    rows = [
        [_REAL[name], case["runs"], *(number(case[key]) for key in ("plain_s", "accelerated_s", "speedup"))]
        for name, case in result("real_engines")["cases"].items()
    ]
    return table(("app", "runs", "original, s", "accelerated, s", "times faster"), rows, ["real_engines"])


def stock_real() -> str:
    """Return each way of calling as a ratio to the better of the original's sync and async way."""
    ways = [f"{mode} {way}" for mode in ("bare", "served", "own") for way in ("sync", "async")]
    rows = []
    for case in result("stock_real")["cases"]:
        better = min(case["seconds"][f"plain {way}"]["median"] for way in ("sync", "async"))
        rows.append([case["app"], number(better), *(number(case["speedup"][way]) for way in ways)])
    heads = ["app", "original, s"]
    heads += [f"{mode} {way}" for mode in ("one line,", "`auto`,", "`dedicated`,") for way in ("sync", "async")]
    return table(heads, rows, ["stock_real"])


def drafts() -> str:
    """Return decoding with drafts of one request, and whole requests of 4 and 16 at once."""
    loaded = result("drafts")
    loads = by_key(loaded["load"], "at once", "kind")
    rows = []
    for case in loaded["cases"]:
        by_load = loads.get((case["kind"],), {})
        cells = [number(case.get(f"{way} faster")) for way in ("lookup", "graph")]
        for requests in (4, 16):
            row = by_load.get(requests, {})
            cells += [number(row.get(f"{way} faster")) for way in ("lookup", "graph")]
        rows.append([case["kind"], number(case["plain ms"], 1), *cells])
    heads = ["kind of text", "without, ms a token", "lookup", "graph"]
    heads += [f"{way}, {requests} at once" for requests in (4, 16) for way in ("lookup", "graph")]
    return table(heads, rows, ["drafts"])


def server() -> str:
    """Return how many answers per second `teola serve` gives beside vLLM's own server."""
    loaded = result("server_load")
    rows = [
        [clients, *(number(loaded[f"{name}_answers_per_s"][clients], 1) for name in ("vllm", "teola")), number(ratio)]
        for clients, ratio in loaded["throughput_ratio"].items()
    ]
    heads = ("clients at once", "vLLM's server, answers/s", "`teola serve`, answers/s", "ratio, median of rounds")
    return table(heads, rows, ["server_load"])


def five_apps_real() -> str:
    """Return the five applications on real engines."""
    return _five_apps("apps_real")


# ------------------------------------------------------------ hosted latencies


def public_apps() -> str:
    """Return all apps, the best to gain first: seconds of the better way, and the speed-up of each entry point."""
    rows = []
    for app in sorted(result("public_apps")["apps"], key=lambda app: -app["possible"]):
        ways = app["ways"]
        ainvoke = ways["ainvoke"]
        cells = [number(ways[way]["speed_up"] if way in ways else None) for way in ("invoke", "ainvoke", "stream")]
        seconds = [number(ainvoke["original_s"]), number(ainvoke["fast_s"])]
        rows.append([app["app"], *seconds, *cells, number(app["possible"])])
    heads = ("app", "original, s", "accelerated, s", "`invoke`", "`ainvoke`", "`stream`", "possible")
    return table(heads, rows, ["public_apps"])


# ------------------------------------------------------------ simulated engines, wall-clock time

_GRAPHS = ((4, 10), (10, 60))
"""Passages of a search and tokens of an answer."""


def graphs() -> str:
    """Return the graphs by the number of passages and tokens, with losses and wasted calls."""
    rows = []
    for (app,), sizes in by_key(
        [row | {"size": (row["documents"], row["tokens"])} for row in result("graphs")["rows"]], "size", "app"
    ).items():
        cells = [number(sizes[size][key]) for size in _GRAPHS for key in ("speedup", "possible")]
        loss_ms = max(row["behind_ms"] for row in sizes.values())
        wasted = max(row["wasted"]["calls"] for row in sizes.values())
        rows.append([app, *cells, number(loss_ms, 1) if loss_ms > 0 else "", f"{wasted:g}" if wasted else ""])
    heads = ["graph"]
    for documents, tokens in _GRAPHS:
        heads += [f"{documents} passages, {tokens} tokens", "possible"]
    return table([*heads, "ms behind", "wasted calls"], rows, ["graphs"])


def patterns() -> str:
    """Return the cookbook patterns whose time changes by more than 2 %, and the names of the others.

    Of `invoke` and `ainvoke` each cell holds the one that is accelerated less.
    """
    columns = (("pool", "speedup"), ("pool", "speedup_all"), ("mixed", "speedup"), ("own", "speedup"))
    rows, unchanged = [], []
    for (name,), kinds in by_key(result("langchain_patterns")["cases"], "objects", "pattern").items():
        ratios = [min(kinds[kind][key], kinds[kind][f"{key}_sync"]) for kind, key in columns]
        if any(abs(ratio - 1) > 0.02 for ratio in ratios):
            rows.append((ratios[0], [name, *map(number, ratios), number(kinds["pool"].get("possible"))]))
        else:
            unchanged.append(name)
    rows.sort(key=lambda row: -row[0])
    heads = ("pattern", "pool", 'pool, `speculate="all"`', "mixed", "own models", "possible, pool")
    last = [f"{len(unchanged)} others, 0.98 to 1.02: {', '.join(unchanged)}", *[""] * (len(columns) + 1)]
    return table(heads, [*(row for _, row in rows), last], ["langchain_patterns"])


def llamaindex_patterns() -> str:
    """Return the LlamaIndex engines on a pool and with own models side by side."""
    runs = ("llamaindex_patterns", "llamaindex_patterns_own")
    cases = by_key([case | {"run": run} for run in runs for case in result(run)["cases"]], "run", "pattern")
    rows, unchanged = [], []
    for (name,), by_run in cases.items():
        ratios = []
        for case in by_run.values():
            seconds = {way: case["seconds"][way]["median"] for way in ("plain sync", "auto sync")}
            ratios += [seconds["plain sync"] / seconds["auto sync"], case["speedup_sync"]]
        if any(abs(ratio - 1) > 0.02 for ratio in ratios):
            rows.append([name, *map(number, ratios)])
        else:
            unchanged.append(name)
    heads = ["engine"]
    for kind in ("pool", "own models"):
        heads += [f"{kind}: over `query`", "over the better way"]
    return table(heads, [*rows, [f"{len(unchanged)} others, 0.98 to 1.02: {', '.join(unchanged)}", *[""] * 4]], runs)


_APPS = {
    "advanced/sequential": "advanced RAG, one step after the other",
    "advanced/parallel": "advanced RAG, parallel by hand",
    "naive": "three answers, combined",
}
_TOKENS = (10, 60, 200)


def single_query() -> str:
    """Return the RAG apps by the tokens of an answer."""
    loaded = result("single_query")
    cases = by_key(loaded["cases"], "answer_tokens", "app")
    rows = []
    for (app,), by_tokens in cases.items():
        row = [_APPS[app]]
        for tokens in _TOKENS:
            row += [number(by_tokens[tokens][key] if tokens in by_tokens else None) for key in ("speedup", "possible")]
        rows.append(row)
    idle = loaded["nothing_to_gain"]
    plain_ms = idle["plain_ms"]["median"]
    rows.append(["retrieve, prompt, answer", number(plain_ms / (plain_ms + idle["behind_ms"]["median"])), *[""] * 5])
    heads = ["app"]
    for tokens in _TOKENS:
        heads += [f"{tokens} tokens", "possible"]
    return table(heads, rows, ["single_query"])


def copied() -> str:
    """Return the speed-ups of answers of 60 tokens that repeat a share of the prompt, on engines that verify drafts."""
    cases = by_key(result("single_query")["drafts"]["rows"], "copied", "app", "answer_tokens")
    rows = []
    for (app, tokens), by_share in cases.items():
        cells = [f"{number(row['speedup'])} ({number(row['speedup_same_engine'])})" for row in by_share.values()]
        if tokens == 60:
            rows.append([_APPS[app], *cells])
    shares = result("single_query")["drafts"]["rows"]
    heads = ["app", *(f"{share:.0%} copied" for share in dict.fromkeys(row["copied"] for row in shares))]
    return table(heads, rows)


# ------------------------------------------------------------ the paper's applications

_FAMILIES = {
    "AutoGen": ("AutoGen-PO", "AutoGen-TO"),
    "LlamaDist": ("LlamaDist-PO", "LlamaDist-TO"),
    "LlamaDistPC": ("LlamaDistPC-PO", "LlamaDistPC-TO"),
    "Haystack": ("Haystack",),
    "hand-written asyncio": ("modern",),
    "original": ("object",),
}
"""Baselines; of two orders of batches the table shows the one that is harder to beat."""


def _hardest(ratios: dict[str, Any], family: str) -> str:
    """Return the smallest speed-up over the baselines of a family, or an empty text if there is none."""
    medians = [ratios[name]["median"] for name in _FAMILIES[family] if ratios.get(name)]
    return number(min(medians)) if medians else ""


def _five_apps(run: str) -> str:
    rows = [
        [
            title(name),
            number(app["seconds"]["accelerated"]["median"]),
            *(_hardest(app["speedup_low"], family) for family in _FAMILIES),
        ]
        for name, app in result(run)["apps"].items()
    ]
    return table(["application", "accelerated, s", *_FAMILIES], rows, [run])


def five_apps() -> str:
    """Return the five applications on simulated engines."""
    return _five_apps("apps")


def apps_under_load() -> str:
    """Return the applications at the highest rate of arrivals."""
    families = [name for name in _FAMILIES if name != "Haystack"]
    rows = []
    for name, app in result("apps_simulated")["apps"].items():
        ratios = [_hardest(app["speedup_high"], family) for family in families]
        rows.append([title(name), f"{app['rates'][-1]:g}", *ratios])
    return table(["application", "queries/s", *families], rows, ["apps_simulated"])


# ------------------------------------------------------------ ablation, in virtual time


def passes() -> str:
    """Return the gain of the passes, one query at a time and at the highest rate."""
    rows: dict[str, dict[bool, list[str]]] = {}
    for (app, rate), ways in by_key(result("ablation")["graph"], "passes", "app", "rate").items():
        ratios = [number(ways[way]["speedup"]["median"]) for way in ("parallelisation", "pipelining", "full")]
        rows.setdefault(title(app), {})[bool(rate)] = ratios
    heads = ("application", "parallelisation", "pipelining", "all four", "all four, highest rate")
    cells = ([app, *by_rate[False], by_rate.get(True, [""])[-1]] for app, by_rate in rows.items())
    return table(heads, cells, ["ablation"])


def order() -> str:
    """Return blind batches and one invocation after the other over topology-aware batches, at the highest rates."""
    rows: dict[tuple[str, int], list[object]] = {}
    cases = by_key(result("ablation")["batching"], "against", "app", "slots", "rate")
    for (app, slots, rate), ways in cases.items():
        ratios = [number(ways[way][key]["median"]) for way in ("TO", "PO") for key in ("speedup", "speedup_p99")]
        rows[app, slots] = [title(app), slots, f"{rate:g}", *ratios]
        if set(ratios) == {"1.00"}:
            del rows[app, slots]
    heads = ("application", "slots", "queries/s", "TO, mean", "TO, 99th", "PO, mean", "PO, 99th")
    return table(heads, rows.values())


# ------------------------------------------------------------ costs


def overhead() -> str:
    """Return what surrounds the engines costs: planning, scheduling, memory, and the wait of neighbours."""
    loaded = result("overhead")
    per, planned = loaded["per_primitive_ms"], loaded["planning"]
    prefetch = {
        name: part["added_ms"]["median"]
        for name, part in result("prefetch_overhead").items()
        if "three" in name or "inside" in name
    }
    rows: list[Sequence[object]] = [
        ["CPU time of a query, nothing prefetched", f"{number(prefetch['inside, nothing prefetched'])} ms"],
        ["CPU time of a prefetched call, sync", f"{number(prefetch['three calls'] / 2, 1)} ms"],
        ["the same, async", f"{number(prefetch['three calls, async'] / 2, 1)} ms"],
        ["one request of an engine, in a chain", f"{number(per['chain']['median'], 3)} ms"],
        ["planning a new kind of query", f"{number(planned['optimise_ms']['median'], 1)} ms"],
        ["planning a known kind of query", f"{number(planned['optimise_cached_ms']['median'], 3)} ms"],
        ["`import teola_plugin`", f"{number(1000 * loaded['import']['median'], 1)} ms"],
    ]
    for one in result("overheads")["decisions"]:
        if one["replicas"] == 4 and one["waiting"] == 1000:
            label = f"a scheduler's decision, {one['waiting']} requests waiting"
            rows.append([label, f"{number(one['us']['median'] / 1000, 2)} ms"])
    names = {
        "queries": "memory before and after {count:,} queries in sequence",
        "open query": "the same, one open query with {count:,} requests",
    }
    for name, text in names.items():
        case = result("memory")["cases"][name]
        sizes = [f"{case['resident_mib'][key]:.0f}" for key in ("after_warm_up", "end")]
        rows.append([text.format(count=case["count"]), f"{', '.join(sizes)} MiB"])
    for case in result("neighbours")["longest_wait_ms"]:
        waits = [number(case[key]["median"], 1) for key in ("plain", "accelerated")]
        rows.append([f"longest wait beside {case['chain']}, original and accelerated", f"{', '.join(waits)} ms"])
    return table(("cost", "median"), rows, ["prefetch_overhead", "overhead", "overheads", "memory", "neighbours"])


def shares() -> str:
    """Return the share of the processor and of wall-clock time that orchestration takes in each application."""
    loaded, rows = result("overheads")["shares"], []
    for app in loaded["clock"]["process"]:
        processor = loaded["path"]["process"][app]["share"]["processor"]["median"]
        clock = [f"{loaded['clock'][ground][app]['share']['all']['median']:.1%}" for ground in ("process", "ray")]
        rows.append([title(app), f"{processor:.2%}", *clock])
    heads = ("application", "processor time", "by the clock", "on Ray, by the clock")
    return table(heads, rows)


_README = (
    ("four analysts and a trader", "four analysts in sequence (LangGraph)"),
    ("research agent with a subgraph", "research agent (LangGraph)"),
    ("langgraph corrective RAG", "corrective RAG (LangGraph)"),
    ("agent with two tools", "agent with two tools (LangGraph)"),
)
"""Apps of `benchmarks.public_apps`, and their names in the README."""


def readme() -> str:
    """Return the results in the README: one app before and after, and a table with losses."""
    apps = {app["app"]: app["ways"]["ainvoke"] for app in result("public_apps")["apps"]}
    rows = [
        [name, "hosted", *(number(apps[app][key]) for key in ("original_s", "fast_s", "speed_up"))]
        for app, name in _README
    ]
    real = result("real_engines")["cases"]
    for case, name in (("one_line", "three independent questions"), ("nothing_to_gain", "retrieve, prompt, answer")):
        cells = (number(real[case][key]) for key in ("plain_s", "accelerated_s", "speedup"))
        rows.append([name, "vLLM, one CPU core", *cells])
    corrective = apps["langgraph corrective RAG"]
    text = (
        "LangGraph's corrective RAG tutorial grades four documents in a loop, one model call after the other. With "
        "`app = accelerate(workflow.compile())` the four calls start together: an answer takes "
        f"{corrective['fast_s']:.1f} s instead of {corrective['original_s']:.1f} s.\n\n"
    )
    return text + table(("app", "models", "original, s", "accelerated, s", "times faster"), rows, texts=2)


def elsewhere() -> str:
    """Return the sources of the tables that stand on other pages."""
    return "<br>\n".join(map(command, ("policies", "routing", "simulator", "ray_overhead")))


TABLES: dict[str, Callable[[], str]] = {
    "readme results": readme,
    "real engines table": real_engines,
    "stock real": stock_real,
    "five apps, real": five_apps_real,
    "drafts": drafts,
    "server": server,
    "public apps table": public_apps,
    "results": single_query,
    "copied": copied,
    "graphs": graphs,
    "patterns": patterns,
    "llamaindex patterns": llamaindex_patterns,
    "five apps": five_apps,
    "apps under load": apps_under_load,
    "ablation, passes": passes,
    "ablation, order": order,
    "results elsewhere": elsewhere,
    "overhead": overhead,
    "overhead shares": shares,
}
"""Block name -> its text."""
