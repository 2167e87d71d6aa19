"""Copies of LlamaIndex's objects: with other attributes, of another class, without spans and events.

The framework's own code runs on them, ahead of the plain object, and tells nobody.
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
"""Texts whose tokens are kept: a chunk is counted again for every prompt that it may fit into."""


# ------------------------------------------------------------ attributes


def held(obj: object) -> Iterator[Any]:
    """All that an object has in its attributes, private ones of Pydantic's too."""
    yield from attributes(obj).values()
    yield from (getattr(obj, "__pydantic_private__", None) or {}).values()


_REPLACED = "__teola_replaced__"


class Overlay:
    """A mixin for objects that share the state of another, but for some attributes.

    `__teola_replaced__` has these by name: the value in the shared state, and the one that is read instead of it, for
    as long as nobody sets another.
    """

    __teola_replaced__: Mapping[str, tuple[Any, Any]]
    __teola_overlaid__: ClassVar[type]

    def __copy__(self) -> Any:
        """Return a copy of the shared state, with what is read instead put in."""
        made = copy.copy(sharing(self.__teola_overlaid__, self))
        vars(made).update(attributes(self))
        return made


def overlaid(obj: Any, values: Mapping[str, Any]) -> Any:
    """Create an object of the same class and state as `obj` that reads other `values` for some of its attributes.

    What is set on it is set on `obj`.
    """
    if all(attributes(obj).get(name) is value for name, value in values.items()):
        return obj
    own: Any = type(obj)
    if isinstance(obj, Overlay):
        own, values = obj.__teola_overlaid__, {**attributes(obj), **values}
    shared = vars(obj)
    replaced = {name: (shared.get(name), value) for name, value in values.items() if shared.get(name) is not value}
    methods = {name: one for name, one in shared.items() if isinstance(one, MethodType) and one.__self__ is obj}
    made = sharing(_overlay_class(own, tuple(sorted(replaced | methods))), obj)
    replaced |= {name: (one, MethodType(one.__func__, made)) for name, one in methods.items()}
    object.__setattr__(made, _REPLACED, replaced)
    return with_slots_of(obj, made)


def with_steps_of(cls: Any, theirs: Any) -> Any:
    """`cls`, a subclass of the workflow class `theirs`, with the same free functions as steps, now and later.

    Touches the classes' `_step_functions`. Without it: nothing, there are no such steps.
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
def _overlay_class(own: Any, names: tuple[str, ...]) -> Any:
    """Create a subclass with the name of the class, by which spans and events go."""
    namespace: dict[str, Any] = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {"__slots__": (_REPLACED,), "__teola_overlaid__": own}
    if issubclass(own, BaseModel):
        namespace["model_config"] = {"defer_build": True}
    cls = type(own)(own.__name__, (Overlay, own), namespace)
    for name in names:  # afterwards: Pydantic would take them for fields
        setattr(cls, name, _replaced_attribute(name))
    return with_steps_of(cls, own)


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


def shared_privates(obj: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a Pydantic object, but for its private attributes, which are shared: models, clients."""
    made = obj.model_copy()
    object.__setattr__(made, "__dict__", {name: copy.deepcopy(value, memo) for name, value in vars(obj).items()})
    return made


def with_attributes(obj: Any, values: Mapping[str, Any]) -> Any:
    """A shallow copy with these attributes; its own bound methods among them are the copy's."""
    made = copy.copy(obj)
    for name, value in values.items():
        own = isinstance(value, MethodType) and value.__self__ is obj
        vars(made)[name] = MethodType(value.__func__, made) if own else value
    return made


def clone(obj: Any, **changes: Any) -> Any:
    """A shallow copy with other attributes; quiet, since what runs ahead prints nothing."""
    made = copy.copy(obj)
    for name in ("_verbose", "verbose"):
        if name in vars(made):
            vars(made)[name] = False
    vars(made).update(changes)
    return made


# ------------------------------------------------------------ without spans and events


def unspanned(obj: Any, name: str) -> Callable[..., Any]:
    """A method of `obj` without the spans around it."""
    bound: Callable[..., Any] = inspect.unwrap(getattr(type(obj), name)).__get__(obj)
    return bound


def nobody() -> CallbackManager:
    """A callback manager without handlers, not even the global one."""
    made = CallbackManager([])
    made.handlers = []
    return made


def silent(obj: Any, *methods: str) -> Any:
    """A copy whose methods have no spans around them."""
    made = clone(obj)
    vars(made).update({name: unspanned(made, name) for name in methods})
    return made


def own_template(template: BasePromptTemplate) -> BasePromptTemplate:
    """A copy that may be formatted beside the original: `partial_format` takes a template's parser off meanwhile.

    A Jinja template is compiled once for all that it formats."""
    parser = template.output_parser
    changes: dict[str, Any] = {"output_parser": None if parser is None else silent(parser, "parse", "format")}
    if isinstance(template, SelectorPromptTemplate):
        arms = [(condition, own_template(one)) for condition, one in template.conditionals or ()]
        changes |= {"default_template": own_template(template.default_template), "conditionals": arms or None}
    return compiled(template.model_copy(update=changes))


def own_splitter(splitter: Any) -> Any:
    return silent(clone(splitter, callback_manager=nobody()), "split_text")


def counts_anywhere(helper: PromptHelper) -> bool:
    """Whether its tokenizer may be called on two threads at once; fast ones of `transformers` may not."""
    tokenizer: Any = helper._token_counter.tokenizer
    function = getattr(tokenizer, "func", tokenizer)
    return not type(getattr(function, "__self__", function)).__module__.startswith("transformers")


def own_helper(helper: PromptHelper) -> PromptHelper:
    """A prompt helper whose splitters tell nobody what they split, and whose tokenizer reads every text once."""
    made: PromptHelper = clone(helper)
    counter = made._token_counter
    counter = clone(counter, tokenizer=lru_cache(maxsize=_COUNTED_TEXTS)(counter.tokenizer))
    if not is_older_than("0.14.15"):  # which counts in a loop, on a thread of its own
        counted = counter.aestimate_tokens_in_messages
        vars(counter)["estimate_tokens_in_messages"] = lambda messages: at_once(counted(messages))
    made._token_counter = counter

    def splitter(*args: Any, **kwargs: Any) -> Any:
        return own_splitter(unspanned(made, "get_text_splitter_given_prompt")(*args, **kwargs))

    vars(made)["get_text_splitter_given_prompt"] = splitter
    return made


def at_once(made: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives that waits for nothing. LlamaIndex would start a thread with a loop of its own for it.

    Raises `Unreadable` where it waits.
    """
    try:
        made.send(None)
    except StopIteration as end:
        return end.value
    made.close()
    raise Unreadable("it takes waiting")


# ------------------------------------------------------------ templates that are compiled once


_COMPILED_TEMPLATES = 256
"""Templates that are kept compiled."""
_FORMAT_METHODS = ("format", "format_messages")


def compiled(template: BasePromptTemplate) -> BasePromptTemplate:
    """`template`, or for a `RichPromptTemplate` a copy that is compiled once. What it formats is the same.

    Touches the global name `Prompt` of LlamaIndex's module, which stands for what compiles: the copy's methods are
    LlamaIndex's own, with another function under that name. Without it (another version): the very template.
    """
    kind = _compiling_once() if type(template) is RichPromptTemplate else None
    if kind is None:
        return template
    made = template.model_copy()
    made.__class__ = kind
    return made


@lru_cache(maxsize=1)
def _compiling_once() -> type[RichPromptTemplate] | None:
    own = {name: inspect.getattr_static(RichPromptTemplate, name, None) for name in _FORMAT_METHODS}
    if not all(isinstance(method, FunctionType) and "Prompt" in method.__globals__ for method in own.values()):
        report_missing("llama-index-core", "RichPromptTemplate(Prompt)", "a template is compiled for each call")
        return None
    once = _once(own["format"].__globals__["Prompt"])
    methods = {name: _with(method, Prompt=once) for name, method in own.items()}
    return type("RichPromptTemplate", (RichPromptTemplate,), {"__module__": RichPromptTemplate.__module__, **methods})


def _with(method: FunctionType, **names: Any) -> FunctionType:
    """The same code, which finds other objects under these global names."""
    made = FunctionType(
        method.__code__, {**method.__globals__, **names}, method.__name__, method.__defaults__, method.__closure__
    )
    made.__kwdefaults__, made.__qualname__, made.__doc__ = method.__kwdefaults__, method.__qualname__, method.__doc__
    return made


def _once(prompt: Any) -> Callable[[str], Any]:
    """Compiles a text once; what it renders is not kept, since prompts hold users' data."""

    @lru_cache(maxsize=_COMPILED_TEMPLATES)
    def make(text: str) -> Any:
        return prompt(text, render_cache=_Nothing())

    return make


class _Nothing:
    """A cache of rendered prompts that keeps none."""

    def get(self, context: dict[str, Any]) -> str | None:
        return None

    def set(self, context: dict[str, Any], prompt: str) -> None: ...

    def clear(self) -> None: ...
