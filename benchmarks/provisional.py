"""What begins before its context is known: answers on a guess, where that was right and where it was not.

python -m benchmarks.provisional --json

Search, reranking of so many passages, an answer from the best four; engines of a profile in virtual time, so that what
happens between them takes none, with a model that verifies drafts and one that does not. An answer is the beginnings of
its passages in their order: two from one question have in common what their passages have. Guessed is the store's order
or, where a model writes three more questions first, what the question itself finds, reranked. Plain, accelerated
without provisional answers, and with them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from benchmarks import provisional_questions as questions
from benchmarks.common import arguments, environment, report, summary
from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeLLM, FakeReranker, fake_engines
from teola_plugin.engines.profiles import drafting, rtx3090
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.requests.payloads import Prompt, Sampling
from teola_plugin.runtime.virtual_time import run_virtual

BEST, LENGTHS, RERANKED = 4, (10, 60), (16, 64)
TEXT = "a lambda makes functions of one expression while def binds names and returns values to callers"
WORDS = TEXT.split(" ")
PASSAGES = [f"[{i}] " + " ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(1, 40)) for i in range(64)]
GUESSES: dict[str, Callable[[int, int], float]] = {
    "right: the reranker keeps the order": lambda place, count: 0.5,
    "half right: the first two stay": lambda place, count: 3.0 - place if place < 2 else place / count,
    "wrong: another one comes first": lambda place, count: place / count,
}
"""The score of a passage by its place in the store's order."""


def joined(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def quoted(prompt: Prompt, sampling: Sampling) -> str:
    """The first words of each passage of the prompt, in turn."""
    passages = [line for line in prompt.flat().splitlines() if "[" in line]
    return " ".join(" ".join(line[line.index("[") :].split()[:16]) for line in passages)


class Bench:
    """A pool of fakes whose reranker orders by the place in the store's order, and its chain."""

    def __init__(self, score: Callable[[int, int], float], *, passages: int, tokens: int, drafts: bool) -> None:
        self.found: dict[str, int] = {}
        machine = drafting(rtx3090()) if drafts else rtx3090()
        engines: list[Any] = [one for one in fake_engines(machine) if one.name not in ("llm", "reranker")]
        self.llm = FakeLLM("llm", machine["llm"], quoted, drafts={"recent": 0} if drafts else "off")
        rank = FakeReranker("reranker", machine["reranker"], lambda _, text: score(self.found[text], passages))
        self.pool = EnginePool.on_this_loop([*engines, self.llm, rank])
        self.passages, self.tokens = passages, tokens

    async def chain(self) -> Runnable[Any, str]:
        pool = self.pool
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="provisional")
        await store.aadd_documents([Document(page_content=text, id=str(i)) for i, text in enumerate(PASSAGES)])
        search = store.as_retriever(search_kwargs={"k": self.passages})
        self.search = search
        rerank = TeolaRerank(pool=pool, top_n=BEST).as_runnable()
        return (
            RunnablePassthrough.assign(documents=(lambda given: given["query"]) | search)
            | RunnablePassthrough.assign(context=rerank | joined)
            | ChatPromptTemplate.from_template("Answer from these passages:\n{context}\nQuestion: {query}")
            | ChatTeola(pool=pool, max_tokens=self.tokens)
            | StrOutputParser()
        )

    async def knows(self, query: str) -> None:
        """The reranker learns in which order the store finds the passages for it."""
        self.found = {found.page_content: place for place, found in enumerate(await self.search.ainvoke(query))}

    async def reset(self) -> None:
        await self.llm.reset()


async def once(chain: Runnable[Any, str], query: str) -> tuple[str, float, float]:
    """(answer, seconds to its first piece, seconds)"""
    now = asyncio.get_running_loop().time
    began, text, first = now(), "", 0.0
    async for piece in chain.astream({"query": query}):
        first, text = first or now() - began, text + piece
    return text, first, now() - began


async def measured(guess: str, passages: int, tokens: int, drafts: bool, repeats: int) -> dict[str, Any]:
    bench = Bench(GUESSES[guess], passages=passages, tokens=tokens, drafts=drafts)
    said = {"guess": guess, "passages": passages, "answer_tokens": tokens, "drafts": drafts}
    return said | await compared(bench, tokens, repeats)


async def measured_questions(guess: str, writer: str, tokens: int, drafts: bool, repeats: int) -> dict[str, Any]:
    given: Any = {"writer": writer, "tokens": tokens, "drafts": drafts}
    bench = questions.Expanded(questions.GUESSES[guess], quoted, PASSAGES, **given)
    said = {"guess": guess, "written_by": writer, "answer_tokens": tokens, "drafts": drafts}
    return said | await compared(bench, tokens, repeats)


async def compared(bench: Bench | questions.Expanded, tokens: int, repeats: int) -> dict[str, Any]:
    async with bench.pool as pool:
        chain = await bench.chain()
        others = tuple(one for one in DEFAULT_PASSES if one.name != "provisional-answers")
        ways = {
            "plain": chain,
            "without": accelerate(chain, pool=pool, passes=others),
            "with": accelerate(chain, pool=pool, passes=DEFAULT_PASSES),
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        first: dict[str, list[float]] = {way: [] for way in ways}
        equal, told = True, []
        for turn in range(repeats):
            query, answers = f"what does a lambda make, {turn}", set()
            await bench.knows(query)
            for way, chain in ways.items():
                await bench.reset()
                text, begun, seconds = await once(chain, query)
                answers.add(text)
                first[way].append(begun)
                took[way].append(seconds)
            equal = equal and len(answers) == 1
            told.append(ways["with"].last_trace().summary())  # type: ignore[attr-defined]
    medians = {way: summary(found) for way, found in took.items()}
    firsts = {way: summary(found) for way, found in first.items()}
    return {
        "seconds": medians,
        "first_piece": firsts,
        "speedup": round(medians["without"]["median"] / medians["with"]["median"], 3),
        "first_piece_sooner": round(firsts["without"]["median"] / firsts["with"]["median"], 3),
        "answers_equal": equal,
        "claimed": sum(one["provisional_claimed"] for one in told),
        "tokens_ahead": sum(one["provisional_tokens"] for one in told),
        "tokens_wasted": sum(one["provisional_wasted_tokens"] for one in told),
        "tokens_of_answers": tokens * len(told),
    }


def main(options: argparse.Namespace) -> dict[str, Any]:
    cases = [
        run_virtual(measured(guess, passages, tokens, drafts, options.repeats))
        for drafts in (False, True)
        for passages in RERANKED
        for tokens in LENGTHS
        for guess in GUESSES
    ]
    expanded = [
        run_virtual(measured_questions(guess, writer, tokens, drafts, options.repeats))
        for drafts in (False, True)
        for writer in ("llm", "proxy")
        for tokens in LENGTHS
        for guess in questions.GUESSES
    ]
    both = cases + expanded
    return {
        "benchmark": "provisional",
        "answers_equal": all(case["answers_equal"] for case in both),
        "worst": min(case["speedup"] for case in both),
        "best": max(case["speedup"] for case in both),
        "wasted_share": round(max(case["tokens_wasted"] / case["tokens_of_answers"] for case in both), 3),
        "cases": cases,
        "questions": expanded,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for case in result["cases"] + result["questions"]:
        yield {
            "guess": case["guess"],
            "of": case["written_by"] if "written_by" in case else str(case["passages"]),
            "tokens": case["answer_tokens"],
            "drafts": "yes" if case["drafts"] else "no",
            "without": case["seconds"]["without"]["median"],
            "with": case["seconds"]["with"]["median"],
            "speed-up": case["speedup"],
            "first piece sooner": case["first_piece_sooner"],
            "wasted": case["tokens_wasted"],
        }


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="questions")


if __name__ == "__main__":
    chosen = arguments(__doc__ or "", _options)
    made = main(chosen)
    report(made, chosen, "an answer begun on a guess at its context, medians", list(rows(made)))
