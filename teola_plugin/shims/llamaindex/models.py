"""Models: prompts and answers of LLMs, and the parts of the user's own models that `bind=` copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from teola_plugin.shims.llamaindex.records import Parts, attribute

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse
    from llama_index.core.llms.llm import LLM
    from llama_index.core.prompts import BasePromptTemplate

NODE_CONTENT, NODE_TYPE = "_node_content", "_node_type"
"""Keys under which LlamaIndex keeps a node, and its class, in the metadata of a store's row."""

# ------------------------------------------------------------ any model


def rate_limiter(model: Any) -> Any:
    """Return the object that decides when `model` may be called; None if there is none.

    LLMs and embedding models have the field `rate_limiter` since llama-index-core 0.14.16. Older ones have none, and
    are called at once.
    """
    return getattr(model, "rate_limiter", None)


def is_paced(model: Any) -> bool:
    """Return True if a rate limiter or a cache decides which calls of `model` are made, and when."""
    return rate_limiter(model) is not None or getattr(model, "embeddings_cache", None) is not None


# ------------------------------------------------------------ any LLM


def messages_of(llm: LLM, template: BasePromptTemplate, arguments: dict[str, Any]) -> list[ChatMessage]:
    """Return the messages that a chat model is sent for a template."""
    return llm._get_messages(template, **arguments)


def text_of(llm: LLM, template: BasePromptTemplate, arguments: dict[str, Any]) -> str:
    """Return the prompt that a model without chat is sent for a template."""
    return llm._get_prompt(template, **arguments)


def parse_output(llm: LLM, text: str) -> str:
    """Parse the model's text as `predict` does."""
    return llm._parse_output(text)


# ------------------------------------------------------------ OpenAI


@dataclass(frozen=True, slots=True)
class OpenAIParts(Parts):
    """The clients of an `OpenAI` or `OpenAILike` LLM."""

    METHODS: ClassVar = (
        *("_chat", "_achat", "_stream_chat", "_astream_chat"),
        *("_get_credential_kwargs", "_get_response_token_counts"),
    )

    client: Any = attribute("_client")
    aclient: Any = attribute("_aclient")
    http_client: Any = attribute("_http_client")
    async_http_client: Any = attribute("_async_http_client")


@dataclass(frozen=True, slots=True)
class OpenAIEmbeddingParts(Parts):
    """The clients of an `OpenAIEmbedding`, and the models that it asks for queries and texts."""

    METHODS: ClassVar = ("_get_client", "_get_aclient", "_get_credential_kwargs")

    client: Any = attribute("_client")
    aclient: Any = attribute("_aclient")
    http_client: Any = attribute("_http_client")
    async_http_client: Any = attribute("_async_http_client")
    query_engine: str = attribute("_query_engine", str)
    text_engine: str = attribute("_text_engine", str)


def credentials(llm: Any, *, is_async: bool = False) -> dict[str, Any]:
    """Return the arguments from which an LLM creates its client when it is first used."""
    arguments: dict[str, Any] = llm._get_credential_kwargs(is_async=is_async)
    return arguments


def chat_silently(llm: Any, messages: Sequence[ChatMessage], arguments: dict[str, Any]) -> ChatResponse:
    """Call `chat` without events."""
    response: ChatResponse = llm._chat(messages, **arguments)
    return response


def token_counts(llm: Any, raw: Any) -> dict[str, Any]:
    """Return the token counts of a response of the package `openai`."""
    counts: dict[str, Any] = llm._get_response_token_counts(raw)
    return counts


# ------------------------------------------------------------ sentence-transformers


@dataclass(frozen=True, slots=True)
class HuggingFaceEmbeddingParts(Parts):
    METHODS: ClassVar = ("_embed",)

    model: Any = attribute("_model")
    parallel_process: bool = attribute("_parallel_process", bool)


@dataclass(frozen=True, slots=True)
class SentenceTransformerRerankParts(Parts):
    model: Any = attribute("_model")


# ------------------------------------------------------------ Cohere


@dataclass(frozen=True, slots=True)
class CohereRerankParts(Parts):
    """The client of a `CohereRerank`."""

    client: Any = attribute("_client")
