"""What a text model's code asks prompt by prompt on a loop, begun together when the first of them is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.callbacks.manager import ahandle_event
from langchain_core.runnables.config import ensure_config

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.langchain.own_models import replay
from teola_plugin.adapters.langchain.side_by_side.prompts import like, moved
from teola_plugin.adapters.langchain.side_by_side.siblings import may_begin
from teola_plugin.adapters.own_calls import Outcome, aoutcome_of
from teola_plugin.runtime.context import current_run


class _Asked(NamedTuple):
    prompt: str
    task: asyncio.Task[Outcome]
    told: replay.EventLog
    """What the model tells the manager of its run."""
    aside: replay.EventLog
    """What it calls without that."""


class LoopPromptCalls:
    """Of one batch. Equal prompts are asked one after the other, the first one in its place."""

    def __init__(self, model: Any, prompts: Sequence[str]) -> None:
        self._model, self._prompts = model, list(dict.fromkeys(prompts))
        self._asked: dict[str, _Asked] = {}

    def close(self) -> None:
        for one in self._asked.values():
            one.task.cancel()

    async def asked(self, prompt: str, stop: Any, run_manager: Any, kwargs: Mapping[str, Any]) -> str:
        """What the model's own `_acall` gives."""
        if self._prompts:
            self._begin(prompt, stop, run_manager, kwargs)
        one = self._asked.pop(prompt, None)
        if one is None:
            return await self._model._acall(prompt, stop=stop, run_manager=run_manager, **kwargs)  # type: ignore[no-any-return]
        try:
            outcome = await one.task
        finally:
            one.task.cancel()
        await replay.adeliver(one.aside, ensure_config(), [])
        for event in [] if run_manager is None else one.told.drain():
            made = moved(event, one.told, run_manager)
            await ahandle_event(
                run_manager.handlers, made.name, replay.IGNORED_BY[made.name], *made.args, **made.kwargs
            )
        return outcome.get()  # type: ignore[no-any-return]

    def _begin(self, first: str, stop: Any, run_manager: Any, kwargs: Mapping[str, Any]) -> None:
        prompts, self._prompts = [one for one in self._prompts if one != first], []
        try:
            if may_begin(ensure_config(), models=True) and may_begin(_heard(run_manager), models=True):
                for prompt in prompts:
                    self._asked[prompt] = self._started(prompt, stop, run_manager, kwargs)
        except Exception as error:
            log_fallback(error, self._model)

    def _started(self, prompt: str, stop: Any, run_manager: Any, kwargs: Mapping[str, Any]) -> _Asked:
        told, aside, context = replay.EventLog(), replay.EventLog(), copy_context()
        manager = like(AsyncCallbackManagerForLLMRun, told, run_manager)
        replay.prepare(context, replay.early_config(ensure_config(), {}, aside, sync=False), current_run.get())

        async def ask() -> Outcome:
            with replay.untraced():
                return await aoutcome_of(self._model._acall(prompt, stop=stop, run_manager=manager, **kwargs))

        return _Asked(prompt, asyncio.get_running_loop().create_task(ask(), context=context), told, aside)


def _heard(run_manager: Any) -> Any:
    return {"callbacks": [] if run_manager is None else run_manager.handlers}
