"""Tests of planned parts that fail: the answer is the original's, and one message names the part."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from support.openai_stub import MODEL, openai_stub

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex.binding.openai import PlannedModel
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool

NODES = [NodeWithScore(node=TextNode(id_=f"n{i}", text=f"Passage {i}: oats are sown.")) for i in range(3)]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture
def llm() -> Iterator[OpenAILike]:
    given: Any = {"is_chat_model": True, "max_retries": 0, "temperature": 0.0, "max_tokens": 9}
    with openai_stub() as stub:
        yield OpenAILike(model=MODEL, api_base=stub.base_url, api_key="none", context_window=20_000, **given)


@pytest.fixture
def pool(llm: OpenAILike) -> Iterator[EnginePool]:
    with EnginePool.local(llm=OpenAIServer(base_url=llm.api_base or "", prefix_caching=True, calibrate=False)) as made:
        yield made


def logged_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "teola_plugin" and r.levelno >= logging.WARNING]


def answered(synthesizer: Any) -> Any:
    return synthesizer.synthesize("What grows?", NODES)


def broken(*_: Any, **__: Any) -> Any:
    raise AttributeError("a bug of ours")


def test_failing_primitive_is_logged_once(llm, pool, monkeypatch, caplog) -> None:
    synthesizer = get_response_synthesizer(llm=llm, response_mode="accumulate")  # type: ignore[arg-type]
    fast = accelerate(synthesizer, pool=pool, bind=[(llm, "llm")])
    monkeypatch.setattr(PlannedModel, "payload_of_template", broken)
    for _ in range(3):
        assert answered(fast) == answered(synthesizer)
        assert not any(span.kind == "DECODING" for span in fast.last_trace().spans)
    [warning] = logged_warnings(caplog)
    assert "'synthesize.answer' of the Accumulate at synthesizer raised AttributeError: a bug of ours" in warning
    assert "Answers are unaffected" in warning


def test_failing_plan_is_logged_once_per_object(llm, pool, monkeypatch, caplog) -> None:
    made = [get_response_synthesizer(llm=llm, response_mode="compact") for _ in range(2)]  # type: ignore[arg-type]
    monkeypatch.setattr("teola_plugin.adapters.llamaindex.session.trace", broken)
    for one in made:
        fast = accelerate(one, pool=pool, bind=[(llm, "llm")])
        for _ in range(3):
            assert answered(fast) == answered(one)
    assert len(logged_warnings(caplog)) == 2
    assert all("planning failed" in one and "of the CompactAndRefine" in one for one in logged_warnings(caplog))


def test_invalid_input_raises_without_a_warning(llm, pool, caplog) -> None:
    """The plain object raises, and so does the plan's template: nothing was lost."""

    def refuses(**_: Any) -> str:
        raise ValueError("no such context")

    template = PromptTemplate("{context_str} {query_str}", function_mappings={"context_str": refuses})
    synthesizer = get_response_synthesizer(llm=llm, response_mode="accumulate", text_qa_template=template)  # type: ignore[arg-type]
    fast = accelerate(synthesizer, pool=pool, bind=[(llm, "llm")])
    for one in (synthesizer, fast):
        with pytest.raises(ValueError, match="no such context"):
            answered(one)
    fast.last_trace()
    assert logged_warnings(caplog) == []
