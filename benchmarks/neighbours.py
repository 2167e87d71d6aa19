"""What others on a pool wait while one app's own code is at work: a heavy chain beside it, plain and accelerated.

python -m benchmarks.neighbours --json

The heavy chain splits, parses and puts together texts of some megabytes between two calls of a model. Beside it another
thread asks for one embedding at a time, of an engine without latency, and the longest wait of each run is taken.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from benchmarks.common import arguments, environment, report, summary
from benchmarks.rag import apps
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText

LINES = 20_000
PAUSE = 0.0005


def upper(text: str) -> list[str]:
    """A bounded function of one walk: computed by the graph, too."""
    return [line.strip().upper() for line in text.split(",")]


def chains(bench: apps.Bench) -> dict[str, tuple[Runnable[Any, Any], Any]]:
    """What is heavy: a pure function on a long text, a parser of the framework's, long documents to be indexed."""
    model, prompt = bench.model(8), ChatPromptTemplate.from_template("Answer {question}: {notes}")
    answer = prompt | model | StrOutputParser()
    words = ",".join(f" passage {i} says {apps.WORDS[i % len(apps.WORDS)]} " for i in range(LINES))
    listed = json.dumps([f"passage {i} says {apps.WORDS[i % len(apps.WORDS)]}" for i in range(LINES)])
    text: Runnable[Any, str] = RunnableLambda(itemgetter("text"))
    notes = RunnableLambda(upper) | (lambda found: len(found))
    parsed = text | JsonOutputParser() | (lambda found: len(found))
    first = ChatPromptTemplate.from_template("First {question}") | model | StrOutputParser()
    return {
        "pure function": (
            RunnablePassthrough.assign(first=first)
            | {"question": itemgetter("question"), "notes": text | notes}
            | answer,
            {"question": "why", "text": words},
        ),
        "JSON parser": (
            RunnablePassthrough.assign(first=first) | {"question": itemgetter("question"), "notes": parsed} | answer,
            {"question": "why", "text": listed},
        ),
        "upload": (bench.indexer() | (lambda name: {"question": name, "notes": ""}) | answer, [words[:400_000]]),
    }


def waits(bench: apps.Bench, work: Callable[[], Any]) -> list[float]:
    """Milliseconds of each embedding that a neighbour asked for while the work was done."""
    found, over = list[float](), threading.Event()

    def ask() -> None:
        number = 0
        while not over.is_set():
            began = time.perf_counter()
            bench.pool.call(PrimitiveKind.EMBEDDING, "embedder", [EmbedText(f"note {number}")]).result(60)
            found.append(1000 * (time.perf_counter() - began))
            number += 1
            time.sleep(PAUSE)

    neighbour = threading.Thread(target=ask)
    neighbour.start()
    try:
        work()
    finally:
        over.set()
        neighbour.join()
    return found


def measured(bench: apps.Bench, name: str, chain: Runnable[Any, Any], given: Any, repeats: int) -> dict[str, Any]:
    ways = {"plain": chain, "accelerated": accelerate(chain, pool=bench.pool)}
    longest: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-1, repeats):
        for way in ways if turn % 2 else reversed(list(ways)):
            bench.pool.reset()
            asked = waits(bench, lambda way=way: ways[way].invoke(given))  # type: ignore[misc]
            if turn >= 0:
                longest[way].append(max(asked, default=0.0))
    return {"chain": name, **{way: summary(found, digits=2) for way, found in longest.items()}}


def main(options: argparse.Namespace) -> dict[str, Any]:
    bench = apps.fake_pool(profiles.noop())
    with bench.pool:
        found = [measured(bench, name, *made, options.repeats) for name, made in chains(bench).items()]
    return {"benchmark": "neighbours", "longest_wait_ms": found, "environment": environment()}


def rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for found in result["longest_wait_ms"]:
        plain, fast = found["plain"]["median"], found["accelerated"]["median"]
        yield {
            "chain": found["chain"],
            "beside the plain one, ms": plain,
            "beside the accelerated one, ms": fast,
            "more, ms": round(fast - plain, 2),
        }


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9, help="runs of each way")


if __name__ == "__main__":
    chosen = arguments(__doc__ or "", _options)
    made = main(chosen)
    report(made, chosen, "longest wait of a neighbour, median of the runs", list(rows(made)))
