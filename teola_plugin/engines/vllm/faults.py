"""What goes wrong at the LLM engine, as errors that say what to do next."""

from __future__ import annotations

from pathlib import Path

from teola_plugin.engines.vllm.link import NotReady, Refusal
from teola_plugin.errors import ConfigError, EngineError, EngineUnavailable, RequestTooLarge, TeolaError
from teola_plugin.requests.bad_input import advice


class Faults:
    """`log`: the file that takes vLLM's output; `tail`: its last lines, if vLLM was started."""

    def __init__(self, engine: str, log: Path) -> None:
        self._engine, self._log = engine, log

    def refused(self, item: Refusal) -> EngineError:
        if item.tokens:
            hint = "shorten the prompt, or raise max_model_len in engine_args if the model allows it"
            return RequestTooLarge(f"{self._engine}: {item.reason}", engine=self._engine, hint=hint)
        hint = item.hint or f"see {self._log}"
        return EngineError(f"{self._engine}: {item.reason}", engine=self._engine, hint=hint)

    def unsendable(self, error: Exception) -> EngineError:
        return EngineError(
            f"{self._engine}: the request cannot be sent: {type(error).__name__}: {error}",
            engine=self._engine,
            hint=advice(error),
        )

    def not_taken(self, payload: object) -> EngineError:
        reason = f"{self._engine} takes Generate or Warmup, not {type(payload).__name__}."
        return EngineError(reason, engine=self._engine, hint="see requests/payloads.py")

    def cancelled(self, request_id: str) -> EngineError:
        return EngineError(f"{request_id} was cancelled.", engine=self._engine)

    def still_busy(self) -> EngineError:
        return EngineError(
            f"{self._engine} could not empty its prefix cache: requests are running.",
            engine=self._engine,
            retryable=True,
            hint="reset between queries",
        )

    def down(self, reason: str, tail: str) -> EngineUnavailable:
        return self._unavailable(f"The LLM engine is down: {reason}", "", tail)

    def not_started(self, frame: NotReady, tail: str) -> TeolaError:
        if frame.settings:
            return ConfigError(frame.reason, hint=frame.hint)
        return self._unavailable(f"vLLM did not start: {frame.reason}", frame.hint, tail)

    def _unavailable(self, reason: str, hint: str, tail: str) -> EngineUnavailable:
        message = f"{self._engine}: {reason}" + (f"\nLast lines of its log:\n{tail}\n" if tail else "")
        hint = hint or f"see {self._log}; a pool starts it again by itself"
        return EngineUnavailable(message, engine=self._engine, retryable=True, hint=hint)
