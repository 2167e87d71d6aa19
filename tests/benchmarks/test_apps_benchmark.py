"""The baselines of the five applications answer as the applications do."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from benchmarks.apps.__main__ import run
from benchmarks.apps.messages import Said, conversation
from benchmarks.apps.schemes import APPS, SCHEMES


def test_every_scheme_gives_the_same_answers_and_sources() -> None:
    options = argparse.Namespace(ground="profile", queries=1, scale=0.01, only="")
    result = run(options)
    assert result["answers_equal"] and set(result["apps"]) == set(APPS) and result["worst_ratio"] > 0
    for name, app in result["apps"].items():
        assert set(app["seconds"]) == {scheme.name for scheme in SCHEMES if scheme.takes(name)}
        assert set(app["speedup_low"]) == set(app["seconds"]) - {"accelerated"}


def test_an_agent_that_fails_ends_the_conversation() -> None:
    async def fails(said: Said) -> Said:
        raise ZeroDivisionError("no agent")

    with pytest.raises(ZeroDivisionError, match="no agent"):
        asyncio.run(conversation({"one": fails}, Said("one")))
