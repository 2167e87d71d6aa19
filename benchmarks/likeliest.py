"""Which context an answer may begin with while expansions are written: how often each guess is the one it ends with.

python -m benchmarks.likeliest --json

Searches, rerankers and expansions of the applications, on real engines: MiniLM, the bundled cross-encoder, and the
bundled model's expansions or those written by hand. Questions and texts are those of `benchmarks.drafts`, of
`examples.demo_model` and of `benchmarks.apps --ground real`; an upload is a question's topics and others, about a
hundred chunks as in `benchmarks.apps`, a reference is all of Python's. Nothing is timed.

Beside them the fakes that the applications are simulated on, with their made-up uploads: `own_score` has to be right as
often there, or virtual time would tell of other gains than real engines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import median
from typing import Any

from langchain_core.documents import Document
from langchain_text_splitters import RecursiveCharacterTextSplitter

from benchmarks.apps.inputs import given
from benchmarks.apps.real import ASKED
from benchmarks.common import arguments, environment, report
from benchmarks.draft_prompts import QUESTIONS
from benchmarks.rewordings import REWORDINGS
from examples.apps.advanced_rag import SEARCHED, TOP, expansion, union
from examples.apps.engines import fake_pool, real_pool
from examples.apps.uploads import CHARACTERS, CHUNK, OVERLAP, flowing
from examples.demo_model.handwritten import ASKED as HANDWRITTEN
from teola_plugin import EnginePool
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaRerank, TeolaVectorStore

FUSED = 60
"""The constant of reciprocal rank fusion, as LlamaIndex has it."""
UPLOAD = 100
"""Chunks of an upload, at least."""
FEW = 4
"""Passages of a retriever where nothing is reranked, and of one prompt."""
Found = list[Document]
Guesses = dict[str, tuple[Found, ...]]
"""What is guessed -> the guesses, one of which has to be right."""


@dataclass(frozen=True, slots=True)
class Case:
    """A question over one store, and what its searches and reranker say."""

    question: Found
    """Hits of the question itself."""
    expanded: list[Found]
    """Hits of each expansion."""
    reranked: Callable[[Found], Found]

    @property
    def wide(self) -> dict[str, tuple[Found, Guesses]]:
        """Where a reranker follows. Form -> (what the answer is made from, the same on guesses)."""
        own, fused = self.question, fusion([self.question, *self.expanded])
        found = union(self.expanded)
        early = self.reranked(own)

        def guesses(order: Found) -> Guesses:
            return {
                "store's order": (order,),
                "the question's hits": (own,),
                "the question's hits, reranked": (early,),
                "one of the first and the last": (order, early),
            }

        return {
            "expansions, reranked": (self.reranked(found), guesses(found)),
            "question and expansions fused, reranked": (self.reranked(fused), guesses(fused)),
        }

    @property
    def narrow(self) -> dict[str, tuple[Found, Guesses]]:
        """Where none does: the context is what was found."""
        own = self.question[:FEW]
        each = [found[:FEW] for found in self.expanded]
        guess: Guesses = {"the question's hits": (own,)}
        return {
            "union of expansions": (union(each), guess),
            "union of expansions and question": (union([*each, own]), guess),
            "question and expansions fused": (fusion([own, *each])[:FEW], guess),
            "question rewritten": (each[0], guess),
        }


def fusion(found: Sequence[Found]) -> Found:
    """By reciprocal ranks."""
    scores: dict[str, float] = {}
    for documents in found:
        for rank, document in enumerate(documents):
            scores[document.page_content] = scores.get(document.page_content, 0.0) + 1 / (rank + FUSED)
    by_text = {document.page_content: document for document in union(list(found))}
    return [by_text[text] for text in sorted(scores, key=lambda text: -scores[text])]


# ------------------------------------------------------------ questions and texts


def questions() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(question, topics of its upload), each question once."""
    seen = set()
    rows: list[tuple[str, tuple[str, ...]]] = [(question, parts) for question, parts in ASKED]
    rows += [(question, (topic,)) for topic, question in QUESTIONS]
    rows += [(asked.question, (asked.topic,)) for asked in HANDWRITTEN]
    for question, parts in rows:
        if question not in seen:
            seen.add(question)
            yield question, upload(parts)


def upload(parts: tuple[str, ...]) -> tuple[str, ...]:
    """These topics, then others by their names, until there are enough chunks."""
    chosen = list(parts)
    for name in sorted(set(topics) - set(parts)):
        if len(chunks(chosen)) >= UPLOAD:
            break
        chosen.append(name)
    return tuple(chosen)


def chunks(names: Sequence[str]) -> list[str]:
    return cut(flowing(topics[name]) for name in names)


def cut(texts: Iterable[str]) -> list[str]:
    splitter = RecursiveCharacterTextSplitter(chunk_size=CHUNK * CHARACTERS, chunk_overlap=OVERLAP * CHARACTERS)
    return list(dict.fromkeys(part for text in texts for part in splitter.split_text(text)))


class Bench:
    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.stores: dict[tuple[str, ...], TeolaVectorStore] = {}
        self.write = expansion(ChatTeola(pool=pool))
        self.best = TeolaRerank(pool=pool, top_n=TOP)

    def store(self, names: tuple[str, ...]) -> TeolaVectorStore:
        if names not in self.stores:
            self.stores[names] = self.filled(f"likeliest-{len(self.stores)}", chunks(names))
        return self.stores[names]

    def filled(self, name: str, texts: Sequence[str]) -> TeolaVectorStore:
        made = TeolaVectorStore(pool=self.pool, embedding=TeolaEmbeddings(pool=self.pool), collection=name)
        made.add_documents([Document(page_content=text) for text in texts])
        return made

    def expansions(self, question: str, by: str) -> Sequence[str]:
        try:
            return REWORDINGS.get(question, ()) if by == "hand" else self.write.invoke({"question": question})
        except json.JSONDecodeError:
            return ()

    def case(self, question: str, store: TeolaVectorStore, others: Sequence[str]) -> Case:
        own, *expanded = [store.similarity_search(text, k=SEARCHED) for text in (question, *others)]
        return Case(own, expanded, lambda found: list(self.best.compress_documents(found, question)))


# ------------------------------------------------------------ counting


def counted(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """For each form and guess: how often its best passage, and its whole context, are the right ones."""
    tally: dict[tuple[str, str], list[tuple[bool, bool]]] = {}
    for case in cases:
        for form, (real, guesses) in (case.wide | case.narrow).items():
            for name, several in guesses.items():
                first = any(_same(real[:1], guess[:1]) for guess in several)
                pair = first, any(_same(real, guess[: len(real)]) for guess in several)
                tally.setdefault((form, name), []).append(pair)
    return [
        {
            "form": form,
            "guess": guess,
            "questions": len(pairs),
            "first": round(sum(first for first, _ in pairs) / len(pairs), 3),
            "all": round(sum(whole for _, whole in pairs) / len(pairs), 3),
        }
        for (form, guess), pairs in tally.items()
    ]


def _same(real: Found, guess: Found) -> bool:
    return [one.page_content for one in real] == [one.page_content for one in guess]


def simulated(count: int) -> list[dict[str, Any]]:
    """The same with the fakes and the inputs of `benchmarks.apps --ground simulated`."""
    with fake_pool(factor=0.0) as pool:
        bench, cases = Bench(pool), []
        for number in range(count):
            asked = given("advanced_rag", number)
            store = bench.filled(f"report-{number}", cut([asked["document"]]))
            cases.append(bench.case(asked["question"], store, bench.expansions(asked["question"], "model")))
        return counted(cases)


def main(options: argparse.Namespace) -> dict[str, Any]:
    nothing = dict.fromkeys(("llm", "proxy", "reranker", "dsn", "pages", "embedder"))
    chosen = argparse.Namespace(app="advanced_rag", web="texts", **nothing)
    asked = list(questions())[: options.questions]
    with real_pool(chosen) as pool:
        bench = Bench(pool)
        found = []
        for by in ("model", "hand"):
            expanded = [(*row, bench.expansions(row[0], by)) for row in asked]
            for text, parts in (("upload", None), ("reference", tuple(topics))):
                cases = [bench.case(q, bench.store(parts or own), others) for q, own, others in expanded if others]
                found += [{"expansions": by, "text": text, **row} for row in counted(cases)]
    found += [{"expansions": "fakes", "text": "report", **row} for row in simulated(len(asked))]
    sizes = {
        "upload": median(len(chunks(parts)) for _, parts in asked),
        "reference": len(chunks(tuple(topics))),
    }
    return {"benchmark": "likeliest", "chunks": sizes, "cases": found, "environment": environment()}


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return list(result["cases"])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=int, default=None, help="only so many")


if __name__ == "__main__":
    chosen = arguments(__doc__ or "", _options)
    made = main(chosen)
    report(made, chosen, "contexts guessed while expansions are written: share of right ones", rows(made))
