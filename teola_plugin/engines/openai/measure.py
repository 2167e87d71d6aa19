"""What a server of one's own is good at: curves, prefilling beside decoding, and the size of its cache's blocks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from teola_plugin.engines.openai.http import json_of, root_of
from teola_plugin.engines.vllm import measure as llm_measure
from teola_plugin.errors import EngineError
from teola_plugin.graph import EngineProfile, PrimitiveKind

if TYPE_CHECKING:
    import httpx

    from teola_plugin.engines.openai.engine import OpenAIServer

_BLOCK = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', re.MULTILINE)


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


async def version_and_block(client: httpx.AsyncClient, base_url: str) -> tuple[str, int]:
    """vLLM's version, and the tokens in a block of its prefix cache; empty and 0 for servers that do not say."""
    version = await client.get(f"{root_of(base_url)}/version")
    metrics = await client.get(f"{root_of(base_url)}/metrics")
    found = _BLOCK.search(metrics.text) if metrics.status_code == 200 else None
    said = str(json_of(version.text).get("version") or "") if version.status_code == 200 else ""
    return said, int(found[1]) if found else 0
