"""Runs one application: engines, one query, answer, sources, trace; with `--compare`, the plain app beside it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.tools import BaseTool

from examples.apps.engines import fake_pool, real_pool
from teola_plugin import EnginePool, accelerate
from teola_plugin.observe.text import timeline_text

COLLECTION = "uploads"


@dataclass(frozen=True, slots=True)
class App:
    """An application, and how it is run from a command line."""

    name: str
    make: Callable[..., Any]
    """(pool, proxy=engine of the small model) -> a LangChain or LangGraph app, which knows nothing of `accelerate`."""
    given: Callable[[argparse.Namespace], dict[str, Any]]
    """Its input."""
    question: str
    tools: Sequence[BaseTool] = ()
    command: str = ""
    """What is run behind `python -m examples.apps.`; the name, if empty."""

    def faster(self, made: Any) -> Any:
        """The one line."""
        return accelerate(made)

    def answer(self, result: Mapping[str, Any]) -> str:
        return str(result["answer"])

    def sources(self, result: Mapping[str, Any]) -> list[str]:
        """Where the answer is from, best first."""
        return [" ".join(document.page_content.split())[:100] for document in result.get("sources", ())]


def run(app: App, arguments: Sequence[str] | None = None) -> None:
    """The command line of an application."""
    args = parser_of(app.command or app.name, app.name, app.question).parse_args(arguments)
    given = app.given(args)
    fakes = args.fakes is not None
    with fake_pool(app.tools, factor=args.fakes) if fakes else real_pool(args, app.tools) as pool:
        plain = app.make(pool, proxy="proxy" if fakes or args.proxy else "llm")
        fast = app.faster(plain)
        if args.compare:
            _compare(app, pool, plain, fast, given)
        fresh(pool)
        result = fast.invoke(given)
        print(f"question: {args.question}\nanswer:   {app.answer(result)}")
        for number, source in enumerate(app.sources(result), start=1):
            print(f"  [{number}] {source}")
        trace = fast.last_trace()
        print(timeline_text(trace) if trace is not None else "no trace")


def fresh(pool: EnginePool) -> None:
    """Nothing of an earlier query helps the next: empty caches, no uploads."""
    pool.reset()
    pool.admin("store", "delete_collection", COLLECTION).result()


def _compare(app: App, pool: EnginePool, plain: Any, fast: Any, given: dict[str, Any]) -> None:
    """Both have had a query before: engines warm up, plans are made."""
    for one in (plain, fast):
        one.invoke({**given, "question": "warm up"})
    results = []
    for label, one in (("plain", plain), ("accelerated", fast)):
        fresh(pool)
        begun = time.perf_counter()
        results.append(one.invoke(given))
        print(f"{label:12} {time.perf_counter() - begun:.2f} s")
    same = app.answer(results[0]) == app.answer(results[1]) and app.sources(results[0]) == app.sources(results[1])
    print(f"same answer and sources: {same}\n")


def parser_of(command: str, name: str, question: str) -> argparse.ArgumentParser:
    """The options of an application: its input, and its engines."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.apps.{command}")
    parser.set_defaults(app=name)
    parser.add_argument("--question", default=question)
    parser.add_argument("--document", help="the upload: a text, HTML or PDF file; by default two chapters on Python")
    told = "engines with the latencies of RTX 3090s, and no model; a number: so many times as slow"
    parser.add_argument("--fakes", nargs="?", const=1.0, type=float, metavar="FACTOR", help=told)
    parser.add_argument("--compare", action="store_true", help="also run the app as it is, and time both")
    parser.add_argument("--llm", help="a model for vLLM, a folder or a hub's name; by default the bundled one")
    parser.add_argument("--proxy", help="a smaller one for the proxy and the judge; by default the same")
    parser.add_argument("--embedder", help="by default MiniLM")
    parser.add_argument("--reranker", help="by default the bundled one")
    parser.add_argument("--dsn", help="a PostgreSQL with pgvector; by default one that comes along")
    parser.add_argument(
        "--web", default="texts", choices=("texts", "searxng", "brave", "tavily"), help="what is searched"
    )
    parser.add_argument("--pages", help="JSONL or folder that is searched with --web texts")
    return parser
