"""How many calls to a provider are prefetched at once: adapted to what it refuses, and to its rate-limit headers.

An app that makes one call after the other must not be refused because its calls were prefetched. So prefetched calls of
one provider and model share a limit. It halves when the provider refuses one, recovers slowly, and nothing is
prefetched before the time that the provider names. A call of the original waits for that time, too, if it was a
prefetched call that was refused: without it, the original would have been answered. If the original's call is refused
all the same, because prefetched calls that were under way have used up what the provider takes, it is sent again.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from teola_plugin.runtime.call_limits import ConcurrencyLimit, PerObject, is_inside_prefetch
from teola_plugin.shims.httpx import retry_after_s

log = logging.getLogger("teola_plugin.limits")

MAX_PREFETCHED = 16
"""Calls to one provider and model under way at once, if prefetched ones are among them, until one is refused."""
DEFAULT_PAUSE_S = 1.0
"""Seconds without prefetched calls after a refusal that names no time."""
LONGEST_PAUSE_S = 60.0
SHORTEST_MEMORY_S = 1.0
"""Seconds after a prefetched call in which a refusal counts as caused by it, unless the provider names more."""
_REFUSED = frozenset({429, 503})
_TRANSIENT = frozenset({408, 409, 429})
_TRANSIENT_NAMES = frozenset({"APIConnectionError", "APITimeoutError", "ConnectError", "ReadTimeout", "TransportError"})
_CHARACTERS_PER_TOKEN = 4
_MODEL_FIELDS = ("model_name", "model", "model_id", "deployment_name", "azure_deployment")
_ADDRESS_FIELDS = ("openai_api_base", "base_url", "api_base", "azure_endpoint", "endpoint_url", "anthropic_api_url")
_REMAINING_HEADERS = (
    ("x-ratelimit-remaining-{}", "x-ratelimit-reset-{}"),
    ("anthropic-ratelimit-{}-remaining", "anthropic-ratelimit-{}-reset"),
)
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


class ProviderLimit(ConcurrencyLimit):
    """The limit of prefetched calls to one provider and model. The original's calls are counted, never held back by it.

    Used from any thread. Times are those of `time.monotonic`, in seconds.
    """

    def __init__(self, name: str) -> None:
        """`name`: what log messages call the provider and model."""
        super().__init__(MAX_PREFETCHED)
        self.name = name
        self.refused_prefetches = 0
        """Prefetched calls that failed because the provider refused them."""
        self._successes = 0
        """Prefetched calls that succeeded since the limit last changed."""
        self._prefetches_from = self._calls_from = 0.0
        """When prefetched calls, and calls of any caller, may be sent again."""
        self._prefetch_ended = float("-inf")
        """When a prefetched call was last answered or refused."""
        self._remaining: dict[str, tuple[int, float]] = {}
        """Requests and tokens that the provider still takes, and until when that holds."""
        self._last_request_tokens = 1
        self._state_lock = threading.Lock()

    def forked(self) -> None:
        """Start anew in a child process, where the parent's calls do not end."""
        super().forked()
        self._state_lock = threading.Lock()

    def is_open(self, *, is_prefetch: bool) -> bool:
        """Return True if another call may begin; the original's always may."""
        return not is_prefetch or self.original_calls + self.prefetched_calls < self.limit

    @property
    def may_prefetch(self) -> bool:
        """False while the provider refuses calls, or has said that it would."""
        if not self._prefetches_from and not self._remaining:
            return True
        now, required = time.monotonic(), {"requests": self.original_calls + self.prefetched_calls + 1}
        required["tokens"] = required["requests"] * self._last_request_tokens
        with self._state_lock:
            is_exhausted = any(left < required[unit] and now < until for unit, (left, until) in self._remaining.items())
            return now >= self._prefetches_from and not is_exhausted

    @property
    def seconds_to_wait(self) -> float:
        """Seconds until a call may be sent: more than 0 after a prefetched call was refused."""
        return max(0.0, self._calls_from - time.monotonic()) if self._calls_from else 0.0

    def note_success(self) -> None:
        """Note that a prefetched call was answered: after as many as the limit allows, it allows one more."""
        self._prefetch_ended = time.monotonic()
        if self.limit == MAX_PREFETCHED:
            return
        with self._state_lock:
            self._successes += 1
            if self._successes >= self.limit:
                self.limit, self._successes = self.limit + 1, 0

    def note_failure(self, error: BaseException, *, is_prefetch: bool) -> None:
        """Note what a call raised."""
        response = getattr(error, "response", None)
        status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
        if status in _REFUSED:
            if is_prefetch:
                self._prefetch_ended = time.monotonic()
            with self._state_lock:
                self.refused_prefetches += is_prefetch
            self._note_refusal(retry_after_s(getattr(response, "headers", None) or {}), is_prefetch)

    def note_response(self, status: int, headers: Mapping[str, str], request_characters: int) -> bool:
        """Note a provider's HTTP response to a call in this context. `headers`: found by names in lower case.

        Returns:
            True for a call of the original that was refused because of prefetched ones. It is to be sent again after
            `seconds_to_wait`.
        """
        left, is_prefetch, must_repeat = _remaining_in(headers), is_inside_prefetch.get(), False
        if status in _REFUSED:
            pause_s = retry_after_s(headers)
            must_repeat = not is_prefetch and pause_s is not None and self._prefetched_within(pause_s, left)
            self._note_refusal(pause_s, is_prefetch or must_repeat)
        with self._state_lock:
            self._remaining.update(left)
            self._last_request_tokens = max(1, request_characters // _CHARACTERS_PER_TOKEN)
        return must_repeat

    def _prefetched_within(self, pause_s: float, left: Mapping[str, tuple[int, float]]) -> bool:
        """Return True if prefetched calls have used part of what the provider takes until it takes all again."""
        if pause_s > LONGEST_PAUSE_S:
            return False
        now = time.monotonic()
        memory_s = max([SHORTEST_MEMORY_S, pause_s, *(until - now for _, until in left.values())])
        return self.prefetched_calls > 0 or now - self._prefetch_ended <= memory_s

    def _note_refusal(self, pause_s: float | None, is_prefetch: bool) -> None:
        """Halve the limit and stop prefetches for `pause_s` seconds after the provider has refused a call.

        Refusals during a pause do not halve it again. After a refused prefetch the original's calls wait, too. None:
        the provider named no time.
        """
        now = time.monotonic()
        until = now + min(DEFAULT_PAUSE_S if pause_s is None else pause_s, LONGEST_PAUSE_S)
        with self._state_lock:
            is_new = now >= self._prefetches_from  # calls that were sent together are refused together
            if is_new:
                self.limit, self._successes = max(1, self.limit // 2), 0
            self._prefetches_from = max(self._prefetches_from, until)
            if is_prefetch:
                self._calls_from = max(self._calls_from, until)
        if is_new and is_prefetch:
            log.warning(
                "%s refuses prefetched calls (too many requests): at most %d at once from now on, after %.1f s. The "
                "app makes the refused calls again, in their place. accelerate(..., speculate='off') prefetches none.",
                self.name,
                self.limit,
                until - now,
            )


def _remaining_in(headers: Mapping[str, str]) -> dict[str, tuple[int, float]]:
    """Return how many requests and tokens a provider still takes, and until when, where the headers say both."""
    remaining = {}
    for unit in ("requests", "tokens"):
        for left_name, reset_name in _REMAINING_HEADERS:
            left, reset = headers.get(left_name.format(unit)), headers.get(reset_name.format(unit))
            reset_s = None if reset is None else _reset_s(reset)
            if left is not None and left.isdecimal() and reset_s is not None:
                remaining[unit] = (int(left), time.monotonic() + reset_s)
    return remaining


def _reset_s(text: str) -> float | None:
    """Return the seconds of a duration (`6m0s`, `20ms`, `1.5`) or until a time (RFC 3339); None for another text."""
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is not None and text:
        factors = (3600, 60, 1, 0.001)
        return sum(float(part) * factor for part, factor in zip(match.groups(), factors, strict=True) if part)
    try:
        return max(0.0, (datetime.fromisoformat(text) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


def is_transient(error: BaseException) -> bool:
    """Return True for an error that says nothing of another attempt: too many requests, no connection, a timeout."""
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status in _TRANSIENT or status >= 500
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


# ------------------------------------------------------------ the limit of an object

_by_provider: dict[tuple[str, str, str], ProviderLimit] = {}


def model_name_of(target: object) -> str:
    """Return the name of the model that an object calls, as its fields say it; empty if none does."""
    return _first_text(target, _MODEL_FIELDS)


def _first_text(target: object, names: Iterable[str]) -> str:
    fields = getattr(target, "__dict__", {})
    return next((str(fields[name]) for name in names if isinstance(fields.get(name), str)), "")


def _new_limit(target: object) -> ProviderLimit:
    """Return the limit of an object's provider and model; one of its own if its fields name neither."""
    model, address = model_name_of(target), _first_text(target, _ADDRESS_FIELDS)
    if not model and not address:
        return ProviderLimit(type(target).__name__)
    package = type(target).__module__.partition(".")[0]
    name = f"{type(target).__name__} {model}".strip()
    return _by_provider.setdefault(
        (package, address, model), ProviderLimit(f"{name} at {address}" if address else name)
    )


provider_limit: Callable[[object], ProviderLimit] = PerObject(_new_limit)
"""Returns the limit of prefetched calls of a model, retriever or tool: one for each provider, address and model."""
