"""Engines made of other engines: transforms, sub-questions, routers, steps, retries, chat engines, agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.evaluation import GuidelineEvaluator, RelevancyEvaluator
from llama_index.core.indices.query.query_transform import (
    DecomposeQueryTransform,
    HyDEQueryTransform,
    StepDecomposeQueryTransform,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import (
    CustomQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryGuidelineQueryEngine,
    RetryQueryEngine,
    RetrySourceQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from benchmarks.llamaindex import engines as documented
from benchmarks.llamaindex.engines import indexes, tools
from benchmarks.llamaindex.kits import Kit, Sizes, corpus

Make = Any


def base(index: VectorStoreIndex, **options: Any) -> Any:
    return index.as_query_engine(similarity_top_k=2, **options)


def transformed(transform: Any, **options: Any) -> Make:
    return lambda kit: TransformQueryEngine(base(kit.reports, **options), transform(kit), callback_manager=kit.manager)


def hyde_over_advanced(kit: Kit) -> BaseQueryEngine:
    return TransformQueryEngine(documented.advanced_rag(kit), HyDEQueryTransform(kit.llm), callback_manager=kit.manager)


def multi_step_known(kit: Kit) -> BaseQueryEngine:
    """Return a multi-step engine with a fixed number of steps."""
    return MultiStepQueryEngine(
        base(kit.reports),
        StepDecomposeQueryTransform(kit.llm),
        num_steps=2,
        early_stopping=False,
        index_summary="Terms",
    )


def sub_questions_sync(kit: Kit) -> BaseQueryEngine:
    return SubQuestionQueryEngine.from_defaults(
        tools(*map(base, indexes(kit))),
        llm=kit.llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=kit.llm),
        verbose=False,
        use_async=False,
    )


def sub_questions_deep(kit: Kit) -> BaseQueryEngine:
    """Return a sub-question engine whose engines ask sub-questions of their own."""
    return SubQuestionQueryEngine.from_defaults(
        tools(documented.fusion(kit), documented.hyde(kit), documented.naive_rag(kit)),
        llm=kit.llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=kit.llm),
        verbose=False,
        use_async=True,
    )


def router_deep(kit: Kit) -> BaseQueryEngine:
    engines = tools(documented.sub_questions(kit), documented.fusion(kit), documented.citation(kit))
    return RouterQueryEngine(LLMMultiSelector.from_defaults(llm=kit.llm), engines, llm=kit.llm)


def summaries(kit: Kit) -> BaseQueryEngine:
    """Return the documentation's example of a router: one tool sums everything up, the other looks it up."""
    everything = SummaryIndex(corpus(Sizes(3, 30)), callback_manager=kit.manager)
    summed = everything.as_query_engine(llm=kit.llm, response_mode="tree_summarize", use_async=True)
    return SubQuestionQueryEngine.from_defaults(
        tools(base(kit.reports), summed),
        llm=kit.llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=kit.llm),
        verbose=False,
        use_async=True,
    )


def retry(kit: Kit) -> BaseQueryEngine:
    return RetryQueryEngine(base(kit.reports), RelevancyEvaluator(llm=kit.llm), max_retries=2)


def retry_source(kit: Kit) -> BaseQueryEngine:
    return RetrySourceQueryEngine(base(kit.reports), RelevancyEvaluator(llm=kit.llm), llm=kit.llm, max_retries=2)


def retry_guideline(kit: Kit) -> BaseQueryEngine:
    judge = GuidelineEvaluator(llm=kit.llm)
    return RetryGuidelineQueryEngine(base(kit.reports), judge, resynthesize_query=True, max_retries=2)


class Own(CustomQueryEngine):
    """Somebody's own, as the documentation writes one."""

    retriever: Any
    llm: Any

    def custom_query(self, query_str: str) -> str:
        context = "\n\n".join(node.node.get_content() for node in self.retriever.retrieve(query_str))
        return str(self.llm.complete(f"From this:\n{context}\nanswer: {query_str}"))

    async def acustom_query(self, query_str: str) -> str:
        context = "\n\n".join(node.node.get_content() for node in await self.retriever.aretrieve(query_str))
        return str(await self.llm.acomplete(f"From this:\n{context}\nanswer: {query_str}"))


def custom(kit: Kit) -> BaseQueryEngine:
    return Own(retriever=kit.reports.as_retriever(), llm=kit.llm, callback_manager=kit.manager)


class Checked(RetrieverQueryEngine):
    """A subclass that does one thing more."""

    def _query(self, query_bundle: Any) -> Any:
        found = super()._query(query_bundle)
        found.metadata = {**(found.metadata or {}), "checked": True}
        return found


def subclass(kit: Kit) -> BaseQueryEngine:
    return Checked.from_args(kit.reports.as_retriever(), llm=kit.llm)


ENGINES: dict[str, Make] = {
    "hyde": transformed(lambda kit: HyDEQueryTransform(kit.llm)),
    "hyde_only": transformed(lambda kit: HyDEQueryTransform(kit.llm, include_original=False), response_mode="refine"),
    "hyde_streaming": transformed(lambda kit: HyDEQueryTransform(kit.llm), streaming=True),
    "hyde_over_advanced": hyde_over_advanced,
    "decomposed": transformed(lambda kit: DecomposeQueryTransform(kit.llm)),
    "step_decomposed": transformed(lambda kit: StepDecomposeQueryTransform(kit.llm)),
    "multi_step": documented.multi_step,
    "multi_step_known": multi_step_known,
    "sub_questions": documented.sub_questions,
    "sub_questions_sync": sub_questions_sync,
    "sub_questions_deep": sub_questions_deep,
    "sub_questions_summary": summaries,
    "router": documented.router,
    "router_multi": documented.router_multi,
    "router_deep": router_deep,
    "citation": documented.citation,
    "retry": retry,
    "retry_source": retry_source,
    "retry_guideline": retry_guideline,
    "custom": custom,
    "subclass": subclass,
    "naive": documented.naive_rag,
}

# ------------------------------------------------------------ chat


def history() -> Any:
    messages = [
        ChatMessage(role=MessageRole.USER, content="What grows here?"),
        ChatMessage(role=MessageRole.ASSISTANT, content="Oats and ivy."),
    ]
    return ChatMemoryBuffer.from_defaults(chat_history=messages, token_limit=3000)


def condense_question(kit: Kit) -> BaseChatEngine:
    return CondenseQuestionChatEngine.from_defaults(base(kit.reports), memory=history(), llm=kit.llm)


def context(kit: Kit) -> BaseChatEngine:
    retriever = kit.reports.as_retriever(similarity_top_k=3)
    return ContextChatEngine.from_defaults(
        retriever, llm=kit.llm, memory=history(), node_postprocessors=[kit.reranker(2)]
    )


def condense_plus_context(kit: Kit) -> BaseChatEngine:
    retriever = kit.reports.as_retriever(similarity_top_k=3)
    return CondensePlusContextChatEngine.from_defaults(
        retriever, llm=kit.llm, memory=history(), system_prompt="Be kind."
    )


def chat_by_mode(kit: Kit) -> BaseChatEngine:
    return kit.reports.as_chat_engine(chat_mode="condense_plus_context", llm=kit.llm, memory=history())  # type: ignore[arg-type]


CHAT: dict[str, Make] = {
    "condense_question": condense_question,
    "context": context,
    "condense_plus_context": condense_plus_context,
    "chat_by_mode": chat_by_mode,
}

# ------------------------------------------------------------ agents, workflows

Fast = Callable[[Any], Any]
"""Accelerates one of the parts; the workflow itself is the user's code."""


def plainly(part: Any) -> Any:
    return part


def agent(kit: Kit, fast: Fast = plainly) -> Any:
    return ReActAgent(tools=[*tools(fast(base(kit.reports)), fast(base(kit.notes)))], llm=kit.llm, streaming=False)


class Retrieved(Event):
    nodes: list[Any]


class Flow(Workflow):
    """The documentation's RAG, as a workflow."""

    def __init__(self, kit: Kit, fast: Fast = plainly) -> None:
        super().__init__(timeout=30)
        self.kit = kit
        self.retriever, self.engine = fast(kit.reports.as_retriever(similarity_top_k=4)), fast(documented.fusion(kit))

    @step
    async def retrieve(self, ctx: Context, ev: StartEvent) -> Retrieved:
        await ctx.store.set("query", ev.user_msg)
        return Retrieved(nodes=await self.retriever.aretrieve(ev.user_msg))

    @step
    async def answer(self, ctx: Context, ev: Retrieved) -> StopEvent:
        query = await ctx.store.get("query")
        text = "\n".join(node.node.get_content() for node in ev.nodes)
        answer = await self.kit.llm.acomplete(f"{text}\n\nAnswer: {query}")
        return StopEvent(result=f"{answer} / {await self.engine.aquery(str(answer))}")


WORKFLOWS: dict[str, Make] = {"agent": agent, "flow": Flow}
