"""Tests of titles of nodes that are requested in parallel: the same titles, prompts, events and errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core.base.llms.types import CompletionResponse, LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.extractors import TitleExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from pydantic import PrivateAttr

from teola_plugin import accelerate

WAIT_S = 0.05
pytestmark = pytest.mark.usefixtures("loop_of_the_thread")


class Slow(CustomLLM):
    _asked: list[str] = PrivateAttr(default_factory=list)
    _under_way: list[int] = PrivateAttr(default_factory=lambda: [0, 0])

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        raise AssertionError("not in a loop")

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self._asked.append(prompt)
        self._under_way[0] += 1
        self._under_way[1] = max(self._under_way)
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            self._under_way[0] -= 1
        if "bad" in prompt:
            raise ValueError("no title for this one")
        return CompletionResponse(text=f"title {sum(map(ord, prompt)) % 997}")

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def nodes(texts: dict[str, int]) -> list[TextNode]:
    """Return this many nodes of each document."""
    made = [TextNode(id_=f"{doc}{i}", text=f"{doc} {i}") for doc, count in texts.items() for i in range(count)]
    for node in made:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=node.text.split()[0])
    return made


def extracted(llm: Slow, texts: dict[str, int], way: str, fast: bool, **options: Any) -> Any:
    pipeline = IngestionPipeline(transformations=[TitleExtractor(llm=llm)], disable_cache=True)
    if fast:
        pipeline = accelerate(pipeline, **options)
    if way == "arun":
        found = asyncio.run(pipeline.arun(nodes=nodes(texts)))
    else:
        found = pipeline.run(nodes=nodes(texts))
    return [node.metadata for node in found]


@pytest.mark.parametrize("way", ["run", "arun"])
@pytest.mark.parametrize(
    "texts", [{"oats": 5}, {"oats": 3, "ivy": 4}, {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}], ids=str
)
def test_title_extractor_calls_overlap_and_give_the_same_titles(texts: dict[str, int], way: str) -> None:
    recordings, found, most = [], [], []
    for fast in (False, True):
        recorder = Recorder()
        llm = Slow(callback_manager=CallbackManager([recorder]))
        with recorded(recorder):
            titles = extracted(llm, texts, way, fast)
        recordings.append((recorder.callbacks, recorder.events, recorder.spans, Counter(llm._asked)))
        found.append(titles)
        most.append(llm._under_way[1])
    assert found[0] == found[1] and recordings[0] == recordings[1]
    assert most[1] <= 4, "its workers"
    if len(texts) == 1:
        assert most == [1, 4]


def test_failing_title_call_raises_the_originals_error() -> None:
    for fast in (False, True):
        llm = Slow()
        with pytest.raises(ValueError, match="no title for this one"):
            extracted(llm, {"bad": 5}, "arun", fast)
        assert len(llm._asked) <= (4 if fast else 1)


def test_title_calls_of_equal_nodes_do_not_overlap() -> None:
    llm = Slow()
    same = [TextNode(text="same") for _ in range(3)]
    fast = accelerate(IngestionPipeline(transformations=[TitleExtractor(llm=llm)], disable_cache=True))
    asyncio.run(fast.arun(nodes=same))
    assert Counter(Counter(llm._asked).values()) == Counter({3: 1, 1: 1})  # three candidates, and one title of them
    assert llm._under_way[1] == 1
    extracted(llm, {"oats": 3}, "arun", True, speculate="off")
    assert llm._under_way[1] == 1
