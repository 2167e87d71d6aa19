"""Tests of workflow steps that call synthesizers, rerankers and memories: independent calls behind them overlap."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LLMRerank, SimilarityPostprocessor
from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from support.hosted_steps import HostedLLM, called, compared

from teola_plugin import accelerate

LATENCY_S = 0.15


class PartsWorkflow(Workflow):
    """A workflow with a synthesizer, a memory and a retriever."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(timeout=60)
        self.llm = llm
        self.summarizer = TreeSummarize(llm=llm)
        self.memory = ChatMemoryBuffer.from_defaults(token_limit=1000, tokenizer_fn=str.split)
        nodes = [TextNode(text=f"text {number}", id_=str(number)) for number in range(3)]
        self.index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=2))
        self.retriever = self.index.as_retriever(similarity_top_k=3)

    async def ask(self, prompt: str) -> str:
        """Return the model's answer."""
        return str(await self.llm.acomplete(prompt))


class Summaries(PartsWorkflow):
    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        summary = await self.summarizer.aget_response(ev.query, ["one", "two"])
        first = await self.ask(f"first {ev.query}")
        return StopEvent(result=[str(summary), first, await self.ask("other"), await self.ask(f"second {summary}")])


class Synthesized(PartsWorkflow):
    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        nodes = await self.retriever.aretrieve(ev.query)
        response = await get_response_synthesizer(llm=self.llm).asynthesize(ev.query, nodes=nodes)
        first = await self.ask(f"first {ev.query}")
        return StopEvent(result=[str(response), first, await self.ask("other"), await self.ask(f"second {response}")])


class Remembered(PartsWorkflow):
    """A prompt reads the memory behind its change."""

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        first = await self.ask(f"first {ev.query}")
        self.memory.put(ChatMessage(role="user", content=ev.query))
        messages = self.memory.get()
        chat = await self.llm.achat(messages)
        self.memory.put(chat.message)
        second = await self.ask(f"second {ev.query}")
        return StopEvent(result=[first, second, str(chat), [message.content for message in self.memory.get()]])


class Reranked(PartsWorkflow):
    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        nodes = await self.retriever.aretrieve(ev.query)
        kept = SimilarityPostprocessor(similarity_cutoff=-1).postprocess_nodes(nodes, query_str=ev.query)
        first = await self.ask(f"first {ev.query}")
        second = await self.ask(f"second {ev.query}")
        return StopEvent(result=[first, len(kept), second, await self.ask(f"third {ev.query}")])


@pytest.mark.parametrize("make", [Summaries, Synthesized, Remembered, Reranked])
def test_independent_calls_behind_a_part_overlap(make: type[PartsWorkflow]) -> None:
    original_llm, llm = compared(make, latency_s=LATENCY_S)

    assert original_llm.most_at_once == 1
    assert llm.most_at_once >= 2


def test_memory_of_several_runs_is_the_originals() -> None:
    original_llm, llm = HostedLLM(), HostedLLM()
    original, fast = Remembered(original_llm), accelerate(Remembered(llm))

    for query in ("oats", "rye", "oats"):
        assert called(fast, query) == called(original, query)

    assert llm.prompts == original_llm.prompts


class Halving(SimilarityPostprocessor):
    """A postprocessor of the user's, which may do anything: it inserts a text."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: Any = None) -> list[NodeWithScore]:
        INDEXES[-1].insert_nodes([TextNode(text="new", id_="new")])
        return nodes[:1]


INDEXES: list[VectorStoreIndex] = []


class OwnPostprocessor(PartsWorkflow):
    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(llm)
        INDEXES.append(self.index)

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        first = await self.ask(f"first {ev.query}")
        kept = Halving().postprocess_nodes([NodeWithScore(node=TextNode(text=first))], query_str=ev.query)
        nodes = await self.index.as_retriever(similarity_top_k=9).aretrieve(ev.query)
        return StopEvent(result=[len(kept), *[await self.ask(node.text) for node in nodes]])


def test_search_behind_a_postprocessor_of_the_users_stays_behind_it() -> None:
    compared(OwnPostprocessor)


class RescoredNodes(PartsWorkflow):
    """A prompt reads scores that a reranker writes."""

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        nodes = await self.retriever.aretrieve(ev.query)
        best = LLMRerank(choice_batch_size=2, top_n=2, llm=self.llm).postprocess_nodes(nodes, query_str=ev.query)
        first = await self.ask(f"first {[node.score for node in nodes]}")
        return StopEvent(result=[first, *[await self.ask(f"{node.text} {node.score}") for node in best]])


class ChoosingLLM(HostedLLM):
    """A model that chooses documents."""

    def _end(self, prompt: str) -> str:
        answer = super()._end(prompt)
        return "Doc: 1, Relevance: 7" if "Relevance" in prompt else answer


def test_prompts_with_new_scores_are_the_originals() -> None:
    original_llm, llm = ChoosingLLM(), ChoosingLLM()

    assert called(accelerate(RescoredNodes(llm))) == called(RescoredNodes(original_llm))
    assert llm.prompts == original_llm.prompts


@pytest.mark.parametrize("make", [Summaries, Remembered])
def test_error_behind_a_part_is_the_originals(make: type[PartsWorkflow]) -> None:
    errors = []
    for change in (lambda workflow: workflow, accelerate):
        with pytest.raises(Exception) as caught:
            called(change(make(HostedLLM(fails_on="second"))))
        errors.append((type(caught.value), str(caught.value)))

    assert errors[0] == errors[1]
