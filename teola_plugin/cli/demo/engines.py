"""The demo's engines: all real, pinned to cores, and the same for the original and the accelerated runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from teola_plugin.adapters.demo_app import SERVED
from teola_plugin.engines.base import Engine
from teola_plugin.pool import EnginePool


@dataclass(frozen=True, slots=True)
class Models:
    """The models that the user chose; None for the default."""

    llm: str | None = None
    embedder: str | None = None
    reranker: str | None = None


SHIPPED = "shipped"
"""The name of the LLM engine that runs as vLLM ships."""


def make_pool(models: Models, *, shipped: bool = False) -> EnginePool:
    """Return a pool of vLLM, two sentence-transformers engines and an embedded PostgreSQL, not started yet.

    `shipped` adds a second vLLM engine, without drafts. On a machine without CUDA the LLM is pinned to one core and the
    other engines to another, like two devices.
    """
    from teola_plugin.engines import model_cache as bundled
    from teola_plugin.engines.pgvector import PgVectorEngine
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine
    from teola_plugin.engines.vllm import VllmEngine

    llm_cores, other_cores = device_cores()
    engines: list[Engine] = [
        VllmEngine("llm", models.llm or bundled.llm_folder(), cores=llm_cores),
        EmbeddingEngine("embedder", models.embedder, cores=other_cores),
        RerankingEngine("reranker", models.reranker or bundled.reranker_folder(), cores=other_cores),
        PgVectorEngine("store", cores=other_cores),
    ]
    if shipped:
        engines.append(VllmEngine(SHIPPED, models.llm or bundled.llm_folder(), cores=llm_cores, drafts="off"))
    return EnginePool.local(engines)


def device_cores() -> tuple[str | None, str | None]:
    """Return the core of the LLM and that of the other engines; None if pinning is pointless: a GPU, or one core."""
    from teola_plugin.engines.devices.cards import cuda

    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cuda().is_available() or len(available) < 2:
        return None, None
    return str(available[0]), str(available[1])


def make_pool_for_app(
    server: str, embedder: str, reranker: str, cores: str | None = None, *, drafts: bool = False
) -> EnginePool:
    """Start engines of the models that the app in stock classes uses.

    `cores`: those of the models in this process. `drafts`: True if the server was started to draft.
    """
    from teola_plugin.engines.openai import OpenAIServer
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine

    pool = EnginePool.local(
        llm=OpenAIServer(base_url=server, model=SERVED, prefix_caching=True, priorities=True, drafts=drafts),
        embedder=EmbeddingEngine(model=embedder, cores=cores),
        reranker=RerankingEngine(model=reranker, cores=cores),
    ).start()
    return pool
