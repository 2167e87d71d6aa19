"""A question-answering chain without a GPU: what it becomes, and where the time goes with and without.

Fake engines take as long as the profile of an RTX 3090 says; the clock is virtual, so nobody waits for them.

    python examples/01_no_gpu.py

prints (shortened)::

    Understood:    13 parts: 13 optimized
    Starts early:  1 ingestion and 1 model call (collection and queries.model) side by side; ...
    ...
    Passes
    ------
    prune-dependencies       fired
    ...
    plain q1: closed in 2.08 s
    ...
    default q2: closed in 1.37 s
    ...
    same answer, 1.52 times sooner
"""

from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.observe import timeline_text
from teola_plugin.runtime.virtual_time import run_virtual

THREE = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}


def question_answering(pool: EnginePool) -> Runnable[Any, str]:
    """Plain LCEL: index what was uploaded, expand the question, search with each, answer."""
    llm = ChatTeola(pool=pool, max_tokens=12)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="uploads")
    retriever = store.as_retriever(search_kwargs={"k": 2})
    expand = ChatPromptTemplate.from_template("Write three questions like this one, as JSON: {question}")
    answer = ChatPromptTemplate.from_template("Answer from the passages. " * 20 + "{question}\n\n{passages}")
    union: Runnable[Any, str] = RunnableLambda(lambda found: "\n".join({d.page_content: d for ds in found for d in ds}))
    return (
        RunnablePassthrough.assign(collection=itemgetter("document") | TeolaIndexer(store=store))
        | RunnablePassthrough.assign(queries=expand | llm.bind(json_schema=THREE, max_tokens=64) | JsonOutputParser())
        | RunnablePassthrough.assign(found=itemgetter("queries") | retriever.map())
        | RunnablePassthrough.assign(passages=itemgetter("found") | union)
        | answer
        | llm
        | StrOutputParser()
    )


async def main() -> None:
    document = " ".join(f"Paragraph {i} says what paragraph {i - 1} does not say." for i in range(1500))
    given = {"question": "What does paragraph 7 say?", "document": document}
    async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
        chain = question_answering(pool)
        with pool.watching("plain") as watched:
            expected = await chain.ainvoke(given)
        await pool.runtime.areset()
        store: Any = pool.engine("store")
        await store.delete_collection("uploads")
        fast = accelerate(chain)
        assert await fast.ainvoke(given) == expected
        plain, sooner = watched.trace.result(), fast.last_trace()
        assert plain is not None and sooner is not None
        print(fast.explain(given, details=True), timeline_text(plain), timeline_text(sooner), sep="\n\n")
        print(f"same answer, {plain.seconds / sooner.seconds:.2f} times sooner")


run_virtual(main())
