"""The tokens that LlamaIndex's LLMs report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse

from teola_plugin.runtime.usage import Tokens
from teola_plugin.shims.interception import CallObserver, observers
from teola_plugin.shims.llamaindex.interceptors import intercept_models

_PROMPT, _COMPLETION = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
"""The names that providers have for the tokens of prompts, and of answers."""


def tokens_of(value: Any) -> Tokens | None:
    """Return the tokens that the answer of an LLM, or a chunk of it, reports; None if it reports none."""
    if not isinstance(value, (ChatResponse, CompletionResponse)):
        return None
    for usage in (value.additional_kwargs, _field(value.raw, "usage")):
        prompt, completion = _first_number(usage, _PROMPT), _first_number(usage, _COMPLETION)
        if prompt is not None or completion is not None:
            return Tokens(prompt or 0, 0, completion or 0)
    return None


def observe_models(observer: CallObserver) -> None:
    """Tell an observer of the calls of all LLMs whose classes are imported by now."""
    intercept_models()
    observers[:] = [observer]


def _first_number(usage: Any, names: tuple[str, ...]) -> int | None:
    return next((number for name in names if isinstance(number := _field(usage, name), int)), None)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
