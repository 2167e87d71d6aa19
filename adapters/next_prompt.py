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
from teola_plugin.runtime.driver.incremental_prefilling import alike
from teola_plugin.runtime.query_run import PartRun, QueryRun

_NAME = "next_prompt"


def prefills(pool: EnginePool, engine: str, passes: tuple[Pass, ...] | None) -> bool:
    """Whether the beginning of a prompt may be prefilled early: the engine keeps prefixes, and a pass splits prompts.

    `passes`: those in force instead of the pool's; None for the pool's.
    """
    chosen = pool.passes if passes is None else passes
    return keeps_prefixes(pool, engine) and any(isinstance(one, PrefillingSplit) for one in chosen)


def keeps_prefixes(pool: EnginePool, engine: str) -> bool:
    profile = pool.profiles.get(engine)
    return profile is not None and profile.prefix_caching


class KnownBeginning:
    """What is known of one prompt, in a live query: it grows. To be used from one thread at a time."""

    def __init__(self, run: QueryRun, pool: EnginePool, engine: str) -> None:
        self._run, self._pool, self._engine = run, pool, engine
        self._sent = ""
        self._part: PartRun | None = None

    def grown(self, prompt: Prompt, *, have: str) -> None:
        """It is `prompt` up to the first `UNKNOWN` in it. What is new is sent, if it is worth a request.

        `have`: what the engine has prefilled for the query already, as `Prompt.flat()` shows it.
        """
        known = prompt.known()
        if self._run.closed or not self._pays(known, max(alike(known, have), alike(known, self._sent))):
            return
        self.over()
        self._sent = known
        self._part = self._run.part(_prefilling(self._engine), {_NAME: _payload}, prompt)

    def over(self) -> None:
        """The prompt is there, or will not come: what has not begun is dropped."""
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def _pays(self, known: str, old: int) -> bool:
        """Whether enough of it is new, and it is not more than the model can read."""
        profile = self._pool.profiles[self._engine]
        most = profile.max_request_size
        fits = most is None or PromptPart.literal(known).tokens < most
        return fits and PromptPart.literal(known[old:]).tokens >= profile.min_split_tokens


@lru_cache(maxsize=64)
def _prefilling(engine: str) -> Graph:
    """A warm-up that waits for a pause of its engine."""
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
def _payload(given: Mapping[str, Any]) -> Generate:
    return Generate(given["prompt"])
