"""Queries of one chain that arrive faster than they are answered."""

from __future__ import annotations

import asyncio
from typing import Any

EVERY = 0.07
"""Seconds from one query to the next."""


async def arriving(chain: Any, queries: int) -> tuple[list[str], float]:
    """Send `queries` queries, one every `EVERY` seconds.

    Return their answers in order, and the seconds until the last one.
    """
    loop = asyncio.get_running_loop()

    async def one(number: int) -> str:
        await asyncio.sleep(EVERY * number)
        return str(await chain.ainvoke({"query": f"lambda {number}"}))

    began = loop.time()
    return list(await asyncio.gather(*map(one, range(queries)))), loop.time() - began
