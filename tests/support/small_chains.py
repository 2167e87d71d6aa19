"""Chains of one or two steps, and functions that call them and wait for the shadow report."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from teola_plugin.adapters.langchain.shadow import ShadowReport

QUESTION = {"question": "what is a lambda?"}
WAYS = ("invoke", "ainvoke")


def ask(text: str, model: Runnable[Any, Any]) -> Runnable[Any, str]:
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()


def two_steps(model: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Return a chain of two independent steps, so that the second can be prefetched."""
    return RunnablePassthrough.assign(a=ask("Rewrite {question}", model)).assign(b=ask("Shorten {question}", model))


def call(fast: Any, way: str, inputs: Any = QUESTION, expected: int = 1, **config: Any) -> tuple[Any, ShadowReport]:
    """Return the answer, and the shadow report once `expected` calls have been counted."""

    async def in_a_loop() -> Any:
        value = await fast.ainvoke(inputs, config)
        await asyncio.to_thread(wait_for_report, fast, expected)
        return value

    value = fast.invoke(inputs, config) if way == "invoke" else asyncio.run(in_a_loop())
    return value, wait_for_report(fast, expected)


def wait_for_report(fast: Any, expected: int) -> ShadowReport:
    for _ in range(500):
        report: ShadowReport = fast.shadow
        if report.compared + report.failed + report.skipped >= expected:
            break
        time.sleep(0.01)
    return report
