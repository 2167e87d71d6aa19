"""Models: prompts and answers of LLMs, and the parts of the user's own models that `bind=` copies."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from teola_plugin.request_keys import UnknownValue, configuration
from teola_plugin.shims.llamaindex.records import Parts, attribute

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse
    from llama_index.core.llms.llm import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.llms.openai import OpenAI

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

_OPENAI_CLIENTS = ("_client", "_aclient", "_http_client", "_async_http_client")


class CreatedModels:
    """The `OpenAI` and `OpenAILike` LLMs that make the prefetched calls of LLMs which the code of a query creates.

    They belong to one query, so that their clients serve one event loop, as those of the created LLMs do.
    """

    def __init__(self) -> None:
        self._models: list[OpenAI] = []
        self._clientless: dict[int, weakref.ref[OpenAI]] = {}
        """LLMs that had no client when they were first seen, by id: one that they have now is the one that they make
        of their configuration."""

    def add(self, template: OpenAI) -> OpenAI:
        """Return the query's LLM that is equal to `template`, with clients of its own."""
        equal_model = self._find_equal(template)
        if equal_model is None:
            equal_model = _without_clients(template)
            self._models.append(equal_model)
        return equal_model

    def find(self, llm: Any) -> OpenAI | None:
        """Return the query's LLM whose calls are equal to those of `llm`: of equal class and configuration.

        None for an LLM that may have got another client than the one that it makes itself.
        """
        if not any(type(llm) is type(model) for model in self._models):
            return None
        seen = self._clientless.get(id(llm))
        if seen is None or seen() is not llm:
            if _has_client(llm):
                return None
            self._clientless[id(llm)] = weakref.ref(llm)
        return self._find_equal(llm)

    def _find_equal(self, llm: OpenAI) -> OpenAI | None:
        """Return an LLM of the query of equal class and configuration, whatever clients `llm` has."""
        try:
            settings = _configuration(llm)
            return next(
                (one for one in self._models if type(one) is type(llm) and _configuration(one) == settings), None
            )
        except UnknownValue:
            return None

    def share_clients(self, model: OpenAI) -> None:
        """Let a model of the query use the client that a created LLM has made, in place of one more."""
        if not any(one is model for one in self._models):
            return
        created = [llm for one in list(self._clientless.values()) if (llm := one()) is not None]
        for llm in created:
            if self._find_equal(llm) is model:
                for name in _OPENAI_CLIENTS[:2]:
                    setattr(model, name, getattr(model, name) or getattr(llm, name))

    def drop_clients(self) -> None:
        """Let go of all clients, which end as the client of an LLM that nobody holds any more."""
        for model in self._models:
            _drop_clients(model)


def _configuration(llm: OpenAI) -> Hashable:
    return configuration(_without_clients(llm))


def _has_client(llm: OpenAI) -> bool:
    return any(getattr(llm, name, None) is not None for name in _OPENAI_CLIENTS)


def _without_clients(llm: OpenAI) -> OpenAI:
    """Return a copy of an LLM that makes clients of its own when it is called."""
    copied = copy.copy(llm)
    _drop_clients(copied)
    return copied


def _drop_clients(llm: OpenAI) -> None:
    for name in _OPENAI_CLIENTS:
        setattr(llm, name, None)


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
