"""The ways in which the user's settings and the draft texts of a request reach the proposer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.requests.draft_texts import APP, KEY, TENANT
from teola_plugin.requests.payloads import lone_surrogate

ENV = "TEOLA_DRAFTS"
"""Environment variable by which the proposer gets its settings, as JSON: vLLM makes it with its own configuration."""
_MAX_TEXTS = 64


def extra_args(texts: Sequence[str], app: str, tenant: str) -> dict[str, Any]:
    """Return `SamplingParams.extra_args` of a request from the engine's host.

    Texts that are not Unicode are left out, as they would not arrive. Subclasses of `str`, such as the text of
    LangChain's messages, would not either, so they are converted.
    """
    valid_texts = [str.__str__(text) for text in texts if not lone_surrogate(text)]
    return {KEY: {"texts": valid_texts, "app": str.__str__(app), "tenant": str.__str__(tenant)}}


@dataclass(frozen=True, slots=True)
class DraftTexts:
    """The draft texts of a request, from our engine's host or over HTTP (see `requests.draft_texts`)."""

    source: tuple[str, str] = ("", "")
    """App and tenant."""
    texts: Sequence[str] = ()
    """Texts that its answer may repeat."""
    is_kept: bool = True
    """True if its output becomes a recent one, and recent ones are a source: over HTTP only if an app or tenant is
    named."""

    @staticmethod
    def of(extra: Mapping[str, Any]) -> DraftTexts:
        """Read `SamplingParams.extra_args`. Values of another form are ignored: others may write there, too."""
        value = extra.get(KEY)
        if isinstance(value, Mapping):
            return DraftTexts((str(value.get("app", "")), str(value.get("tenant", ""))), value.get("texts", ()))
        source = str(extra.get(APP, "")), str(extra.get(TENANT, ""))
        texts = [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
        return DraftTexts(source, texts[:_MAX_TEXTS], any(source))


def conflicting_argument(engine_args: Mapping[str, Any]) -> str:
    """Return the user's engine argument with which nothing is drafted; "" for none.

    vLLM would not start with drafts and processors of logits, watermarks or asynchronous scheduling.
    """
    replaced = [name for name in ("speculative_config", "worker_extension_cls") if name in engine_args]
    incompatible = [
        name for name in ("logits_processors", "watermark_config", "async_scheduling") if engine_args.get(name)
    ]
    return next(iter((*replaced, *incompatible)), "")
