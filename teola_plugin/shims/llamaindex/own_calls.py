"""The user's own models and stores, below their events: where a call of theirs can be made ahead, or its outcome taken.

An LLM's public methods emit events around a body. The plain object goes through them in its place, and only the body
is asked for: `Leaf` objects stand in for the user's own and hand each body to `__teola_call__`. `Unreadable` is raised
for classes whose bodies cannot be told from their events; they are called as they always were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from teola_plugin.shims.llamaindex.copies import at_once, clone, sharing
from teola_plugin.shims.llamaindex.models import messages_of, text_of
from teola_plugin.shims.llamaindex.records import Unreadable

Body = Callable[..., Any]
COMPLETE, CHAT = ("complete", "acomplete"), ("chat", "achat")
"""The sync method and the async one."""
EMBED, SEARCH = ("_get_query_embedding", "_aget_query_embedding"), ("query", "aquery")
_PUBLIC = (*COMPLETE, *CHAT)
_WRAPPERS = {
    "complete": llm_completion_callback,
    "acomplete": llm_completion_callback,
    "chat": llm_chat_callback,
    "achat": llm_chat_callback,
}
_OPENAI = ("llama_index.llms.openai.base.OpenAI", "llama_index.llms.openai_like.base.OpenAILike")
_OPENAI_BODIES = ("_complete", "_acomplete", "_chat", "_achat")
"""All of its public methods come down to these, which emit nothing."""
_OTHERS = (*("stream_complete", "astream_complete", "stream_chat", "astream_chat"), *_PUBLIC)
_FRAMEWORKS = (
    "predict",
    "apredict",
    "_get_prompt",
    "_get_messages",
    "_parse_output",
    "_extend_prompt",
    "_extend_messages",
)


class Captured(Exception):
    """Ends the framework's code where it would call the model."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.asked, self.kwargs = name, args, kwargs


class AsksAnother(BaseException):
    """A body calls another public method, whose events belong in the plain object's place. Not to be caught there."""


# ------------------------------------------------------------ bodies


def body_of(kind: type, name: str) -> Body:
    """A method without spans and events around it. Raises `Unreadable`."""
    found = inspect.getattr_static(kind, name, None)
    while found is not None and type(found) is not FunctionType:  # a span says that it is a function
        found = getattr(found, "__wrapped__", None)
    if found is None:
        raise Unreadable(f"it has no method {name!r}")
    names = found.__code__.co_freevars
    if found.__code__.co_filename == llm_chat_callback.__code__.co_filename and "f" in names:
        found = (found.__closure__ or ())[names.index("f")].cell_contents
    body: Body = found
    return body


def _delegates(body: Any) -> bool:
    """Whether it only asks another public method, or that of a class above."""
    code = body.__code__
    return "__class__" in code.co_freevars or any(name in code.co_names for name in _PUBLIC)


def _is_openai(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" in _OPENAI


# ------------------------------------------------------------ what the plain object holds


def leaf_of(obj: Any, call: Callable[..., Any], acall: Callable[..., Any]) -> Any:
    """`obj` with other bodies: `call(obj, name, body, args, kwargs)` stands for each, `acall` for the async ones.

    Raises `Unreadable`.
    """
    kind: Any = type(obj)
    return sharing(_leaf_class(kind, call, acall), obj)


@lru_cache(maxsize=256)
def _leaf_class(theirs: type, call: Callable[..., Any], acall: Callable[..., Any]) -> type:
    return with_bodies(theirs, bodies(theirs), call, acall)


def with_bodies(theirs: type, names: Iterable[str], call: Callable[..., Any], acall: Callable[..., Any]) -> type:
    """A subclass, under the same names, in which `call` and `acall` stand for these methods; see `leaf_of`."""
    values = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__, "__doc__": theirs.__doc__}
    hooked = {name: _hooked(name, body_of(theirs, name), call, acall) for name in names}
    return type(theirs)(theirs.__name__, (theirs,), {**values, **hooked})


EMBED_BATCH, EMBED_TEXT = "_get_text_embeddings", "_get_text_embedding"


def embeds_by(kind: type[BaseEmbedding]) -> str:
    """The method through which `get_text_embedding_batch` asks the model: of a batch, or of text after text.

    Raises `Unreadable` where the class goes its own way.
    """
    _unchanged(kind, BaseEmbedding, "get_text_embedding_batch")
    own = inspect.getattr_static(kind, EMBED_BATCH, None)
    return EMBED_TEXT if own is inspect.getattr_static(BaseEmbedding, EMBED_BATCH) else EMBED_BATCH


def _hooked(name: str, body: Body, call: Callable[..., Any], acall: Callable[..., Any]) -> Any:
    if inspect.iscoroutinefunction(body):

        async def abody(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await acall(self, name, body, args, kwargs)

        return _dressed(name, body, abody)

    def own_body(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, name, body, args, kwargs)

    return _dressed(name, body, own_body)


def _dressed(name: str, body: Any, made: Any) -> Any:
    """Under the body's names, by which spans go, with the events that its class has around it."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(made, attribute, getattr(body, attribute))
    if name in _WRAPPERS:
        return _WRAPPERS[name]()(made)
    made.__signature__ = inspect.signature(body)
    return made


@lru_cache(maxsize=256)
def bodies(kind: type) -> tuple[str, ...]:
    """Names of the methods that are handed over. Raises `Unreadable` where a class is no leaf, or not known."""
    if issubclass(kind, LLM):
        return _bodies_of_llm(kind)
    if issubclass(kind, BaseEmbedding):
        _unchanged(kind, BaseEmbedding, "get_query_embedding", "aget_query_embedding")
        _unchanged(kind, BaseEmbedding, "get_agg_embedding_from_queries", "aget_agg_embedding_from_queries")
        return EMBED
    if issubclass(kind, BasePydanticVectorStore):
        return SEARCH
    raise Unreadable(f"{kind.__name__} is not known")


def _bodies_of_llm(kind: type) -> tuple[str, ...]:
    _unchanged(kind, LLM, *_FRAMEWORKS)
    if _is_openai(kind):
        return _OPENAI_BODIES
    found = tuple(name for name in _PUBLIC if not _delegates(body_of(kind, name)))
    if not found:
        raise Unreadable(f"{kind.__name__} calls another class's methods")
    return found


def _unchanged(kind: type, base: type, *names: str) -> None:
    for name in names:
        if inspect.getattr_static(kind, name, None) is not inspect.getattr_static(base, name):
            raise Unreadable(f"{kind.__name__} has a {name!r} of its own")


def below(obj: Any, name: str) -> Body:
    """What makes the call itself, on the user's own object; `AsksAnother` where it would emit another's events."""
    body = body_of(type(obj), name)
    own = obj if _is_openai(type(obj)) or not isinstance(obj, LLM) else sharing(_refusing(type(obj)), obj)
    return lambda *args, **kwargs: body(own, *args, **kwargs)


@lru_cache(maxsize=256)
def _refusing(theirs: type) -> type:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AsksAnother

    values = {name: refuse for name in _OTHERS if hasattr(theirs, name)}
    return type(theirs)(theirs.__name__, (theirs,), {"__module__": theirs.__module__, **values})


# ------------------------------------------------------------ what an LLM would be asked


def asked_by(llm: Any, run: Callable[[Any], Any], *, is_async: bool) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The first call that `run` comes to with this LLM: name of the body and arguments. Tells nobody.

    `is_async`: the plain object runs the async way of it. Raises `Unreadable`.
    """
    kind: Any = type(llm)
    silent = sharing(_silent(kind), llm)

    def asking(name: str) -> Body:
        if is_async:
            return lambda *args, **kwargs: at_once(getattr(silent, f"a{name}")(*args, **kwargs))
        asked: Body = getattr(silent, name)
        return asked

    def predict(prompt: Any, **arguments: Any) -> Any:
        if llm.metadata.is_chat_model:
            return asking("chat")(messages_of(llm, prompt, arguments))
        return asking("complete")(text_of(llm, prompt, arguments), formatted=True)

    try:
        run(clone(llm, predict=predict, complete=asking("complete"), chat=asking("chat")))
    except Captured as end:
        return end.name, end.asked, end.kwargs
    raise Unreadable("it does not ask its LLM")


def warm(leaf: Any) -> None:
    """Makes the classes by which a model's calls are found out and made."""
    kind: Any = type(leaf)
    if isinstance(leaf, LLM):
        _silent(kind)
        _refusing(kind)


def writes_own_prompts(llm: Any) -> bool:
    """Whether functions of the user's own have a part in its prompts, or in what it makes of answers."""
    own = (llm.messages_to_prompt, llm.completion_to_prompt)
    return llm.output_parser is not None or any(
        one is not None and not str(getattr(one, "__module__", "")).startswith("llama_index.") for one in own
    )


def answered(llm: Any, run: Callable[[Any], Any], text: str) -> Any:
    """What `run` makes of the LLM's answer."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    own = clone(
        llm,
        predict=lambda *_, **__: text,
        complete=lambda *_, **__: CompletionResponse(text=text),
        chat=lambda *_, **__: ChatResponse(message=message),
    )
    return run(own)


@lru_cache(maxsize=256)
def _silent(theirs: type) -> type:
    """Its public methods without events, down to the bodies, which end with `Captured`."""
    above = theirs.__mro__[1]
    bases = (_bare(above, _PUBLIC),) if _is_openai(theirs) and _is_openai(above) else ()
    made = _bare(theirs, _PUBLIC, bases)
    for name in bodies(theirs):
        setattr(made, name, _capturing(name, inspect.iscoroutinefunction(body_of(theirs, name))))
    return made


def _bare(theirs: type, names: tuple[str, ...], bases: tuple[type, ...] = ()) -> type:
    """A subclass with these methods without spans and events."""
    made = type(theirs)(theirs.__name__, (theirs, *bases), {"__module__": theirs.__module__})
    for name in names:  # set later: what a class is made with gets spans
        setattr(made, name, body_of(theirs, name))
    return made


def _capturing(name: str, is_async: bool) -> Any:
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise Captured(name, args, kwargs)

    async def acapture(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise Captured(name, args, kwargs)

    return acapture if is_async else capture
