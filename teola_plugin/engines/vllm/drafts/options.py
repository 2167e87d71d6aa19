"""How the user's settings and a request's drafts travel to the proposer, and beside what nothing is drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.requests.bad_input import lone_surrogate
from teola_plugin.requests.draft_texts import APP, KEY, TENANT

ENV = "TEOLA_DRAFTS"
"""Environment variable by which the proposer gets its settings, as JSON: vLLM makes it with its own configuration."""
_MOST_TEXTS = 64


def extra_args(texts: Sequence[str], app: str, tenant: str) -> dict[str, Any]:
    """`SamplingParams.extra_args` of a request from the engine's host. What is no Unicode is left out of `texts`, as it
    would not arrive; nor would subclasses of `str`, such as what LangChain's messages have as their text."""
    told = [str.__str__(text) for text in texts if not lone_surrogate(text)]
    return {KEY: {"texts": told, "app": str.__str__(app), "tenant": str.__str__(tenant)}}


@dataclass(frozen=True, slots=True)
class Told:
    """The draft texts and their source, from our engine's host or over HTTP (see `requests.draft_texts`)."""

    source: tuple[str, str] = ("", "")
    """App and tenant."""
    texts: Sequence[str] = ()
    """What its answer may repeat."""
    kept: bool = True
    """Whether its output is a recent one, and may draft from those: over HTTP only where its app or tenant is named."""

    @staticmethod
    def of(extra: Mapping[str, Any]) -> Told:
        """Read `SamplingParams.extra_args`. Values of another form are ignored: others may write there, too."""
        given = extra.get(KEY)
        if isinstance(given, Mapping):
            return Told((str(given.get("app", "")), str(given.get("tenant", ""))), given.get("texts", ()))
        source = str(extra.get(APP, "")), str(extra.get(TENANT, ""))
        texts = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
        return Told(source, texts[:_MOST_TEXTS], any(source))


def ruled_out(engine_args: Mapping[str, Any]) -> str:
    """The argument of the user's own beside which nothing is drafted; empty for none. vLLM would not start with drafts
    and processors of logits, watermarks or asynchronous scheduling."""
    own = [name for name in ("speculative_config", "worker_extension_cls") if name in engine_args]
    refused = [name for name in ("logits_processors", "watermark_config", "async_scheduling") if engine_args.get(name)]
    return next(iter((*own, *refused)), "")
