"""Facts about LangChain objects, which are trusted only if nothing that they execute is overridden."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers.base import BaseLLMOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEachBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.runnables.retry import RunnableRetry
from langchain_core.tools import BaseTool
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from teola_plugin.errors import TraceError
from teola_plugin.graph import UNKNOWN_EFFECT, Effect
from teola_plugin.tracer.leaf import Leaf
from teola_plugin.tracer.purity.purity import Purity, analyze_callable

Node = Runnable[Any, Any]
_HARMLESS_OVERRIDES = re.compile(
    r"__.*|lc_.*|get_.*|with_.*|(a?stream|a?transform)_events|is_lc_serializable|bind|bind_tools|pipe|map|assign|pick"
    r"|partial|pretty_.*|save|dict|asdict|json|copy|model_post_init|_abc_.*|from_.*|validate_.*|pre_init_.*"
)
"""Methods that may be overridden without changing the result of a call."""
_RUN_KEEPERS = ("langchain_core", "langchain_classic", "teola_plugin")
_EXECUTED = ("invoke", "ainvoke", "stream", "astream", "transform", "atransform", "batch", "abatch")
_STORE_WRITERS = ("add_documents", "add_texts", "aadd_documents", "aadd_texts")


@lru_cache(maxsize=1024)
def _overridden_method(cls: type[Any], base: type[Any]) -> str:
    """Return the name of a method of a class below `base` that changes what a call does, "" if there is none."""
    for derived in cls.__mro__[: cls.__mro__.index(base)]:
        for name, value in vars(derived).items():
            if callable(value) and callable(getattr(base, name, None)) and not _HARMLESS_OVERRIDES.fullmatch(name):
                return f"{derived.__name__}.{name}"
    return ""


def find_override(node: object, base: type[Any]) -> str:
    """Return what overrides a method of `base` so that a call does something else, "" if nothing does.

    It is a method of a subclass, or an attribute of the object itself.
    """
    method = _overridden_method(type(node), base)  # type: ignore[arg-type]
    if method or vars(node).keys().isdisjoint(_EXECUTED):
        return method
    return next(f"its own {name}" for name in _EXECUTED if name in vars(node))


@lru_cache(maxsize=1024)
def _leaf_class(cls: type[Any]) -> type[Any] | None:
    """Return the class that describes the leaf of pool-backed objects of `cls`, None if these are not pool-backed."""
    return next((base for base in cls.__mro__ if "__teola_leaf__" in vars(base)), None)


_find_worker: list[Callable[[object], object | None]] = []
"""Set by `find_workers_with`."""


def find_workers_with(find_worker: Callable[[object], object | None]) -> None:
    """Ask `find_worker` from now on for the pool-backed object that does the work of an object that is not."""
    _find_worker[:] = [find_worker]


def worker_of(node: object) -> Any:
    """Return the pool-backed object that does the work of a node: the node itself, or the worker of a routed object.

    None for an object that does its work itself.
    """
    if _leaf_class(type(node)) is not None:  # type: ignore[arg-type]
        return node
    return _find_worker[0](node) if _find_worker else None


def leaf_of(node: object, kwargs: Mapping[str, Any]) -> Leaf | str | None:
    """Return the leaf of a pool-backed object, the reason if it has none, or None for any other object."""
    worker = worker_of(node)
    if worker is None:
        return None
    leaf_class = _leaf_class(type(worker))  # type: ignore[arg-type]
    if leaf_class is not None and worker is node and (override := find_override(node, leaf_class)):
        return f"{override} overrides what the pool-backed class does"
    leaf: Leaf | None = worker.__teola_leaf__(kwargs)
    return leaf or "its bound arguments change what it does"


def is_pool_backed(node: object) -> bool:
    """Return True if an engine does the work of a node."""
    return worker_of(node) is not None


class ProviderMethod(Runnable[Any, Any]):
    """A search of the user's own vector store, or a method of the user's own embeddings, called as a Runnable.

    See `provider_method`.
    """

    def __init__(self, provider: Any, method: str) -> None:
        """`method`: name of the sync one."""
        self.provider, self.method = provider, method

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return getattr(self.provider, self.method)(input, **kwargs)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return await getattr(self.provider, f"a{self.method}")(input, **kwargs)


_provider_methods: WeakValueDictionary[tuple[int, str], ProviderMethod] = WeakValueDictionary()


def provider_method(provider: Any, method: str) -> ProviderMethod:
    """Return a method of a store or of embeddings as a Runnable: the same one each time, as long as one is kept."""
    runnable = ProviderMethod(provider, method)
    return _provider_methods.setdefault((id(provider), method), runnable)


def provider_of(node: Any) -> Any:
    """Return the object whose provider method a call of a node makes: the node itself, or the store or embeddings."""
    return node.provider if type(node) is ProviderMethod else node


def is_search(node: object) -> bool:
    """Return True for what searches a store: a retriever, or a search of a vector store."""
    return isinstance(provider_of(node), (BaseRetriever, VectorStore))


def check_runnable(node: object, path: str) -> None:
    """Raise `TraceError` for anything but a Runnable."""
    if not isinstance(node, Runnable):
        raise TraceError(
            f"{path} is a {type(node).__qualname__}, not a LangChain Runnable.",
            path=path,
            hint="pass a Runnable (a chain, a model, a retriever, RunnableLambda(function), ...)",
        )


def is_transparent(node: Node) -> bool:
    """Return True if the node adds no component of its own to the graph, so that it needs no name."""
    if is_pool_backed(node):
        return False
    if isinstance(node, RunnableSequence):
        return all(is_transparent(step) for step in node.steps)
    if isinstance(node, RunnableParallel):
        return all(is_transparent(step) for step in node.steps__.values())
    if isinstance(node, RunnableAssign):
        return is_transparent(node.mapper)
    if isinstance(node, RunnableBindingBase):
        return is_transparent(node.bound)
    if isinstance(node, RunnableLambda):
        reads = analyze_callable(getattr(node, "func", None))
        return reads is not None and not (isinstance(reads, Purity) and reads.path is None)
    if isinstance(node, RunnablePassthrough):
        return node.func is None and node.afunc is None
    return isinstance(node, (RunnablePick, BasePromptTemplate))


_NAMES: tuple[tuple[type, str], ...] = (
    (BaseLanguageModel, "model"),
    (BaseRetriever, "retrieve"),
    (BaseLLMOutputParser, "parse"),
    (BasePromptTemplate, "prompt"),
    (RunnableEachBase, "each"),
    (RunnableSequence, "sequence"),
    (RunnableParallel, "parallel"),
    (RunnableAssign, "assign"),
    (RunnablePick, "pick"),
    (RunnablePassthrough, "passthrough"),
    (RunnableBranch, "branch"),
    (RunnableGenerator, "generator"),
    (RunnableWithFallbacks, "fallbacks"),
    (RunnableRetry, "retry"),
    (RunnableWithMessageHistory, "history"),
    (RouterRunnable, "router"),
    (DynamicRunnable, "configurable"),
)


WRAPPED_FUNCTION = "__teola_function__"
"""Attribute of functions that stand for one of the user's: that function."""
PLANNED_CHAIN = "__teola_planned_chain__"
"""Attribute of functions that return one chain in every call: that chain, accelerated if it gains."""


def functions_of(node: object) -> Mapping[bool | None, Any]:
    """Return the functions of the user's that a `RunnableLambda` calls: the key is True for the one that it calls on a
    loop, False for the other; None if it has only one."""
    if type(node) is not RunnableLambda:
        return {}
    functions = [vars(node)[name] for name in ("func", "afunc") if name in vars(node)]
    keys = (False, True) if len(functions) == 2 else (None,)
    return {key: getattr(one, WRAPPED_FUNCTION, one) for key, one in zip(keys, functions, strict=False)}


def short_name(node: object) -> str:
    """Return one readable word for the name of the node's component."""
    if isinstance(node, RunnableLambda):
        func = vars(node).get("func") or vars(node).get("afunc")
        name = getattr(func, "__name__", "")
        return name if isinstance(name, str) and name.isidentifier() else "lambda"
    if isinstance(node, BaseTool):
        return node.name
    class_name = next((name for cls, name in _NAMES if isinstance(node, cls)), "")
    return class_name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(node).__name__).lower()


def reason_not_lowered(node: object) -> str:
    """Return the reason, for the report, why a node that no rule lowers runs as it always did."""
    if isinstance(node, RunnableLambda):
        return "your code: runs once, at its usual time; pool-backed models it calls join the query"
    if isinstance(node, (BaseLanguageModel, BaseRetriever)):
        return "wrapped leaf: runs as it always did"
    if isinstance(node, BaseTool):
        return "a tool: runs once, at its usual time"
    if isinstance(node, DynamicRunnable):
        return "its structure depends on the configuration of each call"
    if isinstance(node, (BaseLLMOutputParser, BasePromptTemplate)):
        return f"{type(node).__name__} is not known to be pure"
    return f"{type(node).__name__} decides at run time what runs"


def has_own_run(node: object) -> bool:
    """Return True if the node has a run, as callbacks see it, that ends with exactly the value that the node returns.

    The frameworks' own methods start one. A Router or a Configurable lends its tag to whatever it chooses.
    """
    if isinstance(node, (RouterRunnable, DynamicRunnable)):
        return False
    methods = [getattr(type(node), name) for name in ("invoke", "ainvoke", "transform", "atransform")]
    if not all(str(getattr(m, "__module__", "")).split(".")[0] in _RUN_KEEPERS for m in methods):
        return False
    if isinstance(node, RunnableWithFallbacks):  # what it tries has the same parent and tag as itself
        return all(has_own_run(alternative) for alternative in node.runnables)
    return has_own_run(node.bound) if isinstance(node, RunnableBindingBase) else True


def children(node: object) -> Iterator[tuple[str, object]]:
    """Yield (path, part) for the parts of a composite; none for an accelerated object, which has a plan of its own."""
    if is_accelerated(node):
        return
    if isinstance(node, RunnableSequence):
        yield from ((f".steps[{i}]", step) for i, step in enumerate(node.steps))
    elif isinstance(node, RunnableParallel):
        yield from ((f'.steps__["{key}"]', step) for key, step in node.steps__.items())
    elif isinstance(node, RunnableAssign):
        yield ".mapper", node.mapper
    elif isinstance(node, (RunnableBindingBase, RunnableEachBase)):
        yield ".bound", node.bound
    elif isinstance(node, RunnableBranch):
        for i, (condition, arm) in enumerate(node.branches):
            yield from ((f".branches[{i}][0]", condition), (f".branches[{i}][1]", arm))
        yield ".default", node.default
    elif isinstance(node, RunnableWithFallbacks):
        yield from ((f".runnables[{i}]", alternative) for i, alternative in enumerate(node.runnables))
    elif isinstance(node, RouterRunnable):
        yield from ((f'.runnables["{key}"]', route) for key, route in node.runnables.items())
    elif isinstance(node, DynamicRunnable):
        yield ".default", node.default


def is_accelerated(node: object) -> bool:
    """Return True for an object that `accelerate` returned: it has an e-graph of its own."""
    return hasattr(type(node), "__teola_accelerated__")


def unwrap_accelerated(node: Any) -> Any:
    """Return the chain inside an accelerated object, any other node as it is."""
    return getattr(node, "chain", node) if is_accelerated(node) else node


def find_pool_backed(node: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield (path, part) for each pool-backed or accelerated object among a node and its parts.

    Only `children` are searched, and nothing inside an object that was found. The tracer reports these objects where
    it does not understand the composite: their calls join the query.
    """
    pending = [(path, node)]
    while pending:
        part_path, part = pending.pop()
        if is_pool_backed(part) or is_accelerated(part):
            yield part_path, part
        else:
            pending += [(part_path + suffix, child) for suffix, child in reversed(list(children(part)))]


def store_resource(store: InMemoryVectorStore) -> str:
    """Return the name of a store in this process among the effects of a graph."""
    return f"memory:{id(store.store):x}"


def store_effects(func: object) -> tuple[Effect, ...]:
    """Return the effects of a method that adds documents to a store in this process; () for any other function.

    Searches of the store, which run ahead of any other user code, have to wait for such a method.
    """
    store, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
    if type(store) is not InMemoryVectorStore or name not in _STORE_WRITERS:
        return ()
    if find_override(store, InMemoryVectorStore):
        return ()
    return UNKNOWN_EFFECT, Effect(store_resource(store), writes=True)


class Choice(NamedTuple):
    """The parts that a composite may call with its input."""

    parts: tuple[Node, ...]
    is_certain: bool
    """True if the only part is called whatever happens."""
    input_key: str = ""
    """Key of the input's value that the part gets; "" if it gets the whole input."""


_CHOICES: tuple[tuple[type, Callable[[Any], Choice]], ...] = (
    (RunnableBranch, lambda node: Choice((*(arm for _, arm in node.branches), node.default), False)),
    (RouterRunnable, lambda node: Choice(tuple(node.runnables.values()), False, "input")),
    (RunnableWithFallbacks, lambda node: Choice((node.runnable,), True)),
    (RunnableRetry, lambda node: Choice((node.bound,), True)),
)


def choice_of(node: Node) -> Choice | None:
    """Return the parts that a branch, router, fallbacks or retry may call; None for any other node.

    Return None, too, if a method is overridden. The tracer calls it for a node that it does not understand, and adds
    the requests of these parts that are known before the choice.
    """
    for kind, to_choice in _CHOICES:
        if type(node) is kind and not find_override(node, kind):
            choice = to_choice(node)
            return choice._replace(parts=tuple(unwrap_accelerated(part) for part in choice.parts))
    return None


# ------------------------------------------------------------ branches

_NAMING_KEYS = ("metadata", "run_name", "tags")
"""Keys of a config that only say how runs are called."""
_OTHER_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_COROUTINE | inspect.CO_GENERATOR
"""`co_flags` of functions that take any number of arguments, or do not return their value at once."""


def without_names(runnable: Any) -> Any:
    """Return the Runnable to which `with_config` has given a name, tags or metadata; any other one as it is."""
    node = unwrap_accelerated(runnable)
    while type(node) is RunnableBinding and not find_override(node, RunnableBinding):
        if node.kwargs or node.config_factories or not node.config.keys() <= set(_NAMING_KEYS):
            break
        node = unwrap_accelerated(node.bound)
    return node


def has_branch(node: Any) -> bool:
    """Return True for a `RunnableBranch`, and for a composite of the framework that certainly calls one."""
    kinds = (RunnableBranch, RunnableSequence, RunnableParallel, RunnableAssign)
    kind = next((kind for kind in kinds if isinstance(node, kind)), None)
    if kind is None or find_override(node, kind):
        return False
    if kind is RunnableBranch:
        return True
    steps = node.steps if kind is RunnableSequence else [step for _, step in steps_by_key(node)]
    return any(has_branch(without_names(step)) for step in steps)


def steps_by_key(node: Any) -> Sequence[tuple[str, Any]]:
    """Return the steps of a `RunnableParallel`, or of the one in a `RunnableAssign`; none if that is overridden."""
    mapper = node.mapper if isinstance(node, RunnableAssign) else node
    return [] if find_override(mapper, RunnableParallel) else list(mapper.steps__.items())


def plain_condition(condition: Any) -> FunctionType | None:
    """Return the function of one argument that a condition calls in any case; None for any other condition."""
    if type(condition) is not RunnableLambda or "afunc" in vars(condition) or find_override(condition, RunnableLambda):
        return None
    function = vars(condition).get("func")
    if type(function) is not FunctionType:
        return None
    code = function.__code__
    has_one_argument = code.co_argcount == 1 and not code.co_kwonlyargcount
    return function if has_one_argument and not code.co_flags & _OTHER_ARGUMENTS else None
