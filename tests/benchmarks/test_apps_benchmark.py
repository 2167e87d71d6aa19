"""Tests that the baselines of the five applications answer as the applications do."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import pytest

from benchmarks.apps import haystack_pipelines
from benchmarks.apps.__main__ import given, run
from benchmarks.apps.messages import Said, conversation
from benchmarks.apps.pipelines import Kit
from benchmarks.apps.schemes import APPS, SCHEMES, left_out
from benchmarks.apps.script import SCRIPTS
from teola_plugin.langchain import ChatTeola


def test_every_scheme_gives_the_same_answers_and_sources() -> None:
    options = argparse.Namespace(ground="profile", queries=1, scale=0.01, only="")
    result = run(options)
    assert result["answers_equal"] and set(result["apps"]) == set(APPS) and result["worst_ratio"] > 0
    for name, app in result["apps"].items():
        assert set(app["seconds"]) == {scheme.name for scheme in SCHEMES if scheme.takes(name)}
        assert set(app["speedup_low"]) == set(app["seconds"]) - {"accelerated"}


def test_haystack_is_skipped_if_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haystack_pipelines, "find_spec", lambda name: None)
    assert "Haystack" not in {scheme.name for scheme in SCHEMES if scheme.takes("agent")}
    assert left_out() == [haystack_pipelines.INSTALL]


def test_haystack_runs_independent_steps_concurrently() -> None:
    pytest.importorskip("haystack", reason="a newer lock file than the environment")
    begun, go = [], asyncio.Event()

    async def first(given: str) -> str:
        begun.append("first")
        await go.wait()
        return given

    async def second(given: str) -> str:
        begun.append("second")
        go.set()
        return given

    async def both(one: str, other: str) -> str:
        return one + other

    async def run_two_flows() -> list[dict[str, str]]:
        flow = haystack_pipelines.Flow()
        flow.step("first", first, "given")
        flow.step("second", second, "given")
        flow.step("both", both, one="first", other="second")
        return await asyncio.gather(*[asyncio.wait_for(flow.run({"given": text}), 20) for text in ("a", "b")])

    assert [one["both"] for one in asyncio.run(run_two_flows())] == ["aa", "bb"] and len(begun) == 4


async def test_scripted_apps_make_one_call_at_a_time() -> None:
    with SCHEMES[0].pool(0.01) as pool:
        kit, under_way, most = Kit(pool), [0], [0]

        async def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            try:
                return await original_ainvoke(self, *args, **kwargs)
            finally:
                under_way[0] -= 1

        original_ainvoke, ChatTeola.ainvoke = ChatTeola.ainvoke, watched  # type: ignore[method-assign]
        try:
            for name, script in SCRIPTS.items():
                await script(kit, given(name, 1))
        finally:
            ChatTeola.ainvoke = original_ainvoke  # type: ignore[method-assign]
    assert most == [1]


def test_agent_that_fails_ends_the_conversation() -> None:
    async def fails(message: Said) -> Said:
        raise ZeroDivisionError("no agent")

    with pytest.raises(ZeroDivisionError, match="no agent"):
        asyncio.run(conversation({"one": fails}, Said("one")))
