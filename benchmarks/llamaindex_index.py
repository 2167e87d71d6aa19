"""Building an index of 2,000 chunks with LlamaIndex: its own way, and accelerated, on real engines.

MiniLM embeds, the embedded PostgreSQL stores. Plain: `HuggingFaceEmbedding` in this process, then `add`. Accelerated:
the same object bound to the pool's engine, which fuses batches, and rows are stored while later ones are embedded.
On cores alone there is as much to compute either way. What waiting costs where an engine is a GPU, fakes with the
latencies of an RTX 3090 tell (`--fakes`).

python -m benchmarks.llamaindex_index --json; python -m benchmarks.llamaindex_index --fakes --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pydoc_data.topics import topics
from statistics import median
from typing import Any

from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from benchmarks.common import arguments, environment, report, summary
from teola_plugin import EnginePool
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaVectorStore
from teola_plugin.adapters.llamaindex.binding.bind import bound
from teola_plugin.adapters.llamaindex.ingestion import TeolaVectorStoreIndex, accelerated_ingestion
from teola_plugin.engines import profiles
from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.engines.sentence_transformers.embedding import EmbeddingEngine, packaged_minilm
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import SearchVector

CHUNK, OVERLAP = 64, 8
"""Tokens."""
WARM = 100
"""Chunks of an index that either way builds once before the clock starts."""
PROBES = ("How do generators work?", "import", "What does a with statement do?")
Build = Callable[[TeolaVectorStore], object]


def documents() -> list[Document]:
    """Python's own help, a document a topic."""
    return [Document(text=text, id_=name, metadata={"topic": name}) for name, text in sorted(topics.items())]


def splitter() -> SentenceSplitter:
    """With ids that are the same in every run."""
    ids: Iterator[int] = itertools.count()
    return SentenceSplitter(chunk_size=CHUNK, chunk_overlap=OVERLAP, id_func=lambda *_: f"node-{next(ids):05}")


def enough(docs: Sequence[Document], chunks: int) -> list[Document]:
    """The first documents that make at least so many chunks."""
    ends = itertools.accumulate(len(splitter().get_nodes_from_documents([doc])) for doc in docs)
    return list(docs[: 1 + next(i for i, end in enumerate(ends) if end >= chunks)])


def ways(own: HuggingFaceEmbedding, pool: EnginePool, chunks: int) -> dict[str, dict[str, Build]]:
    """By what is built: the plain way and the accelerated one."""
    served = bound(own, "embedder", pool)
    docs = enough(documents(), chunks)
    nodes = splitter().get_nodes_from_documents(docs)[:chunks]

    def fresh() -> list[BaseNode]:
        return [node.model_copy() for node in nodes]

    def index(cls: type[VectorStoreIndex], model: Any, use_async: bool) -> Build:
        def build(store: TeolaVectorStore) -> object:
            storage = StorageContext.from_defaults(vector_store=store)
            return cls(fresh(), embed_model=model, storage_context=storage, use_async=use_async)

        return build

    def pipeline(model: Any, store: TeolaVectorStore) -> IngestionPipeline:
        return IngestionPipeline(transformations=[splitter(), model], vector_store=store, disable_cache=True)

    return {
        "VectorStoreIndex": {
            "plain": index(VectorStoreIndex, own, False),
            "accelerated": index(TeolaVectorStoreIndex, served, False),
        },
        "VectorStoreIndex, use_async": {
            "plain": index(VectorStoreIndex, own, True),
            "accelerated": index(TeolaVectorStoreIndex, served, True),
        },
        "IngestionPipeline.run": {
            "plain": lambda store: pipeline(own, store).run(documents=docs),
            "accelerated": lambda store: accelerated_ingestion(pipeline(served, store)).run(documents=docs),
        },
        "IngestionPipeline.arun": {
            "plain": lambda store: asyncio.run(pipeline(own, store).arun(documents=docs)),
            "accelerated": lambda store: asyncio.run(
                accelerated_ingestion(pipeline(served, store)).arun(documents=docs)
            ),
        },
    }


class InTurn(TeolaEmbedding):
    """Embeds batch after batch, as LlamaIndex does with any other model."""

    def get_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        return BaseEmbedding.get_text_embedding_batch(self, texts, show_progress, **kwargs)

    async def aget_text_embedding_batch(self, texts: list[str], show_progress: bool = False, **kwargs: Any) -> Any:
        return await BaseEmbedding.aget_text_embedding_batch(self, texts, show_progress, **kwargs)


def fake_ways(pool: EnginePool, chunks: int) -> dict[str, dict[str, Build]]:
    """By texts a batch, in LlamaIndex's two ways; 10 is its default."""
    nodes = splitter().get_nodes_from_documents(enough(documents(), chunks))[:chunks]

    def index(cls: type[VectorStoreIndex], model: type[TeolaEmbedding], size: int, use_async: bool) -> Build:
        def build(store: TeolaVectorStore) -> object:
            storage = StorageContext.from_defaults(vector_store=store)
            given = [node.model_copy() for node in nodes]
            made = model(pool=pool, embed_batch_size=size)
            return cls(given, embed_model=made, storage_context=storage, use_async=use_async)

        return build

    return {
        f"batches of {size}{', use_async' if use_async else ''}": {
            "plain": index(VectorStoreIndex, InTurn, size, use_async),
            "accelerated": index(TeolaVectorStoreIndex, TeolaEmbedding, size, use_async),
        }
        for size in (10, 128)
        for use_async in (False, True)
    }


def stored(store: TeolaVectorStore, own: BaseEmbedding) -> tuple[list[Any], list[list[tuple[str, float]]]]:
    """All rows in the order of insertion, and all ids with scores for some questions, which tell the vectors."""
    rows = [(row.id, row.text, dict(row.metadata)) for row in store.admin("find", ()).result()]
    asked = [SearchVector(store.collection, tuple(own.get_query_embedding(probe)), 100_000) for probe in PROBES]
    found = store.request(PrimitiveKind.SEARCHING, asked).result()
    return rows, [sorted((hit.id, hit.score) for hit in hits) for hits in found]


def equal(one: Any, other: Any) -> bool:
    """Equal rows in equal order; scores within 1e-5."""
    pairs = zip(itertools.chain(*one[1]), itertools.chain(*other[1]), strict=True)
    near = all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-5 for a, b in pairs)
    return bool(one[0] == other[0]) and near


def measured(pool: EnginePool, own: BaseEmbedding, name: str, both: dict[str, Build], repeats: int) -> Any:
    """Seconds of both ways, in turn; and of this process's cores, which other work on the machine disturbs less."""
    seconds: dict[str, list[float]] = {way: [] for way in both}
    cores: dict[str, list[float]] = {way: [] for way in both}
    rows: dict[str, Any] = {}
    for i in range(repeats):
        for way in sorted(both, reverse=bool(i % 2)):
            store = TeolaVectorStore(pool=pool, collection=f"{name}-{way}-{i}")
            begun, used = time.perf_counter(), time.process_time()
            both[way](store)
            seconds[way].append(time.perf_counter() - begun)
            cores[way].append(time.process_time() - used)
            rows[way] = stored(store, own)
            store.clear()
    return {
        **{way: summary(values) for way, values in seconds.items()},
        "ratio": _ratio(seconds),
        "cpu_s": {way: round(median(values), 2) for way, values in cores.items()},
        "cpu_ratio": _ratio(cores),
        "rows": len(rows["plain"][0]),
        "equal": equal(rows["plain"], rows["accelerated"]),
    }


def _ratio(values: dict[str, list[float]]) -> float:
    return round(median(values["plain"]) / median(values["accelerated"]), 3)


def main(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.fakes:
        with EnginePool.local(fake_engines(profiles.rtx3090())) as pool:
            for name, both in fake_ways(pool, options.chunks).items():
                found[name] = measured(pool, TeolaEmbedding(pool=pool), name, both, options.repeats)
    else:
        own = HuggingFaceEmbedding(packaged_minilm())
        engines: dict[str, Engine] = {"embedder": EmbeddingEngine("embedder"), "store": PgVectorEngine("store")}
        with EnginePool.local(engines) as pool:
            for both in ways(own, pool, WARM).values():
                measured(pool, own, "warm-up", both, 1)
            for name, both in ways(own, pool, options.chunks).items():
                found[name] = measured(pool, own, name, both, options.repeats)
    return {
        "benchmark": "llamaindex_index",
        "engines": "fakes, RTX 3090" if options.fakes else "MiniLM, PostgreSQL",
        "chunks": options.chunks,
        "repeats": options.repeats,
        "ratio": min(one["ratio"] for one in found.values()),
        "equal": all(one["equal"] for one in found.values()),
        "building": found,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "what": name,
            "plain, s": one["plain"]["median"],
            "accelerated, s": one["accelerated"]["median"],
            "ratio": one["ratio"],
            "cpu ratio": one["cpu_ratio"],
            "rows": one["rows"],
            "equal": str(one["equal"]),
        }
        for name, one in result["building"].items()
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunks", type=int, default=2000, help="chunks of an index")
    parser.add_argument("--fakes", action="store_true", help="engines that take as long as on an RTX 3090")
    parser.add_argument("--repeats", type=int, default=3, help="timed builds of each kind")


if __name__ == "__main__":
    given = arguments("Building an index with LlamaIndex.", _options)
    outcome = main(given)
    report(outcome, given, f"an index of {given.chunks} chunks: {outcome['engines']}", rows(outcome))
