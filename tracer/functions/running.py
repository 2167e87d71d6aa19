"""Calls of what the framework runs: Runnables, prompts, tools, and pool-backed objects by their own methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.tools import StructuredTool, Tool
from langchain_core.vectorstores import VectorStore

from teola_plugin.shims.langchain import handlers_in, streams
from teola_plugin.tracer.functions.arguments import Arguments
from teola_plugin.tracer.functions.building import is_runnable
from teola_plugin.tracer.functions.loops import mapped
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.reading import is_a, of_framework
from teola_plugin.tracer.functions.values import (
    RUNS,
    UNKNOWN_VALUE,
    Coming,
    Fields,
    Known,
    Series,
    Spread,
    Symbol,
    known_object,
)
from teola_plugin.tracer.langchain.classes import is_pool_backed, leaf_of
from teola_plugin.tracer.leaf import EmbeddingLeaf
from teola_plugin.tracer.symbols import Prompted


def of_framework_object(walk: Walker, func: Any, arguments: Arguments) -> Symbol | None:
    """What a method of an object gives that runs it; None for any other."""
    if type(func) is not MethodType or type(func.__func__) is not FunctionType:
        return None
    owner, name = func.__self__, func.__func__.__name__
    if type(owner) in (StructuredTool, Tool) and name in ("invoke", "ainvoke"):
        return _tool(walk, owner, name, arguments)
    if is_runnable(owner) and name in RUNS:
        return _run(walk, owner, name, arguments)
    asynchronous = name.startswith("a")
    run = _METHODS.get(name.removeprefix("a"))
    if run is None or not of_framework(func.__func__) or not arguments.whole:
        return None
    kind, act = run
    made = act(walk, owner, name, arguments) if is_a(owner, kind) else None
    return Coming(made) if asynchronous and made is not None else made


# ------------------------------------------------------------ Runnables


def _run(walk: Walker, node: Any, how: str, arguments: Arguments) -> Symbol:
    """`node.invoke(input, config, **bound)` and the like."""
    named = dict(arguments.named)
    streamed = how in ("stream", "astream") or _may_stream(arguments.first("config", 1))
    first = arguments.given[0] if arguments.given else named.pop("input", named.pop("inputs", None))
    for name in ("config", "return_exceptions"):
        named.pop(name, None)
    bound = {key: known_object(one) for key, one in named.items()}
    if first is None or isinstance(first, Spread) or not arguments.whole or not all(k for k, _ in bound.values()):
        walk.user_code()
        return UNKNOWN_VALUE
    kwargs = {key: value for key, (_, value) in bound.items()}
    if how in ("batch", "abatch"):
        made = mapped(walk, first, lambda each, item: each.run(node, item, kwargs, streamed=streamed), beside=False)
    else:
        made = walk.run(node, first, kwargs, streamed=streamed)
    if how in ("stream", "astream"):
        return UNKNOWN_VALUE
    return Coming(made) if how.startswith("a") else made


def _may_stream(config: Symbol | None) -> bool:
    """Return True for a config with callbacks of its own, or a list of configs, to which models may stream."""
    if isinstance(config, Series):
        return any(_may_stream(one) for one in config.items if not isinstance(one, Spread))
    callbacks: Symbol = Known(None)
    if isinstance(config, Fields):
        callbacks = config.items.get("callbacks", callbacks)
    elif isinstance(config, Known) and type(config.value) is dict:
        callbacks = Known(config.value.get("callbacks"))
    known, value = known_object(callbacks)
    return not known or streams(handlers_in(value))


def _tool(walk: Walker, tool: Any, how: str, arguments: Arguments) -> Symbol:
    """Its function is the user's own."""
    func = tool.func if how == "invoke" or tool.coroutine is None else tool.coroutine
    given = arguments.given[0] if len(arguments.given) == 1 else arguments.named.get("input")
    made: Symbol | None = None
    if isinstance(given, Fields) and given.base is None:
        made = walk.call_function(func, (), given.items)
    elif given is not None and not isinstance(given, Spread) and type(tool) is Tool:
        made = walk.call_function(func, (given,), {})
    if made is None:
        walk.user_code()
        made = UNKNOWN_VALUE
    value = made.value if isinstance(made, Coming) else made
    return Coming(value) if how == "ainvoke" else value


# ------------------------------------------------------------ other methods


def _search(walk: Walker, store: Any, name: str, arguments: Arguments) -> Symbol | None:
    """`store.similarity_search(query, k, filter=...)` asks for what a retriever of the store asks for."""
    query = arguments.first("query")
    options = {key: arguments.named[key] for key in ("k", "filter") if key in arguments.named}
    if len(arguments.given) > 1 and not isinstance(arguments.given[1], Spread):
        options["k"] = arguments.given[1]
    known = {key: known_object(one) for key, one in options.items()}
    makes = type(store).as_retriever
    if query is None or not all(there for there, _ in known.values()) or not of_framework(makes):
        return None
    retriever = store.as_retriever(search_kwargs={"k": 4, **{key: value for key, (_, value) in known.items()}})
    return walk.run(retriever, query, {}) if is_pool_backed(retriever) else None


def _rerank(walk: Walker, reranker: Any, name: str, arguments: Arguments) -> Symbol | None:
    documents, query = arguments.first("documents"), arguments.first("query", 1)
    if documents is None or query is None or not is_pool_backed(reranker):
        return None
    return walk.run(reranker.as_runnable(), Fields({"query": query, "documents": documents}), {})


def _embed(walk: Walker, embedder: Any, name: str, arguments: Arguments) -> Symbol | None:
    """One text as a query, or several as documents."""
    leaf = leaf_of(embedder, {})
    several = name.endswith("documents")
    given = arguments.first("texts" if several else "text")
    if not isinstance(leaf, EmbeddingLeaf) or given is None:
        return None
    return walk.embed(leaf, given, several=several)


def _format(walk: Walker, prompt: Any, name: str, arguments: Arguments) -> Symbol | None:
    """What a template makes of its variables: a text, messages, or both in one."""
    if arguments.given:
        return None
    made = walk.run(prompt, Fields(dict(arguments.named)), {})
    if not isinstance(made, Prompted):
        return made
    return rendered(made, {"format": "to_string", "format_messages": "to_messages"}.get(name.removeprefix("a"), ""))


def rendered(prompt: Prompted, how: str) -> Prompted:
    """A formatted prompt, as `how` (a method of the framework's prompt values) gives it."""
    if not how:
        return prompt

    def render(given: Mapping[str, Any]) -> Any:
        return getattr(prompt.render(given), how)()

    return Prompted(prompt.inputs, prompt.parts, render)


_Act = Callable[[Walker, Any, str, Arguments], Symbol | None]
_METHODS: Mapping[str, tuple[type, _Act]] = {
    "similarity_search": (VectorStore, _search),
    "compress_documents": (BaseDocumentCompressor, _rerank),
    "embed_query": (Embeddings, _embed),
    "embed_documents": (Embeddings, _embed),
    "format": (BasePromptTemplate, _format),
    "format_messages": (BasePromptTemplate, _format),
    "format_prompt": (BasePromptTemplate, _format),
}
