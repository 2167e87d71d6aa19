"""A model that is asked several prompts in one call: the framework's sync code asks them one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LLM, BaseChatModel

from teola_plugin.adapters.langchain.side_by_side.prompts import PromptCalls
from teola_plugin.adapters.own_class import subclass_of
from teola_plugin.shims.pydantic import sharing

_CALLS = "_teola_prompt_calls"


def together(model: Any) -> Any:
    """An object of a chat model's class, with all that the model is and has, for one `generate`.

    The very model where its calls are counted or kept: by a rate limiter, or a cache, which may know the second of two.
    """
    counted = getattr(model, "rate_limiter", None) or getattr(model, "cache", None) or get_llm_cache() is not None
    if counted or not isinstance(model, BaseChatModel):
        return model
    return _with_calls(model, _ChatTogether, PromptCalls(model, "_generate"))


def _with_calls(model: Any, base: type, calls: PromptCalls) -> Any:
    made = sharing(subclass_of(type(model), base, slots=(_CALLS,)), model)
    object.__setattr__(made, _CALLS, calls)
    return made


class _ChatTogether:
    """Stands before the model's class."""

    def generate(self: Any, messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        calls: PromptCalls = getattr(self, _CALLS)
        if all(isinstance(one.content, str) for prompt in messages for one in prompt):
            calls.expect([list(prompt) for prompt in messages])  # what is in blocks is made something else first
        try:
            return super().generate(messages, *args, **kwargs)  # type: ignore[misc]
        finally:
            calls.close()

    def _generate(self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        return getattr(self, _CALLS).asked(messages, stop, run_manager, kwargs)


# ------------------------------------------------------------ text models


def asks_one_by_one(model: Any) -> bool:
    """Whether it is a text model whose batches are the framework's loop over its own `_call`."""
    kind = type(model)
    if not isinstance(model, LLM) or kind._generate is not LLM._generate:
        return False
    return "run_manager" in inspect.signature(kind._call).parameters


def text_model(model: Any) -> Any:
    """An object of its class, with all that the model is and has, whose batches are asked side by side."""
    return sharing(subclass_of(type(model), TextModel), model)


class TextModel:
    """Stands before the model's class."""

    def _generate(self: Any, prompts: list[str], *args: Any, **kwargs: Any) -> Any:
        if len(prompts) < 2:
            return super()._generate(prompts, *args, **kwargs)  # type: ignore[misc]
        calls = PromptCalls(self, "_call")
        calls.expect(prompts)
        try:
            return LLM._generate(_with_calls(self, _TextTogether, calls), prompts, *args, **kwargs)
        finally:
            calls.close()


class _TextTogether:
    """Of one batch. Stands before the model's class."""

    def _call(self: Any, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        return getattr(self, _CALLS).asked(prompt, stop, run_manager, kwargs)
