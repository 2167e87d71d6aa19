"""Which pool plans an object: that of the pool-backed objects in it."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import MethodType
from typing import Any

from langchain_core.runnables import Runnable

from teola_plugin.adapters.langchain.own_models.wrapped import WrappedPool
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.langchain.classes import is_pool_backed

Reach = Callable[[Any], Iterable[Any]]
"""What an object holds, as far as it is looked into."""
HINT = "say which one plans it: accelerate(..., pool=...)"


def the_pool_of(runnable: Any) -> EnginePool | None:
    """The pool that the chain's pool-backed objects share; None without any. Raises `RegistrationError` for two."""
    pools = pools_below(runnable, fields)
    if len(pools) > 1:
        raise RegistrationError(f"the chain uses {len(pools)} different engine pools.", hint=HINT)
    return next(iter(pools.values()), None)


def fields(node: Any) -> Iterable[Any]:
    """Through fields and containers; user code is not looked into."""
    if isinstance(node, Mapping):
        return node.values()
    if isinstance(node, list | tuple):
        return node
    return vars(node).values() if isinstance(node, Runnable) else ()


def pools_below(root: Any, reach: Reach, *, most: int | None = None) -> dict[int, EnginePool]:
    """Pools of the objects below `root`, the nearest first, by identity; `most`: objects that are looked at."""
    pools = (pool_of(node) for node in below(root, reach, most=most))
    return {id(pool): pool for pool in pools if pool is not None}


def below(root: Any, reach: Reach, *, most: int | None = None) -> Iterator[Any]:
    """`root`, what it holds, what that holds: each once."""
    todo, seen = deque([root]), dict[object, Any]()
    while todo:
        node = todo.popleft()
        if _identity(node) in seen:
            continue
        seen[_identity(node)] = node  # what is made on the way must not give its number to another
        yield node
        room = None if most is None else max(0, most - len(seen) - len(todo))
        todo += islice(reach(node), room)


def _identity(node: Any) -> object:
    """Bound methods are made anew wherever they are asked for."""
    return (id(node.__self__), id(node.__func__)) if type(node) is MethodType else id(node)


def pool_of(node: Any) -> EnginePool | None:
    """The pool of a pool-backed object; a pool itself. Runs nothing of the user's, whose class a leaf's may be."""
    if issubclass(type(node), EnginePool):
        return None if issubclass(type(node), WrappedPool) else node  # type: ignore[no-any-return]
    if not is_pool_backed(node):
        return None
    held = inspect.getattr_static(type(node), "pool", None)
    ours = isinstance(held, property) and str(getattr(held.fget, "__module__", "")).startswith("teola_plugin.")
    pool = node.pool if ours else getattr(node, "__dict__", {}).get("pool")
    return pool if isinstance(pool, EnginePool) else None
