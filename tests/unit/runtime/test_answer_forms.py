"""Tests of requests that fix the form of the answer: prefetched only if the original requests the same form."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.query_parts import GENERATE, ONE_GENERATION, QUESTION, Scene, graph, in_scene

from teola_plugin.engines.openai.wire import WirePrompt
from teola_plugin.graph import Attributes
from teola_plugin.requests.payloads import AnswerForm, Generate, Sampling

CARRIED = WirePrompt.of({"model": "m", "messages": [{"role": "user", "content": QUESTION}]}, exact=True)


def calls(form: AnswerForm | None) -> dict[str, Any]:
    return {"ask": lambda given: replace(GENERATE, form=form)}


def speculative(**attributes: Any) -> Any:
    """Return the graph of one generation with these attributes."""
    return graph(*(one.with_(attributes=Attributes(**attributes)) for one in ONE_GENERATION))


@pytest.mark.parametrize(
    ("asked_in", "fixed", "sent"),
    [
        (AnswerForm.WHOLE, AnswerForm.WHOLE, 1),
        (AnswerForm.STREAMED, AnswerForm.STREAMED, 1),
        (AnswerForm.WHOLE, AnswerForm.STREAMED, 0),
        (AnswerForm.STREAMED, AnswerForm.WHOLE, 0),
        (AnswerForm.UNKNOWN, AnswerForm.WHOLE, 0),
        (AnswerForm.UNKNOWN, AnswerForm.UNKNOWN, 0),
        (AnswerForm.WHOLE, AnswerForm.UNKNOWN, 0),
        (AnswerForm.UNKNOWN, None, 1),
        (AnswerForm.WHOLE, None, 1),
    ],
)
def test_subplan_sends_a_request_only_in_the_originals_form(
    asked_in: AnswerForm, fixed: AnswerForm | None, sent: int
) -> None:
    async def body(scene: Scene) -> int:
        scene.prefetch(calls=calls(fixed), form=asked_in)
        await asyncio.sleep(1)
        return scene.count()

    assert in_scene(body) == sent


def test_subplan_without_a_form_sends_no_request_of_fixed_form() -> None:
    async def body(scene: Scene) -> int:
        scene.prefetch(calls=calls(AnswerForm.WHOLE))
        await asyncio.sleep(1)
        return scene.count()

    assert in_scene(body) == 0


def test_request_of_fixed_form_is_not_sent_in_unknown_form() -> None:
    async def body(scene: Scene) -> int:
        scene.prefetch(speculative(form="unknown"), calls(AnswerForm.WHOLE), form=AnswerForm.WHOLE)
        await asyncio.sleep(1)
        return scene.count()

    assert in_scene(body) == 0


def test_call_left_to_the_original_is_made_once() -> None:
    async def body(scene: Scene) -> tuple[int, set[str]]:
        scene.prefetch(calls=calls(AnswerForm.WHOLE))
        await asyncio.sleep(1)
        await scene.call_as_original()
        return scene.count(), scene.run.left_to_original

    assert in_scene(body) == (1, {"part1/g.p"})


def test_call_left_to_the_original_logs_no_dead_subplan(caplog: pytest.LogCaptureFixture) -> None:
    async def body(scene: Scene) -> None:
        scene.prefetch(calls=calls(AnswerForm.WHOLE))
        await asyncio.sleep(1)
        scene.trace()

    in_scene(body)
    assert "a planned part died" not in caplog.text


@pytest.mark.parametrize(("prompt", "requests"), [(CARRIED, 1), (GENERATE.prompt, 2)])
def test_only_a_carried_request_outlives_its_subplan(prompt: Any, requests: int) -> None:
    """A later part, or the original, may come for it: the server would get it once more."""
    request = Generate(prompt, Sampling(max_tokens=400))

    async def body(scene: Scene) -> int:
        first = scene.prefetch(calls={"ask": lambda given: request}, form=AnswerForm.WHOLE)
        await asyncio.sleep(0.5)
        first.close()
        await asyncio.sleep(0.01)
        await scene.call_as_original(request)
        return scene.count()

    assert in_scene(body) == requests


def test_carried_request_ends_with_its_query() -> None:
    async def body(scene: Scene) -> list[str]:
        request = Generate(CARRIED, Sampling(max_tokens=4000))
        scene.prefetch(calls={"ask": lambda given: request}).close()
        await asyncio.sleep(0.5)
        return [span.outcome for span in scene.trace().spans if span.engine == "llm"]

    assert "done" not in in_scene(body)
