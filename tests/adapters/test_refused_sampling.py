"""Tests that unsupported sampling options are refused by name before a request, also those that exclude drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from support.recording import record

from teola_plugin import EnginePool
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.errors import RegistrationError
from teola_plugin.langchain import ChatTeola
from teola_plugin.llamaindex import TeolaLLM

ASKED: dict[str, Callable[[EnginePool, dict[str, Any]], Any]] = {
    "ChatTeola": lambda pool, given: ChatTeola(pool=pool).invoke("Hi", **given),
    "ChatTeola bound": lambda pool, given: ChatTeola(pool=pool).bind(**given).invoke("Hi"),
    "TeolaLLM": lambda pool, given: TeolaLLM(pool=pool).complete("Hi", **given),
    "ChatOpenAI": lambda pool, given: pool.bound(
        ChatOpenAI(api_key="x", **(given if "logit_bias" in given else {"model_kwargs": given})), "llm"
    ),
}


@pytest.mark.parametrize("given", [{"min_p": 0.1}, {"logit_bias": {"5": 1}}], ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("how", ASKED)
def test_unsupported_sampling_option_raises_before_any_request(how: str, given: dict[str, Any]) -> None:
    engine = FakeLLM("llm", profiles.scaled(profiles.rtx3090(), 0.0)["llm"])
    with EnginePool.local({"llm": engine}) as pool:
        requests = record(pool.engine("llm"))
        with pytest.raises(RegistrationError, match=next(iter(given))) as raised:
            ASKED[how](pool, given)
        assert raised.value.hint and not requests
