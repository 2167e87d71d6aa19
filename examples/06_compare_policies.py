"""Batch policies under load: the same 40 queries on the same engines, under each policy.

Virtual time: the schedulers are the real ones, the engines are fakes with the profile of RTX 3090s, the clock jumps.

    python examples/06_compare_policies.py

prints (one draw of arrivals; other rates and seeds give other figures)::

    policy                   mean     95 %
    topology-aware         7.81 s  11.01 s
    critical-path          7.81 s  11.01 s
    shortest-remaining     9.07 s  15.58 s
    earliest-deadline      8.18 s  10.99 s
    per-invocation        11.68 s  18.10 s
    throughput-oriented    8.18 s  10.99 s
"""

from __future__ import annotations

import asyncio
import random
from statistics import mean, quantiles
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling import POLICIES

QUERIES, PER_SECOND = 40, 0.9


def app(pool: EnginePool) -> Runnable[Any, Any]:
    """Four notes on four long texts, a draft that is improved twice, and a report that needs all of it."""
    llm = ChatTeola(pool=pool, max_tokens=12)

    def ask(prompt: str) -> Runnable[Any, str]:
        return ChatPromptTemplate.from_template(prompt) | llm | StrOutputParser()

    notes = {f"note{i}": ask("{question} " + f"as text {i} has it: " + "some long text " * 150) for i in range(4)}
    return (
        RunnablePassthrough.assign(**notes)
        | RunnablePassthrough.assign(draft=ask("Draft: {question}"))
        | RunnablePassthrough.assign(better=ask("Improve: {draft}"))
        | RunnablePassthrough.assign(best=ask("Improve again: {better}"))
        | ask("Report on {note0} {note1} {note2} {note3} {best}")
    )


async def latencies(policy: str) -> list[float]:
    """Seconds of each query; they arrive at random, the same way under every policy."""
    loop = asyncio.get_running_loop()

    async def one(fast: Runnable[Any, Any], number: int, at: float) -> float:
        await asyncio.sleep(at)
        begun = loop.time()
        await fast.ainvoke({"question": f"question number {number}"})
        return loop.time() - begun

    arrivals = [random.expovariate(PER_SECOND) for _ in range(QUERIES)]
    async with EnginePool.on_this_loop(fake_engines(rtx3090()), policy=policy) as pool:
        fast = accelerate(app(pool))
        return await asyncio.gather(*(one(fast, i, sum(arrivals[: i + 1])) for i in range(QUERIES)))


if __name__ == "__main__":
    print(f"{'policy':20} {'mean':>8} {'95 %':>8}")
    for policy in POLICIES:
        found = run_virtual(latencies(policy), seed=1)
        print(f"{policy:20} {mean(found):6.2f} s {quantiles(found, n=20)[-1]:6.2f} s")
