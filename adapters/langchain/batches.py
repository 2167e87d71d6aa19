"""Batches of an accelerated object: each input is a query of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list
from langchain_core.utils.aiter import aclosing

from teola_plugin.adapters.langchain.active import asked_in
from teola_plugin.adapters.langchain.live.begun import Begun, BegunBatch, shared_limit, streaming
from teola_plugin.adapters.langchain.own_models.gates import Gate
from teola_plugin.adapters.langchain.own_models.places import AsyncPlace, Place, SyncPlace, placed
from teola_plugin.adapters.terms import NOTHING, Asked, interrupting
from teola_plugin.tracer.lcel_classes import is_pool_backed

_KNOWN = ("langchain_core.", "teola_plugin.")
_CLASSES = ("Runnable", "RunnableSequence", "RunnableBindingBase", "Batches", "ClaimingLeaf")
_ONE_BY_ONE = frozenset(f"{cls}.{method}" for cls in _CLASSES for method in ("batch", "abatch"))
"""Methods of these modules whose events and calls are those of a call for each input."""


def batches_one_by_one(chain: Runnable[Any, Any]) -> bool:
    """Whether a batch of it is, for all that can be seen, a call for each input.

    Not so: text models, which make one call of all; fallbacks and retries, which try all and then what has failed;
    classes of the user's own.
    """
    return all(_one_by_one(node) for node in _inside(chain))


def _one_by_one(node: Runnable[Any, Any]) -> bool:
    if is_pool_backed(node):
        return True
    own = (getattr(getattr(type(node), name), "__qualname__", "") for name in ("batch", "abatch"))
    modules = (getattr(getattr(type(node), name), "__module__", "") for name in ("batch", "abatch"))
    return all(name in _ONE_BY_ONE for name in own) and all(module.startswith(_KNOWN) for module in modules)


def _inside(root: Any) -> Iterator[Runnable[Any, Any]]:
    """All Runnables below `root`, through fields and containers; user code is not looked into."""
    todo, seen = [root], dict[int, Any]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, Mapping):
            todo += node.values()
        elif isinstance(node, list | tuple):
            todo += node
        elif isinstance(node, Runnable):
            yield node
            todo += vars(node).values()


def _paced(config: RunnableConfig) -> bool:
    """Whether an input's query has to begin when the framework comes to it."""
    return bool(config.get("max_concurrency")) or asked_in(config).deadline_s is not None


class Batches:
    """Stands before the framework's class in the order of methods."""

    if TYPE_CHECKING:
        kwargs: Mapping[str, Any]
        _pool: Any
        _routed: Any
        _chain: Runnable[Any, Any]

        def _begin(
            self,
            input: Any,
            config: RunnableConfig | None,
            kwargs: Mapping[str, Any] | None = None,
            kind: type[Place] | None = None,
            limit: Gate | None = None,
        ) -> Begun: ...

        def _original(self, config: RunnableConfig | None, asked: Asked | None = None) -> Begun: ...

    def _begin_all(
        self,
        inputs: list[Any],
        configs: Sequence[RunnableConfig],
        kwargs: Mapping[str, Any],
        kind: type[Place],
    ) -> BegunBatch | None:
        """A live query per input, all at once; None when there is nothing to run ahead."""
        way = kind if self._routed is not None and self._routed.batches else None
        if not inputs or (self._pool is None and way is None) or any(_paced(one) for one in configs):
            return None
        limit = shared_limit(configs)
        pairs = zip(inputs, configs, strict=True)
        return BegunBatch.of([self._begin(given, one, kwargs, way, limit) for given, one in pairs])

    def _one_by_one(self, configs: Sequence[RunnableConfig]) -> Any:
        """What is called for each input of a batch: where not all of them may be under way at once, or each has its
        own time. None where the batch is the original's own."""
        paced = any(_paced(one) for one in configs)
        if not paced or self._only_passes(configs) or not batches_one_by_one(self._chain):
            return None
        made: Any = self._limited(list(configs), len(configs)).model_copy()
        made._shadow = None
        return made

    def _of_all(self, configs: Sequence[RunnableConfig]) -> Begun:
        """The original's own batch, on the terms that its inputs have in common. The config of each says the rest."""
        merged = ensure_config(configs[0] if configs else None)
        asked = asked_in(merged) if all(asked_in(one) == asked_in(configs[0]) for one in configs) else NOTHING
        return self._original(merged, asked)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        configs = get_config_list(config, len(inputs))
        one = self._one_by_one(configs)
        if one is not None:
            return Runnable.batch(one, inputs, config, return_exceptions=return_exceptions, **kwargs)
        begun = self._begin_all(inputs, configs, kwargs, SyncPlace)
        if begun is None:
            with self._of_all(configs).beside():
                return self._chain.batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        with placed(*begun.places), streaming(*begun.runs):
            return begun.chain.batch(
                inputs, begun.configs, return_exceptions=return_exceptions, **{**self.kwargs, **kwargs}
            )

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        configs = get_config_list(config, len(inputs))
        one = self._one_by_one(configs)
        if one is not None:
            return await Runnable.abatch(one, inputs, config, return_exceptions=return_exceptions, **kwargs)
        begun = self._begin_all(inputs, configs, kwargs, AsyncPlace)
        if begun is None:
            together = self._of_all(configs)
            with together.beside():
                async with interrupting(together.deadline):
                    return await self._chain.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        with placed(*begun.places), streaming(*begun.runs):
            return await begun.chain.abatch(
                inputs, begun.configs, return_exceptions=return_exceptions, **{**self.kwargs, **kwargs}
            )

    def batch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        if self._only_passes(get_config_list(config, len(inputs))):
            return self._chain.batch_as_completed(inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload, no-any-return]
        one = self._limited(config, len(inputs))
        return Runnable.batch_as_completed(one, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[misc, call-overload, no-any-return]

    async def abatch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        if self._only_passes(get_config_list(config, len(inputs))):
            made = self._chain.abatch_as_completed(inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]
        else:
            one = self._limited(config, len(inputs))
            made = Runnable.abatch_as_completed(one, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]
        async with aclosing(made) as ended:
            async for done in ended:
                yield done

    def _only_passes(self, configs: Sequence[RunnableConfig]) -> bool:
        """Whether the original just runs, whatever the input, and may take its time."""
        timed = any(asked_in(one).deadline_s is not None for one in configs)
        return self._pool is None and self._routed is None and not timed

    def _limited(self, config: Any, inputs: int) -> Any:
        """This object for one batch, whose `max_concurrency` bounds the early work of all its inputs together."""
        limit = shared_limit(get_config_list(config, inputs))
        if limit is None or self._routed is None:
            return self
        made: Any = self.model_copy()  # type: ignore[attr-defined]
        made._limit = limit
        return made
