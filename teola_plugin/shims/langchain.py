"""Private names of LangChain's packages: each touched here, in a function that says what happens without it.

Seen unchanged from langchain-core 1.7.0, langchain-text-splitters 1.1.2, langchain-openai 1.0.0, langchain-huggingface
1.0.0 and langchain-classic 1.0.6 on. Whether the installed version still has a name is looked up when it is wanted, not
concluded from a number: packages of one app come in many combinations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from functools import lru_cache, partial
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import convert_to_messages
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers import context as tracers
from langchain_core.utils.env import env_var_is_set

from teola_plugin.errors import RegistrationError
from teola_plugin.graph.containers import trust_package
from teola_plugin.shims import report_missing

trust_package("langchain_core")

EXTENSION_POINTS: Mapping[str, str] = {
    "_generate": "BaseChatModel, BaseLLM: what a model of one's own writes",
    "_agenerate": "the same in a loop",
    "_stream": "the same, in chunks",
    "_astream": "the same, in chunks in a loop",
    "_acall": "LLM: the same, of a text model in a loop",
    "_call": "LLM: the same, of a text model",
    "_llm_type": "BaseLanguageModel: what a model of one's own is called in traces",
    "_get_ls_params": "BaseLanguageModel, BaseRetriever: what it tells traces; langchain-tests asks for it",
    "_get_relevant_documents": "BaseRetriever: what a retriever of one's own writes",
    "_aget_relevant_documents": "the same in a loop",
    "_run": "BaseTool: what a tool of one's own does",
    "_arun": "the same in a loop",
    "_asimilarity_search_with_relevance_scores": "VectorStore: the scored search of a store of one's own, in a loop",
    "_select_relevance_score_fn": "VectorStore: how a store of one's own turns distances into scores",
    "_call_with_config": "Runnable: 'use this method to implement `invoke` in subclasses'",
    "_acall_with_config": "the same in a loop",
}
"""Names that LangChain documents for subclasses. Writing, calling or looking for them on a class that is made to be
subclassed is no touch of anything private, in spite of their underscore."""


# ------------------------------------------------------------ who listens to a call


def listeners_are_known() -> bool:
    """Return True if everybody who may listen to a call can be found and silenced.

    Private: `langchain_core.tracers.context._configure_hooks`, and the two classes of `streams`; since langchain-core
    1.7.0. Where one of them is gone, nothing is called ahead and `shadow=` is refused: a call might be heard twice.
    """
    return _hooks() is not None and _streaming_handlers() is not None


def streams(handlers: Sequence[object]) -> bool:
    """Return True if a model streams its answer to one of these handlers.

    Private: `_StreamingCallbackHandler` and `_V2StreamingCallbackHandler` in the private module
    `langchain_core.tracers._streaming`; since langchain-core 1.7.0. Without them, any handler may be one.
    """
    kinds = _streaming_handlers()
    return bool(handlers) if kinds is None else any(isinstance(handler, kinds) for handler in handlers)


def handlers_in(callbacks: object) -> Sequence[object]:
    """Return the handlers of a config, or of a model: `callbacks` is a list of them, or their manager."""
    return callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())


def may_stream(callbacks: object) -> bool:
    """Return True if a model that is called here, with these callbacks, may stream its answer to a handler.

    `callbacks`: as a config has them. Handlers that hang on context variables count, too. See `streams`.
    """
    return streaming_kinds(callbacks) != ()


def _attaches_streaming_handler(hook: Hook) -> bool:
    """Return True if an environment variable attaches a handler of this hook that models stream to."""
    _, _, handler_class, variable = hook
    if variable is None or not env_var_is_set(variable):
        return False
    kinds = _streaming_handlers()
    return kinds is None or not isinstance(handler_class, type) or issubclass(handler_class, kinds)


def streaming_kinds(callbacks: object) -> tuple[type, ...] | None:
    """Return the kinds of handlers that models stream to and that are among these callbacks, or on context variables.

    None where that is not known. `callbacks`: as a config has them. See `streams`.
    """
    kinds, hooks = _streaming_handlers(), _hooks()
    if kinds is None or hooks is None or any(map(_attaches_streaming_handler, hooks)):
        return None
    ambient = [handler for hook in hooks if (handler := hook[0].get()) is not None]
    handlers = [*handlers_in(callbacks), *ambient]
    return tuple(kind for kind in kinds if any(isinstance(handler, kind) for handler in handlers))


def event_listeners() -> tuple[type, ...]:
    """Return the kinds of handlers that `astream_events` attaches, and that models stream to. See `streams`."""
    kinds = _streaming_handlers()
    return () if kinds is None else kinds[:1]


def always_streams(model: Any, kwargs: Mapping[str, Any]) -> bool | None:
    """Return True for a chat model that `invoke` makes stream, False for one that never streams, whoever listens.

    None where that is up to the handlers. `kwargs`: arguments of the call. Asks the model's own predicates, with its
    own handlers and with one more that streams.

    Private: `BaseChatModel._should_stream` and `_should_use_protocol_streaming`; since langchain-core 0.1 and 1.7.
    Without them: True, so that nobody relies on a whole answer.
    """
    handlers = handlers_in(model.callbacks)
    if _is_streamed_to(model, handlers, kwargs):
        return True
    kinds = _streaming_handlers()
    if kinds is None or _is_streamed_to(model, [*handlers, _listener(kinds)], kwargs):
        return None
    return False


@lru_cache(maxsize=1)
def _listener(kinds: tuple[type, ...]) -> object:
    """Return a handler that models stream to, in either protocol."""
    return type("Listener", kinds, {})()


def _is_streamed_to(model: Any, handlers: Sequence[object], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the model streams in one of its two ways of being called, to these handlers."""
    manager = SimpleNamespace(handlers=handlers)
    predicates = [getattr(model, name, None) for name in ("_should_stream", "_should_use_protocol_streaming")]
    return any(
        predicate is None or predicate(async_api=async_api, run_manager=manager, **kwargs)
        for predicate in predicates
        for async_api in (False, True)
    )


def attached_by_environment() -> bool:
    """Return True if an environment variable attaches a handler to every call: `register_configure_hook(env_var=)`.

    Private: `langchain_core.tracers.context._configure_hooks`; since langchain-core 1.7.0. Without it: True.
    """
    hooks = _hooks()
    return hooks is None or any(hook[3] is not None and env_var_is_set(hook[3]) for hook in hooks)


def silence() -> None:
    """Detach the handlers that hang on context variables from all calls in this context from now on.

    Private: `langchain_core.tracers.context._configure_hooks`; since langchain-core 1.7.0. Without it: raises
    `RegistrationError`; `listeners_are_known` tells before.
    """
    hooks = _hooks()
    if hooks is None:
        raise unknown_listeners("a call that nobody hears of")
    for variable in (tracers.tracing_v2_callback_var, *(hook[0] for hook in hooks)):
        if variable.get() is not None:
            variable.set(None)


def unknown_listeners(feature: str) -> RegistrationError:
    """Return the error for a feature that has to know who listens, where that cannot be known."""
    from importlib.metadata import version

    return RegistrationError(
        f"{feature} is not possible with langchain-core {version('langchain-core')}: it keeps its handlers elsewhere.",
        hint="install langchain-core 1.7 or a later release of teola-plugin",
    )


Hook = tuple[ContextVar[Any], bool, Any, str | None]
"""Variable that holds a handler, whether it is inherited, the handler's class, the environment variable for it."""


def _hooks() -> list[Hook] | None:
    """Return LangChain's list of handlers on context variables; None if its form is unknown, which is logged."""
    hooks = getattr(tracers, "_configure_hooks", None)
    if isinstance(hooks, list) and all(
        isinstance(one, tuple) and len(one) == 4 and isinstance(one[0], ContextVar) for one in hooks
    ):
        return hooks
    _report_listeners("tracers.context._configure_hooks")
    return None


def _streaming_handlers() -> tuple[type, ...] | None:
    """Return the classes of handlers that models stream to; None if they are not there, which is logged."""
    try:
        from langchain_core.tracers._streaming import _StreamingCallbackHandler, _V2StreamingCallbackHandler
    except ImportError:
        _report_listeners("tracers._streaming._V2StreamingCallbackHandler")
        return None
    return _StreamingCallbackHandler, _V2StreamingCallbackHandler


def _report_listeners(name: str) -> None:
    report_missing("langchain-core", name, "no call of your own models starts early, for a handler might hear it twice")


# ------------------------------------------------------------ callbacks that run where they are called


class inline_callback:
    """Decorator of a handler's sync method: it runs where it is called, by a manager in a thread or one on a loop.

    The framework's async managers know two other ways, and neither will do. They run a sync method on the loop's
    threads, which the user's code may occupy. And beside a handler with `run_inline`, the other handlers of
    `AsyncCallbackManager.on_llm_start` are not told at all (langchain-core 1.7). So it passes for a coroutine
    function: it is called and awaited on the loop. A sync manager calls it and finds nothing to await.

    Private: what `inspect.iscoroutinefunction` looks at, a function's `__code__`, which Python 3.11 leaves no other way
    to say. From 3.12 on `inspect.markcoroutinefunction` says it. Where neither is believed, the method is called on a
    thread of the loop, and awaited: later, with the same effect.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, handler: Any, owner: type | None = None) -> Any:
        """Return the bound method in the disguise of a coroutine function; from the class, the method itself."""
        if handler is None:
            return self._method
        method = MethodType(self._method, handler)
        return _Forged(method) if _mark is None else _mark(_Call(method))


class _Done:
    """An awaitable that is done, and is no coroutine."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_DONE = _Done()
_mark: Callable[[Any], Any] | None = getattr(inspect, "markcoroutinefunction", None)


class _Call:
    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> _Done:
        self._method(*args, **kwargs)
        return _DONE


async def _async() -> None:
    """Do nothing; its code makes `_Forged` look like a coroutine function."""


class _Forged(_Call):
    __name__ = "inline"
    __code__ = _async.__code__
    __defaults__ = __kwdefaults__ = None
    __annotations__ = {}


# ------------------------------------------------------------ models


def prompt_value(model: Any, value: Any) -> PromptValue:
    """Return the prompt value that a model makes of its input: of a text, messages, or a prompt value.

    Private: `_convert_input` of `BaseChatModel` and `BaseLLM`; since langchain-core 1.7.0. Without it: what it does,
    by public names.
    """
    convert = getattr(model, "_convert_input", None)
    if convert is not None:
        return convert(value)  # type: ignore[no-any-return]
    if isinstance(value, PromptValue):
        return value
    if isinstance(value, str):
        return StringPromptValue(text=value)
    messages: Any = convert_to_messages(value)
    return ChatPromptValue(messages=messages)


def generates_as_usual(model: Any) -> bool:
    """Return True for a chat model that `generate` and `agenerate` below call as its `invoke` and `ainvoke` do.

    Private: `_generate_with_cache`, `_agenerate_with_cache` and `_convert_input` of `BaseChatModel`, and
    `_normalize_messages` in the private module `langchain_core.language_models._utils`; since langchain-core 1.7.0.
    Without one of them: False, and the model's `invoke` is called, which takes longer.
    """
    is_usual = isinstance(model, BaseChatModel) and _is_generated_as_usual(type(model))
    return is_usual and _message_normalizer() is not None


@lru_cache(maxsize=512)
def _is_generated_as_usual(cls: Any) -> bool:
    """Return True if a model class overrides none of the framework's methods between `invoke` and `_generate`.

    Overridden methods that only prepare what listeners hear are accepted if they are langchain-openai's.
    """
    return all(
        hasattr(BaseChatModel, name) and getattr(cls, name) is getattr(BaseChatModel, name)
        for name in _FROM_INVOKE_DOWN
    ) and all(hasattr(BaseChatModel, name) and _is_for_listeners(cls, name) for name in _FOR_LISTENERS)


def _is_for_listeners(cls: Any, name: str) -> bool:
    """Return True for a method of `_FOR_LISTENERS` that only computes: langchain-core's or langchain-openai's."""
    method = getattr(cls, name)
    is_openai = getattr(method, "__module__", "") == "langchain_openai.chat_models.base"
    return method is getattr(BaseChatModel, name) or (is_openai and not hasattr(method, "__wrapped__"))


_FROM_INVOKE_DOWN = (
    *("invoke", "generate_prompt", "generate", "_generate_with_cache"),
    *("ainvoke", "agenerate_prompt", "agenerate", "_agenerate_with_cache"),
    "_convert_input",
)
"""Methods by which a chat model gets from `invoke` to its provider method, and back."""
_FOR_LISTENERS = ("_get_invocation_params", "_combine_llm_outputs")
"""Methods that compute on the way what callbacks hear of the call."""


def generate(model: Any, value: Any, run_manager: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the message that `invoke` would return for an input; only `run_manager` hears of the call.

    For a model that `generates_as_usual`.
    """
    messages, arguments = _messages_and_arguments(model, value, kwargs)
    return model._generate_with_cache(messages, run_manager=run_manager, **arguments).generations[0].message


async def agenerate(model: Any, value: Any, run_manager: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the message that `ainvoke` would return for an input; only `run_manager` hears of the call.

    LangChain's cache is read and written as usual. For a model that `generates_as_usual`.
    """
    messages, arguments = _messages_and_arguments(model, value, kwargs)
    result = await model._agenerate_with_cache(messages, run_manager=run_manager, **arguments)
    return result.generations[0].message


def _messages_and_arguments(model: Any, value: Any, kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages and keyword arguments that `invoke` would pass to `_generate_with_cache`."""
    arguments = {"stop": None, **kwargs}
    if not arguments.pop("ls_structured_output_format", None):  # only tracers see it
        arguments.pop("structured_output_format", None)
    normalize: Any = _message_normalizer()
    return normalize(model._convert_input(value).to_messages()), arguments


def _message_normalizer() -> Callable[[Any], list[Any]] | None:
    """Return LangChain's function that brings messages into its standard form; None if missing, which is logged."""
    try:
        from langchain_core.language_models._utils import _normalize_messages
    except ImportError:
        report_missing("langchain-core", "language_models._utils._normalize_messages", "prefetching takes longer")
        return None
    return _normalize_messages


def tracing_metadata(model: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata that a chat model adds to each of its runs.

    Private: `_get_ls_params_with_defaults` of `BaseChatModel`; since langchain-core 1.7.0. Without it: nothing.
    """
    get_params = getattr(model, "_get_ls_params_with_defaults", None)
    return {} if get_params is None else get_params(**{"stop": None, **kwargs})


def chat_completion_params(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters that a `BaseChatOpenAI` called with these arguments sends.

    None where it would not ask for a chat completion, but the Responses API.

    Private: `_default_params`, `_use_responses_api` and, for `chat_result`, `_create_chat_result` of that class; since
    langchain-openai 1.0.0. Without one of them: None, and the model is called in its place, never ahead.
    """
    names = ("_default_params", "_use_responses_api", "_create_chat_result")
    for name in names:
        if not hasattr(type(model), name):
            report_missing("langchain-openai", f"{type(model).__name__}.{name}", "it is not asked ahead")
            return None
    params = {**model._default_params, **arguments}
    return None if model._use_responses_api(params) else params


def chat_result(model: Any, response: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
    """Return the `ChatResult` that a `BaseChatOpenAI` makes of a chat completion with these headers.

    Private: `_create_chat_result` of that class; since langchain-openai 1.0.0. `chat_completion_params` tells before
    whether it is there.
    """
    return model._create_chat_result(response, {"headers": dict(headers)} if model.include_response_headers else None)


def copy_with_one_tokenization(model: Any) -> Any:
    """Return a copy of `OpenAIEmbeddings` that splits equal texts into tokens once, for a call that is made twice.

    Private: `_tokenize` of `OpenAIEmbeddings`; since langchain-openai 1.0. Without it: each call splits the texts.
    """
    copied = model.model_copy()
    tokenize = getattr(copied, "_tokenize", None)
    results: dict[tuple[int, int], tuple[Any, Any]] = {}

    def tokenize_once(texts: Any, chunk_size: int) -> Any:
        key = id(texts), chunk_size
        if key not in results:
            results[key] = texts, tokenize(texts, chunk_size)  # type: ignore[misc]
        return results[key][1]

    if tokenize is not None:
        object.__setattr__(copied, "_tokenize", tokenize_once)
    return copied


def sentence_transformer(embeddings: Any) -> Any:
    """Return the model inside a `HuggingFaceEmbeddings`; None where it cannot be found, and then it cannot be bound.

    Private: `_client` of langchain-huggingface's class, since 1.0.0; langchain-community's has a public `client`.
    """
    return getattr(embeddings, "_client", None) or getattr(embeddings, "client", None)


# ------------------------------------------------------------ generators, splitters


def yields(generator: Any, *, on_loop: bool) -> bool:
    """Return True if a `RunnableGenerator` was made of a function for that way of streaming.

    Private: `_transform` and `_atransform`, of which its instances have those that they were given; since
    langchain-core 1.7.0. Where one has neither: True, and what it lacks is said at its first chunk.
    """
    attributes = vars(generator)
    return ("_atransform" if on_loop else "_transform") in attributes or not attributes.keys() & {
        "_transform",
        "_atransform",
    }


class SplitterSizes(NamedTuple):
    """The sizes of a text splitter's chunks, in its own measure."""

    chunk: int
    overlap: int
    length: Callable[[str], int]


def splitter_sizes(splitter: Any) -> SplitterSizes | None:
    """Return how long the chunks of a `TextSplitter` become.

    Private: its `_chunk_size`, `_chunk_overlap` and `_length_function`; since langchain-text-splitters 1.1.2. Without
    them: None, and the number of chunks is not foreseen.
    """
    for name in ("_chunk_size", "_chunk_overlap", "_length_function"):
        if not hasattr(splitter, name):
            name = f"{type(splitter).__name__}.{name}"
            report_missing("langchain-text-splitters", name, "the number of its chunks is not foreseen")
            return None
    return SplitterSizes(splitter._chunk_size, splitter._chunk_overlap, splitter._length_function)


# ------------------------------------------------------------ langchain_classic


class Stuffing(NamedTuple):
    """A function that joins documents to one text."""

    prompt: Any
    separator: str
    variable: str
    """The key of the documents."""


def stuffing(function: Any) -> Stuffing | None:
    """Return what the function inside `create_stuff_documents_chain` does; None for any other function.

    Private: the variables of that function's closure, one of them `_document_prompt`; since langchain-classic 1.0.0.
    Where they are called otherwise: None, and it runs as user code does.
    """
    name = "create_stuff_documents_chain.<locals>.format_docs"
    if not _is_from(function, "langchain_classic.chains.combine_documents.stuff", name):
        return None
    values = (cell.cell_contents for cell in function.__closure__ or ())
    cells = dict(zip(function.__code__.co_freevars, values, strict=True))
    variables = ("_document_prompt", "document_separator", "document_variable_name")
    if cells.keys() == set(variables):
        return Stuffing(*(cells[one] for one in variables))
    private_name = f"create_stuff_documents_chain({', '.join(variables)})"
    report_missing("langchain-classic", private_name, "its chain is not planned")
    return None


def is_structured_output_parser(function: Any) -> bool:
    """Return True for the function with which `ChatOpenAI.with_structured_output` ends a chain.

    It returns the object that the client has parsed, from the message. Private: `_oai_structured_outputs_parser` of
    `langchain_openai.chat_models.base`. Without it: False, and the chain's value is not known before its place.
    """
    inner = function.func if type(function) is partial else None
    return _is_from(inner, "langchain_openai.chat_models.base", "_oai_structured_outputs_parser")


def keeps_documents_as_bytes(store: Any) -> bool:
    """Return True if an `EncoderBackedStore` is what `create_kv_docstore` makes of a store of bytes.

    Private: `_identity` and `_load_document_from_bytes` in the private module `langchain_classic.storage._lc_store`;
    since langchain-classic 1.0.0. Where they are called otherwise: False, and what is behind it is looked up in place.
    """
    functions = ((store.key_encoder, "_identity"), (store.value_deserializer, "_load_document_from_bytes"))
    return all(_is_from(function, "langchain_classic.storage._lc_store", name) for function, name in functions)


def _is_from(function: Any, module: str, name: str) -> bool:
    return getattr(function, "__module__", "") == module and getattr(function, "__qualname__", "") == name


# ------------------------------------------------------------ models that a config chooses


_LISTENERS = ("Runnable.with_listeners.<locals>.<lambda>", "Runnable.with_alisteners.<locals>.<lambda>")


def listens_to_ends(factory: Any) -> bool:
    """Return True for a config factory by which `with_listeners` adds listeners to ends and errors, none to starts.

    Private: the names and closures of these functions; since langchain-core 1.0. Without it: False, and calls of what
    the listeners are bound to start in their place.
    """
    if not any(_is_from(factory, "langchain_core.runnables.base", name) for name in _LISTENERS):
        return False
    cells = dict(zip(factory.__code__.co_freevars, factory.__closure__ or (), strict=True))
    return "on_start" in cells and cells["on_start"].cell_contents is None


def setting_names(runnable: Any) -> tuple[str, ...] | None:
    """Return the keys of `configurable` that choose models in a Runnable; empty for none, None if any key may.

    Private: `_ConfigurableModel`, which `init_chat_model` makes, its `_configurable_fields` and `_config_prefix`; since
    langchain 0.2.8. Without them: empty, and such models are called in their places.
    """
    if _is_configurable(runnable):
        fields = getattr(runnable, "_configurable_fields", ())
        prefix = getattr(runnable, "_config_prefix", "")
        return None if fields == "any" else tuple(f"{prefix}{name}" for name in fields)
    names: list[str] = []
    for part in _parts(runnable):
        part_names = setting_names(part)
        if part_names is None:
            return None
        names += part_names
    return tuple(dict.fromkeys(names))


def configured(runnable: Any, settings: Mapping[str, Any], opens_no_connection: Callable[[Any, Any], bool]) -> Any:
    """Return a Runnable with the models in it that `configurable` chooses, for reading alone: it is never run.

    `opens_no_connection`: (model, provider) -> True if such a model may be made now. Raise `ValueError` if it may not,
    or whatever its constructor raises. Private: as in `setting_names`, its `_default_config` and its `_model`.
    """
    # First, since `isinstance` reads an attribute of the object, for which old releases make a model.
    if not _is_configurable(runnable):
        if isinstance(runnable, RunnableSequence):
            return RunnableSequence(*(configured(step, settings, opens_no_connection) for step in runnable.steps))
        if isinstance(runnable, RunnableBindingBase):
            bound_settings = Context().run(ensure_config, runnable.config).get("configurable", {})
            bound = configured(runnable.bound, {**settings, **bound_settings}, opens_no_connection)
            return runnable if bound is runnable.bound else runnable.model_copy(update={"bound": bound})
        return runnable
    prefix = runnable._config_prefix
    arguments = {**runnable._default_config, **{key.removeprefix(prefix): value for key, value in settings.items()}}
    if not opens_no_connection(arguments.get("model"), arguments.get("model_provider")):
        raise ValueError("a model of a provider that may open a connection")
    return Context().run(runnable._model, {"configurable": dict(settings)})


def _is_configurable(runnable: Any) -> bool:
    """Return True for an object of `init_chat_model` whose model is chosen by each call's config."""
    return type(runnable).__name__ == "_ConfigurableModel" and type(runnable).__module__ in (
        "langchain.chat_models.base",
        "langchain_classic.chat_models.base",
    )


def _parts(runnable: Any) -> Sequence[Any]:
    """Return the runnables that a sequence or a binding consists of; none for any other runnable."""
    if isinstance(runnable, RunnableSequence):
        return runnable.steps
    return (runnable.bound,) if isinstance(runnable, RunnableBindingBase) else ()
