"""`EngineMiddleware`: an agent of `create_agent` whose model cannot be changed asks an engine of a pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel

from teola_plugin.adapters.calls import check_engine
from teola_plugin.adapters.options import Bindings, pairs
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.langchain.classes import is_pool_backed

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as missing:
    raise RegistrationError(
        "EngineMiddleware is for agents of langchain 1, which is not installed.", hint="pip install 'langchain>=1.0'"
    ) from missing

KEPT = 16
"""Models that an agent may be given at run time, remembered with what serves them."""


class EngineMiddleware(AgentMiddleware[Any, Any, Any]):
    """Has an engine of the pool do the work of the agent's model, as `pool.bound(model, engine)` does.

    ::

        agent = create_agent("openai:gpt-4o", tools, middleware=[..., EngineMiddleware(pool, "llm")])

    Put it last: what other middleware chooses is served, too. Pool-backed models are called as they are. With `bind`,
    which is as in `accelerate`, the models that it names are served, each by its engine, and no others.

    Where the model can be changed, `create_agent(pool.bound(model, "llm"), tools)` does the same. Raises
    `RegistrationError` for a model that cannot be served faithfully: with `bind` here, else when the agent asks it.
    """

    def __init__(self, pool: EnginePool, engine: str = "llm", *, bind: Bindings | None = None) -> None:
        super().__init__()
        if bind is None:
            check_engine(pool, engine)
        self.pool = pool
        self._engine = engine if bind is None else None
        self._served: dict[int, _Served] = {}
        for model, name in pairs(bind):
            self._serve(model, name)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        return handler(request.override(model=self.served(request.model)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        return await handler(request.override(model=self.served(request.model)))

    def served(self, model: BaseChatModel) -> BaseChatModel:
        """What is called in the place of `model`. Raises `RegistrationError`."""
        known = self._served.get(id(model))
        if known is not None and known.model is model:
            return known.made if known.is_fresh() else self._serve(model, known.engine)
        return model if self._engine is None or is_pool_backed(model) else self._serve(model, self._engine)

    def _serve(self, model: BaseChatModel, engine: str) -> BaseChatModel:
        made: BaseChatModel = self.pool.bound(model, engine)
        self._served[id(model)] = _Served(model, engine, made, dict(vars(model)))
        for other in list(self._served)[:-KEPT] if self._engine is not None else ():
            self._served.pop(other, None)
        return made


class _Served(NamedTuple):
    model: BaseChatModel
    engine: str
    made: BaseChatModel
    attributes: dict[str, Any]
    """Of the model, when `made` was."""

    def is_fresh(self) -> bool:
        """Whether nobody has set an attribute of the model since."""
        now = vars(self.model)
        return now.keys() == self.attributes.keys() and all(now[key] is self.attributes[key] for key in now)
