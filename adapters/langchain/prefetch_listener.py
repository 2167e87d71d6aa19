"""The only handler of a prefetch: nobody hears of the call, and it is noticed when it calls other objects."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, CallbackManager

from teola_plugin.runtime.provider_calls import CallScope
from teola_plugin.shims import langchain as shims


class PrefetchListener(BaseCallbackHandler):
    """The only handler of a prefetch. Notices when the object calls other objects of the framework.

    The original has to hear of those: the call is not shared then, and the original makes it itself.
    """

    def __init__(self, scope: CallScope) -> None:
        self._scope = scope

    def started(self, *args: Any, parent_run_id: Any = None, **kwargs: Any) -> None:
        """Withdraw the call in whose run, or inside whose method, another run starts."""
        if self._scope.calls:
            self._scope.withdraw(parent_run_id)


def _ignore_event(self: PrefetchListener, *args: Any, **kwargs: Any) -> None:
    """Handle an event of no interest, where it occurs."""


_STARTS = ("on_chat_model_start", "on_llm_start", "on_retriever_start", "on_chain_start", "on_tool_start")
_OTHERS = (
    *(f"on_{kind}_{end}" for kind in ("llm", "retriever", "chain", "tool") for end in ("end", "error")),
    "on_llm_new_token",
    "on_stream_event",
    "on_text",
    "on_retry",
    "on_custom_event",
    "on_agent_action",
    "on_agent_finish",
)
for _name in _STARTS:
    setattr(PrefetchListener, _name, shims.inline_callback(PrefetchListener.started))
for _name in _OTHERS:
    setattr(PrefetchListener, _name, shims.inline_callback(_ignore_event))


@lru_cache(maxsize=4)
def listener_class(kinds: tuple[type, ...]) -> type[PrefetchListener]:
    """Return the class of listeners that are taken for handlers of these kinds, and hear nothing.

    Models stream to them as they do to the handlers; instrumentation that looks for a handler of its own finds them.
    """
    if not kinds:
        return PrefetchListener
    taps = {"tap_output_iter": _output, "tap_output_aiter": _output}
    is_tapped = any(hasattr(kind, name) for kind in kinds for name in taps)  # models know these handlers by the methods
    cls: Any = type("PrefetchListener", (PrefetchListener, *kinds), taps if is_tapped else {})
    cls.__abstractmethods__ = frozenset()
    return cls  # type: ignore[no-any-return]


def _output(self: PrefetchListener, run_id: Any, output: Any) -> Any:
    return output


def added_to_every_manager(manager: Any) -> tuple[type, ...]:
    """Return the kinds of handlers that instrumentation adds to every callback manager, unless it has one of the kind.

    OpenInference's and OpenLLMetry's packages wrap the constructor of managers to do so.
    """
    return tuple(dict.fromkeys(map(type, manager([]).handlers)))


def can_be_silenced(listeners: tuple[type, ...]) -> bool:
    """Return True if a listener can be made that is of all these kinds, and of those that instrumentation adds."""
    try:
        listener_class((*listeners, *added_to_every_manager(CallbackManager)))
    except TypeError:  # classes that have no common subclass
        return False
    return True
