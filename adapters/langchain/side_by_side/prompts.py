"""What the code of a model asks prompt by prompt, begun together when the first of them is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.callbacks.manager import handle_event
from langchain_core.runnables.config import ensure_config

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.langchain.own_models import replay
from teola_plugin.adapters.langchain.own_models.leaf_calls import LeafCall
from teola_plugin.adapters.langchain.side_by_side.siblings import Siblings, begin_by
from teola_plugin.adapters.own_calls import Outcome, outcome_of


class PromptCalls:
    """Of one model. The first is asked in its place: by then it is known how, and that the model does not stream."""

    def __init__(self, model: Any, method: str) -> None:
        """`method`: what asks one prompt, called as `method(prompt, stop=, run_manager=, ...)`."""
        self._model, self._ask = model, getattr(model, method)
        self._prompts: Sequence[Any] = ()
        self._calls: Siblings | None = None
        self._told: dict[int, replay.EventLog] = {}
        """What the model told the manager of its run, by the identity of the call."""

    def expect(self, prompts: Sequence[Any]) -> None:
        """The prompts that are about to be asked."""
        self._prompts = list(prompts)

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()

    def asked(self, prompt: Any, stop: Any, run_manager: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the model's own method gives."""
        if self._prompts:
            self._begin(stop, run_manager, kwargs)
        call = None if self._calls is None else self._calls.claimed(self._model, prompt)
        if call is None:
            return self._ask(prompt, stop=stop, run_manager=run_manager, **kwargs)
        outcome: Outcome = call.outcome.result()
        replay.deliver(call.log, ensure_config(), [])
        if run_manager is not None and id(call) in self._told:
            _tell(self._told[id(call)], run_manager)
        return outcome.get()

    def _begin(self, stop: Any, run_manager: Any, kwargs: Mapping[str, Any]) -> None:
        prompts, self._prompts = self._prompts, ()

        def ask(call: LeafCall, config: Any) -> Outcome:
            log = self._told[id(call)] = replay.EventLog()
            given, manager = call.fresh_input(), like(CallbackManagerForLLMRun, log, run_manager)
            with replay.untraced():
                return outcome_of(lambda: self._ask(given, stop=stop, run_manager=manager, **kwargs))

        heard: Any = {"callbacks": [] if run_manager is None else run_manager.handlers}
        try:
            if replay.may_be_kept_back(heard, models=True):
                self._calls = begin_by(ask, [(self._model, prompt) for prompt in prompts], {}, models=True)
        except Exception as error:  # nothing has been asked yet
            log_fallback(error)


def like(kind: type[Any], log: replay.EventLog, plain: Any) -> Any:
    """A manager as the framework made for this prompt, but that only the log hears of the run."""
    if plain is None:
        return None
    return kind(
        run_id=log.parent,
        handlers=[log],
        inheritable_handlers=[log],
        parent_run_id=plain.parent_run_id,
        tags=plain.tags,
        inheritable_tags=plain.inheritable_tags,
        metadata=plain.metadata,
        inheritable_metadata=plain.inheritable_metadata,
    )


def moved(event: replay.Event, log: replay.EventLog, plain: Any) -> replay.Event:
    """The event as it would have been told of the run of the manager `plain`."""
    ids = {key: event.kwargs.get(key) for key in ("run_id", "parent_run_id")}
    real = {key: plain.run_id for key, one in ids.items() if one == log.parent}
    return event._replace(kwargs={**event.kwargs, **real})


def _tell(log: replay.EventLog, run_manager: Any) -> None:
    """What the model told its manager goes to the manager of the framework's own call."""
    for event in log.drain():
        made = moved(event, log, run_manager)
        handle_event(run_manager.handlers, made.name, replay.IGNORED_BY[made.name], *made.args, **made.kwargs)
