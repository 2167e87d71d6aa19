"""A model that is asked several prompts in one call: the framework's code asks them one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LLM, BaseChatModel

from teola_plugin.adapters.langchain.side_by_side.loop_prompts import LoopPromptCalls
from teola_plugin.adapters.langchain.side_by_side.prompts import PromptCalls
from teola_plugin.adapters.own_class import subclass_of
from teola_plugin.shims.pydantic import sharing

_CALLS = "__teola_prompt_calls__"


def together(model: Any) -> Any:
    """An object of a chat model's class, with all that the model is and has, for one `generate`.

    The very model where its calls are counted or kept: by a rate limiter, or a cache, which may know the second of two.
    """
    counted = getattr(model, "rate_limiter", None) or getattr(model, "cache", None) or get_llm_cache() is not None
    if counted or not isinstance(model, BaseChatModel) or not _told_of_its_run(type(model)._generate):
        return model
    return _with_calls(model, _ChatTogether, PromptCalls(model, "_generate"))


def prepare(model: Any) -> None:
    """Makes the class that `together` wants, which takes some milliseconds."""
    if isinstance(model, BaseChatModel):
        _class(type(model), _ChatTogether)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _class(kind: type[Any], base: type[Any]) -> Any:
    """Kept, since objects of it live for one call only."""
    return subclass_of(kind, base, slots=(_CALLS,))


def _with_calls(model: Any, base: type[Any], calls: PromptCalls | LoopPromptCalls) -> Any:
    made = sharing(_class(type(model), base), model)  # type: ignore[arg-type]
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


def text_model(model: Any, *, threads: bool) -> Any:
    """A text model whose batches are asked side by side, of its class and with all that it is and has.

    The very model where its batches are no loop of the framework's over one prompt. `threads`: whether sync ones may
    be asked on threads; async ones are, where the model has async code of its own, and otherwise on threads, too.
    """
    if not isinstance(model, LLM) or isinstance(model, (_OnThreads, _OnTheLoop)):
        return model
    kind = type(model)
    looped = threads and _loops(kind, "_generate", "_call")
    alooped = (threads or _own(kind, "_acall")) and _loops(kind, "_agenerate", "_acall")
    bases = {(True, True): _OnBoth, (True, False): _OnThreads, (False, True): _OnTheLoop}
    base = bases.get((looped, alooped))
    if base is None:
        return model
    made = sharing(subclass_of(kind, base), model)
    _class(type(made), _TextTogether)  # type: ignore[arg-type]
    return made


def _loops(kind: type, whole: str, one: str) -> bool:
    return _told_of_its_run(getattr(kind, one)) and getattr(kind, whole) is getattr(LLM, whole)


def _told_of_its_run(method: Any) -> bool:
    """As is usual; the framework hands it no manager else."""
    return "run_manager" in inspect.signature(method).parameters


def _own(kind: type, method: str) -> bool:
    return getattr(kind, method) is not getattr(LLM, method)


class _OnThreads:
    """Stands before the model's class."""

    def _generate(self: Any, prompts: list[str], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        if len(prompts) < 2:
            return super()._generate(prompts, stop, run_manager, **kwargs)  # type: ignore[misc]
        calls = PromptCalls(self, "_call")
        calls.expect(prompts)
        try:
            return LLM._generate(_with_calls(self, _TextTogether, calls), prompts, stop, run_manager, **kwargs)
        finally:
            calls.close()


class _OnTheLoop:
    """Stands before the model's class."""

    async def _agenerate(self: Any, prompts: list[str], stop: Any = None, run_manager: Any = None, **told: Any) -> Any:
        if len(prompts) < 2:
            return await super()._agenerate(prompts, stop, run_manager, **told)  # type: ignore[misc]
        calls = LoopPromptCalls(self, prompts)
        try:
            return await LLM._agenerate(_with_calls(self, _TextTogether, calls), prompts, stop, run_manager, **told)
        finally:
            calls.close()


class _OnBoth(_OnThreads, _OnTheLoop):
    """Stands before the model's class."""


class _TextTogether:
    """Of one batch. Stands before the model's class."""

    def _call(self: Any, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        return getattr(self, _CALLS).asked(prompt, stop, run_manager, kwargs)

    async def _acall(self: Any, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        return await getattr(self, _CALLS).asked(prompt, stop, run_manager, kwargs)
