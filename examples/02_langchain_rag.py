"""An ordinary LangChain RAG chain, accelerated by one line. Streaming, batches and events stay what they were.

    python examples/02_langchain_rag.py             fake engines, in real time
    python examples/02_langchain_rag.py --real      vLLM, MiniLM and PostgreSQL on this machine (tiny random model)

prints, with fake engines::

    plain        1.20 s
    accelerated  0.79 s
    same answer: True
    streamed:    13 chunks, the same text: True
"""

import sys
import time
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090


def make_pool(*, real: bool) -> EnginePool:
    if not real:
        return EnginePool.local(fake_engines(rtx3090()))
    from teola_plugin.engines import EmbeddingEngine
    from teola_plugin.engines.bundled import llama as tiny_llama

    return EnginePool.local(llm=str(tiny_llama.make()), embedder=EmbeddingEngine("embedder"), store="embedded")


def rag(pool: EnginePool) -> Runnable[Any, str]:
    """Nothing in here knows of `accelerate`."""
    llm = ChatTeola(pool=pool, max_tokens=12)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(["Oats are sown in spring.", "Ivy climbs walls.", "Lambs eat oats and ivy."])
    rewrite = ChatPromptTemplate.from_template("Rewrite for a search engine: {question}") | llm | StrOutputParser()
    keywords = ChatPromptTemplate.from_template("List keywords of: {question}") | llm | StrOutputParser()
    answer = ChatPromptTemplate.from_messages(
        [("system", "Answer with these passages only. " * 30), ("human", "{question}\n\n{keywords}\n\n{passages}")]
    )
    texts: Runnable[Any, str] = RunnableLambda(lambda found: "\n".join(document.page_content for document in found))
    return (
        RunnablePassthrough.assign(keywords=keywords)
        | RunnablePassthrough.assign(rewritten=rewrite)
        | RunnablePassthrough.assign(found=itemgetter("rewritten") | store.as_retriever(search_kwargs={"k": 2}))
        | RunnablePassthrough.assign(passages=itemgetter("found") | texts)
        | answer
        | llm
        | StrOutputParser()
    )


def timed(label: str, chain: Runnable[Any, str], given: dict[str, str]) -> str:
    begun = time.perf_counter()
    answer = chain.invoke(given)
    print(f"{label:12} {time.perf_counter() - begun:.2f} s")
    return answer


with make_pool(real="--real" in sys.argv) as pool:
    chain = rag(pool)
    fast = accelerate(chain)  # the one line
    given = {"question": "What do lambs eat?"}
    chain.invoke({"question": "warm up"})
    plain = timed("plain", chain, given)
    pool.reset()
    print("same answer:", timed("accelerated", fast, given) == plain)
    chunks = list(fast.stream(given))
    print(f"streamed:    {len(chunks)} chunks, the same text: {''.join(chunks) == plain}")
