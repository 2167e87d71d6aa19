"""Query engines of `OpenAILike` and `HuggingFaceEmbedding` over an index in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.query_engine import SubQuestionQueryEngine
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import QueryEngineTool, ToolMetadata

QUESTION = "What does an expression-less except clause match?"
PARTS = ("What does an except clause match?", "When is the else clause executed?", "What does finally do?")


@dataclass(frozen=True, slots=True)
class Models:
    """Stock objects."""

    llm: Any
    """An `OpenAILike`."""
    index: VectorStoreIndex


def models(base_url: str, model: str, folder: str, texts: list[str], *, tokens: int = 16) -> Models:
    """`folder`: of the embedding model. The index holds the texts."""
    from llama_index.embeddings.huggingface import HuggingFaceEmbedding
    from llama_index.llms.openai_like import OpenAILike

    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "max_retries": 1, "context_window": 2048}
    llm = OpenAILike(model=model, api_base=base_url, api_key="none", is_chat_model=True, **given)
    documents = [Document(text=text, id_=str(number)) for number, text in enumerate(texts)]
    return Models(llm, VectorStoreIndex.from_documents(documents, embed_model=HuggingFaceEmbedding(folder)))


class FixedQuestions(BaseQuestionGenerator):
    """The same parts whatever is asked: the small model of the demo writes no JSON of them."""

    def generate(self, tools: Sequence[ToolMetadata], query: QueryBundle) -> list[SubQuestion]:
        name = tools[0].name or ""
        return [SubQuestion(sub_question=part, tool_name=name) for part in PARTS]

    async def agenerate(self, tools: Sequence[ToolMetadata], query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...


def _engine(made: Models, mode: str, k: int) -> Any:
    return made.index.as_query_engine(llm=made.llm, response_mode=mode, similarity_top_k=k)


def sub_questions(made: Models) -> Any:
    """Three parts, each answered by an engine of its own; then an answer."""
    tool = QueryEngineTool.from_defaults(_engine(made, "compact", 1), name="pages", description="pages about Python")
    synthesizer = get_response_synthesizer(llm=made.llm)
    return SubQuestionQueryEngine(FixedQuestions(), synthesizer, [tool], verbose=False, use_async=False)


APPS: dict[str, Callable[[Models], Any]] = {
    "accumulate": lambda made: _engine(made, "accumulate", 3),
    "tree": lambda made: _engine(made, "tree_summarize", 6),
    "sub-questions": sub_questions,
    "compact": lambda made: _engine(made, "compact", 2),
}
