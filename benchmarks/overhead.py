"""What everything around the engines costs: engines without latency, planning, importing.

python -m benchmarks.overhead --json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import arguments, environment, report, summary
from benchmarks.rag import apps
from teola_plugin import EnginePool
from teola_plugin.engines import profiles
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Query, Ref, build_pgraph, named
from teola_plugin.passes import DEFAULT_PASSES, PassContext, PassPipeline, resolve_passes
from teola_plugin.tracer.langchain.trace import trace

K = PrimitiveKind
SIZE, QUERIES = 20, 16


def embedding(number: int, *after: str) -> Primitive:
    """A request of its own: equal texts would be embedded once."""
    text = named(texts=Ref("$input", (number,)))
    return Primitive(f"e{number}", K.EMBEDDING, "embedder", text, after=after)


def chain() -> Graph:
    """20 embeddings, each after the one before."""
    return Graph([embedding(i, *([f"e{i - 1}"] if i else [])) for i in range(SIZE)], Ref(f"e{SIZE - 1}"))


def fan_out() -> Graph:
    """20 embeddings side by side, and what puts them together."""
    leaves = [embedding(i) for i in range(SIZE)]
    parts = tuple((f"part{i}", Ref(leaf.id)) for i, leaf in enumerate(leaves))
    return Graph([*leaves, Primitive("all", K.AGGREGATE, inputs=parts, call="concat")], Ref("all"))


def milliseconds(work: Callable[[], Any], repeats: int) -> list[float]:
    """Times of `work` in milliseconds, after three untimed runs."""
    found = []
    for i in range(-3, repeats):
        start = time.perf_counter()
        work()
        if i >= 0:
            found.append(1000 * (time.perf_counter() - start))
    return found


def per_primitive(pool: EnginePool, repeats: int) -> dict[str, Any]:
    """Milliseconds from submitting to the output, divided by the number of engine primitives."""
    texts = [f"text {i}" for i in range(SIZE)]

    def run(graph: Graph, queries: int = 1) -> Callable[[], None]:
        def once() -> None:
            runs = [pool.runtime.submit(Query({"input": texts}), graph, {}) for _ in range(queries)]
            for live in runs:
                live.output.result(60)

        return once

    shapes = {"chain": (chain(), 1), "fan_out": (fan_out(), 1), "queries": (chain(), QUERIES)}
    return {
        name: summary([ms / (SIZE * n) for ms in milliseconds(run(graph, n), repeats)])
        for name, (graph, n) in shapes.items()
    }


def planning(repeats: int) -> dict[str, Any]:
    """Advanced RAG over an upload of 666 chunks, on the RTX 3090 profile: the full pipeline, and a cache hit."""
    bench = apps.fake_pool(profiles.rtx3090())
    app = apps.advanced_rag(bench, 60)
    traced = trace(app)
    shape = traced.sizes({"question": apps.QUESTION, "document": apps.document()})
    pipeline, context = PassPipeline(resolve_passes(DEFAULT_PASSES)), PassContext(bench.pool.profiles)
    return {
        "trace_ms": summary(milliseconds(lambda: trace(app), repeats)),
        "optimise_ms": summary(
            milliseconds(lambda: pipeline.run(build_pgraph(traced.template, shape), context), repeats)
        ),
        "optimise_cached_ms": summary(milliseconds(lambda: bench.pool.plan(traced.template, shape), repeats)),
        "primitives": len(tuple(bench.pool.plan(traced.template, shape).graph)),
    }


def import_seconds(repeats: int) -> dict[str, Any]:
    """`import teola_plugin` in a fresh interpreter, less what the bare interpreter takes."""

    def start(code: str) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begun

    start("import teola_plugin")
    return summary([start("import teola_plugin") - start("pass") for _ in range(repeats)])


def main(options: argparse.Namespace) -> dict[str, Any]:
    pool = apps.fake_pool(profiles.noop()).pool
    with pool:
        primitives = per_primitive(pool, options.repeats)
    planned = planning(options.repeats)
    imported = import_seconds(max(3, options.repeats // 6))
    return {
        "benchmark": "overhead",
        "ms_per_primitive": max(found["median"] for found in primitives.values()),
        "optimise_ms": planned["optimise_ms"]["median"],
        "optimise_cached_ms": planned["optimise_cached_ms"]["median"],
        "import_s": imported["median"],
        "per_primitive_ms": primitives,
        "planning": planned,
        "import": imported,
        "repeats": options.repeats,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    named_figures = {
        **{f"{name}, ms a primitive": found for name, found in result["per_primitive_ms"].items()},
        **{name: found for name, found in result["planning"].items() if isinstance(found, dict)},
        "import, s": result["import"],
    }
    return [
        {"figure": name, "median": found["median"], "95 %": str(found["interval"]), "n": found["n"]}
        for name, found in named_figures.items()
    ]


if __name__ == "__main__":
    given = arguments(
        "What everything around the engines costs.",
        lambda parser: parser.add_argument("--repeats", type=int, default=30, help="timed runs of each figure"),
    )
    outcome = main(given)
    report(outcome, given, "overhead, engines without latency", rows(outcome))
