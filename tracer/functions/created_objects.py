"""Objects that functions create: models, prompts, chains and data of known arguments."""

from __future__ import annotations

import copy
import operator
import os
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from pydantic import SecretStr

from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import (
    are_model_variables_reliable,
    is_framework_code,
    is_instance,
    is_subclass,
)
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    Instance,
    KnownValue,
    Spread,
    Symbol,
    is_constant,
    known_value,
    word_set,
)

_SPLITTER = "langchain_text_splitters.character.RecursiveCharacterTextSplitter"
"""The class of splitters that only compute. Others may load a tokenizer, or log that a chunk is too long."""

_MODEL_INITIALIZERS = (
    "langchain.chat_models.base.init_chat_model",
    "langchain_classic.chat_models.base.init_chat_model",
)

_PROVIDERS = ("openai", "azure_openai")
"""Providers whose models open no connection when they are made."""

_GRAPH_CLASSES = ("langgraph.types.Command", "langgraph.types.Send")

_POSITIONAL_FIELDS = {"Send": ("node", "arg"), "Command": (), "Document": ("page_content",)}
"""The fields that a data class takes as positional arguments; a message takes its content."""

_BUILDER_METHODS = word_set(
    "as_retriever assign bind bind_tools from_messages from_template map partial pick pipe with_config with_fallbacks",
    "with_retry with_structured_output with_types",
)
"""Methods that make an object of the framework from another, and do nothing else."""

_PURE_FUNCTIONS = (operator.itemgetter, operator.attrgetter, SecretStr, string.Template)
"""Pure functions and classes outside of the framework that prompts, chains and models are written with."""

_METACLASS_MODULES = ("abc", "enum", "pydantic", "typing", "typing_extensions")
"""Where the metaclasses come from of classes that describe what a model writes."""

_SAFE_TYPES = (FunctionType, MethodType, type(len), operator.itemgetter, operator.attrgetter, SecretStr)


def is_runnable(value: object) -> bool:
    """Return True for a Runnable. Runs no code of the user's."""
    return is_instance(value, Runnable)


def is_splitter_class(kind: Any) -> bool:
    return is_instance(kind, type) and f"{kind.__module__}.{kind.__qualname__}" == _SPLITTER


def build(
    interpreter: FunctionInterpreter,
    func: Any,
    arguments: Sequence[Symbol | Spread],
    keywords: Mapping[str, Symbol],
) -> Symbol | None:
    """Return the object that a class, a method or a function makes that does nothing else; None for any other."""
    if is_instance(func, type) and _is_data_class(func):
        return _build_data(func, arguments, keywords)
    is_initializer = _is_model_initializer(func)
    if not is_initializer and not _is_builder(func):
        return None
    arguments = [one if isinstance(one, Spread) else interpreter.read_setting(one) for one in arguments]
    keywords = {key: interpreter.read_setting(value) for key, value in keywords.items()}
    if is_initializer and not _initializes_model(arguments, keywords):
        return None
    positional = [known_value(argument) for argument in arguments if not isinstance(argument, Spread)]
    keyword_values = {key: known_value(value) for key, value in keywords.items()}
    all_safe = all(is_known and is_safe(value) for is_known, value in (*positional, *keyword_values.values()))
    if len(positional) < len(arguments) or not all_safe:
        return UNKNOWN_VALUE
    is_model = is_initializer or (is_instance(func, type) and is_subclass(func, BaseLanguageModel))
    if is_model and (interpreter.mutations.has(KnownValue(os.environ)) or not are_model_variables_reliable()):
        return UNKNOWN_VALUE
    values = [value for _, value in positional]
    if any(func is pure for pure in _PURE_FUNCTIONS) and not all(map(is_constant, values)):
        return None
    return try_build(lambda: func(*values, **{key: value for key, (_, value) in keyword_values.items()}))


def build_plain_model(interpreter: FunctionInterpreter, cls: Any, arguments: Any) -> KnownValue | None:
    """Return a model that a class of another framework makes of plain data; None if more than that decides about it."""
    symbols = arguments.symbols if arguments.complete else None
    if symbols is None:
        return None
    positional = [known_value(symbol) for symbol in symbols]
    keywords = {key: known_value(symbol) for key, symbol in arguments.keywords.items()}
    if not all(is_known and holds_plain_data(value) for is_known, value in (*positional, *keywords.values())):
        return None
    if type(cls.__init__) is not FunctionType or not is_framework_code(cls.__init__) or "openai" not in sys.modules:
        return None
    settings = (os.environ, sys.modules["openai"])
    if any(interpreter.mutations.has(KnownValue(one)) for one in settings) or not are_model_variables_reliable():
        return None
    values = copy.deepcopy([value for _, value in positional])
    options = copy.deepcopy({key: value for key, (_, value) in keywords.items()})
    model = try_build(lambda: cls(*values, **options))
    return model if isinstance(model, KnownValue) else None


def holds_plain_data(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(holds_plain_data, value.values()))
    return all(map(holds_plain_data, value)) if type(value) is list else is_constant(value)


def is_model_creator(func: Any) -> bool:
    """Return True for a class of models or retrievers, and for the framework's function that creates models."""
    is_class = is_instance(func, type) and is_subclass(func, BaseLanguageModel, BaseRetriever)
    return is_class or _is_model_initializer(func)


def is_safe(value: Any) -> bool:
    """Return True if the framework may be given the value: looking at it runs no code of the user's."""
    kind = type(value)
    if kind in (list, tuple):
        return all(map(is_safe, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_safe, value.values()))
    if is_instance(value, type):
        return kind is type or kind.__module__.split(".", 1)[0] in _METACLASS_MODULES
    return is_constant(value) or kind in _SAFE_TYPES or is_framework_code(kind) or is_runnable(value)


def try_build(make: Callable[[], Any]) -> Symbol:
    """Return what the framework makes; unknown if it raises, as it will for the original."""
    try:
        return KnownValue(make())
    except Exception:
        return UNKNOWN_VALUE


def _is_builder(func: Any) -> bool:
    """Return True for a class, method or function that only makes an object, so it may be called during tracing."""
    if type(func) is MethodType:
        method: Any = func.__func__
        return type(method) is FunctionType and method.__name__ in _BUILDER_METHODS and is_framework_code(method)
    if any(func is pure for pure in _PURE_FUNCTIONS):
        return True
    if is_splitter_class(func):
        return True
    is_runnable_class = is_instance(func, type) and is_subclass(func, Runnable)
    return is_runnable_class and is_framework_code(func) and is_framework_code(func.__init__)


def _is_model_initializer(func: Any) -> bool:
    name = f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', '')}"
    return type(func) is FunctionType and name in _MODEL_INITIALIZERS


def _initializes_model(arguments: Sequence[Symbol | Spread], keywords: Mapping[str, Symbol]) -> bool:
    """Return True if `init_chat_model` opens no connection with these arguments.

    A model with `configurable_fields` is none yet: the config of each call says which one it is.
    """
    if "configurable_fields" in keywords:
        return True
    first = keywords.get("model", arguments[0] if arguments else KnownValue(None))
    model = None if isinstance(first, Spread) else known_value(first)[1]
    return opens_no_connection(model, known_value(keywords.get("model_provider", KnownValue(None)))[1])


def opens_no_connection(model: Any, provider: Any) -> bool:
    """Return True for a model of a provider whose models open no connection when they are made.

    `provider`: None to find it in the model's name, as in `openai:gpt-4o`; names that begin with `gpt-` are of OpenAI.
    """
    if provider is None and type(model) is str:
        provider = "openai" if model.startswith("gpt-") else model.partition(":")[0]
    return provider in _PROVIDERS


def _is_data_class(kind: type) -> bool:
    if is_subclass(kind, BaseMessage, Document):
        return is_framework_code(kind)
    return f"{kind.__module__}.{kind.__qualname__}" in _GRAPH_CLASSES


def _build_data(kind: type, arguments: Sequence[Symbol | Spread], keywords: Mapping[str, Symbol]) -> Symbol:
    """Return an object of a data class: a message whose fields are all known for real, any other as a symbol."""
    parameters = _POSITIONAL_FIELDS.get(kind.__name__, ("content",))
    if len(arguments) > len(parameters) or any(isinstance(argument, Spread) for argument in arguments):
        return UNKNOWN_VALUE
    fields: dict[str, Symbol] = {}
    for name, argument in zip(parameters, arguments, strict=False):
        assert not isinstance(argument, Spread)
        fields[name] = argument
    fields |= keywords
    values = {key: known_value(field) for key, field in fields.items()}
    all_safe = all(is_known and is_safe(value) for is_known, value in values.values())
    if is_subclass(kind, BaseMessage) and all_safe:
        return try_build(lambda: kind(**{key: value for key, (_, value) in values.items()}))
    return Instance(kind, fields)
