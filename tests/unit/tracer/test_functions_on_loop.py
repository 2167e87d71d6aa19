"""Tests of which callables of a graph may run on the pool's loop: none of the user's or a framework's."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough

from teola_plugin import EnginePool
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import fake_engines
from teola_plugin.graph import runs_on_loop
from teola_plugin.tracer.langchain.trace import trace


def test_only_our_own_small_functions_may_run_on_the_loop() -> None:
    with EnginePool.local(fake_engines()) as pool:
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
        listed = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=pool) | JsonOutputParser()
        chain: Any = (
            RunnablePassthrough.assign(
                docs=itemgetter("question") | store.as_retriever(), said=listed, two=itemgetter("question", "style")
            )
            | RunnablePassthrough.assign(
                text=lambda x: ", ".join(d.page_content for d in x["docs"]),
                length=itemgetter("said") | RunnableLambda(attrgetter("x")),
            )
            | RunnableParallel(all=RunnablePassthrough(), prompt=ChatPromptTemplate.from_template("{text}"))
        )
        calls = trace(chain).calls
    ours = {name for name, call in calls.items() if runs_on_loop(call)}
    assert ours == {"docs.documents", "said.model.message", "two.items", "output.pack"}
    assert calls.keys() - ours == {"said.model", "said.parse", "text", "length.attribute", "output.prompt"}
