"""Which pool plans an object: that of the pool-backed objects in it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.runnables import Runnable

from teola_plugin.adapters.provider_executor import ProviderPool
from teola_plugin.adapters.reachable import ReferentsOf, reachable
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.langchain.classes import is_pool_backed

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
    return vars(node).values() if isinstance(node, Runnable | BaseDocumentCompressor) else ()


def pools_below(root: Any, referents_of: ReferentsOf, *, limit: int | None = None) -> dict[int, EnginePool]:
    """Return the pools of the objects below `root`, by identity. At most `limit` objects are looked at.

    `referents_of` gives the objects that an object refers to. Without `limit` all of them are looked at.
    """
    pools = (pool_of(node) for node in reachable(root, referents_of, limit=limit))
    return {id(pool): pool for pool in pools if pool is not None}


def pool_of(node: Any) -> EnginePool | None:
    """The pool of a pool-backed object; a pool itself. Runs nothing of the user's, whose class a leaf's may be."""
    if issubclass(type(node), EnginePool):
        return None if issubclass(type(node), ProviderPool) else node  # type: ignore[no-any-return]
    if not is_pool_backed(node):
        return None
    class_attribute = inspect.getattr_static(type(node), "pool", None)
    ours = isinstance(class_attribute, property) and str(getattr(class_attribute.fget, "__module__", "")).startswith(
        "teola_plugin."
    )
    pool = node.pool if ours else getattr(node, "__dict__", {}).get("pool")
    return pool if isinstance(pool, EnginePool) else None
