"""Two apps on one pool of engines: each has its answers, and what they ask for at the same time shares batches.

Starts a Ray cluster of its own on this machine, a pool of fake engines in it, and ends both.

    python examples/08_shared_pool.py

prints::

    engines: embedder, llm, store
    answers as of one process: True
    batches with queries of both apps: True
    the pool is down
"""

from __future__ import annotations

import asyncio

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.engines import fake_engines

YAML = """
name: example
engines:
  embedder: {kind: fake, options: {seconds: 0.2}}
  llm: {kind: fake, replicas: 2}
  store: {kind: fake}
"""
QUESTIONS = ["What do lambs eat?", "Where do hens sleep?", "Who feeds the pigs?", "When do cows come home?"]
TEXTS = ["Lambs eat oats.", "Hens sleep on perches.", "The farmer feeds the pigs.", "Cows come home at six."]


def app(pool: EnginePool) -> Runnable[str, str]:
    """Retrieve, prompt, answer."""
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(TEXTS, ids=[str(number) for number in range(len(TEXTS))])
    found = store.as_retriever(search_kwargs={"k": 1}) | (lambda documents: documents[0].page_content)
    prompt = ChatPromptTemplate.from_template("Answer {question} with: {found}")
    return {"question": RunnablePassthrough(), "found": found} | prompt | ChatTeola(pool=pool) | StrOutputParser()


def expected() -> list[str]:
    """The same app, plain, in one process."""
    with EnginePool.local(fake_engines()) as pool:
        return app(pool).batch(QUESTIONS)


async def ask(**pools: EnginePool) -> list[list[str]]:
    """All questions to all apps at once."""
    apps = [accelerate(app(pool), pool=pool, app=name) for name, pool in pools.items()]
    return list(await asyncio.gather(*(fast.abatch(QUESTIONS) for fast in apps)))


def main() -> None:
    address = deploy.up(PoolConfig.parse(YAML))
    try:
        with EnginePool.connect(address, pool="example") as one, EnginePool.connect(address, pool="example") as two:
            print("engines:", ", ".join(one.engine_names))
            answers = asyncio.run(ask(one=one, two=two))
            print("answers as of one process:", answers == [expected()] * 2)
            batches = deploy.batches("example", "embedder", address)
            print("batches with queries of both apps:", any(len(batch["apps"]) == 2 for batch in batches))
    finally:
        deploy.down("example")
    print("the pool is down")


if __name__ == "__main__":
    main()
