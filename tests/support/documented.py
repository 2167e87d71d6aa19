"""The texts that ARCHITECTURE.md shows, made from the code: a test compares them, so they cannot grow old."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from support import report_tables
from support.documented_results import (
    demo_diff,
    example,
    fenced,
    policies,
    ray_overhead,
    routing,
    simulated,
    simulator,
)
from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling import graph_scheduler
from tools import reference_pages

TWO = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
QUESTION = {"question": "what do lambs eat?"}


def chain(pool: EnginePool) -> Runnable[Any, str]:
    """Return the chain of the section about the life of a query."""
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


async def _plan() -> Any:
    async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
        return accelerate(chain(pool)).plan(QUESTION)


@functools.cache
def graphs() -> dict[str, str]:
    """Return the p-graph and the e-graph of the chain."""
    plan = run_virtual(_plan())
    return {"p-graph": str(plan.source), "e-graph": str(plan.graph)}


# ------------------------------------------------------------ schedulers


def states() -> str:
    """Return the states of a primitive as the scheduler's docstring draws them."""
    drawn = (graph_scheduler.__doc__ or "").split("::\n\n")[1]
    return "\n".join(line.removeprefix("    ") for line in drawn.rstrip().splitlines())


GENERATED: dict[str, Callable[[], str]] = {
    "simulate": lambda: fenced(simulated()),
    "the demo's diff": demo_diff,
    "p-graph": lambda: fenced(graphs()["p-graph"]),
    "e-graph": lambda: fenced(graphs()["e-graph"]),
    "states": lambda: fenced(states()),
    "routing": routing,
    "policies": policies,
    "simulator": simulator,
    "ray overhead": ray_overhead,
    "settings reference": reference_pages.settings_reference,
    "http reference": reference_pages.http_reference,
    "metrics reference": reference_pages.metrics_reference,
    **report_tables.TABLES,
    **{
        f"example {script} {name}": (lambda script=script, name=name: fenced(example(script, name), "python"))  # type: ignore[misc]
        for script, name in (("03_custom_engine", "WordOverlap.execute"), ("04_custom_pass", "NoWarmUps"))
    },
}
"""Block name -> its text. In a document it stands between `<!-- generated: NAME -->` and `<!-- end -->`."""
