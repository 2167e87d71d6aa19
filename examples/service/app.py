"""The app of `make serve`: an ordinary LangChain chain that answers from a few passages."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool
from teola_plugin.cli.demo.steps import ANSWER
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore

PASSAGES = (
    "Oats are sown in spring, as soon as the soil can be worked.",
    "Lambs are born in March, and graze on clover from May on.",
    "The barn was built in 1921 by the farmer's grandfather.",
    "Cows are milked twice a day, at six in the morning and at five in the evening.",
)


def farm(pool: EnginePool) -> Runnable[Any, str]:
    """Input: `{"question": str}`. Nothing in here knows of the server."""
    llm = ChatTeola(pool=pool, max_tokens=48)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(list(PASSAGES))
    found = itemgetter("question") | store.as_retriever(search_kwargs={"k": 1})
    text = RunnableLambda(lambda documents: "\n".join(document.page_content for document in documents))
    return RunnablePassthrough.assign(context=found | text) | ANSWER | llm | StrOutputParser()
