"""Tests of steps whose calls have inputs that are computed of lists of nodes."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from support.hosted_steps import HostedLLM, called, compared

from teola_plugin import accelerate


class OwnNode(TextNode):
    """A node that reads its text by code of the user's."""

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        READS.append(self.text)
        return self.text


READS: list[str] = []


def nodes_of(kind: type[TextNode]) -> list[NodeWithScore]:
    """Return four nodes of a class, with scores and with the name of a file for two of them."""
    return [
        NodeWithScore(
            node=kind(text=f"text {number}", metadata={"file": f"file {number}"} if number % 2 else {}),
            score=number / 4,
        )
        for number in range(4)
    ]


class Retrieved(Event):
    """Documents were found."""

    nodes: list[NodeWithScore]


class OwnWorkflow(Workflow):
    """A workflow that finds nodes in its first step."""

    kind: type[TextNode] = TextNode

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(timeout=60)
        self.llm = llm

    @step
    async def find(self, ev: StartEvent) -> Retrieved:
        return Retrieved(nodes=nodes_of(self.kind))


class Sliced(OwnWorkflow):
    @step
    async def use(self, ev: Retrieved) -> StopEvent:
        return StopEvent(result=[str(await self.llm.acomplete(f"sum up {node.text}")) for node in ev.nodes[:3]])


class Numbered(OwnWorkflow):
    @step
    async def use(self, ev: Retrieved) -> StopEvent:
        texts = []
        for number, node in enumerate(ev.nodes, 1):
            texts.append(str(await self.llm.acomplete(f"sum up [{number}] {node.text}")))
        return StopEvent(result=texts)


class Metadata(OwnWorkflow):
    @step
    async def use(self, ev: Retrieved) -> StopEvent:
        texts = []
        for node in ev.nodes:
            texts.append(str(await self.llm.acomplete(f"sum up {node.metadata.get('file', 'x')}: {node.text}")))
        return StopEvent(result=texts)


class Filtered(OwnWorkflow):
    @step
    async def use(self, ev: Retrieved) -> StopEvent:
        nodes = [node for node in ev.nodes if (node.score or 0) > 0.3]
        return StopEvent(result=[str(await self.llm.acomplete(f"sum up {node.text}")) for node in nodes])


class Ranked(OwnWorkflow):
    @step
    async def use(self, ev: Retrieved) -> StopEvent:
        nodes = sorted(ev.nodes, key=lambda node: node.score, reverse=True)
        return StopEvent(result=[str(await self.llm.acomplete(f"sum up {node.text}")) for node in nodes])


class Sources(OwnWorkflow):
    """Both calls get all sources, or are told that there are none."""

    @step
    async def use(self, ev: Retrieved) -> StopEvent:
        context = "\n".join(f"[{i}] {n.node.get_content()} ({n.score:.3f})" for i, n in enumerate(ev.nodes, 1))
        context = context if ev.nodes else "none"
        first = await self.llm.acomplete(f"first {context}")
        second = await self.llm.acomplete(f"second {context}")
        return StopEvent(result=[str(first), str(second)])


class ContentWithMetadata(OwnWorkflow):
    @step
    async def use(self, ev: Retrieved) -> StopEvent:
        texts = []
        for node in ev.nodes:
            content = node.get_content(metadata_mode=MetadataMode.LLM)
            texts.append(str(await self.llm.acomplete(f"sum up {content}; {node.get_text()}")))
        return StopEvent(result=texts)


GAINING = (ContentWithMetadata, Sliced, Numbered, Metadata, Filtered, Ranked, Sources)


@pytest.mark.parametrize("make", GAINING)
def test_calls_with_parts_of_nodes_overlap(make: type[OwnWorkflow]) -> None:
    original_llm, llm = compared(make)
    assert original_llm.most_at_once == 1
    assert llm.most_at_once >= 2


@pytest.mark.parametrize("make", [Sliced, Numbered])
def test_lists_of_the_users_own_nodes_are_taken_apart(make: type[OwnWorkflow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "kind", OwnNode)
    READS.clear()
    _, llm = compared(make)
    assert llm.most_at_once >= 2
    assert READS == []


@pytest.mark.parametrize("make", [Filtered, Ranked, Sources, ContentWithMetadata])
def test_code_of_the_users_own_nodes_runs_as_often_as_in_the_original(
    make: type[OwnWorkflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "kind", OwnNode)
    reads = []
    for change in (lambda workflow: workflow, accelerate):
        READS.clear()
        called(change(make(HostedLLM())))
        reads.append(len(READS))
    assert reads[0] == reads[1]


@pytest.mark.parametrize("make", GAINING)
def test_error_of_a_call_with_parts_of_nodes_is_the_originals(make: type[OwnWorkflow]) -> None:
    errors: list[Any] = []
    for change in (lambda workflow: workflow, accelerate):
        with pytest.raises(Exception) as caught:
            called(change(make(HostedLLM(fails_on="text 2"))))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
