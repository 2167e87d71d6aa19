"""The two flows of agents by messages, as AutoGen has it: who speaks next gets all that was said, by a mailbox.

Every agent is a task with an inbox. It answers a message with one of its own, and names who is next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from langchain_core.documents import Document

from benchmarks.apps.pipelines import Found, Given, Kit
from examples.apps import agent, search_engine
from teola_plugin.langchain import TeolaWebSearch, on_engine


@dataclass(frozen=True, slots=True)
class Said:
    """Everything up to now; `to` names who is next, and is empty at the end."""

    to: str
    known: dict[str, Any] = field(default_factory=dict)

    def and_(self, to: str, **more: Any) -> Said:
        return Said(to, {**self.known, **more})


Speak = Callable[[Said], Awaitable[Said]]


async def conversation(agents: dict[str, Speak], first: Said) -> dict[str, Any]:
    """What is known when nobody is left to speak."""
    inboxes: dict[str, asyncio.Queue[Said]] = {name: asyncio.Queue() for name in (*agents, "")}

    async def live(name: str, speak: Speak) -> None:
        while True:
            said = await speak(await inboxes[name].get())
            inboxes[said.to].put_nowait(said)

    tasks = [asyncio.create_task(live(name, speak)) for name, speak in agents.items()]
    inboxes[first.to].put_nowait(first)
    ending = asyncio.create_task(inboxes[""].get())
    done, _ = await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if ending not in done:
        done.pop().result()  # raises what an agent has
    return ending.result().known


async def search(kit: Kit, given: Given) -> Found:
    small, web = kit.small(search_engine.GUESS_TOKENS), TeolaWebSearch(pool=kit.pool, k=search_engine.RESULTS)
    judge, core = small.with_structured_output(search_engine.Verdict), kit.llm(search_engine.ANSWER_TOKENS)
    question = given["question"]

    async def guess(said: Said) -> Said:
        return said.and_("judge", guess=(await small.ainvoke(search_engine.for_guess(question))).text)

    async def decide(said: Said) -> Said:
        verdict: Any = await judge.ainvoke(search_engine.for_verdict(question, said.known["guess"]))
        return said.and_("writer" if verdict.alone == "yes" else "searcher")

    async def look(said: Said) -> Said:
        return said.and_("writer", found=await web.ainvoke(question))

    async def write(said: Said) -> Said:
        passages = [document.page_content for document in said.known.get("found", [])]
        asked = search_engine.for_answer(question, said.known["guess"], passages)
        return said.and_("", answer=(await core.ainvoke(asked)).text)

    known = await conversation({"proxy": guess, "judge": decide, "searcher": look, "writer": write}, Said("proxy"))
    return known["answer"], known.get("found", [])


async def agent_flow(kit: Kit, given: Given) -> Found:
    tools = {tool.name: tool for tool in on_engine(agent.TOOLS, kit.pool)}
    llm, request = kit.llm(agent.ANSWER_TOKENS), given["messages"][-1].content
    caller = llm.bind_tools(list(tools.values()), tool_choice="any")

    async def plan(said: Said) -> Said:
        return said.and_("executor", calls=(await caller.ainvoke(agent.for_call(request))).tool_calls)

    async def execute(said: Said) -> Said:
        told = [await tools[one["name"]].ainvoke(one) for one in said.known["calls"]]
        return said.and_("reporter", told=[message.content for message in told])

    async def report(said: Said) -> Said:
        return said.and_("", answer=(await llm.ainvoke(agent.for_answer(request, said.known["told"]))).text)

    known = await conversation({"planner": plan, "executor": execute, "reporter": report}, Said("planner"))
    return known["answer"], [Document(str(text)) for text in known["told"]]


MESSAGES = {"search_engine": search, "agent": agent_flow}
