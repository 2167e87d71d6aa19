"""Copies of LlamaIndex's objects: with other attributes, of another class, without spans and events.

The framework's own code runs on them before the original does, and no handler hears of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, ClassVar

from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import BasePromptTemplate, RichPromptTemplate, SelectorPromptTemplate
from pydantic import BaseModel

from teola_plugin.shims import report_missing
from teola_plugin.shims.llamaindex.records import Unreadable, is_older_than
from teola_plugin.shims.pydantic import of_class as of_class
from teola_plugin.shims.pydantic import sharing as sharing

_COUNTED_TEXTS = 1024
"""Texts whose token counts are cached: a chunk is counted again for every prompt that it may fit into."""


# ------------------------------------------------------------ attributes


def attribute_values(obj: object) -> Iterator[Any]:
    """Yield the values of an object's attributes, including Pydantic's private ones."""
    yield from attributes(obj).values()
    yield from (getattr(obj, "__pydantic_private__", None) or {}).values()


_REPLACED = "__teola_replaced__"


class Overlay:
    """A mixin for objects that share the state of another, but for some attributes.

    `__teola_replaced__` has these by name: the value in the shared state, and the one that is read instead of it, for
    as long as no other value is set.
    """

    __teola_replaced__: Mapping[str, tuple[Any, Any]]
    __teola_overlaid__: ClassVar[type]

    def __copy__(self) -> Any:
        """Return a copy of the shared state with the replaced values in it."""
        copied = copy.copy(sharing(self.__teola_overlaid__, self))
        vars(copied).update(attributes(self))
        return copied


def with_overlay(obj: Any, values: Mapping[str, Any]) -> Any:
    """Create an object of the same class and state as `obj` that reads other `values` for some of its attributes.

    What is set on it is set on `obj`.
    """
    if all(attributes(obj).get(name) is value for name, value in values.items()):
        return obj
    original_class: Any = type(obj)
    if isinstance(obj, Overlay):
        original_class, values = obj.__teola_overlaid__, {**attributes(obj), **values}
    shared = vars(obj)
    replaced = {name: (shared.get(name), value) for name, value in values.items() if shared.get(name) is not value}
    methods = {
        name: method for name, method in shared.items() if isinstance(method, MethodType) and method.__self__ is obj
    }
    overlay = sharing(_overlay_class(original_class, tuple(sorted(replaced | methods))), obj)
    replaced |= {name: (method, MethodType(method.__func__, overlay)) for name, method in methods.items()}
    object.__setattr__(overlay, _REPLACED, replaced)
    return with_slots_of(obj, overlay)


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


def attributes(obj: object) -> Mapping[str, Any]:
    """Return the attributes of an object, by name, as they are read from it."""
    shared = vars(obj)
    if not isinstance(obj, Overlay):
        return shared
    return {**shared, **{name: getattr(obj, name) for name in obj.__teola_replaced__ if name in shared}}


@lru_cache(maxsize=256)
def _overlay_class(original_class: Any, names: tuple[str, ...]) -> Any:
    """Create a subclass with the name of the class, which spans and events contain."""
    namespace: dict[str, Any] = {
        name: getattr(original_class, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    namespace |= {"__slots__": (_REPLACED,), "__teola_overlaid__": original_class}
    if issubclass(original_class, BaseModel):
        namespace["model_config"] = {"defer_build": True}
    cls = type(original_class)(original_class.__name__, (Overlay, original_class), namespace)
    for name in names:  # afterwards: Pydantic would take them for fields
        setattr(cls, name, _replaced_attribute(name))
    return with_steps_of(cls, original_class)


def _replaced_attribute(name: str) -> property:
    def read(self: Any) -> Any:
        shared = vars(self)
        before, value = self.__teola_replaced__.get(name, (None, None))
        if name not in shared:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return value if shared[name] is before else shared[name]

    def write(self: Any, value: Any) -> None:
        vars(self)[name] = value

    def remove(self: Any) -> None:
        del vars(self)[name]

    return property(read, write, remove)


def copy_sharing_privates(obj: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a Pydantic object that shares its private attributes (models, clients)."""
    copied = obj.model_copy()
    object.__setattr__(copied, "__dict__", {name: copy.deepcopy(value, memo) for name, value in vars(obj).items()})
    return copied


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
    """Return a method of `obj` without the spans around it."""
    bound: Callable[..., Any] = inspect.unwrap(getattr(type(obj), name)).__get__(obj)
    return bound


def silent_callback_manager() -> CallbackManager:
    """Return a callback manager without handlers, not even the global one."""
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
    """Return True if the tokenizer may be called on two threads at once; those of `transformers` may not."""
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
