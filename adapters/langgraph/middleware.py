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

MAX_MODELS = 16
"""Models of requests that are remembered with the models that replace them."""


class EngineMiddleware(AgentMiddleware[Any, Any, Any]):
    """Middleware that has an engine of the pool do the work of the agent's model, as `pool.bound(model, engine)` does.

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
        self._replacements: dict[int, _Replacement] = {}
        for model, engine_name in pairs(bind):
            self._replace(model, engine_name)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        return handler(request.override(model=self.pool_model_of(request.model)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        return await handler(request.override(model=self.pool_model_of(request.model)))

    def pool_model_of(self, model: BaseChatModel) -> BaseChatModel:
        """Return the model that is called in place of `model`: its replacement on the pool, or the model itself.

        Raises `RegistrationError` for a model that cannot be served faithfully.
        """
        replacement = self._replacements.get(id(model))
        if replacement is not None and replacement.model is model:
            return replacement.pool_model
        return model if self._engine is None or is_pool_backed(model) else self._replace(model, self._engine)

    def _replace(self, model: BaseChatModel, engine: str) -> BaseChatModel:
        pool_model: BaseChatModel = self.pool.bound(model, engine)
        self._replacements[id(model)] = _Replacement(model, pool_model)
        for oldest in list(self._replacements)[:-MAX_MODELS] if self._engine is not None else ():
            self._replacements.pop(oldest, None)
        return pool_model


class _Replacement(NamedTuple):
    model: BaseChatModel
    pool_model: BaseChatModel
    """It shares the state of `model`."""
