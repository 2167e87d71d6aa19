"""The tokens that LangChain's models report, counted where no call of the pool below them was counted.

The handler reaches every model in the counting code through a context variable, as LangChain's own does that counts
usage. Calls ahead of their place are told where the original makes them.
"""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult, LLMResult
from langchain_core.tracers.context import register_configure_hook

from teola_plugin.adapters.langchain.prefetching import intercept
from teola_plugin.runtime.usage import ModelRun, Tally, Tokens, current_listener, current_model_run
from teola_plugin.shims.interception import CallObserver, observers

register_configure_hook(current_listener, inheritable=True)


def listening_tally() -> Tally:
    """Return a tally for one request to a served app.

    It counts the calls of the pool, and those of other models whose messages have `usage_metadata`.
    """
    tally = Tally()
    tally.listener = UsageHandler(tally)
    return tally


class UsageHandler(BaseCallbackHandler):
    """A handler that adds the tokens of each run of a chat model to a tally, from any thread."""

    run_inline = True  # in the context of the call: what it asks the pool for is known to be its own
    ignore_chain = ignore_agent = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._lock = threading.Lock()
        self._runs: dict[UUID, ModelRun] = {}

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, batch_size: int = 1, **kwargs: Any
    ) -> None:
        """Note a call of a chat model, and make it the current one for calls that its own code makes."""
        outer = current_model_run.get()
        while outer is not None and outer.is_over:
            outer = outer.outer
        # several prompts of one call begin one after the other, before it does anything: they are one run here
        run = outer if outer is not None and outer.prompts else ModelRun(outer, batch_size)
        run.prompts -= 1
        with self._lock:
            self._runs[run_id] = run
        current_model_run.set(run)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Count the tokens that a call reports, unless the pool or a call inside it has counted them."""
        run = self._end_run(run_id)
        tokens = _reported_tokens(response)
        if run is None or run.is_counted or tokens is None:
            return
        self._tally.add(tokens)
        if run.outer is not None:
            run.outer.mark_counted()

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_run(run_id)

    def _end_run(self, run_id: UUID) -> ModelRun | None:
        """Forget a run and return its call; the call is over when the last of its prompts is."""
        with self._lock:
            run = self._runs.pop(run_id, None)
            if run is not None:
                run.is_over = run not in self._runs.values()
            return run


def _reported_tokens(response: LLMResult) -> Tokens | None:
    """Return the tokens that the first choice reports: providers report those of all choices in each."""
    return _tokens_of_choice(next((one for choices in response.generations for one in choices), None))


def tokens_of(value: Any) -> Tokens | None:
    """Return the tokens that the result of a provider method, or a chunk of it, reports; None if it reports none."""
    if isinstance(value, ChatGeneration):  # a chunk
        return _tokens_of_choice(value)
    if not isinstance(value, (ChatResult, LLMResult)):
        return None
    choices = value.generations if isinstance(value, ChatResult) else [one for row in value.generations for one in row]
    tokens = _tokens_of_choice(choices[0]) if choices else None
    usage = (value.llm_output or {}).get("token_usage") or {}
    if tokens is None and isinstance(usage.get("prompt_tokens"), int):
        tokens = Tokens(usage["prompt_tokens"], 0, usage.get("completion_tokens") or 0)
    return tokens


def observe_models(observer: CallObserver) -> None:
    """Tell an observer of the calls of all models."""
    intercept()
    observers[:] = [observer]


def _tokens_of_choice(choice: Any) -> Tokens | None:
    """Return the tokens that a choice's message reports; None if it reports none."""
    message = choice.message if isinstance(choice, ChatGeneration) else None
    usage = message.usage_metadata if isinstance(message, AIMessage) else None
    if not usage:
        return None
    cached = (usage.get("input_token_details") or {}).get("cache_read") or 0
    return Tokens(usage["input_tokens"], cached, usage["output_tokens"])
