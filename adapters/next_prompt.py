"""The prompt that a model will be sent next, as far as it is known: prefilled on its engine while the rest is made.

While an agent's tools run, the conversation so far is known, and so is each result as it comes. What is sent ahead is a
guess at how the next prompt begins. It costs the engine's pauses, is never claimed, and changes no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from teola_plugin.graph import (
    INPUT,
    Attributes,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Ref,
    named,
    on_loop,
)
from teola_plugin.passes import Pass
from teola_plugin.passes.prefilling_split import PrefillingSplit
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Prompt
from teola_plugin.runtime.primitive_requests import common_prefix_length
from teola_plugin.runtime.query_run import QueryRun, SubplanRun

_NAME = "next_prompt"


def prefills(pool: EnginePool, engine: str, passes: tuple[Pass, ...] | None) -> bool:
    """Return True if the beginning of a prompt may be prefilled early.

    It may if the engine keeps prefixes, and a pass splits prompts.

    `passes`: those in force instead of the pool's; None for the pool's.
    """
    passes_in_force = pool.passes if passes is None else passes
    return keeps_prefixes(pool, engine) and any(isinstance(one, PrefillingSplit) for one in passes_in_force)


def keeps_prefixes(pool: EnginePool, engine: str) -> bool:
    profile = pool.profiles.get(engine)
    return profile is not None and profile.prefix_caching


class KnownBeginning:
    """The known beginning of one prompt of a live query, which grows. Use it from one thread at a time."""

    def __init__(self, run: QueryRun, pool: EnginePool, engine: str) -> None:
        self._run, self._pool, self._engine = run, pool, engine
        self._requested_text = ""
        self._part: SubplanRun | None = None

    def extend(self, prompt: Prompt, *, have: str) -> None:
        """Prefill `prompt` up to the first `UNKNOWN` in it, if enough of it is new to be worth a request.

        `have`: what the engine has prefilled for the query already, as `Prompt.flat()` shows it.
        """
        text = prompt.known_prefix()
        if self._run.closed or not self._pays(
            text, max(common_prefix_length(text, have), common_prefix_length(text, self._requested_text))
        ):
            return
        self.close()
        self._requested_text = text
        self._part = self._run.begin_subplan(_prefilling(self._engine), {_NAME: _payload}, prompt)

    def close(self) -> None:
        """Drop the prefilling if it has not begun: the prompt is there, or will not come."""
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def _pays(self, text: str, prefilled: int) -> bool:
        """Return True if enough of the text is new, and the model can read all of it.

        `prefilled`: characters at its beginning that the engine has, or was asked for before. Tokens are estimated.
        Enough are the engine's `min_split_tokens`, below which a request costs more than it saves.
        """
        profile = self._pool.profiles[self._engine]
        max_tokens = profile.max_request_size
        fits = max_tokens is None or PromptPart.literal(text).tokens < max_tokens
        return fits and PromptPart.literal(text[prefilled:]).tokens >= profile.min_split_tokens


@lru_cache(maxsize=64)
def _prefilling(engine: str) -> Graph:
    """Return the graph of a warm-up that waits for a pause of its engine."""
    primitive = Primitive(
        _NAME,
        PrimitiveKind.PARTIAL_PREFILLING,
        engine,
        named(prompt=Ref(INPUT)),
        call=_NAME,
        size=1,
        prompt=(PromptPart.var("prompt"),),
        attributes=Attributes(when="idle"),
    )
    return Graph([primitive], Ref(_NAME))


@on_loop
def _payload(inputs: Mapping[str, Any]) -> Generate:
    return Generate(inputs["prompt"])
