"""Workflows whose LLM is on a real server: results, events, states and requests of runs, compared with the original."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.workflow import Workflow
from llama_index.llms.openai_like import OpenAILike

from support.openai_stub import MODEL, openai_stub
from teola_plugin import accelerate

LATENCY_S = 0.15
"""Seconds that the server takes for an answer."""


class OwnWorkflow(Workflow):
    """A workflow with a model in an attribute."""

    def __init__(self, llm: Any, **options: Any) -> None:
        super().__init__(**{"timeout": 30, **options})
        self.llm = llm

    async def ask(self, prompt: str) -> str:
        """Return the model's answer."""
        return str(await self.llm.acomplete(prompt))


@dataclass
class Answers:
    """The answers of a server, which count how many requests are under way."""

    latency_s: float = LATENCY_S
    fails_on: str = ""
    running: int = 0
    most_at_once: int = 0
    prompts: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        prompt = body["messages"][-1]["content"]
        with self._lock:
            self.prompts.append(prompt)
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        time.sleep(self.latency_s)
        with self._lock:
            self.running -= 1
        if self.fails_on and self.fails_on in prompt:
            return {"status": 400}
        return {"content": f"answer to {prompt}"}


@dataclass(frozen=True)
class Outcome:
    """The visible results of a run: its result or error, events, state and requests."""

    result: Any
    error: str
    events: list[Any]
    state: Any
    requests: list[str]
    most_at_once: int = field(compare=False)


async def _run(workflow: Any, inputs: dict[str, Any]) -> tuple[Any, str, list[Any], Any]:
    handler, result, error = workflow.run(**inputs), None, ""
    events = [
        (type(event).__name__, event.model_dump(exclude={"elapsed_seconds"})) async for event in handler.stream_events()
    ]
    try:
        result = await handler
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return result, error, events, (await handler.ctx.store.get_state()).model_dump()


def run_on_server(
    make: Callable[[Any], Any],
    change: Callable[[Any], Any],
    *,
    runs: int = 1,
    fails_on: str = "",
    latency_s: float = LATENCY_S,
    **inputs: Any,
) -> Outcome:
    """Return the outcome of the last of some runs of `change(make(llm))`, with the requests of all of them."""
    answers = Answers(latency_s=latency_s, fails_on=fails_on)
    with openai_stub(answers) as stub:
        llm = OpenAILike(model=MODEL, api_base=stub.base_url, api_key="none", is_chat_model=True, max_retries=0)
        workflow = change(make(llm))
        for _ in range(runs):
            result, error, events, state = asyncio.run(_run(workflow, {"query": "oats", **inputs}))
        requests = sorted(json.dumps(body, sort_keys=True) for _, body in stub.requests)
    return Outcome(result, error, events, state, requests, answers.most_at_once)


def compare_on_server(
    make: Callable[[Any], Any], *, runs: int = 1, fails_on: str = "", latency_s: float = LATENCY_S, **inputs: Any
) -> tuple[int, int]:
    """Check that an accelerated workflow does what its original does. Return the most requests at once of each."""
    options: dict[str, Any] = {"runs": runs, "fails_on": fails_on, "latency_s": latency_s, **inputs}
    original = run_on_server(make, lambda workflow: workflow, **options)
    fast = run_on_server(make, accelerate, **options)
    assert fast == original
    return original.most_at_once, fast.most_at_once
