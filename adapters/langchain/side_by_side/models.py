"""A chat model that is asked several prompts in one call: the framework's sync code asks them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel

from teola_plugin.adapters.langchain.side_by_side.prompts import PromptCalls
from teola_plugin.adapters.own_class import subclass_of
from teola_plugin.shims.pydantic import sharing

_CALLS = "_teola_prompt_calls"


def together(model: Any) -> Any:
    """An object of the model's class, with all that the model is and has, for one `generate`.

    The very model where its calls are counted or kept: by a rate limiter, or a cache, which may know the second of two.
    """
    counted = getattr(model, "rate_limiter", None) or getattr(model, "cache", None) or get_llm_cache() is not None
    if counted or not isinstance(model, BaseChatModel):
        return model
    made = sharing(subclass_of(type(model), _Together, slots=(_CALLS,)), model)
    object.__setattr__(made, _CALLS, PromptCalls(model))
    return made


class _Together:
    """Stands before the model's class."""

    def generate(self: Any, messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        calls: PromptCalls = getattr(self, _CALLS)
        calls.expect(messages)
        try:
            return super().generate(messages, *args, **kwargs)  # type: ignore[misc]
        finally:
            calls.close()

    def _generate(self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        calls: PromptCalls = getattr(self, _CALLS)
        return calls.generate(messages, stop, run_manager, kwargs)
