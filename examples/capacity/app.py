"""An app for `teola simulate`: a function makes it from the pool.

    teola simulate examples/capacity/pool.yaml --app examples.capacity.app:support_desk --rate 0.5,1,2

docs/simulation.md shows what that prints.
"""

from __future__ import annotations

from typing import Any

from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore

THREE = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}
PARAGRAPH = "What to feed, when to milk, how to mend a fence, and whom to call if none of this helps. " * 8
MANNERS = "You answer customers of a farm shop. Be brief and friendly; say so where the manual says nothing. " * 4


async def support_desk(pool: EnginePool) -> Runnable[Any, str]:
    """Plain LCEL: three wordings of the question, a search with each, an answer in two steps."""
    llm = ChatTeola(pool=pool, max_tokens=48)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="manual")
    await store.aadd_texts([f"Chapter {number}. " + PARAGRAPH for number in range(40)])  # not timed
    expand = ChatPromptTemplate.from_template("Write three questions like this one, as JSON: {question}")
    draft = ChatPromptTemplate.from_template(MANNERS + "Question: {question}\n\nManual: {found}\n\nAnswer:")
    better = ChatPromptTemplate.from_template(MANNERS + "Question: {question}\n\nMake this shorter: {draft}")
    return (
        RunnablePassthrough.assign(queries=expand | llm.bind(json_schema=THREE, max_tokens=96) | JsonOutputParser())
        | RunnablePassthrough.assign(found=RunnableLambda(lambda state: state["queries"]) | store.as_retriever().map())
        | RunnablePassthrough.assign(draft=draft | llm | StrOutputParser())
        | better
        | llm
        | StrOutputParser()
    )
