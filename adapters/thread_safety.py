"""The user's objects that take several sync calls at once, on threads: classes on a list, and objects the user names.

That the sync methods of an object may run on several threads is known in two ways: its class is on the list of classes
that were tested so, or the user says `accelerate(..., concurrent=[it])`. Adapters may know more of their classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from teola_plugin.errors import RegistrationError

HTTP_CLIENTS = frozenset(
    {
        "langchain_anthropic.chat_models.ChatAnthropic",
        "langchain_aws.chat_models.bedrock.ChatBedrock",
        "langchain_aws.chat_models.bedrock_converse.ChatBedrockConverse",
        "langchain_aws.embeddings.bedrock.BedrockEmbeddings",
        "langchain_cohere.chat_models.ChatCohere",
        "langchain_cohere.embeddings.CohereEmbeddings",
        "langchain_deepseek.chat_models.ChatDeepSeek",
        "langchain_fireworks.chat_models.ChatFireworks",
        "langchain_fireworks.embeddings.FireworksEmbeddings",
        "langchain_google_genai.chat_models.ChatGoogleGenerativeAI",
        "langchain_google_genai.embeddings.GoogleGenerativeAIEmbeddings",
        "langchain_groq.chat_models.ChatGroq",
        "langchain_mistralai.chat_models.ChatMistralAI",
        "langchain_mistralai.embeddings.MistralAIEmbeddings",
        "langchain_ollama.chat_models.ChatOllama",
        "langchain_ollama.embeddings.OllamaEmbeddings",
        "langchain_ollama.llms.OllamaLLM",
        "langchain_openai.chat_models.azure.AzureChatOpenAI",
        "langchain_openai.chat_models.base.ChatOpenAI",
        "langchain_openai.embeddings.azure.AzureOpenAIEmbeddings",
        "langchain_openai.embeddings.base.OpenAIEmbeddings",
        "langchain_openai.llms.azure.AzureOpenAI",
        "langchain_openai.llms.base.OpenAI",
        "langchain_openrouter.chat_models.ChatOpenRouter",
        "langchain_together.chat_models.ChatTogether",
        "langchain_together.embeddings.TogetherEmbeddings",
        "langchain_xai.chat_models.ChatXAI",
    }
)
"""Models and embeddings behind an API, whose client takes calls of several threads."""

STORES = frozenset(
    {
        "langchain_chroma.vectorstores.Chroma",
        "langchain_community.vectorstores.faiss.FAISS",
        "langchain_core.vectorstores.in_memory.InMemoryVectorStore",
        "langchain_qdrant.qdrant.QdrantVectorStore",
    }
)
"""Vector stores that may be searched by several threads; what embeds their queries has to be known by itself."""

LISTED = HTTP_CLIENTS | STORES


@dataclass(frozen=True, slots=True)
class ThreadSafety:
    """The objects that are known to take several sync calls at once."""

    named: tuple[Any, ...] = ()
    """The objects, by identity, and classes, with their subclasses, that the user has named."""

    def is_named(self, obj: object) -> bool:
        """Return True if the user has named the object; then it holds for all that the object calls, too."""
        return any(isinstance(obj, one) if isinstance(one, type) else obj is one for one in self.named)

    def allows(self, obj: object, listed: frozenset[str] = LISTED) -> bool:
        """Return True if its sync methods may run on several threads. A subclass of a listed class is not listed."""
        return self.is_named(obj) or _full_name(type(obj)) in listed  # type: ignore[arg-type]


NOBODY = ThreadSafety()
"""The user has named nothing."""


@lru_cache(maxsize=1024)
def _full_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def concurrent_objects(concurrent: Iterable[Any] | None) -> tuple[Any, ...]:
    """Return the objects and classes in `concurrent=`. Raise `RegistrationError` if that is no list."""
    if concurrent is None:
        return ()
    if not isinstance(concurrent, (list, tuple, set, frozenset)):
        raise RegistrationError(
            f"concurrent= takes a list of objects and classes, not a {type(concurrent).__qualname__}.",
            hint=f"write concurrent=[{'...' if isinstance(concurrent, str) else 'the_object'}], with the models, "
            "embeddings and stores whose sync methods may be called on several threads at once",
        )
    return tuple(concurrent)
