"""Corrective RAG, self-RAG and the adaptive router, as LangGraph's tutorials write them.

What differs from there: the web search is a retriever, and what they print is logged.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, TypedDict

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from benchmarks.langgraph.kits import Kit

log = logging.getLogger(__name__)

GRADER = (
    "You are a grader assessing relevance of a retrieved document to a user question. If the document contains "
    "keyword(s) or semantic meaning related to the question, grade it as relevant. It does not need to be a stringent "
    "test, the goal is to filter out erroneous retrievals. Give a binary score 'yes' or 'no' score to indicate whether "
    "the document is relevant to the question."
)
REWRITER = (
    "You are a question re-writer that converts an input question to a better version that is optimized for web "
    "search. Look at the input and try to reason about the underlying semantic intent / meaning."
)
RAG = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\nQuestion: {question}\nContext: {context}\nAnswer:"
)
HALLUCINATION = (
    "You are a grader assessing whether an LLM generation is grounded in / supported by a set of retrieved facts. "
    "Give a binary score 'yes' or 'no'. 'Yes' means that the answer is grounded in / supported by the set of facts."
)
USEFUL = (
    "You are a grader assessing whether an answer addresses / resolves a question. Give a binary score 'yes' or 'no'. "
    "'Yes' means that the answer resolves the question."
)
ROUTER = (
    "You are an expert at routing a user question to a vectorstore or web search. The vectorstore contains documents "
    "related to terms of contract and the reports about them. Use the vectorstore for questions on these topics. "
    "Otherwise, use web-search."
)


class GradeDocuments(BaseModel):
    """Binary score for relevance check on retrieved documents."""

    binary_score: Literal["yes", "no"] = Field(description="Documents are relevant to the question, 'yes' or 'no'")


class GradeHallucinations(BaseModel):
    """Binary score for hallucination present in generation answer."""

    binary_score: Literal["yes", "no"] = Field(description="Answer is grounded in the facts, 'yes' or 'no'")


class GradeAnswer(BaseModel):
    """Binary score to assess answer addresses question."""

    binary_score: Literal["yes", "no"] = Field(description="Answer addresses the question, 'yes' or 'no'")


class RouteQuery(BaseModel):
    """Route a user query to the most relevant datasource."""

    datasource: Literal["vectorstore", "web_search"]


class GraphState(TypedDict):
    question: str
    generation: str
    web_search: str
    documents: list[Document]


class SelfRagState(TypedDict):
    question: str
    generation: str
    documents: list[Document]
    tries: int


def asked(system: str, human: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages([("system", system), ("human", human)])


def format_docs(docs: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in docs)


def document_grader(kit: Kit) -> Runnable[Any, Any]:
    prompt = asked(GRADER, "Retrieved document: \n\n {document} \n\n User question: {question}")
    return prompt | kit.llm.with_structured_output(GradeDocuments)


def rag_chain(kit: Kit) -> Runnable[Any, str]:
    return ChatPromptTemplate.from_template(RAG) | kit.llm | StrOutputParser()


def question_rewriter(kit: Kit) -> Runnable[Any, str]:
    human = "Here is the initial question: \n\n {question} \n Formulate an improved question."
    return asked(REWRITER, human) | kit.llm | StrOutputParser()


def corrective_rag(kit: Kit, *, batch: bool = False) -> Any:
    """With `batch`, the documents are graded by one `batch`, and not one after the other."""
    retriever, web_search_tool = kit.retriever(), kit.web
    retrieval_grader, generator, rewriter = document_grader(kit), rag_chain(kit), question_rewriter(kit)

    def retrieve(state: GraphState) -> dict[str, Any]:
        log.info("---RETRIEVE---")
        question = state["question"]
        documents = retriever.invoke(question)
        return {"documents": documents, "question": question}

    def generate(state: GraphState) -> dict[str, Any]:
        log.info("---GENERATE---")
        question = state["question"]
        documents = state["documents"]
        generation = generator.invoke({"context": format_docs(documents), "question": question})
        return {"documents": documents, "question": question, "generation": generation}

    def grade_documents(state: GraphState) -> dict[str, Any]:
        log.info("---CHECK DOCUMENT RELEVANCE TO QUESTION---")
        question = state["question"]
        documents = state["documents"]
        filtered_docs = []
        web_search = "No"
        for d in documents:
            score = retrieval_grader.invoke({"question": question, "document": d.page_content})
            grade = score.binary_score
            if grade == "yes":
                log.info("---GRADE: DOCUMENT RELEVANT---")
                filtered_docs.append(d)
            else:
                log.info("---GRADE: DOCUMENT NOT RELEVANT---")
                web_search = "Yes"
                continue
        return {"documents": filtered_docs, "question": question, "web_search": web_search}

    def grade_batch(state: GraphState) -> dict[str, Any]:
        question = state["question"]
        documents = state["documents"]
        scores = retrieval_grader.batch([{"question": question, "document": d.page_content} for d in documents])
        filtered_docs = [d for d, score in zip(documents, scores, strict=True) if score.binary_score == "yes"]
        web_search = "No" if len(filtered_docs) == len(documents) else "Yes"
        return {"documents": filtered_docs, "question": question, "web_search": web_search}

    def transform_query(state: GraphState) -> dict[str, Any]:
        log.info("---TRANSFORM QUERY---")
        question = state["question"]
        documents = state["documents"]
        better_question = rewriter.invoke({"question": question})
        return {"documents": documents, "question": better_question}

    def web_search(state: GraphState) -> dict[str, Any]:
        log.info("---WEB SEARCH---")
        question = state["question"]
        documents = state["documents"]
        docs = web_search_tool.invoke(question)
        return {"documents": [*documents, *docs], "question": question}

    def decide_to_generate(state: GraphState) -> str:
        log.info("---ASSESS GRADED DOCUMENTS---")
        return "transform_query" if state["web_search"] == "Yes" else "generate"

    workflow = StateGraph(GraphState)
    workflow.add_node("retrieve", retrieve)
    workflow.add_node("grade_documents", grade_batch if batch else grade_documents)
    workflow.add_node("generate", generate)
    workflow.add_node("transform_query", transform_query)
    workflow.add_node("web_search_node", web_search)
    workflow.add_edge(START, "retrieve")
    workflow.add_edge("retrieve", "grade_documents")
    workflow.add_conditional_edges("grade_documents", decide_to_generate, ["transform_query", "generate"])
    workflow.add_edge("transform_query", "web_search_node")
    workflow.add_edge("web_search_node", "generate")
    workflow.add_edge("generate", END)
    return workflow.compile()


def self_rag(kit: Kit) -> Any:
    """The checks of an answer are made in the function of a conditional edge. At most three answers are tried."""
    retriever, retrieval_grader = kit.retriever(), document_grader(kit)
    generator, rewriter = rag_chain(kit), question_rewriter(kit)
    facts = "Set of facts: \n\n {documents} \n\n LLM generation: {generation}"
    hallucination_grader = asked(HALLUCINATION, facts) | kit.llm.with_structured_output(GradeHallucinations)
    both = "User question: \n\n {question} \n\n LLM generation: {generation}"
    answer_grader = asked(USEFUL, both) | kit.llm.with_structured_output(GradeAnswer)

    def retrieve(state: SelfRagState) -> dict[str, Any]:
        question = state["question"]
        documents = retriever.invoke(question)
        return {"documents": documents, "question": question}

    def generate(state: SelfRagState) -> dict[str, Any]:
        question = state["question"]
        documents = state["documents"]
        generation = generator.invoke({"context": format_docs(documents), "question": question})
        return {"generation": generation, "tries": state["tries"] + 1}

    def grade_documents(state: SelfRagState) -> dict[str, Any]:
        question = state["question"]
        documents = state["documents"]
        filtered_docs = []
        for d in documents:
            score = retrieval_grader.invoke({"question": question, "document": d.page_content})
            if score.binary_score == "yes":
                filtered_docs.append(d)
        return {"documents": filtered_docs, "question": question}

    def transform_query(state: SelfRagState) -> dict[str, Any]:
        better_question = rewriter.invoke({"question": state["question"]})
        return {"question": better_question}

    def decide_to_generate(state: SelfRagState) -> str:
        return "generate" if state["documents"] else "transform_query"

    def grade_generation(state: SelfRagState) -> str:
        question = state["question"]
        documents = state["documents"]
        generation = state["generation"]
        if state["tries"] >= 3:
            return "useful"
        score = hallucination_grader.invoke({"documents": format_docs(documents), "generation": generation})
        if score.binary_score != "yes":
            return "not supported"
        score = answer_grader.invoke({"question": question, "generation": generation})
        return "useful" if score.binary_score == "yes" else "not useful"

    workflow = StateGraph(SelfRagState)
    workflow.add_node("retrieve", retrieve)
    workflow.add_node("grade_documents", grade_documents)
    workflow.add_node("generate", generate)
    workflow.add_node("transform_query", transform_query)
    workflow.add_edge(START, "retrieve")
    workflow.add_edge("retrieve", "grade_documents")
    workflow.add_conditional_edges("grade_documents", decide_to_generate, ["transform_query", "generate"])
    workflow.add_edge("transform_query", "retrieve")
    workflow.add_conditional_edges(
        "generate",
        grade_generation,
        {"not supported": "generate", "useful": END, "not useful": "transform_query"},
    )
    return workflow.compile()


def adaptive_rag(kit: Kit) -> Any:
    """A model says where to look; what was found is graded."""
    retriever, web_search_tool = kit.retriever(), kit.web
    retrieval_grader, generator = document_grader(kit), rag_chain(kit)
    question_router = asked(ROUTER, "{question}") | kit.llm.with_structured_output(RouteQuery)

    def route_question(state: GraphState) -> str:
        source = question_router.invoke({"question": state["question"]})
        return "web_search" if source.datasource == "web_search" else "vectorstore"

    def retrieve(state: GraphState) -> dict[str, Any]:
        documents = retriever.invoke(state["question"])
        return {"documents": documents}

    def web_search(state: GraphState) -> dict[str, Any]:
        documents = web_search_tool.invoke(state["question"])
        return {"documents": documents}

    def grade_documents(state: GraphState) -> dict[str, Any]:
        question = state["question"]
        filtered_docs = []
        for d in state["documents"]:
            score = retrieval_grader.invoke({"question": question, "document": d.page_content})
            if score.binary_score == "yes":
                filtered_docs.append(d)
        return {"documents": filtered_docs}

    def generate(state: GraphState) -> dict[str, Any]:
        context = format_docs(state["documents"])
        generation = generator.invoke({"context": context, "question": state["question"]})
        return {"generation": generation}

    workflow = StateGraph(GraphState)
    workflow.add_node("web_search_node", web_search)
    workflow.add_node("retrieve", retrieve)
    workflow.add_node("grade_documents", grade_documents)
    workflow.add_node("generate", generate)
    workflow.add_conditional_edges(START, route_question, {"web_search": "web_search_node", "vectorstore": "retrieve"})
    workflow.add_edge("web_search_node", "grade_documents")
    workflow.add_edge("retrieve", "grade_documents")
    workflow.add_edge("grade_documents", "generate")
    workflow.add_edge("generate", END)
    return workflow.compile()
