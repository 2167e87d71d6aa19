"""What users hold of an accelerated model: an object of the model's own class, with all the methods of that."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.utils.aiter import aclosing

from teola_plugin.adapters.early_work import joinable
from teola_plugin.adapters.langchain.live.started_calls import StartedCall
from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.adapters.own_class import subclass_of
from teola_plugin.adapters.terms import context_of
from teola_plugin.shims.pydantic import sharing
from teola_plugin.tracer.langchain.classes import is_pool_backed, leaf_of
from teola_plugin.tracer.leaf import Leaf

_CALLS = "_teola_calls"
_OURS = frozenset(
    {"chain", "report", "plan", "gains", "explain", "last_trace", "shadow", "__teola_of__", "__teola_explained__"}
    | AcceleratedRunnable.model_fields.keys()
    | AcceleratedRunnable.__private_attributes__.keys()
)
"""What an `AcceleratedRunnable` has beside its entry points, and a model has not."""


class ModelCalls(AcceleratedRunnable):
    """The entry points of an accelerated model. Nothing of a single call can begin before it: the query is traced."""

    def _started(self, input: Any, config: Any, terms: Any, *more: Any) -> StartedCall | None:
        """Inside a live query the model just runs: who planned that query knows of the call."""
        pool = self._pool
        if pool is not None and joinable(context_of(terms.asked, terms.runs, pool).run) is not None:
            return None
        return super()._started(input, config, terms, *more)

    def shallow_copy(self) -> Any:
        """The model that this calls, copied, and accelerated on the same terms."""
        assert self._again is not None
        made: Any = self._again(copy.copy(self.bound) if self.chain is self.bound else self.bound)
        vars(made).update(vars(self.chain))
        return made


class AcceleratedModel:
    """Stands before the model's class in the order of methods. Its attributes are those of the model that it calls:
    what is set on one is set on both."""

    __teola_accelerated__: ClassVar[bool] = True
    __teola_accelerated_runnable__: ClassVar[bool] = True

    if TYPE_CHECKING:
        _teola_calls: ModelCalls

    def _here(self) -> Any:
        """Who makes the calls. The class's own methods, for one that was made by its constructor."""
        calls = getattr(self, _CALLS, None)
        return super() if calls is None else calls

    def __getattr__(self, name: str) -> Any:
        """What the model has no attribute for."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name not in _OURS or (calls := getattr(self, _CALLS, None)) is None:
                raise
        return getattr(calls, name)

    # ------------------------------------------------------------ entry points

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return self._here().invoke(*args, **kwargs)

    async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
        return await self._here().ainvoke(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self._here().stream(*args, **kwargs)

    async def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(self._here().astream(*args, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def transform(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self._here().transform(*args, **kwargs)

    async def atransform(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(self._here().atransform(*args, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def batch(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._here().batch(*args, **kwargs)  # type: ignore[no-any-return]

    async def abatch(self, *args: Any, **kwargs: Any) -> list[Any]:
        return await self._here().abatch(*args, **kwargs)  # type: ignore[no-any-return]

    def batch_as_completed(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, Any]]:
        return self._here().batch_as_completed(*args, **kwargs)  # type: ignore[no-any-return]

    async def abatch_as_completed(self, *args: Any, **kwargs: Any) -> AsyncIterator[tuple[int, Any]]:
        async with aclosing(self._here().abatch_as_completed(*args, **kwargs)) as ended:
            async for done in ended:
                yield done

    def astream_events(self, *args: Any, **kwargs: Any) -> Any:
        return self._here().astream_events(*args, **kwargs)

    # ------------------------------------------------------------ copies

    def __copy__(self) -> Any:
        return self._teola_calls.shallow_copy()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Any:
        """A copy of the original, accelerated on the same terms; pools are shared."""
        return copy.deepcopy(self._teola_calls, memo)

    def __reduce__(self) -> Any:
        """As the original is pickled. Raises `RegistrationError` for one with a pool, which stays where it is."""
        return self._teola_calls.__reduce__()


class AcceleratedPoolModel(AcceleratedModel):
    """Of a pool-backed model: in a chain it is the leaf that the model is."""

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        calls = getattr(self, _CALLS, None)
        found = super().__teola_leaf__(kwargs) if calls is None else leaf_of(calls.chain, kwargs)  # type: ignore[misc]
        return None if isinstance(found, str) else found


def as_model(calls: AcceleratedRunnable) -> Any:
    """An object of the class of the model that `calls` calls."""
    served = calls.chain
    base = AcceleratedPoolModel if is_pool_backed(served) else AcceleratedModel
    made = sharing(subclass_of(type(served), base, slots=(_CALLS,)), served)
    object.__setattr__(made, _CALLS, calls)
    return made
