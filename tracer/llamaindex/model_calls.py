"""Models and stores of the user's own, whose calls the graph asks the query's prefetcher for.

Each call is one component on the engine `wrapped`. Its payload says with what the original is about to call the
provider method, as the framework's own code finds it out on silent copies.
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

from teola_plugin.graph import Attributes, Component, Effect, PromptPart, Ref, Role
from teola_plugin.requests.payloads import UNKNOWN, Generate, Generation
from teola_plugin.shims.llamaindex.copies import clone, nobody
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
from teola_plugin.tracer.symbols import NotUnderstood

if TYPE_CHECKING:
    from teola_plugin.tracer.llamaindex.lowering import SymbolicQuery, Value, Walk

Given = Mapping[str, Any]
Run = Callable[[Any, Given], Any]
"""(LLM, values by name) -> what the framework's code returns; it asks the LLM once."""
Blanks = Mapping[str, Callable[[str], Any]]
"""How a text stands for a value that is not known yet, by the value's name; the text itself where nothing is said."""
_MARKS = 0xE001
"""First of the private-use characters that stand for values while the parts of a prompt are told apart."""
_OTHERS = ("stream", "stream_chat", "stream_complete", "structured_predict", "predict_and_call", "apredict", "achat")


class _PromptCaptured(Exception):
    """Ends the framework's code at its first question."""

    def __init__(self, payload: Generate) -> None:
        self.payload = payload


def captured(llm: Any, run: Run, given: Mapping[str, Any], blanks: Blanks, names: Sequence[str]) -> Generate:
    """The payload that `run` asks for; values that are missing in `given` are unknown."""
    missing = {name: blanks.get(name, str)(UNKNOWN) for name in names if name not in given}
    try:
        run(_answering_llm(llm, _capture), {**given, **missing})
    except _PromptCaptured as ended:
        return ended.payload
    raise NotUnderstood("the LLM is not asked")


def replayed(llm: Any, run: Run, given: Mapping[str, Any], generations: Sequence[Generation]) -> Any:
    """What `run` returns when the LLM answers with these, one after the other."""
    answers: Iterator[Generation] = iter(generations)

    def reply(_: Generate) -> Generation:
        for answer in answers:
            return answer
        raise NotUnderstood("the LLM is asked once more")

    return run(_answering_llm(llm, reply), given)


def _capture(payload: Generate) -> Generation:
    raise _PromptCaptured(payload)


def _answering_llm(llm: Any, reply: Callable[[Generate], Generation]) -> Any:
    """A copy of the LLM, of the same class, whose calls are answered by `reply`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotUnderstood("the LLM is asked in another way")

    return clone(
        llm,
        **dict.fromkeys(_OTHERS, refuse),
        callback_manager=nobody(),
        predict=lambda prompt, **kwargs: llm.text_of(reply(llm.payload_of_template(prompt, **kwargs))),
        complete=lambda prompt, formatted=False, **kwargs: llm.completion_of(
            reply(llm.payload_of_prompt(prompt, formatted, **kwargs))
        ),
        chat=lambda messages, **kwargs: llm.chat_of(reply(llm.payload_of_messages(messages, **kwargs)), **kwargs),
    )


def parts(llm: Any, run: Run, names: Sequence[str], blanks: Blanks) -> tuple[PromptPart, ...]:
    """Literals and variables of the prompt, in order; nothing where they cannot be told apart."""
    marks = {chr(_MARKS + i): name for i, name in enumerate(names)}
    given = {name: blanks.get(name, str)(mark) for mark, name in marks.items()}
    try:
        text = captured(llm, run, given, blanks, names).prompt.flat()
    except Exception:  # its code wants real values
        return ()
    if any(text.count(mark) == 0 for mark in marks):
        return ()
    return tuple(_split_at_marks(text, marks))


def _split_at_marks(text: str, marks: Mapping[str, str]) -> Iterator[PromptPart]:
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


def own_nodes(nodes: Sequence[NodeWithScore], *, deep: bool = False) -> list[NodeWithScore]:
    """Copies: fusion and rerankers write scores into what they are given; `deep` for what writes into nodes, too."""
    return copy.deepcopy(list(nodes)) if deep else [node.model_copy() for node in nodes]


# ------------------------------------------------------------ models and stores of the user's own


PROVIDER = "wrapped"
"""Name of the engine that makes provider calls."""


class OwnModels(Protocol):
    """Says which of the user's own objects the graph may call, and makes payloads of calls."""

    def require_llm(self, llm: Any) -> Any:
        """Return an LLM whose calls may be prefetched. Raises `NotUnderstood` for others."""
        ...

    def require_leaf(self, target: Any) -> Any:
        """Return an embedding model or store whose calls can be found in the seam. Raises `NotUnderstood`."""
        ...

    def add_site(self, key: str, target: Any, *, runs_in_loop: bool) -> None:
        """Note a call site: the component `key` calls `target`. `runs_in_loop`: the original does that side by side."""
        ...

    def request(self, key: str, arguments: ProviderArguments) -> Any:
        """Return the payload of a call."""
        ...


def provider_call(
    walk: Walk, wanted: str, target: Any, role: Role, arguments: Callable[..., ProviderArguments], **inputs: Ref
) -> Ref:
    """Add one call of a provider method, with the arguments that `arguments` makes of the inputs."""
    own = walk.own_models
    assert own is not None
    name = walk.name(wanted, *DERIVED, "parsed")
    own.add_site(name, target, runs_in_loop=walk.runs_in_loop)
    effects = (Effect(f"store:{id(target)}"),) if role is Role.SEARCHING else ()
    component = Component(
        name,
        role,
        tuple(inputs.items()),
        PROVIDER,
        effects=effects,
        scope=walk.scope,
        attributes=Attributes(wrapped=name),
    )
    return walk.draft.add(component, lambda given: own.request(name, arguments(**given)))


def ask_own_llm(
    walk: Walk,
    wanted: str,
    llm: Any,
    run: Run,
    inputs: Mapping[str, Ref],
    value: Callable[[str, Given], Any] | None,
    *,
    in_sync_code: bool = False,
) -> Ref:
    """Add one call of an LLM by `run`, the framework's code; return the ref of what `run` returns.

    `value`: see `Walk.ask`. `in_sync_code`: the original uses the sync methods, also where the rest is async.
    """
    is_async = walk.runs_in_loop and not in_sync_code

    def arguments(**given: Any) -> ProviderArguments:
        return provider_call_of(llm, lambda asked: run(asked, given), is_async=is_async)

    text = provider_call(walk, wanted, llm, Role.GENERATION, arguments, **inputs)

    def parsed(text: str, **given: Any) -> Any:
        return value(text, given) if value is not None else replay(llm, lambda asked: run(asked, given), [text])

    return walk.call(f"{wanted}.parsed", parsed, text=text, **inputs)


def retrieve_by_own_models(walk: Walk, r: VectorIndexRetriever, asked: SymbolicQuery, name: str) -> Value:
    """Add the calls of an index whose embedding model and store are the user's own. Raises `NotUnderstood`."""
    parts = walk.parts(VectorIndexRetrieverParts, r)
    own = walk.own_models
    if own is None:
        raise NotUnderstood("its embedding model is not on the pool")
    if type(parts.docstore) is not SimpleDocumentStore:
        raise NotUnderstood(f"its documents are in a {type(parts.docstore).__name__}, which may be anywhere")
    store, inputs = own.require_leaf(parts.vector_store), {"query": asked.text}
    walk.read(parts.vector_store, "is_embedding_query")
    if searches_by_vector(r):
        inputs["vector"] = _embedded(walk, own.require_leaf(parts.embed_model), asked.texts, f"{name}.embedding")
    method = _method(store, SEARCH, walk.runs_in_loop)

    def search(query: str, vector: Sequence[float] | None = None) -> ProviderArguments:
        return ProviderArguments(method, (store_query(r, query, vector),), dict(parts.vector_store_kwargs))

    result = provider_call(walk, f"{name}.search", store, Role.SEARCHING, search, **inputs)

    def nodes(query: str, result: Any) -> list[NodeWithScore]:
        return nodes_of_result(r, query, result)

    return walk.call(f"{name}.nodes", nodes, query=asked.text, result=result)


def _embedded(walk: Walk, model: Any, texts: Sequence[Ref], name: str) -> Ref:
    """Add the calls of `get_agg_embedding_from_queries`."""
    method = _method(model, EMBED_QUERY, walk.runs_in_loop)

    def embed(text: str) -> ProviderArguments:
        return ProviderArguments(method, (text,), {})

    vectors = {
        f"vector{i}": provider_call(walk, name, model, Role.SEARCHING, embed, text=text) for i, text in enumerate(texts)
    }
    return walk.call(f"{name}.mean", lambda **given: mean_agg(list(given.values())), **vectors)


def _method(target: Any, names: tuple[str, str], is_async: bool) -> str:
    """Return the provider method that the original enters: a default of the framework's calls the sync one."""
    return names[is_async and is_intercepted(type(target), names[1])]


def require_one_model(walk: Walk, parts: Sequence[Any]) -> None:
    """Raise `NotUnderstood` if parts that are asked one query embed it with several models of the user's own.

    They share the vector that the first of them makes.
    """
    if walk.own_models is not None and len({id(model) for part in parts for model in _embedding_models(part)}) > 1:
        raise NotUnderstood("its parts embed one query with several models")


def _embedding_models(part: Any) -> list[Any]:
    """Return the models that may embed the very query that a part is asked."""
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
