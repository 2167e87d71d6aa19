"""The user's own models, embeddings and cross encoders on an engine, of their own class: for code that holds them.

A `ChatOpenAI` that its server's engine carries is of its class already, see `openai`. Of the others the class, the
attributes and what LangChain makes of them stay: prompts, caches, callbacks, streams. What a call asks a provider for
is done by the object that `bind=` puts in their place, made of the attributes that they have then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, NoReturn

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.language_models.llms import BaseLLM
from pydantic import BaseModel

from teola_plugin.adapters.langchain.binding.models import fields_of, model_of
from teola_plugin.adapters.langchain.current_query import ConfigScopedModel
from teola_plugin.adapters.langchain.llm import BatchesByQuery
from teola_plugin.adapters.langchain.structured import structured_output
from teola_plugin.adapters.langchain.tools import described
from teola_plugin.adapters.own_class import ServedBy, subclass_of
from teola_plugin.adapters.tool_text import ARGUMENTS
from teola_plugin.errors import RegistrationError
from teola_plugin.shims.pydantic import of_class
from teola_plugin.tracer.leaf import Leaf

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
