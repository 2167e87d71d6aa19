"""Tests of synthesizers whose LLM is bound to a server: the same answers, and the plan makes every call of the LLM.

The planned calls are counted, because a plan that fails would change only the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import accelerate
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool

MODES = {"refine": 3, "accumulate": 3}
"""How an answer is made of three passages, and in how many calls. The first may be the plain object's: it is a race."""
NODES = [NodeWithScore(node=TextNode(id_=f"n{i}", text=f"Passage {i}: oats are sown.")) for i in range(3)]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


@pytest.fixture(scope="module")
def pool(stub: OpenAIStub) -> Iterator[EnginePool]:
    with EnginePool.local(llm=OpenAIServer(base_url=stub.base_url, prefix_caching=True, calibrate=False)) as made:
        yield made


@pytest.fixture
def llm(stub: OpenAIStub) -> OpenAILike:
    given: Any = {"is_chat_model": True, "max_retries": 0, "temperature": 0.0, "max_tokens": 9}
    return OpenAILike(model=MODEL, api_base=stub.base_url, api_key="none", context_window=20_000, **given)


def answered(synthesizer: Any, way: str) -> Any:
    if way == "synthesize":
        return synthesizer.synthesize("What grows?", NODES)
    return asyncio.run(synthesizer.asynthesize("What grows?", NODES))


def planned(trace: Any) -> int:
    """Return the number of calls of the LLM that the plan made or shares with the original."""
    return sum(span.kind == "DECODING" and span.outcome == "done" for span in trace.spans)


@pytest.mark.parametrize("way", ["synthesize", "asynthesize"])
@pytest.mark.parametrize("mode", MODES)
def test_every_llm_call_of_a_bound_synthesizer_is_planned(
    mode: Any, way: str, llm: OpenAILike, pool: EnginePool, stub: OpenAIStub
) -> None:
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode)
    before = answered(synthesizer, way)
    fast = accelerate(synthesizer, pool=pool, bind=[(llm, "llm")])
    stub.requests.clear()
    after = answered(fast, way)
    assert after == before
    assert MODES[mode] - 1 <= planned(fast.last_trace()) <= MODES[mode]
    assert sum(body.get("max_tokens") == 9 for _, body in stub.requests) == MODES[mode], "nothing was asked for twice"
