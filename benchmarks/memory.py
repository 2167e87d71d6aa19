"""What stays in memory: many short queries one after the other, and one query that stays open through many requests.

python -m benchmarks.memory --json

Each case runs in processes of its own: one that measures the resident set, one that traces allocations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from benchmarks.common import arguments, environment, report
from benchmarks.rag import apps
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import engines as fakes

MIB = 1 << 20
PER_ROUND = 5
"""Requests of one round of the open query."""
SAMPLES, WARM = 10, 3
"""Memory is looked at ten times; the warm-up ends with the third."""

Sample = Callable[[], None]


def answering(bench: apps.Bench) -> Runnable[Any, Any]:
    """A question is searched with and answered: an embedding, a search, a generation."""
    prompt = ChatPromptTemplate.from_template("Answer {question} with\n{context}")
    context = bench.store().as_retriever(search_kwargs={"k": 2}) | RunnableLambda(_joined)
    return {"question": RunnablePassthrough(), "context": context} | prompt | bench.model(8) | StrOutputParser()


def _joined(found: Any) -> str:
    return "\n".join(document.page_content for document in found)


def queries(bench: apps.Bench, count: int, sample: Sample) -> None:
    """Short queries, none like another."""
    fast = accelerate(answering(bench))
    for number in range(count):
        fast.invoke(f"what does passage {number} say?")
        bench.observed.clear()
        if (number + 1) % (count // SAMPLES) == 0:
            sample()


def open_query(bench: apps.Bench, requests: int, sample: Sample) -> None:
    """One query: a function that asks again and again, by a chain with a plan of its own and by single calls."""
    inner = accelerate(answering(bench))
    model, embeddings = bench.model(8), bench.store().embeddings
    rounds = requests // PER_ROUND

    def ask(question: str) -> str:
        found = ""
        for number in range(rounds):
            found = inner.invoke(f"{question} {number}")
            model.invoke(f"shorter {number}: {found}")
            assert embeddings is not None
            embeddings.embed_query(f"note {number}")
            bench.observed.clear()
            if (number + 1) % (rounds // SAMPLES) == 0:
                sample()
        return found

    accelerate(RunnableLambda(ask) | StrOutputParser(), pool=bench.pool).invoke("what do the passages say?")


CASES: dict[str, Callable[[apps.Bench, int, Sample], None]] = {"queries": queries, "open query": open_query}


def measured(case: str, count: int, traced: bool) -> list[float]:
    """MiB after each tenth of the work, garbage collected."""
    found: list[float] = []

    def sample() -> None:
        bench.pool.reset()
        for kept in (fakes.embed_words, fakes.bag_of_words, fakes._bits):  # what the fakes remember is no part of this
            kept.cache_clear()
        gc.collect()
        found.append((tracemalloc.get_traced_memory()[0] if traced else resident()) / MIB)

    bench = apps.fake_pool(profiles.noop())
    with bench.pool:
        bench.store().add_texts([f"passage {i} says {apps.WORDS[i]}" for i in range(20)])
        if traced:
            tracemalloc.start()
        CASES[case](bench, count, sample)
    return found


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_a_process(case: str, count: int, traced: bool) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.memory", "--case", case, "--count", str(count)]
    done = subprocess.run([*command, *(["--traced"] if traced else [])], check=True, stdout=subprocess.PIPE, text=True)
    found: list[float] = json.loads(done.stdout)
    return found


def figures(samples: list[float]) -> dict[str, Any]:
    """With the warm-up everything that is kept is there: traces, plans, the spans of a long query."""
    return {
        "after_warm_up": round(samples[WARM - 1], 2),
        "end": round(samples[-1], 2),
        "growth": round(samples[-1] - samples[WARM - 1], 2),
        "samples": [round(sample, 2) for sample in samples],
    }


def main(options: argparse.Namespace) -> dict[str, Any]:
    counts = {"queries": options.queries, "open query": options.requests}
    found = {
        case: {
            "count": count,
            "resident_mib": figures(in_a_process(case, count, traced=False)),
            "traced_mib": figures(in_a_process(case, count, traced=True)),
        }
        for case, count in counts.items()
    }
    return {"benchmark": "memory", "cases": found, "environment": environment()}


def rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for case, found in result["cases"].items():
        for what in ("resident_mib", "traced_mib"):
            samples = found[what]
            yield {
                "case": f"{case}, {found['count']}",
                "what": what.removesuffix("_mib"),
                "warm, MiB": samples["after_warm_up"],
                "end, MiB": samples["end"],
                "growth, MiB": samples["growth"],
            }


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queries", type=int, default=20_000, help="short queries, one after the other")
    parser.add_argument("--requests", type=int, default=5_000, help="requests of the query that stays open")
    parser.add_argument("--case", choices=CASES, help="measure one case here, print its samples")
    parser.add_argument("--count", type=int, default=0, help="queries or requests of that case")
    parser.add_argument("--traced", action="store_true", help="by tracing allocations")


if __name__ == "__main__":
    given = arguments("What stays in memory.", _options)
    if given.case:
        print(json.dumps(measured(given.case, given.count, given.traced)))
    else:
        outcome = main(given)
        report(outcome, given, "memory, engines without latency", list(rows(outcome)))
