"""Workflows in LangGraph's functional API."""

from __future__ import annotations

import asyncio
from typing import Any

from langgraph.func import entrypoint, task
from langgraph.types import CachePolicy, Command, RetryPolicy, interrupt

from support.graphs.case import Turn, case
from support.graphs.kit import Kit, joined


@case("lambda", "class", races=True)
def tasks_side_by_side(kit: Kit) -> Any:
    llm, retriever = kit.llm, kit.retriever

    @task
    def ask(text: str) -> str:
        return str(llm.invoke(f"about {text}").content)

    @task(name="look")
    def find(text: str) -> str:
        return joined(retriever.invoke(text))

    @entrypoint(checkpointer=kit.saver)
    def workflow(word: str) -> dict[str, Any]:
        asked = [ask(word), ask(word + "s")]
        found = find(word)
        return {"asked": [one.result() for one in asked], "found": found.result()}

    return workflow


@case(1, 2, 3)
def what_was_saved_before(kit: Kit) -> Any:
    """Build a workflow with `entrypoint.final`: it returns one value and saves another one for the next call."""
    llm = kit.llm

    @entrypoint(checkpointer=kit.saver)
    def total(number: int, *, previous: Any = None) -> entrypoint.final[str, int]:
        now = (previous or 0) + number
        return entrypoint.final(value=str(llm.invoke(f"the sum is {now}").content), save=now)

    return total


@case("a poem", Command(resume="more of it"))
def reviewed(kit: Kit) -> Any:
    """Build a workflow that stops for a question. The task before the question must not run again."""
    llm = kit.llm

    @task
    def write(topic: str) -> str:
        kit.note("written")
        return str(llm.invoke(f"write {topic}").content)

    @entrypoint(checkpointer=kit.saver)
    def workflow(topic: str) -> dict[str, Any]:
        draft = write(topic).result()
        review = interrupt({"draft": draft})
        return {"draft": draft, "review": review, "last": llm.invoke(f"{draft} {review}").content}

    return workflow


@case("q", "q", races=True)
def tasks_with_policies(kit: Kit) -> Any:
    """Build a workflow with a cached task and a retried one."""
    llm = kit.llm

    @task(cache_policy=CachePolicy())
    def cached(text: str) -> str:
        kit.note("cached ran")
        return str(llm.invoke(f"cached {text}").content)

    @task(retry_policy=RetryPolicy(initial_interval=0.001, jitter=False))
    def shaky(text: str) -> str:
        said = str(llm.invoke(f"shaky {text}").content)
        if kit.before("shaky ran") == 0:
            raise ConnectionError("not yet")
        return said

    @entrypoint(cache=kit.cache)
    def workflow(text: str) -> list[str]:
        return [cached(text).result(), shaky(text).result()]

    return workflow


@case("go", Turn("go", options={"stream_mode": "updates"}), only="async", races=True)
def async_tasks(kit: Kit) -> Any:
    llm = kit.llm

    @task
    async def ask(text: str) -> str:
        return str((await llm.ainvoke(f"async {text}")).content)

    @entrypoint(checkpointer=kit.saver)
    async def workflow(text: str) -> list[str]:
        return list(await asyncio.gather(*[ask(f"{text}{i}") for i in range(3)]))

    return workflow
