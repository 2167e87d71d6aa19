"""Calls that no handler hears of: LlamaIndex's own code around a provider call, and silence for a whole context.

LlamaIndex keeps handlers in objects that all calls share, so `silence_context` takes effect where it notifies them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import uuid4

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index_instrumentation.dispatcher import Dispatcher

from teola_plugin.errors import RegistrationError
from teola_plugin.shims.llamaindex.copies import clone, run_without_waiting, sharing
from teola_plugin.shims.llamaindex.interceptors import (
    CALLS_NOBODY,
    PUBLIC_METHODS,
    STREAMING_METHODS,
    STRUCTURED_METHODS,
    TOOL_METHODS,
    Body,
    body_of,
    defining_class,
    is_async_method,
    is_openai,
    provider_methods,
    routed_body,
)
from teola_plugin.shims.llamaindex.models import messages_of, text_of
from teola_plugin.shims.llamaindex.records import Unreadable

Run = Callable[[Any], Any]
"""Framework code that calls an LLM once: takes the LLM, and returns any value."""


class ProviderArguments(NamedTuple):
    """A call of a provider method: its name and what it is called with."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _ProviderCallCaptured(Exception):
    """Ends the framework's code where it would call the provider; carries the arguments of that call."""

    def __init__(self, arguments: ProviderArguments) -> None:
        self.arguments = arguments


class CallsPublicMethod(BaseException):
    """A body calls another public method, whose events belong in the original's place. Not an `Exception`, so that the
    body's own code does not handle it."""


def silent_body(target: Any, method: str) -> Body:
    """Return the body of a provider method, or its worker's, to be called with the original's arguments.

    It raises `CallsPublicMethod` where it would emit the events of another public method.
    """
    kind: Any = type(target)
    body = body_of(kind, method)
    if isinstance(target, (BaseRetriever, BaseNodePostprocessor)):
        install_silencing()
        return _refusing_events(body, is_async=is_async_method(method))
    emits_no_events = is_openai(kind) or not isinstance(target, LLM)
    silent_target = target if emits_no_events else sharing(_without_public_methods(kind), target)
    return lambda _, *args, **kwargs: routed_body(target, method, body)(silent_target, *args, **kwargs)


def _refusing_events(body: Body, *, is_async: bool) -> Body:
    """Return a body that raises `CallsPublicMethod` where code that it calls would notify a handler."""

    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the body in a context that refuses events."""
        token = _silence.set(Silence.REFUSED)
        try:
            return body(*args, **kwargs)
        finally:
            _silence.reset(token)

    async def arun(*args: Any, **kwargs: Any) -> Any:
        """Run the async body in a context that refuses events."""
        token = _silence.set(Silence.REFUSED)
        try:
            return await body(*args, **kwargs)
        finally:
            _silence.reset(token)

    return arun if is_async else run


@lru_cache(maxsize=256)
def _without_public_methods(cls: type) -> Any:
    """Return a subclass of an LLM whose public methods raise `CallsPublicMethod` when a body calls them."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CallsPublicMethod

    names = (*STREAMING_METHODS, *PUBLIC_METHODS, *STRUCTURED_METHODS)
    members = {name: refuse for name in names if hasattr(cls, name)}
    subclass = type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, **members})
    setattr(subclass, CALLS_NOBODY, True)
    return subclass


def provider_call_of(llm: Any, run: Run, *, is_async: bool) -> ProviderArguments:
    """Return the first provider call that `run` comes to with this LLM. No provider is called, no event emitted.

    `is_async`: the original runs the async methods there. Raises `Unreadable`.
    """
    kind: Any = type(llm)
    capturing = sharing(_capturing_class(kind), llm)

    def calling(name: str) -> Body:
        """Return a capturing method, the async one of that name if the original runs async methods."""
        if is_async:
            return lambda *args, **kwargs: run_without_waiting(getattr(capturing, f"a{name}")(*args, **kwargs))
        method: Body = getattr(capturing, name)
        return method

    def predict(prompt: Any, **arguments: Any) -> Any:
        if llm.metadata.is_chat_model:
            return calling("chat")(messages_of(llm, prompt, arguments))
        return calling("complete")(text_of(llm, prompt, arguments), formatted=True)

    methods = {"complete": calling("complete"), "chat": calling("chat")}
    try:
        run(clone(llm, predict=predict, acomplete=capturing.acomplete, achat=capturing.achat, **methods))
    except _ProviderCallCaptured as end:
        return end.arguments
    raise Unreadable("it does not ask its LLM")


def replay(llm: Any, run: Run, texts: list[str]) -> Any:
    """Return what `run` returns when the LLM answers with these texts, one after the other."""
    answers = iter(texts)

    def chat(*_: Any, **__: Any) -> ChatResponse:
        answer = next(answers)
        if isinstance(answer, ToolCallText):
            return answer.response.model_copy(deep=True)
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=answer))

    return run(
        clone(
            llm,
            predict=lambda *_, **__: next(answers),
            complete=lambda *_, **__: CompletionResponse(text=next(answers)),
            chat=chat,
        )
    )


class ToolCallText(str):
    """The text of an answer that calls tools and has no text: it is empty, and holds the answer for `replay`."""

    response: ChatResponse


def text_of_answer(response: ChatResponse) -> str:
    """Return the text of a chat model's answer; a `ToolCallText` if it has none, and calls tools."""
    message = response.message
    calls_tools = bool(message.additional_kwargs.get("tool_calls")) or any(
        getattr(block, "block_type", "") == "tool_call" for block in getattr(message, "blocks", ())
    )
    if message.content or not calls_tools:
        return message.content or ""
    text = ToolCallText()
    text.response = response.model_copy(deep=True)
    return text


_STRUCTURED_CODE = (
    *(*STRUCTURED_METHODS, *TOOL_METHODS, "predict_and_call", "apredict_and_call"),
    *("chat_with_tools", "achat_with_tools", "_prepare_chat_with_tools_compat", "_validate_chat_with_tools_response"),
    *("as_structured_llm", "_prepare_schema", "_should_use_structure_outputs"),
)
"""Methods of LLMs that have a part in structured answers."""


def has_own_structured_code(llm: Any) -> bool:
    """Return True if functions of the user's own have a part in an LLM's structured answers."""
    names = [name for name in _STRUCTURED_CODE if hasattr(type(llm), name)]
    classes = [defining_class(type(llm), name) for name in names]
    are_of_framework = all(cls.__module__.startswith("llama_index.") for cls in classes)
    return not are_of_framework or not vars(llm).keys().isdisjoint(names)


def run_silently(call: Callable[[], Any]) -> Any:
    """Return what a function returns, or its coroutine, which must not wait. No handler hears of its calls.

    Raises `Unreadable` if the coroutine waits.
    """
    install_silencing()
    token = _silence.set(Silence.SILENT)
    try:
        value = call()
        return run_without_waiting(value) if inspect.iscoroutine(value) else value
    finally:
        _silence.reset(token)


def prepare(target: Any) -> None:
    """Create the classes by which a model's calls are found and made: that takes some milliseconds."""
    if isinstance(target, LLM):
        _capturing_class(type(target))
        _without_public_methods(type(target))


def has_own_prompt_code(llm: Any) -> bool:
    """Return True if functions of the user's own have a part in an LLM's prompts, or in reading its answers."""
    functions = (llm.messages_to_prompt, llm.completion_to_prompt)
    return llm.output_parser is not None or any(
        one is not None and not str(getattr(one, "__module__", "")).startswith("llama_index.") for one in functions
    )


@lru_cache(maxsize=256)
def _capturing_class(cls: type) -> type:
    """Create a subclass without events around public methods, whose provider methods raise `_ProviderCallCaptured`."""
    above = cls.__mro__[1]
    bases = (_without_events(above),) if is_openai(cls) and is_openai(above) else ()
    capturing: type = _without_events(cls, bases)
    for name in provider_methods(cls):
        setattr(capturing, name, _capturing_method(name, inspect.iscoroutinefunction(body_of(cls, name))))
    return capturing


def _without_events(cls: type, bases: tuple[type, ...] = ()) -> Any:
    """Return a subclass of an LLM whose public methods are the bodies alone, without events and spans."""
    subclass = type(cls)(cls.__name__, (cls, *bases), {"__module__": cls.__module__})
    setattr(subclass, CALLS_NOBODY, True)
    for name in PUBLIC_METHODS:  # set afterwards: methods that a class is made with get spans
        setattr(subclass, name, body_of(cls, name))
    return subclass


def _capturing_method(name: str, is_async: bool) -> Any:
    """Return a provider method that raises `_ProviderCallCaptured` with its arguments and calls no provider."""

    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _ProviderCallCaptured(ProviderArguments(name, args, kwargs))

    async def acapture(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _ProviderCallCaptured(ProviderArguments(name, args, kwargs))

    return acapture if is_async else capture


# ------------------------------------------------------------ silence for a whole context


class Silence(Enum):
    """What becomes of a notification of handlers in a context."""

    HEARD = "heard"
    SILENT = "silent"
    REFUSED = "refused"
    """It raises `CallsPublicMethod`."""


_silence: ContextVar[Silence] = ContextVar("teola_silence", default=Silence.HEARD)
_NOTIFYING_METHODS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (CallbackManager, ("on_event_start", "on_event_end", "start_trace", "end_trace")),
    (Dispatcher, ("event", "aevent", "span_enter", "span_exit", "span_drop")),
)
"""The methods that notify handlers, by class."""


def silence_context() -> None:
    """Hide all calls in this context from handlers from now on. Needs `install_silencing` first."""
    _silence.set(Silence.SILENT)


def install_silencing() -> None:
    """Make `silence_context` effective; handlers hear of all other calls as before.

    Wraps the methods by which `CallbackManager` and `Dispatcher` notify their handlers. Without them (another version):
    raises `RegistrationError`.
    """
    for kind, names in _NOTIFYING_METHODS:
        for name in names:
            method = inspect.getattr_static(kind, name, None)
            if not inspect.isfunction(method):
                raise _unknown_listeners()
            if not hasattr(method, "__teola_asks__"):
                setattr(kind, name, _silenceable(method))


def _silenceable(method: Any) -> Any:
    """Return a wrapper of a method that notifies handlers: in a silent context, it notifies nobody.

    In a context that refuses events (`Silence.REFUSED`), it raises `CallsPublicMethod`. `__teola_asks__` marks methods
    that are wrapped already.
    """
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def anotify(*args: Any, **kwargs: Any) -> Any:
            return None if _is_silent() else await method(*args, **kwargs)

        wrapper: Any = anotify
    else:

        @functools.wraps(method)
        def notify(*args: Any, **kwargs: Any) -> Any:
            if not _is_silent():
                return method(*args, **kwargs)
            return kwargs.get("event_id") or str(uuid4())  # of an event that begins

        wrapper = notify
    wrapper.__teola_asks__ = True
    return wrapper


def _is_silent() -> bool:
    """Return True in a context where no handler may hear. Raise `CallsPublicMethod` in one that refuses events."""
    silence = _silence.get()
    if silence is Silence.REFUSED:
        raise CallsPublicMethod
    return silence is Silence.SILENT


def _unknown_listeners() -> RegistrationError:
    """Return the error for a version of LlamaIndex whose handlers cannot be silenced."""
    from importlib.metadata import version

    return RegistrationError(
        f"shadow= is not possible with llama-index-core {version('llama-index-core')}: it tells its handlers in "
        "another way.",
        hint="install llama-index-core 0.14 or a later release of teola-plugin",
    )
