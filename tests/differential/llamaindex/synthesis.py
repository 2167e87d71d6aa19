"""Query engines over one index, one for each response mode."""

from __future__ import annotations

from typing import Any

from llama_index.core import PromptTemplate
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.vector_stores import ExactMatchFilter, MetadataFilters
from pydantic import BaseModel

from benchmarks.llamaindex.engines import synthesizer
from benchmarks.llamaindex.kits import Kit

Make = Any
MODES = tuple(ResponseMode)


def mode(name: ResponseMode, **options: Any) -> Make:
    return lambda kit: kit.reports.as_query_engine(similarity_top_k=3, response_mode=name, **options)


def packed(name: ResponseMode, **options: Any) -> Make:
    """Return an engine with a small context window, so that it makes several calls."""

    def make(kit: Kit) -> BaseQueryEngine:
        return kit.reports.as_query_engine(
            similarity_top_k=5, response_synthesizer=synthesizer(kit, name, 120, **options)
        )

    return make


def own_prompts(kit: Kit) -> BaseQueryEngine:
    """Return an engine whose prompts were changed by `update_prompts`."""
    engine = kit.reports.as_query_engine(similarity_top_k=2, response_mode="refine")
    words = PromptTemplate("Read {context_str} and say, as a poet would, {query_str}")
    engine.update_prompts({"response_synthesizer:text_qa_template": words})
    return engine


def _from(source: str) -> MetadataFilters:
    return MetadataFilters(filters=[ExactMatchFilter(key="source", value=source)])


def filtered(kit: Kit) -> BaseQueryEngine:
    only = _from("report-1.txt")
    return kit.reports.as_query_engine(similarity_top_k=4, filters=only)


class Found(BaseModel):
    """What is to be found."""

    name: str
    pages: int


def structured(kit: Kit) -> BaseQueryEngine:
    return kit.reports.as_query_engine(similarity_top_k=2, output_cls=Found)


def nothing_found(kit: Kit) -> BaseQueryEngine:
    none = _from("no such report")
    return kit.reports.as_query_engine(filters=none)


ENGINES: dict[str, Make] = {
    **{str(one.value): mode(one) for one in MODES},
    "refine_packed": packed(ResponseMode.REFINE),
    "compact_packed": packed(ResponseMode.COMPACT),
    "tree_packed": packed(ResponseMode.TREE_SUMMARIZE),
    "tree_packed_async": packed(ResponseMode.TREE_SUMMARIZE, use_async=True),
    "accumulate_async": mode(ResponseMode.ACCUMULATE, use_async=True),
    "compact_accumulate_packed": packed(ResponseMode.COMPACT_ACCUMULATE, use_async=True),
    "own_prompts": own_prompts,
    "filtered": filtered,
    "structured": structured,
    "nothing_found": nothing_found,
}
STREAMING: dict[str, Make] = {
    "compact_streaming": mode(ResponseMode.COMPACT, streaming=True),
    "refine_streaming": packed(ResponseMode.REFINE, streaming=True),
    "tree_streaming": packed(ResponseMode.TREE_SUMMARIZE, streaming=True),
    "simple_summarize_streaming": mode(ResponseMode.SIMPLE_SUMMARIZE, streaming=True),
    "generation_streaming": mode(ResponseMode.GENERATION, streaming=True),
    "nothing_found_streaming": lambda kit: kit.reports.as_query_engine(filters=_from("no such report"), streaming=True),
}


def bare(name: ResponseMode) -> Make:
    """Return a synthesizer alone."""
    return lambda kit: get_response_synthesizer(kit.llm, response_mode=name, callback_manager=kit.manager)


SYNTHESIZERS: dict[str, Make] = {
    "bare_refine": bare(ResponseMode.REFINE),
    "bare_tree": lambda kit: synthesizer(kit, ResponseMode.TREE_SUMMARIZE, 60, use_async=True),
}
