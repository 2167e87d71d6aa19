"""A kit of LlamaIndex objects on the demo's engines: vLLM, MiniLM, a cross-encoder, PostgreSQL; all real."""

from __future__ import annotations

import os

from llama_index.core import Document
from llama_index.core.callbacks import CallbackManager
from llama_index.core.node_parser import SentenceSplitter

from benchmarks.llamaindex.kits import Kit, index
from benchmarks.llamaindex.ledger import Ledger
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore
from teola_plugin.cli.demo import documents
from teola_plugin.cli.demo.engines import Models, make_pool

ANSWER_TOKENS = 48


def real_kit() -> Kit:
    """The demo's documents in chunks of 200 tokens; close its pool."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    pool = make_pool(Models()).start()
    manager = CallbackManager([])
    llm = TeolaLLM(pool=pool, max_tokens=ANSWER_TOKENS, callback_manager=manager)
    embedding = TeolaEmbedding(pool=pool, callback_manager=manager)
    texts = [Document(text=found.page_content, metadata=found.metadata) for found in documents.load_documents([])]
    nodes = SentenceSplitter(chunk_size=200, chunk_overlap=20).get_nodes_from_documents(texts)
    for i, node in enumerate(nodes):
        node.id_ = f"chunk-{i}"
    reports, notes = (TeolaVectorStore(pool=pool, collection=name) for name in ("reports", "notes"))
    return Kit(
        "real",
        llm,
        embedding,
        index(nodes, embedding, reports, manager),  # type: ignore[arg-type]
        index(nodes[::2], embedding, notes, manager),  # type: ignore[arg-type]
        lambda top_n: TeolaRerank(pool=pool, top_n=top_n),
        Ledger(),
        manager,
        pool,
    )
