"""The app of `make serve`: an ordinary LangChain chain that answers from a few pages of Python's reference.

The bundled model was trained to answer from such prose, in its words (examples/demo_model): of a text of another kind
it mostly finds that it does not say. With another model the app answers from any pages.
"""

from __future__ import annotations

from operator import itemgetter
from pydoc_data.topics import topics
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EnginePool
from teola_plugin.adapters.demo_app import ANSWER, joined_texts, make_splitter
from teola_plugin.cli.demo.documents import join_lines
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore

PAGES = ("break", "continue", "global", "lambda", "raise")


def manual(pool: EnginePool) -> Runnable[Any, str]:
    """Input: `{"question": str}`. Nothing in here knows of the server."""
    llm = ChatTeola(pool=pool, max_tokens=64)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="manual")
    store.add_texts([chunk for page in PAGES for chunk in make_splitter().split_text(join_lines(topics[page]))])
    found = itemgetter("question") | store.as_retriever(search_kwargs={"k": 1}) | RunnableLambda(joined_texts)
    return RunnablePassthrough.assign(context=found) | ANSWER | llm | StrOutputParser()
