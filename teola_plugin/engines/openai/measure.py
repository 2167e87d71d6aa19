"""What a server of one's own is good at: curves, and prefilling beside decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from teola_plugin.engines.vllm import measure as llm_measure
from teola_plugin.errors import EngineError
from teola_plugin.graph import EngineProfile, PrimitiveKind

if TYPE_CHECKING:
    from teola_plugin.engines.openai.engine import OpenAIServer


async def measure(engine: OpenAIServer) -> EngineProfile:
    """Takes some 20 requests and 3 s. Raises `EngineError` where the server does not tell how long prompts are."""
    try:
        found = await llm_measure.measure(engine, limit=engine.max_model_len)
    except ZeroDivisionError as error:
        raise _untold(engine) from error
    sizes = [size for size, _ in found.curves[PrimitiveKind.PREFILLING].points]
    if sizes != sorted(set(sizes)):
        raise _untold(engine)
    return replace(found, interference=await llm_measure.interference(engine, found))


def _untold(engine: OpenAIServer) -> EngineError:
    return EngineError(
        f"{engine.name}: the usage in the server's answers does not tell how many tokens a prompt has.",
        engine=engine.name,
        hint=f"OpenAIServer({engine.name!r}, ..., calibrate=False)",
    )
