"""`accelerate(..., bind={object: engine})`: the user's own models and embeddings, served by engines of the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLanguageModel, BaseLLM
from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import BaseModel

from teola_plugin.adapters.calls import carries_openai, check_engine
from teola_plugin.adapters.langchain.binding.huggingface import (
    cross_encoder_on,
    embeddings_on,
    is_cross_encoder,
    is_own_decoder,
)
from teola_plugin.adapters.langchain.binding.openai import is_openai_chat, served_by_server
from teola_plugin.adapters.langchain.binding.stores import retriever_on, store_on
from teola_plugin.adapters.langchain.chat import ChatTeola, structured_output
from teola_plugin.adapters.langchain.current_query import ConfigScopedModel
from teola_plugin.adapters.langchain.llm import BatchesByQuery, TeolaLLM
from teola_plugin.adapters.langchain.tools import described, without_tools
from teola_plugin.adapters.own_class import ServedBy, subclass_of
from teola_plugin.adapters.sampling import sampling_fields
from teola_plugin.adapters.tool_text import ARGUMENTS
from teola_plugin.adapters.whole import in_part, kept_by
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.shims.pydantic import of_class
from teola_plugin.tracer.langchain.classes import is_accelerated
from teola_plugin.tracer.leaf import Leaf

# ------------------------------------------------------------ objects replaced wherever they sit


Make = Callable[[Any, Mapping[str, Any]], Any]
"""(object, arguments bound to it where it stands) -> what stands there instead, or the very same object."""

_LOOKED_INTO = (Runnable, BaseDocumentCompressor, BaseDocumentTransformer, Embeddings)


def replaced(node: Any, make: Make, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of whatever is around replaced objects; the very same object where nothing is replaced.

    Fields of Pydantic objects of the framework are looked into, and lists, tuples and dicts there. Functions,
    vector stores, compiled graphs and what a model is made of are not.
    """
    arguments = kwargs or {}
    replacement = make(node, arguments)
    if replacement is not node:
        return replacement
    if type(node) in (list, tuple):
        items = [replaced(item, make) for item in node]
        return node if _all_same(node, items) else type(node)(items)
    if type(node) is dict:
        inner = {key: replaced(value, make) for key, value in node.items()}
        return node if _all_same(node.values(), inner.values()) else inner
    if not isinstance(node, BaseModel) or not isinstance(node, _LOOKED_INTO) or isinstance(node, BaseLanguageModel):
        return node
    if is_accelerated(node):  # on terms of its own
        return node
    return _with_fields(node, make, arguments)


def _with_fields(node: Any, make: Make, kwargs: Mapping[str, Any]) -> Any:
    names = [name for name in type(node).model_fields if name in vars(node)]
    fields = {name: replaced(vars(node)[name], make, _handed_on(node, name, kwargs)) for name in names}
    new = {name: value for name, value in fields.items() if value is not vars(node)[name]}
    if not new:
        return node
    copied = node.model_copy(update=new)
    for name in [name for name in vars(copied) if isinstance(getattr(type(node), name, None), cached_property)]:
        del vars(copied)[name]  # it was computed from what is replaced
    return copied


def _handed_on(node: Any, name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with which a part is called, as far as they are bound."""
    if isinstance(node, RunnableBindingBase) and name == "bound":
        return {**node.kwargs, **kwargs}
    return kwargs if isinstance(node, RunnableSequence) and name == "first" else {}


def _all_same(before: Any, after: Any) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


# ------------------------------------------------------------ models on an engine


_KEPT = (
    "callbacks",
    "tags",
    "metadata",
    "verbose",
    "cache",
    "rate_limiter",
    "disable_streaming",
    "custom_get_token_ids",
)


def model_on(obj: BaseChatModel | BaseLLM, engine: str, pool: EnginePool, kwargs: Mapping[str, Any]) -> Any:
    """Return a `ChatTeola` or `TeolaLLM` in place of `obj`.

    Raises `RegistrationError` for what the engine cannot do, also of the arguments that are bound to it.
    """
    return model_of(fields_of(obj), isinstance(obj, BaseChatModel), engine, pool, kwargs)


def model_of(
    fields: Mapping[str, Any], chat: bool, engine: str, pool: EnginePool, kwargs: Mapping[str, Any]
) -> ChatTeola | TeolaLLM:
    """Return what `model_on` returns, for the fields of `obj`."""
    model: Any
    if chat:
        model, kwargs = ChatTeola(pool=pool, engine=engine, **fields), without_tools(kwargs)[0]
    else:
        text_fields = {name: value for name, value in fields.items() if name in TeolaLLM.model_fields}
        model = TeolaLLM(pool=pool, engine=engine, **text_fields)
    model.sampling(None, kwargs)
    return model  # type: ignore[no-any-return]


def fields_of(model: Any) -> dict[str, Any]:
    """Return the fields of a pool-backed model that answers as `model` is set up to. Raises `RegistrationError`."""
    values = sampling_fields(model, dict(getattr(model, "model_kwargs", None) or {}))
    copied_fields = {key: value for key in _KEPT if (value := getattr(model, key, None)) is not None}
    return values | copied_fields | {"name": model.get_name()}


# ------------------------------------------------------------ copies that keep the class of their original


_WORKER = "__teola_worker__"
"""Where an object keeps what does its work; a model with the fields that it was made of."""
_ENTRIES = ("invoke", "ainvoke", "stream", "astream", "generate", "agenerate", "generate_prompt", "agenerate_prompt")


def in_class_of(obj: Any, worker: Any, served_by: ServedBy) -> Any:
    """Return a copy of `obj`, of a subclass of its class, whose work `worker` does.

    `bind=` puts it in the place of `obj`.

    `worker` itself where it is of that class. Raises `RegistrationError` for an object that cannot be copied.
    """
    if isinstance(worker, type(obj)):
        return worker
    if isinstance(obj, BaseLanguageModel):
        base = _ChatModel if isinstance(obj, BaseChatModel) else _TextModel
        return of_class(subclass_of(type(obj), base, served_by), obj, base.settings(obj), {})
    cls = subclass_of(type(obj), _Embeddings if isinstance(obj, Embeddings) else _CrossEncoder, served_by)
    if isinstance(obj, BaseModel):
        return of_class(cls, obj, {_WORKER: worker}, {})
    copied: Any = object.__new__(cls)
    try:
        vars(copied).update(vars(obj) | {_WORKER: worker})
    except TypeError as error:
        raise RegistrationError(
            f"a {type(obj).__name__} keeps its attributes where they cannot be copied.",
            hint="use TeolaEmbeddings(pool=pool) in its place",
        ) from error
    return copied


class _OnEngine:
    """A mixin before the object's own class in the order of methods."""

    __teola_served_by__: ClassVar[ServedBy]

    @property
    def pool(self) -> Any:
        return self.__teola_served_by__.pool


# ------------------------------------------------------------ models


class _Model(_OnEngine, ConfigScopedModel):
    """A model on an engine: what chat models and text models have in common."""

    __teola_known__: ClassVar[type]
    """LangChain's class, whose calls end in `_generate` and `_stream`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """One that its class makes, as `configurable_fields` has it do, is served as well."""
        super().__init__(*args, **kwargs)
        vars(self).update(self.settings(self))

    @staticmethod
    def settings(model: Any) -> dict[str, Any]:
        """Attributes that differ from those of the object. Raises `RegistrationError` for what the engine cannot do."""
        fields_of(model)
        return {}

    @property
    def _worker(self) -> Any:
        """The pool-backed model of the attributes as they are now."""
        fields, worker = fields_of(self), vars(self).get(_WORKER)
        if worker is None or worker[0] != fields:
            pool, engine = self.__teola_served_by__
            worker = fields, model_of(fields, self.__teola_known__ is BaseChatModel, engine, pool, {})
            vars(self)[_WORKER] = worker
        return worker[1]

    def __getstate__(self) -> NoReturn:
        raise RegistrationError(
            f"a {type(self).__name__} on an engine cannot be pickled: its pool lives in this process.",
            hint="pickle your own object, and call pool.bound in the process that asks",
        )

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._worker._generate(*args, **kwargs)

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        return await self._worker._agenerate(*args, **kwargs)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self._worker._stream(*args, **kwargs)

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(self._worker._astream(*args, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    # Each class says `__teola_leaf__` itself: one that overrides anything of who says it is not trusted.
    def _leaf(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        """Return None where its class does more in a call than LangChain does: its request is not known then."""
        framework_class = self.__teola_known__
        original_class = next(
            cls for cls in type(self).__mro__ if issubclass(cls, framework_class) and not issubclass(cls, _OnEngine)
        )
        if any(getattr(original_class, name, None) is not getattr(framework_class, name, None) for name in _ENTRIES):
            return None
        return self._worker.__teola_leaf__(kwargs)  # type: ignore[no-any-return]


class _ChatModel(_Model):
    __teola_known__ = BaseChatModel
    _stream_chat_model_events = _astream_chat_model_events = None
    """A provider's own way to stream; LangChain takes `_stream` instead."""

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        return self._leaf(kwargs)

    @staticmethod
    def settings(model: Any) -> dict[str, Any]:
        """Return the settings of a `ChatTeola`: with tools an answer has to be read before it is known what it is."""
        fields_of(model)
        return {"disable_streaming": model.disable_streaming or "tool_calling"}

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Any:
        """Bind tools as `ChatTeola.bind_tools` does, in whose words `tool_choice` is.

        Arguments of provider APIs are left out.
        """
        other_arguments = {name: value for name, value in kwargs.items() if name not in ARGUMENTS}
        return self.bind(**described(tools, tool_choice), **other_arguments)  # type: ignore[attr-defined]

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> Any:
        """Bind a schema as `ChatTeola.with_structured_output` does: the engine writes only what it allows."""
        model: Any = self
        return structured_output(model, schema, include_raw=include_raw, **kwargs)


class _TextModel(BatchesByQuery, _Model):
    __teola_known__ = BaseLLM

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        return self._leaf(kwargs)


# ------------------------------------------------------------ embeddings, cross encoders


class _Worked(_OnEngine):
    """An object whose work is done by another one, made once."""

    @property
    def _worker(self) -> Any:
        return vars(self)[_WORKER]


class _Embeddings(_Worked):
    """Providers' own arguments say how many texts a request holds, which is the engine's affair here."""

    def embed_query(self, text: str, *_: Any, **__: Any) -> list[float]:
        return self._worker.embed_query(text)  # type: ignore[no-any-return]

    async def aembed_query(self, text: str, *_: Any, **__: Any) -> list[float]:
        return await self._worker.aembed_query(text)  # type: ignore[no-any-return]

    def embed_documents(self, texts: list[str], *_: Any, **__: Any) -> list[list[float]]:
        return self._worker.embed_documents(texts)  # type: ignore[no-any-return]

    async def aembed_documents(self, texts: list[str], *_: Any, **__: Any) -> list[list[float]]:
        return await self._worker.aembed_documents(texts)  # type: ignore[no-any-return]

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        return self._worker.__teola_leaf__(kwargs)  # type: ignore[no-any-return]


class _CrossEncoder(_Worked):
    def score(self, text_pairs: Sequence[tuple[str, str]]) -> Any:
        """float32, [pairs]."""
        return self._worker.score(text_pairs)

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        return self._worker.__teola_leaf__(kwargs)  # type: ignore[no-any-return]


# ------------------------------------------------------------ what takes the place of an object


Node = Runnable[Any, Any]


def bound(
    chain: Any, bind: Sequence[tuple[Any, str]], pool: EnginePool | None, *, strict: bool = True, holders: Any = ()
) -> Any:
    """Return the chain (or a list of them) with the named objects replaced by ones on the pool; the very object if none
    is.

    A `ChatOpenAI` on an `OpenAIServer` engine keeps its own code and is carried by the engine. Another chat model
    becomes a `ChatTeola`, a text model a `TeolaLLM`, with the same name, tags and sampling parameters (those the model
    leaves to its provider are the engine's defaults: greedy, 256 tokens); messages then carry the engine's
    `response_metadata`. Embeddings and cross encoders are replaced wherever they sit in retrievers and compressors;
    see `stores` for the stores. Raises `RegistrationError` for what cannot be served faithfully, for what functions in
    the chain, or in `holders`, hold as well, and, if `strict`, for what does not occur.
    """
    if bind and pool is None:
        raise RegistrationError(
            "bind= names engines, but there is no pool.", hint="accelerate(..., pool=..., bind=...)"
        )
    for obj, engine in bind:
        assert pool is not None
        check_engine(pool, engine)
        bound_chain = replaced(chain, _replacement(obj, engine, pool))
        if bound_chain is chain and strict:
            raise _absent(obj)
        if bound_chain is not chain and (keeper := kept_by((bound_chain, holders), obj, CLOSED)):
            raise in_part(obj, keeper)
        chain = bound_chain
    return chain


CLOSED = (VectorStore, BaseCallbackHandler)
"""Stores embed their documents as they always did; handlers hear, and are no part of the chain."""


def bound_object(obj: Any, engine: str, pool: EnginePool) -> Any:
    """Return a copy of one object, of a subclass of its class, served as `bind=` serves it; see `EnginePool.bound`.

    Raises `RegistrationError` for what cannot be served faithfully.
    """
    check_engine(pool, engine)
    served_by = ServedBy(pool, engine)
    current: ServedBy | None = getattr(type(obj), "__teola_served_by__", None)
    if current is not None and current != served_by:
        raise RegistrationError(
            f"the {type(obj).__name__} is served by the engine {current.engine!r} already.",
            hint="bind the object that it was made of",
        )
    return obj if current is not None else in_class_of(obj, _replacement(obj, engine, pool)(obj, {}), served_by)


def _replacement(obj: Any, engine: str, pool: EnginePool) -> Make:
    """Return what replaces `obj`. Raises `RegistrationError` for what no engine can do."""
    if is_cross_encoder(obj):
        return _replace_only(obj, lambda kwargs: cross_encoder_on(obj, engine, pool))
    if isinstance(obj, Embeddings):
        return _embeddings(obj, engine, pool)
    if is_own_decoder(obj):
        raise RegistrationError(
            f"a {type(obj).__name__} decodes by means of its own: an engine's answers would be others.",
            hint="leave it unbound, or put ChatTeola(pool=pool) in the chain",
        )
    if is_openai_chat(obj) and carries_openai(pool.engine(engine)):
        return _replace_only(obj, lambda kwargs: served_by_server(obj, engine, pool))
    if isinstance(obj, BaseChatModel | BaseLLM):
        return _replace_only(obj, lambda kwargs: model_on(obj, engine, pool, kwargs))
    if isinstance(obj, BaseDocumentCompressor) or hasattr(obj, "score"):
        raise RegistrationError(
            f"a reranker ({type(obj).__name__}) cannot be bound.",
            hint="bind its HuggingFaceCrossEncoder, or use TeolaRerank(pool=pool) in the chain",
        )
    raise RegistrationError(
        f"a {type(obj).__name__} cannot be bound to an engine.",
        hint="bind chat models, text models, embeddings or a HuggingFaceCrossEncoder",
    )


def _replace_only(obj: Any, make: Callable[[Mapping[str, Any]], Any]) -> Make:
    return lambda node, kwargs: make(kwargs) if node is obj else node


def _embeddings(obj: Embeddings, engine: str, pool: EnginePool) -> Make:
    engine_embeddings: Any = None

    def stand_in(node: Any, kwargs: Mapping[str, Any]) -> Any:
        nonlocal engine_embeddings
        store = node.vectorstore if isinstance(node, VectorStoreRetriever) else node
        if node is not obj and not (isinstance(store, VectorStore) and store.embeddings is obj):
            return node
        engine_embeddings = engine_embeddings or embeddings_on(obj, engine, pool)
        if node is obj:
            return engine_embeddings
        return store_on(node, engine_embeddings) if node is store else retriever_on(node, engine_embeddings)

    return stand_in


def _absent(obj: Any) -> RegistrationError:
    return RegistrationError(
        f"the {type(obj).__name__} in bind= does not occur in the chain where it could be replaced.",
        hint="bind the very object that the chain holds; for what functions and agents hold, pool.bound(model, engine)",
    )
