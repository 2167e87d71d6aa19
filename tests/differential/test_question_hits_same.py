"""Plain and accelerated where the answer begins on what the question itself finds: results, prompts, events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from differential.chains import TEXTS, UPLOAD, Parts, expanded, parts
from differential.recording import WAYS, Outcome, observe
from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from support.books import Books, rows, watch
from support.sample_workflows import GIVEN, advanced_rag, answer, engines

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeLLM, Faults, fake_engines
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.runtime.virtual_time import run_virtual

LINES = "Write 3 search queries, one a line, for: {question}"
MACHINE = scaled(rtx3090(), 0.04)
MACHINE["reranker"] = replace(MACHINE["reranker"], curves={PrimitiveKind.RERANKING: Curve.linear(0.02, 0.0)})
"""So slow that it is worth beginning before it, and done before the questions are written."""


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    lists = FakeLLM("lists", replace(MACHINE["llm"], device="lists"), answer)
    with EnginePool.local([*fake_engines(MACHINE), lists]) as pool:
        yield pool


@pytest.fixture(scope="module")
def p(pool: EnginePool) -> Parts:
    made = parts(pool)
    made.store.add_texts(TEXTS)
    return made


def several(p: Parts, *, own: bool) -> Runnable[Any, Any]:
    """`MultiQueryRetriever` below a reranker."""
    written = p.llm.model_copy(update={"engine": "lists", "max_tokens": 60})
    prompt = PromptTemplate.from_template(LINES)
    search = p.store.as_retriever(search_kwargs={"k": 3})
    found = MultiQueryRetriever.from_llm(search, written, prompt, include_original=own)
    best = ContextualCompressionRetriever(base_compressor=p.reranker, base_retriever=found)
    ask = ChatPromptTemplate.from_template("{question} by {passages}")
    given = {"question": RunnablePassthrough(), "passages": best}
    return given | ask | p.llm | StrOutputParser()


CHAINS: dict[str, tuple[Any, Any]] = {
    "expanded": (expanded, UPLOAD),
    "several": (lambda p: several(p, own=False), "what is a lambda?"),
    "several and the question": (lambda p: several(p, own=True), "what is raise?"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_same(name: str, way: str, p: Parts, pool: EnginePool) -> None:
    make, given = CHAINS[name]
    plain_chain = make(p)
    fast = accelerate(plain_chain, pool=pool)
    assert "provisionally, on what the question itself finds" in fast.explain()

    def seen(chain: Any) -> tuple[Outcome, list[str]]:
        pool.admin("store", "delete_collection", "uploads").result(5)
        return observe(chain, way, given), rows(pool.engine("store"))

    (plain, before), (accelerated, after) = seen(plain_chain), seen(fast)
    assert not plain.failed and accelerated.result == plain.result and after == before
    assert accelerated.prompts == plain.prompts
    assert accelerated.events == plain.events


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_asked_is_asked_once(name: str, p: Parts, pool: EnginePool) -> None:
    """But for what only the guess asks for: the question's search, its answer."""
    make, given = CHAINS[name]
    books = Books()
    watch(pool, [pool.engine(one) for one in pool.engine_names], books)
    pool.admin("store", "delete_collection", "uploads").result(5)
    observe(make(p), "ainvoke", given)
    plainly = books.copy()
    pool.admin("store", "delete_collection", "uploads").result(5)
    books.clear()
    observe(accelerate(make(p), pool=pool), "ainvoke", given)
    assert books.writes == plainly.writes and not plainly.missing(books)


async def _run(speculate: str, **faults: Faults) -> tuple[list[str], list[dict[str, Any]]]:
    made = engines(rtx3090())
    for engine in made:
        engine.faults = faults.get(engine.name, Faults())
    async with EnginePool.on_this_loop(made) as pool:
        deployed = advanced_rag().deploy(pool, speculate=speculate)
        results = [await deployed.arun({**GIVEN, "question": f"What does paragraph {n} say?"}) for n in range(6)]
        return [str(one.outputs) for one in results], [one.trace.summary() for one in results if one.trace]


def test_a_workflow_says_the_same() -> None:
    plain, _ = run_virtual(_run("off"))
    fast, told = run_virtual(_run("auto"))
    assert fast == plain
    assert all(one["provisional_answers"] for one in told)


@pytest.mark.parametrize("engine", ["embedder", "store", "reranker", "llm"])
def test_a_workflow_is_not_told_of_what_fails_on_a_guess(engine: str) -> None:
    plain, _ = run_virtual(_run("off"))
    faults = Faults(fail_on=lambda request: request.objective == "provisional", retryable=False)
    fast, _ = run_virtual(_run("auto", **{engine: faults}))
    assert fast == plain
