"""The prompt that a model will be sent next, as far as it is known: prefilled on its engine while the rest is made.

While an agent's tools run, the conversation so far is known, and so is each result as it comes. What is sent ahead is a
guess at how the next prompt begins. It costs the engine's pauses, is never claimed, and changes no answer.
"""

from __future__ import annotations

from teola_plugin.graph import Attributes, EngineProfile, Graph, Primitive, PrimitiveKind, Ref, on_loop
from teola_plugin.passes import Pass
from teola_plugin.passes.prefilling_split import PrefillingSplit
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Prompt
from teola_plugin.runtime.driver.incremental_prefilling import alike
from teola_plugin.runtime.query_run import PartRun, QueryRun

CHARACTERS = 4
"""Of a token, for estimates."""
_ID, _CALL = "next.prefilling", "next"


def prefills(pool: EnginePool, engine: str, passes: tuple[Pass, ...] | None) -> bool:
    """Whether the beginning of a prompt may be prefilled early: the engine keeps prefixes, and a pass splits prompts.

    `passes`: those in force instead of the pool's; None for the pool's.
    """
    chosen = pool.passes if passes is None else passes
    return pool.engine(engine).profile.prefix_caching and any(isinstance(one, PrefillingSplit) for one in chosen)


class NextPrompt:
    """Of one model in a live query. To be used from one thread at a time; never raises, never waits."""

    def __init__(self, run: QueryRun, engine: str, profile: EngineProfile) -> None:
        self._run = run
        self._graph = _graph(engine)
        self._least = profile.min_split_tokens * CHARACTERS
        self._sent = ""
        self._part: PartRun | None = None

    def begins(self, prompt: Prompt, *, have: str = "") -> None:
        """It begins as `prompt` does, up to the first `UNKNOWN` in it. What is new is sent if it is worth a request.

        `have`: what the engine has prefilled for the query already, as `Prompt.flat()` shows it.
        """
        known = prompt.known()
        old = max(alike(known, have), alike(known, self._sent))
        if self._run.closed or len(known) - old < self._least:
            return
        self.over()
        self._sent = known
        asked = Generate(prompt)
        self._part = self._run.part(self._graph, {_CALL: on_loop(lambda _: asked)}, None)

    def over(self) -> None:
        """The prompt is there, or will not come: what has not begun is dropped."""
        part, self._part = self._part, None
        if part is not None:
            part.close()


def _graph(engine: str) -> Graph:
    attributes = Attributes(when="idle")
    warm_up = Primitive(_ID, PrimitiveKind.PARTIAL_PREFILLING, engine, call=_CALL, attributes=attributes)
    return Graph((warm_up,), Ref(_ID))
