"""Calls of models and stores: LLMs of a pool, found out by dry runs, and the user's own objects.

A dry run executes the framework's own code on silent copies whose LLM calls no model: `capture_payload` finds out what
the code would ask its LLM, `replay_generations` what it makes of the answers. So prompts and their parsing are
LlamaIndex's own, byte for byte.

The query's prefetcher calls the user's own models and stores. Each call is one component on the engine `wrapped`; its
payload has the arguments with which the original is about to call the provider method, found out by a dry run, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import mean_agg
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.schema import NodeWithScore
from llama_index.core.storage.docstore import SimpleDocumentStore

from teola_plugin.graph import Attributes, PromptPart, Ref, Role
from teola_plugin.requests.payloads import UNKNOWN, Generate, Generation
from teola_plugin.shims.llamaindex.copies import clone, silent_callback_manager
from teola_plugin.shims.llamaindex.engines import RouterQueryEngineParts
from teola_plugin.shims.llamaindex.interceptors import EMBED_QUERY, SEARCH, is_intercepted
from teola_plugin.shims.llamaindex.retrieval import (
    VectorIndexRetrieverParts,
    nodes_of_result,
    searches_by_vector,
    store_query,
)
from teola_plugin.shims.llamaindex.silent_calls import ProviderArguments, provider_call_of, replay
from teola_plugin.tracer.draft import DERIVED
from teola_plugin.tracer.leaf import search_effect
from teola_plugin.tracer.symbols import NotUnderstood

if TYPE_CHECKING:
    from teola_plugin.tracer.llamaindex.lowering import Lowering, SymbolicQuery, Value

Values = Mapping[str, Any]
Run = Callable[[Any, Values], Any]
"""(LLM, values by name) -> what the framework's code returns; it asks the LLM once."""
Blanks = Mapping[str, Callable[[str], Any]]
"""Functions that turn a placeholder text into a value of the right type, by the value's name. Default: `str`."""
_MARKS = 0xE001
"""First of the private-use characters that stand for values while a prompt is split into its parts."""
_OTHERS = ("stream", "stream_chat", "stream_complete", "structured_predict", "predict_and_call", "apredict", "achat")


class _PromptCaptured(Exception):
    """Ends the framework's code when it first calls its LLM; carries the payload of that call."""

    def __init__(self, payload: Generate) -> None:
        self.payload = payload


def capture_payload(llm: Any, run: Run, values: Mapping[str, Any], blanks: Blanks, names: Sequence[str]) -> Generate:
    """Return the payload of the LLM call that `run` makes; `names` that are missing in `values` are unknown."""
    missing = {name: blanks.get(name, str)(UNKNOWN) for name in names if name not in values}
    try:
        run(_answering_llm(llm, _capture), {**values, **missing})
    except _PromptCaptured as capture:
        return capture.payload
    raise NotUnderstood("the LLM is not asked")


def replay_generations(llm: Any, run: Run, values: Mapping[str, Any], generations: Sequence[Generation]) -> Any:
    """Return what `run` returns when the LLM answers with these generations, one after the other."""
    answers: Iterator[Generation] = iter(generations)

    def reply(_: Generate) -> Generation:
        """Return the next of the recorded answers in place of calling the LLM.

        Raise `NotUnderstood` if the code asks for more answers than there are.
        """
        for answer in answers:
            return answer
        raise NotUnderstood("the LLM is asked once more")

    return run(_answering_llm(llm, reply), values)


def _capture(payload: Generate) -> Generation:
    raise _PromptCaptured(payload)


def _answering_llm(llm: Any, reply: Callable[[Generate], Generation]) -> Any:
    """Return a copy of the LLM, of the same class, whose calls are answered by `reply`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotUnderstood("the LLM is asked in another way")

    return clone(
        llm,
        **dict.fromkeys(_OTHERS, refuse),
        callback_manager=silent_callback_manager(),
        predict=lambda prompt, **kwargs: llm.text_of(reply(llm.payload_of_template(prompt, **kwargs))),
        complete=lambda prompt, formatted=False, **kwargs: llm.completion_of(
            reply(llm.payload_of_prompt(prompt, formatted, **kwargs))
        ),
        chat=lambda messages, **kwargs: llm.chat_of(reply(llm.payload_of_messages(messages, **kwargs)), **kwargs),
    )


def prompt_parts(llm: Any, run: Run, names: Sequence[str], blanks: Blanks) -> tuple[PromptPart, ...]:
    """Return the literals and variables of the prompt, in order; an empty tuple if they cannot be separated."""
    marks = {chr(_MARKS + i): name for i, name in enumerate(names)}
    values = {name: blanks.get(name, str)(mark) for mark, name in marks.items()}
    try:
        text = capture_payload(llm, run, values, blanks, names).prompt.flat()
    except Exception:  # its code needs real values
        return ()
    if any(text.count(mark) == 0 for mark in marks):
        return ()
    return tuple(_split_at_marks(text, marks))


def _split_at_marks(text: str, marks: Mapping[str, str]) -> Iterator[PromptPart]:
    """Yield the literals and variables of a prompt in which single characters stand for the variables."""
    literal = ""
    for char in text:
        if char not in marks:
            literal += char
            continue
        if literal:
            yield PromptPart.literal(literal)
        yield PromptPart.var(marks[char])
        literal = ""
    if literal:
        yield PromptPart.literal(literal)


def copy_nodes(nodes: Sequence[NodeWithScore], *, deep: bool = False) -> list[NodeWithScore]:
    """Return copies for code that writes scores; `deep` copies for code that writes into the nodes, too."""
    return copy.deepcopy(list(nodes)) if deep else [node.model_copy() for node in nodes]


# ------------------------------------------------------------ models and stores of the user's own


PROVIDER = "wrapped"
"""Name of the engine that makes provider calls."""


class OwnModels(Protocol):
    """An object that decides which of the user's own models the graph may call, and makes payloads of calls."""

    def require_llm(self, llm: Any) -> Any:
        """Return an LLM whose calls may be prefetched. Raises `NotUnderstood` for others."""
        ...

    def require_leaf(self, target: Any) -> Any:
        """Return an embedding model or store whose calls can be found in the seam. Raises `NotUnderstood`."""
        ...

    def add_created(self, llm: Any) -> None:
        """Note that the code creates LLMs equal to `llm`, which stands for them at their call sites."""
        ...

    def add_site(self, key: str, target: Any, *, runs_in_loop: bool) -> None:
        """Note that the component `key` calls `target`. `runs_in_loop`: the original makes these calls concurrently."""
        ...

    def request(self, key: str, arguments: ProviderArguments) -> Any:
        """Return the payload of a call."""
        ...


def add_provider_call(
    lowering: Lowering,
    base_name: str,
    target: Any,
    role: Role,
    arguments: Callable[..., ProviderArguments],
    **inputs: Ref,
) -> Ref:
    """Add one call of a provider method, with the arguments that `arguments` makes of the inputs."""
    own_models = lowering.own_models
    assert own_models is not None
    name = lowering.unique_name(base_name, *DERIVED, "parsed")
    own_models.add_site(name, target, runs_in_loop=lowering.runs_in_loop)
    effects = (search_effect(target),) if role is Role.SEARCHING else ()
    return lowering.add_component(
        name,
        role,
        tuple(inputs.items()),
        PROVIDER,
        lambda values: own_models.request(name, arguments(**values)),
        effects=effects,
        attributes=Attributes(wrapped=name),
    )


def add_own_llm_call(
    lowering: Lowering,
    base_name: str,
    llm: Any,
    run: Run,
    inputs: Mapping[str, Ref],
    value: Callable[[str, Values], Any] | None,
    *,
    in_sync_code: bool = False,
) -> Ref:
    """Add one call of an LLM by `run`, the framework's code; return the ref of what `run` returns.

    `value`: see `Lowering.add_llm_call`. `in_sync_code`: the original uses sync methods even if the rest is async.
    """
    is_async = lowering.runs_in_loop and not in_sync_code

    def arguments(**values: Any) -> ProviderArguments:
        return provider_call_of(llm, lambda asking_llm: run(asking_llm, values), is_async=is_async)

    text = add_provider_call(lowering, base_name, llm, Role.GENERATION, arguments, **inputs)

    def parsed(text: str, **values: Any) -> Any:
        """Return what the framework's code makes of the LLM's text: computed directly, or by running the code again."""
        return (
            value(text, values)
            if value is not None
            else replay(llm, lambda asking_llm: run(asking_llm, values), [text])
        )

    return lowering.add_call(f"{base_name}.parsed", parsed, text=text, **inputs)


def lower_retriever_of_own_models(
    lowering: Lowering, retriever: VectorIndexRetriever, query: SymbolicQuery, name: str
) -> Value:
    """Lower a retriever whose embedding model and store are the user's own. Raises `NotUnderstood`."""
    parts = lowering.read_parts(VectorIndexRetrieverParts, retriever)
    own_models = lowering.own_models
    if own_models is None:
        raise NotUnderstood("its embedding model is not on the pool")
    if type(parts.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(parts.docstore).__name__}, which may be anywhere")
    store, inputs = own_models.require_leaf(parts.vector_store), {"query": query.text}
    lowering.guard_attributes(parts.vector_store, "is_embedding_query")
    if searches_by_vector(retriever):
        inputs["vector"] = _add_embedding_calls(
            lowering, own_models.require_leaf(parts.embed_model), query.texts, f"{name}.embedding"
        )
    method = _entered_method(store, SEARCH, lowering.runs_in_loop)

    def search(query: str, vector: Sequence[float] | None = None) -> ProviderArguments:
        return ProviderArguments(method, (store_query(retriever, query, vector),), dict(parts.vector_store_kwargs))

    result = add_provider_call(lowering, f"{name}.search", store, Role.SEARCHING, search, **inputs)

    def nodes(query: str, result: Any) -> list[NodeWithScore]:
        return nodes_of_result(retriever, query, result)

    return lowering.add_call(f"{name}.nodes", nodes, query=query.text, result=result)


def _add_embedding_calls(lowering: Lowering, model: Any, texts: Sequence[Ref], name: str) -> Ref:
    """Add the calls of `get_agg_embedding_from_queries`."""
    method = _entered_method(model, EMBED_QUERY, lowering.runs_in_loop)

    def embed(text: str) -> ProviderArguments:
        return ProviderArguments(method, (text,), {})

    vectors = {
        f"vector{i}": add_provider_call(lowering, name, model, Role.SEARCHING, embed, text=text)
        for i, text in enumerate(texts)
    }
    return lowering.add_call(f"{name}.mean", lambda **values: mean_agg(list(values.values())), **vectors)


def _entered_method(target: Any, names: tuple[str, str], is_async: bool) -> str:
    """Return the provider method that the original enters: a default of the framework's calls the sync one."""
    return names[is_async and is_intercepted(type(target), names[1])]


def require_one_model(lowering: Lowering, parts: Sequence[Any]) -> None:
    """Raise `NotUnderstood` if parts that are asked one query embed it with several models of the user's own.

    They share the vector that the first of them makes.
    """
    if lowering.own_models is not None and len({id(model) for part in parts for model in _embedding_models(part)}) > 1:
        raise NotUnderstood("its parts embed one query with several models")


def _embedding_models(part: Any) -> list[Any]:
    """Return the models that may embed the query that is passed to `part`."""
    if isinstance(part, VectorIndexRetriever):
        return [VectorIndexRetrieverParts.of(part).embed_model]
    if isinstance(part, RouterQueryEngine):
        return [model for one in RouterQueryEngineParts.of(part).query_engines for model in _embedding_models(one)]
    if isinstance(part, BaseQueryEngine):
        retriever = getattr(part, "retriever", None)
        return [] if retriever is None else _embedding_models(retriever)
    values = vars(part).values() if type(part).__module__.startswith("llama_index.core.") else ()
    flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    return [model for one in flat if isinstance(one, BaseRetriever) for model in _embedding_models(one)]
