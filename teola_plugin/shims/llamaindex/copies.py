"""Copies of LlamaIndex's objects: with other attributes, of another class, without spans and events.

The framework's own code runs on them before the original does, and no handler hears of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import BasePromptTemplate, RichPromptTemplate, SelectorPromptTemplate

from teola_plugin.shims import report_missing
from teola_plugin.shims.llamaindex.records import Unreadable, is_older_than
from teola_plugin.shims.pydantic import sharing as sharing

_COUNTED_TEXTS = 1024
"""Texts whose token counts are cached: a chunk is counted again for every prompt that it may fit into."""


# ------------------------------------------------------------ attributes


def attribute_values(obj: object) -> Iterator[Any]:
    """Yield the values of an object's attributes, including Pydantic's private ones."""
    yield from vars(obj).values()
    yield from (getattr(obj, "__pydantic_private__", None) or {}).values()


def with_steps_of(cls: Any, theirs: Any) -> Any:
    """Give `cls` the steps of its base class `theirs` that are free functions, also ones added later; return it.

    Touches the classes' `_step_functions`. Without it there are no such steps, and nothing is done.
    """
    steps = vars(theirs).get("_step_functions")
    if steps is not None:
        cls._step_functions = steps
    return cls


def with_slots_of(obj: Any, other: Any) -> Any:
    """Return `other`, which gets what `obj` keeps in `__slots__` of the user's."""
    for name, member in inspect.getmembers(type(other), inspect.ismemberdescriptor):
        if not name.startswith("__") and hasattr(obj, name):
            member.__set__(other, getattr(obj, name))
    return other


def with_attributes(obj: Any, values: Mapping[str, Any]) -> Any:
    """Return a shallow copy with these attributes; bound methods of `obj` among them are bound to the copy."""
    copied = copy.copy(obj)
    for name, value in values.items():
        is_own_method = isinstance(value, MethodType) and value.__self__ is obj
        vars(copied)[name] = MethodType(value.__func__, copied) if is_own_method else value
    return copied


def clone(obj: Any, **changes: Any) -> Any:
    """Return a shallow copy with other attributes and with `verbose` off, so that a dry run prints nothing."""
    copied = copy.copy(obj)
    for name in ("_verbose", "verbose"):
        if name in vars(copied):
            vars(copied)[name] = False
    vars(copied).update(changes)
    return copied


# ------------------------------------------------------------ without spans and events


def without_spans(obj: Any, name: str) -> Callable[..., Any]:
    """Return a method of `obj` without the spans around it.

    LlamaIndex wraps methods in spans, which the user's handlers would see. Raise AttributeError without such a method.
    """
    bound: Callable[..., Any] = inspect.unwrap(getattr(type(obj), name)).__get__(obj)
    return bound


def silent_callback_manager() -> CallbackManager:
    """Return a callback manager without handlers, not even the global one.

    The constructor of LlamaIndex's `CallbackManager` adds the global handler, if there is one; it is removed again.
    """
    manager = CallbackManager([])
    manager.handlers = []
    return manager


def with_silent_methods(obj: Any, *methods: str) -> Any:
    """Return a copy whose `methods` have no spans around them."""
    copied = clone(obj)
    vars(copied).update({name: without_spans(copied, name) for name in methods})
    return copied


def copy_template(template: BasePromptTemplate) -> BasePromptTemplate:
    """Return a copy that may be formatted while the original is in use.

    `partial_format` removes a template's parser for a moment. The copy compiles a Jinja template only once.
    """
    parser = template.output_parser
    changes: dict[str, Any] = {
        "output_parser": None if parser is None else with_silent_methods(parser, "parse", "format")
    }
    if isinstance(template, SelectorPromptTemplate):
        arms = [(condition, copy_template(arm)) for condition, arm in template.conditionals or ()]
        changes |= {"default_template": copy_template(template.default_template), "conditionals": arms or None}
    return with_compiled_template(template.model_copy(update=changes))


def silent_splitter(splitter: Any) -> Any:
    return with_silent_methods(clone(splitter, callback_manager=silent_callback_manager()), "split_text")


def has_thread_safe_tokenizer(helper: PromptHelper) -> bool:
    """Return True if the tokenizer may be called on two threads at once; those of `transformers` may not.

    Two threads in a tokenizer of Hugging Face may raise "Already borrowed" (huggingface/tokenizers#537).
    """
    tokenizer: Any = helper._token_counter.tokenizer
    function = getattr(tokenizer, "func", tokenizer)
    return not type(getattr(function, "__self__", function)).__module__.startswith("transformers")


def copy_prompt_helper(helper: PromptHelper) -> PromptHelper:
    """Return a copy whose splitters emit no events, and whose tokenizer reads every text once."""
    copied: PromptHelper = clone(helper)
    counter = copied._token_counter
    counter = clone(counter, tokenizer=lru_cache(maxsize=_COUNTED_TEXTS)(counter.tokenizer))
    if not is_older_than("0.14.15"):  # which counts in a loop, on a thread of its own
        count_tokens = counter.aestimate_tokens_in_messages
        vars(counter)["estimate_tokens_in_messages"] = lambda messages: run_without_waiting(count_tokens(messages))
    copied._token_counter = counter

    def splitter(*args: Any, **kwargs: Any) -> Any:
        return silent_splitter(without_spans(copied, "get_text_splitter_given_prompt")(*args, **kwargs))

    vars(copied)["get_text_splitter_given_prompt"] = splitter
    return copied


def run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits, without an event loop.

    LlamaIndex would start a thread with a loop for it. Raises `Unreadable` if the coroutine waits.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise Unreadable("it takes waiting")


# ------------------------------------------------------------ templates that are compiled once


_COMPILED_TEMPLATES = 256
"""Number of templates that are kept compiled."""
_FORMAT_METHODS = ("format", "format_messages")


def with_compiled_template(template: BasePromptTemplate) -> BasePromptTemplate:
    """Return `template`, or for a `RichPromptTemplate` a copy that is compiled once and formats the same.

    LlamaIndex compiles such a template at each call. That takes a millisecond in which no other thread of the process
    runs, and dry runs format the same template several times a query.

    Touches the global name `Prompt` of LlamaIndex's module, which stands for what compiles: the copy's methods are
    LlamaIndex's own, with another function under that name. Without it (another version) `template` is returned.
    """
    kind = _caching_template_class() if type(template) is RichPromptTemplate else None
    if kind is None:
        return template
    copied = template.model_copy()
    copied.__class__ = kind
    return copied


@lru_cache(maxsize=1)
def _caching_template_class() -> type[RichPromptTemplate] | None:
    """Return a `RichPromptTemplate` class that compiles each text once; None for other versions, which is logged."""
    originals = {name: inspect.getattr_static(RichPromptTemplate, name, None) for name in _FORMAT_METHODS}
    if not all(isinstance(method, FunctionType) and "Prompt" in method.__globals__ for method in originals.values()):
        report_missing("llama-index-core", "RichPromptTemplate(Prompt)", "a template is compiled for each call")
        return None
    compile_template = _caching_compiler(originals["format"].__globals__["Prompt"])
    methods = {name: _with_globals(method, Prompt=compile_template) for name, method in originals.items()}
    return type("RichPromptTemplate", (RichPromptTemplate,), {"__module__": RichPromptTemplate.__module__, **methods})


def _with_globals(method: FunctionType, **names: Any) -> FunctionType:
    """Return a function with the same code, which finds other objects under these global names."""
    function = FunctionType(
        method.__code__, {**method.__globals__, **names}, method.__name__, method.__defaults__, method.__closure__
    )
    function.__kwdefaults__ = method.__kwdefaults__
    function.__qualname__, function.__doc__ = method.__qualname__, method.__doc__
    return function


def _caching_compiler(prompt: Any) -> Callable[[str], Any]:
    """Return a function that compiles each text once. Rendered prompts are not cached: they hold users' data."""

    @lru_cache(maxsize=_COMPILED_TEMPLATES)
    def make(text: str) -> Any:
        return prompt(text, render_cache=_NoRenderCache())

    return make


class _NoRenderCache:
    """A render cache that keeps nothing."""

    def get(self, context: dict[str, Any]) -> str | None:
        return None

    def set(self, context: dict[str, Any], prompt: str) -> None: ...

    def clear(self) -> None: ...
