"""The parts of frameworks that a server and the command line need, for an app of whichever framework.

Each framework is imported only for an app of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.comparison import Entries
from teola_plugin.adapters.contract import reported_tokens
from teola_plugin.errors import RegistrationError
from teola_plugin.runtime.usage import Tally, Tokens
from teola_plugin.shims.interception import CallObserver, observers

if TYPE_CHECKING:
    from teola_plugin.adapters.engine_specs import SpecOrReason


def _is_llamaindex(obj: Any) -> bool:
    return any(cls.__module__.startswith(("llama_index.core.", "workflows.")) for cls in type(obj).__mro__)


# ------------------------------------------------------------ comparing an object with its original


def entries_of(obj: Any, name: str) -> Entries:
    """Return the entries of an object that the user named. Raise `RegistrationError` for an object without any."""
    entries: Entries | None = None
    if _is_llamaindex(obj):
        from teola_plugin.adapters.llamaindex.checking import entries_of as llamaindex_entries

        entries = llamaindex_entries(obj)
    elif any(cls.__module__.startswith("langchain_core.runnables.") for cls in type(obj).__mro__):
        from teola_plugin.adapters.langchain.shadow import entries_of as langchain_entries

        entries = langchain_entries(obj)
    if entries is None:
        raise RegistrationError(
            f"{name} is a {type(obj).__qualname__}, which cannot be compared.",
            hint="name a LangChain Runnable, a graph or agent, a LlamaIndex query engine, retriever, synthesizer, chat "
            "engine, workflow or agent, or a function without arguments that returns one",
        )
    return entries


def engine_specs(obj: Any) -> Iterable[tuple[Any, SpecOrReason]]:
    """Return the own models of an object, each with the engine that can serve it, or the reason why none can."""
    if _is_llamaindex(obj):
        from teola_plugin.adapters.llamaindex.binding import rules as llamaindex

        return [(one, llamaindex.engine_for(one, starts_engines=False)) for one in llamaindex.models_in(obj)]
    from teola_plugin.adapters.langchain.binding import rules as langchain

    nodes = getattr(obj, "nodes", None)
    parts = [node.bound for node in nodes.values()] if isinstance(nodes, dict) else obj
    return [(one, langchain.engine_for(one, starts_engines=False)) for one in langchain.models_in(parts)]


def answer_cache() -> Any:
    """Return the cache of answers that the app has set for the whole process; None if there is none.

    It would answer every call of an input but the first.
    """
    if "langchain_core" not in sys.modules:
        return None
    from langchain_core.globals import get_llm_cache

    return get_llm_cache()


def set_answer_cache(cache: Any = None) -> None:
    """Set the process's cache of answers, by default to an empty one."""
    from langchain_core.caches import InMemoryCache
    from langchain_core.globals import set_llm_cache

    set_llm_cache(InMemoryCache() if cache is None else cache)


def observe_models(observer: CallObserver) -> None:
    """Tell an observer of every call that models make, original or prefetched, until `stop_observing`.

    Models of the frameworks that are imported by now, once an object of theirs was accelerated.
    """
    if "langchain_core" in sys.modules:
        from teola_plugin.adapters.langchain.usage import observe_models as observe_langchain

        observe_langchain(observer)
    if "llama_index.core" in sys.modules:
        from teola_plugin.adapters.llamaindex.checking import observe_models as observe_llamaindex

        observe_llamaindex(observer)


def stop_observing() -> None:
    """Tell nobody of the calls of models any more."""
    observers.clear()


def tokens_of(value: Any) -> Tokens | None:
    """Return the tokens that a model reports with a result, or with a chunk of it; None if it reports none."""
    if type(value).__module__.startswith("llama_index."):
        from teola_plugin.adapters.llamaindex.checking import tokens_of as llamaindex_tokens

        return llamaindex_tokens(value)
    tokens = None
    if "langchain_core" in sys.modules:
        from teola_plugin.adapters.langchain.usage import tokens_of as langchain_tokens

        tokens = langchain_tokens(value)
    return reported_tokens(value) if tokens is None else tokens


# ------------------------------------------------------------ serving an app


def listening_tally() -> Tally:
    """Return a tally that counts the models outside the pool, too, whose framework reports their tokens."""
    if "langchain_core" not in sys.modules:
        return Tally()
    from teola_plugin.adapters.langchain.usage import listening_tally as langchain_tally

    return langchain_tally()


def chat_history(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    """Return the messages of a chat engine for pairs of a role, as OpenAI names it, and a text.

    They are LlamaIndex's, which is imported by this call and has to be installed.
    """
    from teola_plugin.adapters.llamaindex.llm import chat_messages

    return chat_messages(pairs)


def to_message(
    role: str, text: str, fields: Mapping[str, Any], calls: Sequence[tuple[str | None, str, Any]] = ()
) -> Any:
    """Return the message of a chain or graph for one as OpenAI writes it.

    `fields`: `name` and `tool_call_id`, if the message has them. `calls`: id, name and arguments of calls of tools.
    """
    from teola_plugin.adapters.langchain.chat import from_openai

    return from_openai(role, text, fields, calls)


def check_messages(messages: Any) -> None:
    """Raise the framework's exception for messages that chains and graphs do not take.

    `messages`: a list in any form that LangChain reads, or one message. The class of the exception depends on the
    fault.
    """
    from langchain_core.messages import convert_to_messages

    convert_to_messages(messages if isinstance(messages, list) else [messages])


def resume_command(answer: Any) -> Any:
    """Return the input with which an interrupted graph goes on with an answer.

    It is LangGraph's `Command`; with several open interrupts, `answer` has the values by their ids.
    """
    from teola_plugin.adapters.langgraph.checkpoints import Command

    return Command(resume=answer)


def is_chunk_of(metadata: Mapping[str, Any], node: str) -> bool:
    """Return True if a streamed chunk with this metadata comes from a node of a graph."""
    return bool(metadata.get("langgraph_node") == node)


def checkpoint_saver(pool: Any = None) -> Any:
    """Create a checkpointer in memory or on a PostgreSQL connection pool, not set up yet.

    Raise `EngineUnavailable` if the package for PostgreSQL is not installed.
    """
    from teola_plugin.adapters.langgraph.checkpoints import memory_saver, postgres_saver

    return memory_saver() if pool is None else postgres_saver(pool)
