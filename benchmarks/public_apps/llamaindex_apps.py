"""LlamaIndex apps after public tutorials: query engines in sync code, and a corrective workflow."""

from __future__ import annotations

from typing import Any

from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai import OpenAI

from benchmarks.public_apps.apps import EMBEDDING_MODEL, KEY, MODEL, App
from benchmarks.public_apps.langchain_apps import QUESTION, TEXTS


def llm(base_url: str) -> OpenAI:
    """Return a hosted LLM as tutorials make it."""
    return OpenAI(model=MODEL, api_base=base_url, api_key=KEY, temperature=0)


def index(base_url: str, texts: list[str]) -> VectorStoreIndex:
    """Return an index of these texts in memory."""
    nodes = [TextNode(text=text, id_=f"{text[:6]}-{number}") for number, text in enumerate(texts)]
    model = OpenAIEmbedding(model=EMBEDDING_MODEL, api_base=base_url, api_key=KEY)
    return VectorStoreIndex(nodes, embed_model=model)


def sub_questions(base_url: str) -> Any:
    """Answer sub-questions on three indexes from sync code, then the question."""
    model = llm(base_url)
    tools = [
        QueryEngineTool.from_defaults(
            index(base_url, TEXTS[start : start + 2]).as_query_engine(llm=model, similarity_top_k=2),
            name=f"notes_{start}",
            description=f"Useful for notes {start}",
        )
        for start in (0, 2, 4)
    ]
    return SubQuestionQueryEngine.from_defaults(
        tools,
        llm=model,
        question_gen=LLMQuestionGenerator.from_defaults(llm=model),
        response_synthesizer=get_response_synthesizer(llm=model),
        use_async=False,
    )


def fusion(base_url: str) -> Any:
    """Retrieve for several versions of a question from sync code, fuse the results, answer."""
    model = llm(base_url)
    retriever = QueryFusionRetriever(
        [index(base_url, TEXTS).as_retriever(similarity_top_k=2)],
        llm=model,
        num_queries=4,
        similarity_top_k=3,
        mode="reciprocal_rerank",  # type: ignore[arg-type]
        use_async=False,
    )
    return RetrieverQueryEngine.from_args(retriever, llm=model)


def tree_summary(base_url: str) -> Any:
    """Summarize many nodes as a tree from sync code."""
    model = llm(base_url)
    engine = index(base_url, [f"{text} {'More of the same. ' * 60}" for text in TEXTS]).as_query_engine(
        llm=model, similarity_top_k=6, response_mode="accumulate"
    )
    return engine


# ------------------------------------------------------------ the corrective workflow


class Retrieved(Event):
    """Documents were retrieved."""

    nodes: list[NodeWithScore]


class Evaluated(Event):
    """Each document was judged relevant or not."""

    results: list[str]


class Extracted(Event):
    """The relevant text is known."""

    text: str


RELEVANCE = PromptTemplate("Grade the relevance of this document.\n{context}\nQuestion: {query}")
TRANSFORM = PromptTemplate("Refine this query for a web search: {query}")


class CorrectiveRag(Workflow):
    """Retrieve, grade each document in a loop, search again with a better query, answer."""

    def __init__(self, base_url: str) -> None:
        super().__init__(timeout=60)
        self.llm = llm(base_url)
        self.index = index(base_url, [*TEXTS[:3], "An off-topic note about the weather."])

    @step
    async def retrieve(self, ctx: Context, ev: StartEvent) -> Retrieved:
        """Retrieve the documents of the query."""
        await ctx.store.set("query", ev.query)
        return Retrieved(nodes=await self.index.as_retriever(similarity_top_k=4).aretrieve(ev.query))

    @step
    async def eval_relevance(self, ctx: Context, ev: Retrieved) -> Evaluated:
        """Grade the documents one by one."""
        query = await ctx.store.get("query")
        results = []
        for node in ev.nodes:
            prompt = RELEVANCE.format(context=node.text, query=query)
            relevancy = await self.llm.acomplete(prompt)
            results.append(relevancy.text.strip().lower())
        await ctx.store.set("nodes", ev.nodes)
        return Evaluated(results=results)

    @step
    async def extract(self, ctx: Context, ev: Evaluated) -> Extracted:
        """Keep the texts, and refine the query."""
        nodes = await ctx.store.get("nodes")
        text = "\n".join(f"{node.text} ({result})" for node, result in zip(nodes, ev.results, strict=True))
        query = await ctx.store.get("query")
        refined = await self.llm.acomplete(TRANSFORM.format(query=query))
        return Extracted(text=f"{text}\nRefined: {refined.text}")

    @step
    async def answer(self, ctx: Context, ev: Extracted) -> StopEvent:
        """Answer from what was kept."""
        query = await ctx.store.get("query")
        response = await self.llm.acomplete(f"Answer the query {query} from:\n{ev.text}")
        return StopEvent(result=str(response))


def _sub_question_bound(calls: Any) -> float:
    answers = [duration for duration in calls.all("Context information is below")]
    *parts, final = answers
    return float(calls.one("sub_question") + calls.longest(EMBEDDING_MODEL) + max(parts) + final)


APPS = [
    App("sub-questions in sync code", sub_questions, QUESTION, _sub_question_bound, "query_engine"),
    App(
        "fusion retriever in sync code",
        fusion,
        QUESTION,
        lambda calls: (
            max(calls.one("search queries"), calls.all(EMBEDDING_MODEL)[0])
            + calls.longest(EMBEDDING_MODEL)
            + calls.one("Context information is below")
        ),
        "query_engine",
    ),
    App(
        "accumulated answers in sync code",
        tree_summary,
        QUESTION,
        lambda calls: calls.one(EMBEDDING_MODEL) + calls.longest("Context information is below"),
        "query_engine",
    ),
    App(
        "corrective workflow",
        CorrectiveRag,
        QUESTION,
        lambda calls: (
            max(
                calls.one(EMBEDDING_MODEL) + calls.longest("Grade the relevance of"),
                calls.one("Refine this query"),
            )
            + calls.one("Answer the query")
        ),
        "workflow",
    ),
]
