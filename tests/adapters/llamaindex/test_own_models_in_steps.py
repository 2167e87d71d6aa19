"""Tests of workflow steps that call own models: certain calls are prefetched, and nothing else changes."""

from __future__ import annotations

import asyncio
import datetime
import threading
from typing import Any, ClassVar

import pytest
from llama_index.core import MockEmbedding, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from support.hosted_steps import LATENCY_S, HostedLLM, called, compared, run_with_events

from teola_plugin import accelerate, uninstall
from teola_plugin.adapters.plan_report import Reason
from teola_plugin.shims.llamaindex.engines import QueriedIndexParts

NODES = [NodeWithScore(node=TextNode(text=f"text {number}"), score=1.0) for number in range(4)]
GRADE = PromptTemplate("grade {text} for {query}")


class Retrieved(Event):
    """Documents were found."""

    nodes: list[NodeWithScore]


class Graded(Event):
    """Documents were graded."""

    grades: list[str]


class OwnWorkflow(Workflow):
    """A workflow with a model in an attribute, which finds documents in its first step."""

    def __init__(self, llm: HostedLLM, **options: Any) -> None:
        super().__init__(timeout=60, **options)
        self.llm = llm

    @step
    async def find(self, ctx: Context, ev: StartEvent) -> Retrieved:
        await ctx.store.set("query", ev.query)
        return Retrieved(nodes=NODES)


class Loop(OwnWorkflow):
    @step
    async def grade(self, ctx: Context, ev: Retrieved) -> StopEvent:
        query = await ctx.store.get("query")
        grades = []
        for node in ev.nodes:
            print("grading", node.node_id)
            answer = await self.llm.acomplete(GRADE.format(text=node.text, query=query))
            ctx.write_event_to_stream(Graded(grades=[answer.text]))
            grades.append(answer.text.strip().lower())
        return StopEvent(result=grades)


class Comprehension(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        return StopEvent(result=[str(await self.llm.acomplete(f"grade {node.get_content()}")) for node in ev.nodes])


class ContentsFirst(OwnWorkflow):
    """The step reads the texts of all nodes before it calls the model."""

    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        contents = [node.node.get_content() for node in ev.nodes]
        texts = []
        for node in ev.nodes:
            texts.append(node.get_content())
        context = "; ".join([node.get_content() for node in ev.nodes])
        grades = [str(await self.llm.acomplete(f"grade {content}")) for content in contents]
        for text in texts:
            grades.append(str(await self.llm.acomplete(f"check {text} in {context}")))
        return StopEvent(result=grades)


class Messages(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        grades = []
        for node in ev.nodes:
            messages = [
                ChatMessage(role=MessageRole.SYSTEM, content="You grade."),
                ChatMessage(role="user", content=f"grade {node.text}"),
            ]
            grades.append((await self.llm.achat(messages)).message.content)
        return StopEvent(result=grades)


class HelperMethod(OwnWorkflow):
    async def ask(self, kind: str, query: str) -> str:
        return str(await self.llm.acomplete(f"{kind} {query}"))

    @step
    async def grade(self, ctx: Context, ev: Retrieved) -> StopEvent:
        query = await ctx.store.get("query")
        plan = await self.ask("plan", query)
        outline = await self.ask("outline", query)
        return StopEvent(result=[plan, outline])


class Predictions(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        results = []
        for node in ev.nodes:
            results.append(await self.llm.apredict(GRADE, text=node.text, query="oats"))
        return StopEvent(result=results)


class Gathered(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        answers = await asyncio.gather(*(self.llm.acomplete(f"grade {node.text}") for node in ev.nodes))
        return StopEvent(result=[str(answer) for answer in answers])


class SyncStep(OwnWorkflow):
    @step
    def grade(self, ev: Retrieved) -> StopEvent:
        return StopEvent(result=[self.llm.complete(f"grade {node.text}").text for node in ev.nodes])


class Answers(OwnWorkflow):
    """Calls that need the text of another's answer, in the ways in which steps read it."""

    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        first = await self.llm.acomplete("first")
        chatted = await self.llm.achat([ChatMessage(role="user", content="chat")])
        kept = str(await self.llm.acomplete("kept"))
        return StopEvent(
            result=[
                (await self.llm.acomplete(f"{node.text} {first} {kept} {chatted.message.content}")).text
                for node in ev.nodes
            ]
        )


class Engine(OwnWorkflow):
    """Calls that need an engine's answer."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(llm)
        nodes = [TextNode(text=f"text {number}", id_=str(number)) for number in range(3)]
        self.engine = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=2)).as_query_engine(llm=llm)

    @step
    async def grade(self, ctx: Context, ev: Retrieved) -> StopEvent:
        response = await self.engine.aquery(await ctx.store.get("query"))
        answers = [await self.llm.acomplete(f"{node.text} {response} {response.response}") for node in ev.nodes]
        return StopEvent(result=[answer.text for answer in answers])


class IndexInAttribute(OwnWorkflow):
    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(llm)
        nodes = [TextNode(text=f"text {number}", id_=str(number)) for number in range(3)]
        self.index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=2))


class MadeEngine(IndexInAttribute):
    """Makes its engine in the step that asks it."""

    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        engine = self.index.as_query_engine(llm=self.llm, similarity_top_k=2)
        return StopEvent(result=[str(await engine.aquery(f"question {number}")) for number in range(3)])


class EngineOfAHelper(IndexInAttribute):
    def engine(self, top_k: int) -> Any:
        return self.index.as_query_engine(llm=self.llm, similarity_top_k=top_k, response_mode="tree_summarize")

    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        first = await self.engine(1).aquery("first")
        second = await self.engine(2).aquery("second")
        return StopEvent(result=[str(first), str(second)])


class EngineOfSettings(IndexInAttribute):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        engine = self.index.as_query_engine()
        return StopEvent(result=[str(await engine.aquery(node.text)) for node in ev.nodes])


class MadeRetriever(IndexInAttribute):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        first = (await self.llm.acomplete("first")).text
        nodes = await self.index.as_retriever(similarity_top_k=2).aretrieve("oats")
        return StopEvent(result=[first, *[str(await self.llm.acomplete(f"grade {node.text}")) for node in nodes]])


class Representation(OwnWorkflow):
    """An answer is more than its text where its representation is read."""

    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        first = await self.llm.acomplete("first")
        return StopEvent(result=[(await self.llm.acomplete(f"{node.text} {first!r}")).text for node in ev.nodes])


ASYNC = (
    *(Loop, Comprehension, ContentsFirst, Messages, HelperMethod, Predictions, Answers, Engine),
    *(MadeEngine, EngineOfAHelper, MadeRetriever),
)


@pytest.mark.parametrize("make", ASYNC)
def test_independent_calls_of_a_step_overlap(make: type[OwnWorkflow]) -> None:
    original_llm, llm = compared(make)
    assert original_llm.most_at_once == 1
    assert llm.most_at_once >= 2


class CountedNode(TextNode):
    """A node of a class of the user's own, which counts how often its content is read."""

    reads: ClassVar[int] = 0

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        CountedNode.reads += 1
        return super().get_content(metadata_mode)


class ContentsOfCountedNodes(ContentsFirst):
    @step
    async def find(self, ctx: Context, ev: StartEvent) -> Retrieved:
        return Retrieved(nodes=[NodeWithScore(node=CountedNode(text=f"text {number}")) for number in range(2)])


def test_content_of_the_users_own_nodes_is_read_as_often_as_by_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    for change in (lambda workflow: workflow, accelerate):
        monkeypatch.setattr(CountedNode, "reads", 0)
        called(change(ContentsOfCountedNodes(HostedLLM())))
        reads.append(CountedNode.reads)

    assert reads[0] == reads[1] == 6


def test_engine_created_in_a_step_uses_the_settings_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    original_llm, llm = HostedLLM(), HostedLLM()
    monkeypatch.setattr(Settings, "_llm", original_llm)
    expected = called(EngineOfSettings(original_llm))
    fast = accelerate(EngineOfSettings(llm))
    fast.explain()
    Settings.llm = llm

    assert called(fast) == expected
    assert llm.prompts == original_llm.prompts
    assert llm.most_at_once >= 2


def test_engine_created_in_a_step_sees_nodes_added_later() -> None:
    original_llm, llm = HostedLLM(), HostedLLM()
    original = MadeEngine(original_llm)
    workflow = MadeEngine(llm)
    fast = accelerate(workflow)
    called(fast)
    called(original)
    for one in (original, workflow):
        one.index.insert_nodes([TextNode(text="text of oats", id_="oats")])

    assert called(fast) == called(original)
    assert llm.prompts == original_llm.prompts
    assert llm.most_at_once >= 2


def test_index_of_an_unknown_version_is_not_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueriedIndexParts, "METHODS", ("renamed",))

    _, llm = compared(MadeEngine)

    assert llm.most_at_once == 1


def test_reading_a_step_does_not_change_the_llm() -> None:
    manager = CallbackManager([])
    llm = HostedLLM(callback_manager=manager)

    accelerate(MadeEngine(llm)).explain()

    assert llm.callback_manager is manager


class DatedPrompt(OwnWorkflow):
    """The first call's prompt has the date, and the second call needs nothing of it."""

    @step
    async def grade(self, ctx: Context, ev: Retrieved) -> StopEvent:
        first = await self.llm.acomplete(f"On {datetime.date.today()}: grade oats")
        second = await self.llm.acomplete("grade rye")
        return StopEvent(result=[str(first), str(second)])


class CheckedPrompt(OwnWorkflow):
    """A helper that may raise writes the first prompt."""

    def check(self, text: str) -> str:
        raise RuntimeError(f"{text} is not allowed on {datetime.date.today()}")

    @step
    async def grade(self, ctx: Context, ev: Retrieved) -> StopEvent:
        first = await self.llm.acomplete(f"grade {self.check('oats')}")
        second = await self.llm.acomplete("grade rye")
        return StopEvent(result=[str(first), str(second)])


def test_call_behind_a_prompt_of_the_run_is_prefetched() -> None:
    original_llm, llm = compared(DatedPrompt)
    assert original_llm.most_at_once == 1
    assert llm.most_at_once == 2


def test_explain_says_that_only_the_run_knows_the_prompt() -> None:
    rows = accelerate(DatedPrompt(HostedLLM())).report().calls

    assert [row.reason for row in rows] == [Reason.PROMPT_AT_RUN_TIME, None]
    assert "test_own_models_in_steps.py:" in str(rows[0].explanation)


def test_nothing_passes_a_helper_that_may_raise() -> None:
    llm = HostedLLM()

    with pytest.raises(RuntimeError, match="oats is not allowed"):
        called(accelerate(CheckedPrompt(llm)))
    assert llm.prompts == []


def test_prompt_with_repr_of_an_answer_equals_the_originals() -> None:
    compared(Representation)


def test_calls_gathered_by_a_step_are_not_repeated() -> None:
    original_llm, llm = compared(Gathered)
    assert llm.most_at_once == original_llm.most_at_once == len(NODES)


def test_calls_of_a_sync_step_stay_sequential_for_unknown_llm() -> None:
    _, llm = compared(SyncStep)
    assert llm.most_at_once == 1


def test_calls_of_a_sync_step_overlap_with_concurrent_option() -> None:
    _, llm = compared(SyncStep, concurrent=[HostedLLM])
    assert llm.most_at_once >= 2


def test_speculate_off_prefetches_nothing_in_steps() -> None:
    _, llm = compared(Loop, speculate="off")
    assert llm.most_at_once == 1


def test_nothing_is_prefetched_after_uninstall() -> None:
    llm = HostedLLM()
    fast = accelerate(Loop(llm))
    uninstall()
    called(fast)
    assert llm.most_at_once == 1


def test_explain_names_steps_with_concurrent_calls() -> None:
    explanation = str(accelerate(Loop(HostedLLM())).explain())
    assert "calls that the step grade makes one after the other, side by side" in explanation


# ------------------------------------------------------------ calls that are not certain


class EarlyReturn(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        for node in ev.nodes:
            answer = await self.llm.acomplete(f"grade {node.text}")
            if "text 1" in answer.text:
                return StopEvent(result=answer.text)
        return StopEvent(result="none")


class Condition(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        first = await self.llm.acomplete("is it enough?")
        if "no" in first.text.split():
            return StopEvent(result=str(await self.llm.acomplete("search again")))
        return StopEvent(result=first.text)


class Asked(Event):
    """A person is asked."""


class Approved(Event):
    """A person has agreed."""


class Human(OwnWorkflow):
    @step
    async def grade(self, ctx: Context, ev: Retrieved) -> StopEvent:
        results = [str(await self.llm.acomplete("plan"))]
        await ctx.wait_for_event(Approved, waiter_event=Asked())
        for node in ev.nodes:
            results.append(str(await self.llm.acomplete(f"grade {node.text}")))
        return StopEvent(result=results)


class UnknownCode(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])
        first = await self.llm.acomplete("first")
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0))])
        second = await self.llm.acomplete("second")
        return StopEvent(result=[first.text, second.text])


@pytest.mark.parametrize("make", [EarlyReturn, Condition, UnknownCode])
def test_uncertain_calls_of_a_step_are_not_prefetched(make: type[OwnWorkflow]) -> None:
    _, llm = compared(make)
    assert llm.most_at_once == 1


def test_no_call_after_human_input_is_prefetched() -> None:
    llm = HostedLLM()
    fast = accelerate(Human(llm))

    async def run() -> Any:
        handler = fast.run(query="oats")
        async for event in handler.stream_events():
            if isinstance(event, Asked):
                await asyncio.sleep(2 * LATENCY_S)
                assert set(llm.prompts) == {"plan"}
                handler.ctx.send_event(Approved())
        return await handler

    results = asyncio.run(run())
    assert results == ["answer to plan", *(f"answer to grade text {number}" for number in range(4))]


# ------------------------------------------------------------ errors, changes, waste


def test_error_of_a_call_in_a_step_is_the_originals() -> None:
    errors = []
    for change in (lambda workflow: workflow, accelerate):
        with pytest.raises(Exception) as caught:
            called(change(Loop(HostedLLM(fails_on="text 2"))))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_replaced_llm_is_not_called() -> None:
    before, after = HostedLLM(), HostedLLM()
    original = Loop(before)
    fast = accelerate(original)
    called(fast)
    calls_before = len(before.prompts)
    original.llm = after
    called(fast)
    assert len(before.prompts) == calls_before
    assert len(after.prompts) == len(NODES)
    assert after.most_at_once >= 2


class Rewritten(OwnWorkflow):
    @step
    async def grade(self, ev: Retrieved) -> StopEvent:
        first = await self.llm.acomplete("first")
        second = await asked_otherwise(self.llm, "second")
        return StopEvent(result=[first.text, second])


async def asked_otherwise(llm: HostedLLM, prompt: str) -> str:
    """Call the model with a prompt that depends on something which the source does not show."""
    return str(await llm.acomplete(f"{prompt} {threading.active_count() > 0}"))


def test_concurrent_runs_have_their_own_results() -> None:
    llm = HostedLLM()
    fast = accelerate(Loop(llm))

    async def run() -> list[Any]:
        return list(await asyncio.gather(*(run_with_events(fast, query) for query in ("oats", "rye", "oats"))))

    results = asyncio.run(run())
    assert [result for result, _ in results] == [
        [f"answer to grade text {number} for {query}" for number in range(4)] for query in ("oats", "rye", "oats")
    ]
    assert len(llm.prompts) == 3 * len(NODES)


def test_prompts_that_depend_on_opaque_code_are_sent_once() -> None:
    compared(Rewritten)


# ------------------------------------------------------------ traces of runs


def test_run_whose_steps_prefetch_is_traced() -> None:
    fast = accelerate(Loop(HostedLLM()))
    assert fast.last_trace() is None

    async def run() -> Any:
        return await fast.run(query="oats")

    asyncio.run(run())

    trace = fast.last_trace()
    assert trace.outcome in ("done", "closed")
    assert len([span for span in trace.spans if span.engine]) == len(NODES)
    assert fast.report().expected_speed_up > 1.5
    assert "times faster in the last call" in fast.explain()


def test_trace_ends_with_a_run_that_fails() -> None:
    fast = accelerate(Loop(HostedLLM(fails_on="text 1")))

    async def run() -> Any:
        return await fast.run(query="oats")

    with pytest.raises(Exception, match="text 1"):
        asyncio.run(run())

    assert fast.last_trace().outcome not in ("done", "closed")
    assert "times faster" not in fast.explain()


def test_run_without_prefetched_calls_is_not_traced() -> None:
    fast = accelerate(Gathered(HostedLLM()))

    async def run() -> Any:
        return await fast.run(query="oats")

    asyncio.run(run())

    assert fast.last_trace() is None
    assert fast.report().expected_speed_up == 1.0


class WarmerEachRound(Workflow):
    """A step that sets the model's temperature before each of its calls."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.llm = llm

    @step
    async def write(self, ev: StartEvent) -> StopEvent:
        self.llm.temperature = 0.1
        written = []
        for word in ("oats", "ivy", "grass"):
            written.append(str(await self.llm.acomplete(f"Describe {word}.")))
            self.llm.temperature += 0.2
        return StopEvent(result=written)


class WarmerAfterEachRound(WarmerEachRound):
    """A step that sets the model's temperature after each of its calls."""

    @step
    async def write(self, ev: StartEvent) -> StopEvent:
        written = []
        for word in ("oats", "ivy", "grass"):
            written.append(str(await self.llm.acomplete(f"Describe {word}.")))
            self.llm.temperature = (self.llm.temperature + 0.2) % 0.6
        return StopEvent(result=written)


@pytest.mark.parametrize("kind", [WarmerEachRound, WarmerAfterEachRound])
def test_calls_with_settings_that_a_step_sets_send_the_originals_requests(kind: type[Workflow]) -> None:
    from llama_index.llms.openai_like import OpenAILike
    from support.openai_stub import MODEL, openai_stub

    with openai_stub() as server:

        def bodies_of(flow: Any) -> list[Any]:
            server.requests.clear()
            asyncio.run(_run_twice(flow))
            return list(server.generations)

        given: dict[str, Any] = {"model": MODEL, "api_base": server.base_url, "api_key": "none", "is_chat_model": True}
        expected = bodies_of(kind(OpenAILike(temperature=0.1, **given)))
        assert [round(body["temperature"], 1) for body in expected] == [0.1, 0.3, 0.5] * 2
        assert bodies_of(accelerate(kind(OpenAILike(temperature=0.1, **given)))) == expected


async def _run_twice(flow: Any) -> None:
    await flow.run()
    await flow.run()
