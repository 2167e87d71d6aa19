"""Models of other providers on an engine: pool-backed ones that answer as they are set up to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLLM

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.llm import TeolaLLM
from teola_plugin.adapters.langchain.tools import without_tools
from teola_plugin.adapters.sampling import sampling_fields
from teola_plugin.pool import EnginePool

_KEPT = (
    "callbacks",
    "tags",
    "metadata",
    "verbose",
    "cache",
    "rate_limiter",
    "disable_streaming",
    "custom_get_token_ids",
)


def model_on(obj: BaseChatModel | BaseLLM, engine: str, pool: EnginePool, kwargs: Mapping[str, Any]) -> Any:
    """Return a `ChatTeola` or `TeolaLLM` in place of `obj`.

    Raises `RegistrationError` for what the engine cannot do, also of the arguments that are bound to it.
    """
    return model_of(fields_of(obj), isinstance(obj, BaseChatModel), engine, pool, kwargs)


def model_of(
    fields: Mapping[str, Any], chat: bool, engine: str, pool: EnginePool, kwargs: Mapping[str, Any]
) -> ChatTeola | TeolaLLM:
    """Return what `model_on` returns, for the fields of `obj`."""
    model: Any
    if chat:
        model, kwargs = ChatTeola(pool=pool, engine=engine, **fields), without_tools(kwargs)[0]
    else:
        text_fields = {name: value for name, value in fields.items() if name in TeolaLLM.model_fields}
        model = TeolaLLM(pool=pool, engine=engine, **text_fields)
    model.sampling(None, kwargs)
    return model  # type: ignore[no-any-return]


def fields_of(model: Any) -> dict[str, Any]:
    """Return the fields of a pool-backed model that answers as `model` is set up to. Raises `RegistrationError`."""
    values = sampling_fields(model, dict(getattr(model, "model_kwargs", None) or {}))
    copied_fields = {key: value for key in _KEPT if (value := getattr(model, key, None)) is not None}
    return values | copied_fields | {"name": model.get_name()}
