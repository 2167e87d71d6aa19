"""A workflow without a framework: upload, expand, search, rerank, refine. Then settings for one query, and a stream.

    python examples/12_workflow.py             fake engines, in real time
    python examples/12_workflow.py --real      vLLM, MiniLM and PostgreSQL on this machine (tiny random model)

prints, with fake engines, 0.3 times the latency of an RTX 3090 (shortened)::

    Understood:    5 parts: 5 optimized
    Starts early:  1 ingestion and 1 model call (index and queries) side by side; ...
    ...
    as written  1.47 s
    planned     1.06 s
    same answer: True
    sources: 3, with k=2: 2
    streamed, the same text: True
"""

import sys

from teola_plugin import EnginePool
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.workflow import PER_QUERY, Indexing, QueryExpansion, Reranking, Searching, Synthesis, Workflow

RAG = Workflow(
    "document_qa",
    Indexing("index", chunk_size=12, chunk_overlap=2, collection=PER_QUERY)
    >> QueryExpansion("queries", n=3, max_tokens=12)
    >> Searching("found", query="queries", k=16, collection=PER_QUERY)
    >> Reranking("best", passages="found", k=3)
    >> Synthesis("answer", context="best", mode="refine", max_tokens=6),
)


def make_pool(*, real: bool) -> EnginePool:
    if not real:
        return EnginePool.local(fake_engines(scaled(rtx3090(), 0.3)))
    from teola_plugin.engines import EmbeddingEngine
    from teola_plugin.engines.bundled import llama
    from teola_plugin.engines.model_cache import reranker_folder

    embedder = EmbeddingEngine("embedder")
    return EnginePool.local(llm=str(llama.make()), embedder=embedder, reranker=str(reranker_folder()), store="embedded")


document = " ".join(f"Paragraph {i} says what paragraph {i - 1} does not say." for i in range(2000))
given = {"question": "What does paragraph 7 say?", "documents": document}

with make_pool(real="--real" in sys.argv) as pool:
    plain = RAG.deploy(pool, passes=()).run(given)
    pool.reset()  # no prefix is cached for the second one
    app = RAG.deploy(pool)
    print(app.explain(given))
    result = app.run(given)
    assert plain.trace is not None and result.trace is not None
    print(f"as written  {plain.trace.seconds:.2f} s\nplanned     {result.trace.seconds:.2f} s")
    print("same answer:", result.answer == plain.answer)
    print(f"sources: {len(result.sources)}, with k=2: {len(app.run(given, {'best.k': 2}).sources)}")
    stream = app.stream(given)
    print("streamed, the same text:", "".join(stream) == stream.result().answer == result.answer)
