"""The applications with an upload in LlamaIndex: an ingestion pipeline and a query engine, each made fast by one line.

Run one from the root of the checkout::

    python -m examples.apps.llamaindex naive_rag                      real engines of this machine
    python -m examples.apps.llamaindex advanced_rag --document report.pdf --question "..."
    python -m examples.apps.llamaindex contextual_retrieval --fakes --compare      latencies of an RTX 3090, no model

The search-engine and agent apps are graphs: `search_engine.py`, `agent.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core import ChatPromptTemplate, PromptHelper, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import Response
from llama_index.core.extractors import BaseExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import LLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import BaseNode, Document, TransformComponent

from examples.apps import advanced_rag, contextual_retrieval, naive_rag, prompts
from examples.apps.runner import COLLECTION, App, run
from examples.apps.uploads import CHUNK, OVERLAP
from teola_plugin import EnginePool, accelerate
from teola_plugin.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore


@dataclass(frozen=True, slots=True)
class Questions:
    """About an upload: it is ingested, then asked about. Nothing in here knows of `accelerate`."""

    pipeline: IngestionPipeline
    engine: BaseQueryEngine

    def invoke(self, given: dict[str, Any]) -> dict[str, Any]:
        self.pipeline.run(documents=[Document(text=given["document"])])
        return _told(self.engine.query(given["question"]))

    async def ainvoke(self, given: dict[str, Any]) -> dict[str, Any]:
        await self.pipeline.arun(documents=[Document(text=given["document"])])
        return _told(await self.engine.aquery(given["question"]))


@dataclass(frozen=True, slots=True)
class FastQuestions(Questions):
    def last_trace(self) -> Any:
        """Of the engine."""
        return self.engine.last_trace()  # type: ignore[attr-defined]


def faster(made: Questions) -> FastQuestions:
    """The one line, of each object."""
    return FastQuestions(accelerate(made.pipeline), accelerate(made.engine))


def _told(response: Any) -> dict[str, Any]:
    assert isinstance(response, Response)
    return {"answer": str(response), "sources": [found.node for found in response.source_nodes]}


# ------------------------------------------------------------ the applications


def naive(pool: EnginePool, *, proxy: str = "llm", collection: str = COLLECTION) -> Questions:
    """Chunks of 256 tokens, the 3 nearest, an answer from each, and one of these."""
    tree = synthesizer(pool, ResponseMode.TREE_SUMMARIZE, summary_template=ANSWER)
    return Questions(ingestion(pool, collection), searching(pool, collection, naive_rag.TOP, tree))


def advanced(pool: EnginePool, *, proxy: str = "llm", collection: str = COLLECTION) -> Questions:
    """3 more questions, 16 passages each, reranked to 3, refined."""
    near = index(pool, collection).as_retriever(similarity_top_k=advanced_rag.SEARCHED)
    fusion = QueryFusionRetriever(
        [near],
        llm=model(pool, tokens=96),
        num_queries=advanced_rag.EXPANSIONS + 1,
        similarity_top_k=(advanced_rag.EXPANSIONS + 1) * advanced_rag.SEARCHED,
        mode=FUSION_MODES.RECIPROCAL_RANK,
    )
    refine = synthesizer(pool, ResponseMode.REFINE, text_qa_template=ANSWER, refine_template=REFINE)
    best = TeolaRerank(pool=pool, top_n=advanced_rag.TOP)
    return Questions(ingestion(pool, collection), RetrieverQueryEngine(fusion, refine, node_postprocessors=[best]))


def contextual(pool: EnginePool, *, proxy: str = "llm", collection: str = COLLECTION) -> Questions:
    """A line about each chunk, then index, search, answer."""
    situate = Situating(llm=model(pool, proxy, contextual_retrieval.LINE_TOKENS))
    answer = synthesizer(pool, ResponseMode.COMPACT, text_qa_template=ANSWER)
    return Questions(ingestion(pool, collection, situate), searching(pool, collection, naive_rag.TOP, answer))


class Situating(BaseExtractor):
    """Says where each chunk belongs in its document; that is metadata, which are embedded and read with the chunk."""

    llm: LLM

    async def aextract(self, nodes: Sequence[BaseNode]) -> list[dict[str, str]]:
        whole: dict[Any, str] = {}
        for node in nodes:
            whole[node.ref_doc_id] = f"{whole.get(node.ref_doc_id, '')}{node.get_content()} "
        return list(await asyncio.gather(*[self._line(whole[node.ref_doc_id], node) for node in nodes]))

    async def _line(self, document: str, node: BaseNode) -> dict[str, str]:
        seen = document[: contextual_retrieval.WHOLE]
        said = await self.llm.achat(SITUATE.format_messages(document=seen, chunk=node.get_content()))
        return {"about": str(said.message.content).strip()}


# ------------------------------------------------------------ what they are made of


def template(words: Any, **names: str) -> ChatPromptTemplate:
    """The prompt of the LangChain apps; `names` are LlamaIndex's for its variables."""
    system, text = (message.prompt.template for message in words.messages)
    for old, new in names.items():
        text = text.replace(f"{{{old}}}", f"{{{new}}}")
    return ChatPromptTemplate.from_messages([("system", system), ("user", text)])


ANSWER = template(prompts.ANSWER, question="query_str", passage="context_str")
REFINE = template(prompts.REFINE, question="query_str", passage="context_msg", previous="existing_answer")
SITUATE = template(prompts.SITUATE)


def model(pool: EnginePool, engine: str = "llm", tokens: int = naive_rag.ANSWER_TOKENS) -> TeolaLLM:
    return TeolaLLM(pool=pool, engine=engine, max_tokens=tokens)


def store(pool: EnginePool, collection: str) -> TeolaVectorStore:
    return TeolaVectorStore(pool=pool, collection=collection)


def index(pool: EnginePool, collection: str) -> VectorStoreIndex:
    return VectorStoreIndex.from_vector_store(store(pool, collection), embed_model=TeolaEmbedding(pool=pool))


def ingestion(pool: EnginePool, collection: str, *before: TransformComponent) -> IngestionPipeline:
    """Chunks of 256 tokens that overlap by 30; `before` they are embedded."""
    splitter = SentenceSplitter(chunk_size=CHUNK, chunk_overlap=OVERLAP, include_metadata=False)
    parts = [splitter, *before, TeolaEmbedding(pool=pool)]
    return IngestionPipeline(transformations=parts, vector_store=store(pool, collection), disable_cache=True)


def searching(pool: EnginePool, collection: str, top: int, synthesis: BaseSynthesizer) -> BaseQueryEngine:
    found = index(pool, collection).as_retriever(similarity_top_k=top)
    return RetrieverQueryEngine(found, synthesis)


def synthesizer(pool: EnginePool, mode: ResponseMode, **templates: ChatPromptTemplate) -> BaseSynthesizer:
    """One passage to a prompt, except where `mode` packs them together."""
    llm = model(pool)
    limit = None if mode is ResponseMode.COMPACT else PASSAGE
    helper = PromptHelper(llm.metadata.context_window, llm.max_tokens, chunk_overlap_ratio=0.0, chunk_size_limit=limit)
    given: dict[str, Any] = {"response_mode": mode, "use_async": True, **templates}
    return get_response_synthesizer(llm, helper, **given)


PASSAGE = 400
"""Tokens, at most, that a prompt holds of the passages: one of them, or the answers from three."""


# ------------------------------------------------------------ the command


FORMS: dict[str, Callable[..., Questions]] = {
    "naive_rag": naive,
    "advanced_rag": advanced,
    "contextual_retrieval": contextual,
}
"""(pool, proxy=engine of the small model, collection=of the upload) -> the application."""


class LlamaIndexApp(App):
    """Its objects are made fast one by one."""

    def faster(self, made: Any) -> Any:
        return faster(made)

    def sources(self, result: Any) -> list[str]:
        return [" ".join(node.get_content().split())[:100] for node in result["sources"]]


def app_of(name: str) -> LlamaIndexApp:
    return LlamaIndexApp(name, FORMS[name], naive_rag.given, naive_rag.APP.question, command=f"llamaindex {name}")


def main(arguments: list[str]) -> None:
    first = argparse.ArgumentParser(prog="python -m examples.apps.llamaindex", add_help=False)
    first.add_argument("app", choices=tuple(FORMS))
    chosen, rest = first.parse_known_args(arguments)
    run(app_of(chosen.app), rest)


if __name__ == "__main__":
    main(sys.argv[1:])
