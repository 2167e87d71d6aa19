"""LangChain apps after public tutorials: chains, functions with loops, retrievers."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from langchain.chat_models import init_chat_model
from langchain_classic.retrievers.multi_query import MultiQueryRetriever
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field, SecretStr

from benchmarks.public_apps.apps import EMBEDDING_MODEL, KEY, MODEL, App

QUESTION = "How do small teams keep their plans up to date?"
TEXTS = [f"Note {number}: teams of size {number} review their plans every {number + 2} days." for number in range(8)]


def chat_model(base_url: str, **options: Any) -> ChatOpenAI:
    """Return a hosted chat model as tutorials make it."""
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key=SecretStr(KEY), temperature=0, **options)


def embeddings(base_url: str) -> OpenAIEmbeddings:
    """Return hosted embeddings."""
    return OpenAIEmbeddings(
        model=EMBEDDING_MODEL, base_url=base_url, api_key=SecretStr(KEY), check_embedding_ctx_length=False
    )


def vector_store(base_url: str, texts: list[str]) -> InMemoryVectorStore:
    """Return a store with these texts."""
    store = InMemoryVectorStore(embeddings(base_url))
    store.add_documents([Document(text, id=str(number)) for number, text in enumerate(texts)])
    return store


def joined(documents: list[Document]) -> str:
    """Return the texts of documents, one after the other."""
    return "\n\n".join(document.page_content for document in documents)


# ------------------------------------------------------------ RAG from scratch, part 7: decomposition


def decomposition(base_url: str) -> Any:
    """Answer each of the sub-questions of a question, then the question."""
    llm = chat_model(base_url)
    decompose = ChatPromptTemplate.from_template("Write sub-questions of this one, separated by newlines: {question}")
    answer_one = ChatPromptTemplate.from_template("Answer the sub-question: {question}")
    synthesize = ChatPromptTemplate.from_template("Synthesize an answer to {question} from:\n{answers}")
    generate_queries = decompose | llm | StrOutputParser() | (lambda text: text.split("\n"))

    def answer_each(inputs: dict[str, Any]) -> dict[str, Any]:
        answers = []
        for sub_question in inputs["sub_questions"]:
            answer = (answer_one | llm | StrOutputParser()).invoke({"question": sub_question})
            answers.append(f"Q: {sub_question}\nA: {answer}")
        return {"question": inputs["question"], "answers": "\n".join(answers)}

    return (
        RunnablePassthrough.assign(sub_questions=generate_queries)
        | RunnableLambda(answer_each)
        | synthesize
        | llm
        | StrOutputParser()
    )


# ------------------------------------------------------------ map-reduce summarisation in a function


def map_reduce(base_url: str) -> Any:
    """Summarize documents one by one in a plain function, then their summaries."""
    llm = init_chat_model(MODEL, model_provider="openai", base_url=base_url, api_key=KEY, temperature=0)

    def summarize(inputs: dict[str, Any]) -> str:
        summaries = [
            llm.invoke(f"Summarize in one sentence: {document.page_content}").content
            for document in inputs["documents"]
            if len(document.page_content) > 20
        ]
        return str(llm.invoke("Write a summary of these summaries:\n" + "\n".join(map(str, summaries))).content)

    return RunnableLambda(summarize)


# ------------------------------------------------------------ multi-query retrieval


def multi_query(base_url: str) -> Any:
    """Retrieve for several versions of a question, then answer."""
    llm = chat_model(base_url)
    retriever = MultiQueryRetriever.from_llm(vector_store(base_url, TEXTS).as_retriever(search_kwargs={"k": 2}), llm)
    prompt = ChatPromptTemplate.from_template("Answer from the context.\n{context}\nQuestion: {question}")
    return (
        RunnableParallel(context=retriever | joined, question=RunnablePassthrough()) | prompt | llm | StrOutputParser()
    )


# ------------------------------------------------------------ routing: nothing can run sooner


class RouteQuery(BaseModel):
    """Route a user query to the most relevant datasource."""

    datasource: Literal["python_docs", "js_docs"] = Field(description="The datasource to search.")


def routing(base_url: str) -> Any:
    """Choose a prompt by a structured answer."""
    llm = chat_model(base_url)
    router = ChatPromptTemplate.from_template("Route this question: {question}") | llm.with_structured_output(
        RouteQuery
    )
    python = ChatPromptTemplate.from_template("As an expert of Python, answer: {question}")
    script = ChatPromptTemplate.from_template("As an expert of JavaScript, answer: {question}")

    def choose(inputs: dict[str, Any]) -> Any:
        prompt = python if inputs["route"].datasource == "python_docs" else script
        return prompt | llm | StrOutputParser()

    return RunnablePassthrough.assign(route=router) | RunnableLambda(choose)


# ------------------------------------------------------------ guardrails with a helper function and partial


def _check(llm: Any, rule: str, question: str) -> bool:
    return "no" not in str(llm.invoke(f"Does this follow the rule {rule!r}? {question}").content).split()[:1]


def checked_answer(base_url: str) -> Any:
    """Check a question against three rules by a helper, one after the other, then answer."""
    llm = chat_model(base_url)
    check = partial(_check, llm)

    def answer(question: str) -> str:
        results = {rule: check(rule, question) for rule in ("be kind", "be brief", "be exact")}
        reply = llm.invoke(f"Answer the question: {question}")
        return f"{results}: {reply.content}"

    return RunnableLambda(answer)


# ------------------------------------------------------------ translations with a model to fall back on


def translations(base_url: str) -> Any:
    """Translate into three languages in a comprehension, then choose the best translation."""
    llm = chat_model(base_url).with_fallbacks([init_chat_model("gpt-4o", base_url=base_url, api_key=KEY)])
    translate = ChatPromptTemplate.from_template("Translate into {language}: {text}") | llm | StrOutputParser()

    def translate_all(text: str) -> dict[str, str]:
        return {
            language: translate.invoke({"language": language, "text": text})
            for language in ("French", "German", "Spanish")
        }

    def choose(texts: dict[str, str]) -> str:
        lines = [f"{language}: {text}" for language, text in texts.items()]
        return str(llm.with_retry(stop_after_attempt=2).invoke("Choose the best:\n" + "\n".join(lines)).content)

    return RunnableLambda(translate_all) | RunnableLambda(choose)


APPS = [
    App(
        "rag-from-scratch decomposition",
        decomposition,
        {"question": QUESTION},
        lambda calls: calls.one("Write sub-questions") + calls.longest("the sub-question: ") + calls.one("Synthesize"),
        "runnable",
    ),
    App(
        "map-reduce summary in a function",
        map_reduce,
        {"documents": [Document(text) for text in TEXTS[:5]]},
        lambda calls: calls.longest("one sentence") + calls.one("these summaries"),
        "runnable",
    ),
    App(
        "multi-query retrieval",
        multi_query,
        QUESTION,
        lambda calls: calls.one("different versions") + calls.longest(EMBEDDING_MODEL) + calls.one("from the context"),
        "runnable",
    ),
    App(
        "query routing",
        routing,
        {"question": QUESTION},
        lambda calls: calls.one("Route this") + calls.one("As an expert"),
        "runnable",
    ),
    App(
        "rules checked by a helper",
        checked_answer,
        QUESTION,
        lambda calls: max(calls.longest("follow the rule"), calls.one("Answer the question")),
        "runnable",
    ),
    App(
        "translations with a fallback",
        translations,
        QUESTION,
        lambda calls: calls.longest("Translate into") + calls.one("Choose the best"),
        "runnable",
    ),
]
