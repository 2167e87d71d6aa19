"""Two apps on one pool of engines: each has its answers, and what they ask for at the same time shares batches.

Starts a Ray cluster of its own on this machine, a pool of fake engines in it, and ends both.

    python examples/08_shared_pool.py

prints::

    embedder: 1 instance
    llm: 2 instances
    store: 1 instance
    8 answers, as of one process: yes
    batches with queries of both apps: yes
    the pool is down
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.engines.fake import fake_engines

YAML = """
name: example
engines:
  embedder: {kind: fake, options: {seconds: 0.2}}
  llm: {kind: fake, instances: 2}
  store: {kind: fake}
"""
QUESTIONS = ("What do lambs eat?", "Where do hens sleep?", "Who feeds the pigs?", "When do cows come home?")
TEXTS = ["Lambs eat oats.", "Hens sleep on perches.", "The farmer feeds the pigs.", "Cows come home at six."]


def app(pool: EnginePool) -> Runnable[Any, str]:
    """Retrieve, prompt, answer."""
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(TEXTS, ids=[str(number) for number in range(len(TEXTS))])
    found = store.as_retriever(search_kwargs={"k": 1}) | (lambda documents: documents[0].page_content)
    prompt = ChatPromptTemplate.from_template("Answer {question} with: {found}")
    return {"question": RunnablePassthrough(), "found": found} | prompt | ChatTeola(pool=pool) | StrOutputParser()


def expected() -> list[str]:
    """The same app, plain, in one process."""
    with EnginePool.local(fake_engines()) as pool:
        return app(pool).batch(list(QUESTIONS))


async def both(one: EnginePool, other: EnginePool) -> list[list[str]]:
    """All questions to both apps at once."""
    apps = [accelerate(app(pool), pool=pool, app=name) for name, pool in (("one", one), ("two", other))]
    return list(await asyncio.gather(*(fast.abatch(list(QUESTIONS)) for fast in apps)))


def main() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the cluster is on the loopback, and ends with this script
    config = PoolConfig.parse(YAML)
    counts: dict[str, int] = {}
    address = deploy.up(config, told=lambda facts: counts.update({facts.name: len(facts.instances)}))
    try:
        for name, count in sorted(counts.items()):
            print(f"{name}: {count} instance{'s' if count > 1 else ''}")
        with EnginePool.connect(address, pool="example") as one, EnginePool.connect(address, pool="example") as other:
            answers = asyncio.run(both(one, other))
            same = answers == [expected()] * 2
            print(f"{sum(map(len, answers))} answers, as of one process: {'yes' if same else 'no'}")
            shared = any(
                {"one", "two"} <= set(batch["apps"]) for batch in deploy.batches("example", "embedder", address)
            )
            print(f"batches with queries of both apps: {'yes' if shared else 'no'}")
    finally:
        deploy.down("example")
    print("the pool is down")


if __name__ == "__main__":
    main()
