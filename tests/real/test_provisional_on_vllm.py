"""Answers begun on a guess, on real vLLM: claimed or drafted, token for token what the plain chain writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from real.conftest import Borrowed, BorrowedLoop

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.requests.payloads import Generate, Prompt, Sampling
from teola_plugin.requests.request import Request
from teola_plugin.runtime.local import LocalRuntime

if TYPE_CHECKING:
    from conftest import SessionLlm

pytestmark = [pytest.mark.vllm]
THREE = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}
PASSAGES = [f"Passage {i}: a lambda is an expression that makes a function, and part {i} says so." for i in range(9)]
TOKENS = 40


class Watched(Borrowed):
    """The session's LLM; what it is asked for is kept."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.asked: list[Request] = []

    def execute(self, batch: Sequence[Request]) -> Any:
        self.asked += batch
        return self._engine.execute(batch)


@contextmanager
def a_pool(
    session_llm: SessionLlm, *, right: bool, reranking: float = 0.5, **more: Any
) -> Iterator[tuple[EnginePool, Watched]]:
    """The reranker takes half a second, and keeps the store's order or another one. `more`: engines."""

    def score(query: str, text: str) -> float:
        return 0.5 if right else float(PASSAGES.index(text) * 5 % 9)

    slow = replace(
        profiles.noop()["reranker"], curves={PrimitiveKind.RERANKING: Curve.linear(reranking, 0.0)}, device="another"
    )
    llm = Watched(session_llm.engine)
    engines: dict[str, Any] = {
        "llm": [llm],
        "embedder": [FakeEmbedder()],
        "reranker": [FakeReranker("reranker", slow, score)],
        "store": [FakeStore()],
        **{name: [engine] for name, engine in more.items()},
    }
    loop = BorrowedLoop(session_llm.thread.loop, session_llm.thread._thread.ident or 0)
    with EnginePool(LocalRuntime(engines, loop=loop), engines, DEFAULT_PASSES) as pool:
        yield pool, llm


def a_chain(pool: EnginePool, tokens: int = TOKENS) -> Runnable[Any, Any]:
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="docs")
    store.add_documents([Document(page_content=text, id=str(i)) for i, text in enumerate(PASSAGES)])
    search = store.as_retriever(search_kwargs={"k": 6})
    return (
        RunnablePassthrough.assign(documents=(lambda given: given["query"]) | search)
        | RunnablePassthrough.assign(best=TeolaRerank(pool=pool, top_n=2).as_runnable())
        | RunnablePassthrough.assign(context=lambda given: "\n".join(one.page_content for one in given["best"]))
        | ChatPromptTemplate.from_template("Answer from these passages.\n{context}\nQuestion: {query}")
        | ChatTeola(pool=pool, max_tokens=tokens)
    )


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_an_answer_that_begins_before_its_reranker_has_spoken(session_llm: SessionLlm, right: bool) -> None:
    with a_pool(session_llm, right=right) as (pool, llm):
        chain = a_chain(pool)
        fast = accelerate(chain, pool=pool)
        for question in ("What is a lambda?", "Who says so?"):
            plain = chain.invoke({"query": question})
            llm.asked.clear()
            pieces = list(fast.stream({"query": question}))
            assert "".join(str(piece.content) for piece in pieces) == plain.content
            guess, *rest = [one for one in llm.asked if one.kind is not PrimitiveKind.PARTIAL_PREFILLING]
            told = fast.last_trace().summary()
            assert guess.objective == "provisional" and told["provisional_tokens"] <= TOKENS
            if rest:  # stopped at a quarter, or wrong: its text is a draft
                [real] = rest
                assert real.drafts and (real.payload == guess.payload) is right
                assert not right or plain.content.startswith(real.drafts[0])
            else:
                assert right and told["provisional_claimed"] == 1


def test_a_right_guess_goes_on(session_llm: SessionLlm) -> None:
    """Long enough an answer that the reranker has spoken before a quarter is written."""
    with a_pool(session_llm, right=True) as (pool, llm):
        pool.engine("reranker")._profile = replace(
            pool.engine("reranker").profile, curves={PrimitiveKind.RERANKING: Curve.linear(0.03, 0.0)}
        )
        chain = a_chain(pool, 100)
        fast = accelerate(chain, pool=pool)
        for number in range(8):  # before the plain one: nothing can be looked up in an answer that was never given
            llm.asked.clear()
            fast_answer = fast.invoke({"query": f"What is part {number}?"}).content
            asked = [one for one in llm.asked if one.kind is not PrimitiveKind.PARTIAL_PREFILLING]
            assert fast_answer == chain.invoke({"query": f"What is part {number}?"}).content
            if fast.last_trace().summary()["provisional_claimed"]:
                assert len(asked) == 1 and asked[0].objective == "provisional"
                return
        pytest.fail("no guess was claimed")


def union(found: list[list[Document]]) -> list[Document]:
    return list({document.page_content: document for documents in found for document in documents}.values())


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_an_answer_that_begins_on_what_the_question_itself_finds(session_llm: SessionLlm, right: bool) -> None:
    """vLLM answers; a fake of another device writes the other questions."""

    def write(prompt: Prompt, sampling: Sampling) -> str:
        return json.dumps([f"{prompt.flat()[-20:]} {word}" for word in ("part 1", "part 7", "function")])

    machine = profiles.scaled(profiles.rtx3090(), 0.3)
    writer = FakeLLM("writer", replace(machine["llm"], device="writer"), write)
    with a_pool(session_llm, right=right, reranking=0.15, writer=writer) as (pool, llm):
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="docs")
        store.add_documents([Document(page_content=text, id=str(i)) for i, text in enumerate(PASSAGES)])
        ask = ChatPromptTemplate.from_template("Others like: {query}")
        queries = ask | ChatTeola(pool=pool, engine="writer").bind(json_schema=THREE) | StrOutputParser()
        search = store.as_retriever(search_kwargs={"k": 3})
        chain = (
            RunnablePassthrough.assign(queries=queries | RunnableLambda(json.loads))
            | RunnablePassthrough.assign(documents=itemgetter("queries") | search.map() | RunnableLambda(union))
            | RunnablePassthrough.assign(best=TeolaRerank(pool=pool, top_n=2).as_runnable())
            | RunnablePassthrough.assign(context=lambda given: "\n".join(one.page_content for one in given["best"]))
            | ChatPromptTemplate.from_template("Answer from these passages.\n{context}\nQuestion: {query}")
            | ChatTeola(pool=pool, max_tokens=TOKENS)
        )
        fast = accelerate(chain, pool=pool)
        assert "on what the question itself finds" in fast.explain()
        begun = 0
        for question in ("What is a lambda?", "Who says so?", "What is part 3?"):
            llm.asked.clear()
            pieces = list(fast.stream({"query": question}))
            begun += sum(one.objective == "provisional" and isinstance(one.payload, Generate) for one in llm.asked)
            assert "".join(str(piece.content) for piece in pieces) == chain.invoke({"query": question}).content
        assert begun
