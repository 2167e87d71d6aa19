"""Stock objects on a vLLM API server: plain, accelerated bare, and with `engines="auto"`; LangChain and LlamaIndex.

A server with the bundled model is started for it (or `--url`, with `--model`), beside MiniLM in this process. Every way
is run sync and async, in alternating order, with the server's prefix cache emptied before; answers are compared. A
speed-up is over the better plain way. On a machine without a GPU all of it shares a few cores.

    python -m benchmarks.stock_real --json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import arguments, environment, report, summary
from benchmarks.stock import langchain_apps, llamaindex_apps
from teola_plugin import accelerate
from teola_plugin.adapters.demo_app import SERVED
from teola_plugin.cli.demo import documents
from teola_plugin.cli.demo.engines import device_cores
from teola_plugin.cli.demo.stock import api_server
from teola_plugin.engines.model_cache import llm_folder
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

Ask = Callable[[Any, str], Any]
"""(object, sync or async) -> what the user sees."""
MODES = ("plain", "bare", "served", "own")
WAYS = tuple(f"{mode} {way}" for mode in MODES for way in ("sync", "async"))
PLAIN = ("plain sync", "plain async")


@contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The address and the model."""
    if options.url:
        yield options.url, options.model
        return
    cores, _ = device_cores()
    with api_server(llm_folder(), Path(tempfile.mkdtemp(prefix="teola-stock-")), cores=cores) as started:
        yield started.base_url, SERVED


def texts() -> list[str]:
    pages = "\n\n".join([one.page_content for one in documents.load_documents([])])
    return [part for part in pages.split("\n\n") if len(part) > 80][:24]


def apps(runner: asyncio.Runner, base_url: str, model: str, tokens: int) -> Iterator[tuple[str, str, Any, Ask]]:
    """Framework, name, the plain object, how it is asked."""
    given = base_url, model, packaged_minilm(), texts()
    chains = langchain_apps.models(*given, tokens=tokens)
    question = {"question": langchain_apps.QUESTION}

    def of_chain(chain: Any, way: str) -> Any:
        return chain.invoke(question) if way == "sync" else runner.run(chain.ainvoke(question))

    for name, make in langchain_apps.APPS.items():
        yield "LangChain", name, make(chains), of_chain
    engines, asked = llamaindex_apps.models(*given, tokens=tokens), llamaindex_apps.QUESTION

    def of_engine(engine: Any, way: str) -> Any:
        return str(engine.query(asked) if way == "sync" else runner.run(engine.aquery(asked)))

    for name, built in llamaindex_apps.APPS.items():
        yield "LlamaIndex", name, built(engines), of_engine


def forget(base_url: str) -> None:
    """Empties the server's prefix cache, where it offers that."""
    request = urllib.request.Request(f"{base_url.removesuffix('/v1')}/reset_prefix_cache", method="POST")
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except OSError as error:
        logging.getLogger(__name__).debug("its cache stays: %s", error)


def measure(framework: str, name: str, plain: Any, ask: Ask, base_url: str, repeats: int) -> dict[str, Any]:
    """Seconds of every way. Raises `SystemExit` when the answers differ."""
    engines = {"bare": None, "served": "auto", "own": "dedicated"}
    made = {"plain": plain, **{mode: accelerate(plain, engines=how) for mode, how in engines.items()}}
    wanted = ask(plain, "sync")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(-1, repeats):  # the first is for whatever is made when it is first used
        for way in WAYS[:: 1 if number % 2 else -1]:
            mode, entry = way.split()
            forget(base_url)
            gc.collect()
            start = time.perf_counter()
            found = ask(made[mode], entry)
            if number >= 0:
                seconds[way].append(time.perf_counter() - start)
            if found != wanted:
                raise SystemExit(f"{name}, {way}: the answers differ: {found} and {wanted}")
    return figures(framework, name, seconds)


def figures(framework: str, name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    middle = {way: median(times) for way, times in seconds.items()}
    better = min(middle[way] for way in PLAIN)
    ratios = {way: round(better / middle[way], 3) for way in WAYS if way not in PLAIN}
    return {
        "framework": framework,
        "app": name,
        "speedup": ratios,
        "seconds": {way: summary(times) for way, times in seconds.items()},
    }


def main(options: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    started, cases = time.perf_counter(), []
    with server(options) as (base_url, model), asyncio.Runner() as runner:
        for framework, name, plain, ask in apps(runner, base_url, model, options.tokens):
            if options.only in name:
                cases.append(measure(framework, name, plain, ask, base_url, options.repeats))
    return {
        "benchmark": "stock_real",
        "cases": cases,
        "tokens": options.tokens,
        "repeats": options.repeats,
        "took_s": round(time.perf_counter() - started, 1),
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "app": f"{case['framework']}: {case['app']}",
            **{f"{way} s": case["seconds"][way]["median"] for way in PLAIN},
            **case["speedup"],
        }
        for case in result["cases"]
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way")
    parser.add_argument("--tokens", type=int, default=16, help="the longest answer of a call")
    parser.add_argument("--only", default="", help="only apps whose name contains this")
    parser.add_argument("--url", default="", help="a server that is there, as clients write it")
    parser.add_argument("--model", default=SERVED, help="what it calls its model")


if __name__ == "__main__":
    given = arguments("Stock objects on a vLLM API server, plain and accelerated.", _options)
    outcome = main(given)
    report(outcome, given, "stock objects on a vLLM API server; speed-ups over the better plain way", rows(outcome))
