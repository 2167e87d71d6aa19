"""The apps of `teola demo`, in LangChain: prompts, steps, and chains of stock classes and of pool-backed objects.

`make_app` is an app of somebody who has never heard of this package, but for its last lines: they say which engine can
do the work of which object. docs/using.md shows the difference as a diff. Nothing here knows of `accelerate`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.pool import EnginePool

PACKAGES = ("langchain-openai", "langchain-huggingface", "langchain-classic", "langchain-community")
"""Distributions that `make_app` needs beside LangChain itself."""
COLLECTION = "demo"
SERVED = "demo"
"""The name under which the demo's server serves its model."""

# ------------------------------------------------------------ prompts (the bundled model is trained on these wordings)

EXPAND_INSTRUCTION = (
    "You help people search reference documentation. You get a question and write other questions that ask "
    "for the same facts in other words, so that a search finds passages which use other terms than the "
    "person did. Keep names of functions, statements and types as they are. Each question stands alone, is "
    "one sentence long, and differs from the others. Write exactly {n} questions, as a JSON list of "
    "strings and nothing else."
)
INSTRUCTION = (
    "You answer questions about a document. You get the question and one passage of the document. Answer in one or "
    "two sentences, with the words of the passage, and only with what it says. When the passage does not hold the "
    "answer, say so. Do not add anything of your own, and do not repeat the question."
)
REFINE_INSTRUCTION = " You also get an earlier answer: improve it with the passage, or keep it."


# ------------------------------------------------------------ steps

QUERIES, SEARCHED, KEPT = 3, 16, 3
CHUNK, OVERLAP = 256, 30
"""In tokens, as in the paper; a token is taken as four characters."""
QUESTION_TOKENS, ANSWER_TOKENS = 96, 64

EXPAND = ChatPromptTemplate.from_messages(
    [("system", EXPAND_INSTRUCTION.format(n=QUERIES)), ("human", "Question: {question}")]
)
ANSWER = ChatPromptTemplate.from_messages(
    [("system", INSTRUCTION), ("human", "Question: {question}\n\nPassage:\n{context}\n\nAnswer:")]
)
REFINE = ChatPromptTemplate.from_messages(
    [
        ("system", INSTRUCTION + REFINE_INSTRUCTION),
        ("human", "Question: {question}\n\nPassage:\n{context}\n\nEarlier answer: {previous}\n\nBetter answer:"),
    ]
)
LIST_OF_QUESTIONS = {"type": "array", "items": {"type": "string"}, "minItems": QUERIES, "maxItems": QUERIES}


def document(text: str, source: str) -> Document:
    return Document(page_content=text, metadata={"source": source})


def texts(documents: list[Document]) -> list[str]:
    return [document.page_content for document in documents]


def joined_texts(documents: list[Document]) -> str:
    return "\n\n".join(texts(documents))


def answer_with(context: int, llm: Runnable[Any, Any], previous: str = "") -> Runnable[Any, Any]:
    """One answer from passage number `context`, refining the `previous` one if there is one."""
    inputs: dict[str, Any] = {
        "question": itemgetter("question"),
        "context": itemgetter("passages") | RunnableLambda(itemgetter(context)),
    }
    if previous:
        inputs["previous"] = itemgetter(previous)
    return inputs | (REFINE if previous else ANSWER) | llm | StrOutputParser()


def nothing_to_gain(llm: Runnable[Any, Any], store: VectorStore) -> Runnable[Any, Any]:
    """Retrieve, prompt, answer: every step needs the one before. Input: the question."""
    retrieve = store.as_retriever(search_kwargs={"k": 1}) | RunnableLambda(joined_texts)
    prompt = ChatPromptTemplate.from_template("Passage:\n{context}\n\nQuestion: {question}\n\nAnswer:")
    return {"context": retrieve, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


def make_splitter() -> RecursiveCharacterTextSplitter:
    """Return the splitter of the demo's documents. Sizes are in tokens, of four characters each, rounded up."""
    return RecursiveCharacterTextSplitter(
        chunk_size=CHUNK, chunk_overlap=OVERLAP, length_function=lambda text: (len(text) + 3) // 4
    )


# ------------------------------------------------------------ the app in stock classes (the paper's Figure 2d)

KEY: Any = "none"
JSON = {"type": "json_schema", "json_schema": {"name": "questions", "schema": LIST_OF_QUESTIONS}}


@dataclass(frozen=True, slots=True)
class App:
    """The chain in three forms, and the objects that it is made of."""

    chain: Runnable[Any, Any]
    """Input: `{"question": str, "documents": [...]}`."""
    indexed: Runnable[Any, Any]
    """The same over what the store holds. Input: `{"question": str}`."""
    nothing_to_gain: Runnable[Any, Any]
    index: Runnable[Any, Any]
    store: InMemoryVectorStore
    llm: Runnable[Any, Any]
    bind: list[tuple[Any, str]]
    """What engines of a pool can do for it: the object, and the engine's name."""


def make_app(server: str, embedder: str, reranker: str) -> App:
    """Create the app of ordinary LangChain objects. `server`: the address of an OpenAI-compatible server."""
    from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever
    from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
    from langchain_community.cross_encoders import HuggingFaceCrossEncoder
    from langchain_huggingface import HuggingFaceEmbeddings
    from langchain_openai import ChatOpenAI

    splitter = make_splitter()
    llm = ChatOpenAI(base_url=server, model=SERVED, api_key=KEY, temperature=0, max_completion_tokens=64)
    embeddings = HuggingFaceEmbeddings(model_name=embedder)
    scorer = HuggingFaceCrossEncoder(model_name=reranker)
    store = InMemoryVectorStore(embeddings)
    index = RunnableLambda(splitter.split_documents) | RunnableLambda(store.add_documents)
    retriever = ContextualCompressionRetriever(
        base_compressor=CrossEncoderReranker(model=scorer, top_n=3),
        base_retriever=MultiQueryRetriever(
            retriever=store.as_retriever(search_kwargs={"k": 16}),
            llm_chain=EXPAND | llm.bind(response_format=JSON, max_tokens=96) | JsonOutputParser(),
        ),
    )
    answer = (
        RunnablePassthrough.assign(passages=itemgetter("question") | retriever | RunnableLambda(texts))
        | RunnablePassthrough.assign(first=answer_with(0, llm))
        | RunnablePassthrough.assign(second=answer_with(1, llm, "first"))
        | RunnablePassthrough.assign(answer=answer_with(2, llm, "second"))
        | itemgetter("answer")
    )
    chain = RunnablePassthrough.assign(ids=itemgetter("documents") | index) | answer
    bind = [(llm, "llm"), (embeddings, "embedder"), (scorer, "reranker")]
    return App(chain, answer, nothing_to_gain(llm, store), index, store, llm, bind)


# ------------------------------------------------------------ the app on pool-backed objects


def union(results: list[list[Document]]) -> list[Document]:
    """Passages of all searches, each once, in the order in which they were found."""
    return list({document.page_content: document for documents in results for document in documents}.values())


def search_and_answer(llm: ChatTeola, store: TeolaVectorStore, reranker: TeolaRerank) -> Runnable[Any, Any]:
    """Expand the question, search for each, rerank, refine an answer. Input: `{"question": str}`."""
    # JsonOutputParser streams unfinished lists, and whatever comes next adds these up: not in a chain that may stream.
    questions = StrOutputParser() | RunnableLambda(json.loads)
    expand = EXPAND | llm.bind(json_schema=LIST_OF_QUESTIONS, max_tokens=QUESTION_TOKENS) | questions
    search = store.as_retriever(search_kwargs={"k": SEARCHED})
    return (
        RunnablePassthrough.assign(queries=expand)
        | RunnablePassthrough.assign(found=itemgetter("queries") | search.map())
        | RunnablePassthrough.assign(candidates=itemgetter("found") | RunnableLambda(union))
        | RunnablePassthrough.assign(
            best={"query": itemgetter("question"), "documents": itemgetter("candidates")} | reranker.as_runnable()
        )
        | RunnablePassthrough.assign(passages=itemgetter("best") | RunnableLambda(texts))
        | RunnablePassthrough.assign(first=answer_with(0, llm))
        | RunnablePassthrough.assign(second=answer_with(1, llm, "first"))
        | RunnablePassthrough.assign(answer=answer_with(2, llm, "second"))
        | itemgetter("answer")
    )


def uploaded_document_qa(
    llm: ChatTeola, store: TeolaVectorStore, reranker: TeolaRerank, indexer: TeolaIndexer
) -> Runnable[Any, Any]:
    """The same over a document that comes with the question. Input: `{"question": str, "documents": [...]}`."""
    return RunnablePassthrough.assign(collection=itemgetter("documents") | indexer) | search_and_answer(
        llm, store, reranker
    )


@dataclass(frozen=True, slots=True)
class Chains:
    """The original chains, all on the same objects."""

    uploaded: Runnable[Any, Any]
    indexed: Runnable[Any, Any]
    nothing_to_gain: Runnable[Any, Any]
    indexer: TeolaIndexer


def make_chains(pool: EnginePool, engine: str = "llm") -> Chains:
    """Create the chains on the pool's objects. `engine`: the LLM's."""
    llm = ChatTeola(pool=pool, engine=engine, max_tokens=ANSWER_TOKENS)
    embeddings = TeolaEmbeddings(pool=pool, engine="embedder")
    store = TeolaVectorStore(pool=pool, engine="store", embedding=embeddings, collection=COLLECTION)
    reranker = TeolaRerank(pool=pool, engine="reranker", top_n=KEPT)
    indexer = TeolaIndexer(store=store, splitter=make_splitter())
    return Chains(
        uploaded_document_qa(llm, store, reranker, indexer),
        search_and_answer(llm, store, reranker),
        nothing_to_gain(llm, store),
        indexer,
    )


# ------------------------------------------------------------ the smallest app that one line makes faster

QUESTIONS = {
    "what": "What is this page about?",
    "when": "When does what it describes happen?",
    "otherwise": "What happens otherwise?",
}


def three_questions(llm: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Create the chain that answers `QUESTIONS` about a page. Input: `{"text": str}`; each key gets an answer."""
    chain: Runnable[Any, Any] = RunnablePassthrough()
    for name, question in QUESTIONS.items():
        messages = [("system", INSTRUCTION), ("human", f"Question: {question}\n\nPassage:\n{{text}}\n\nAnswer:")]
        ask = ChatPromptTemplate.from_messages(messages) | llm | StrOutputParser()
        chain = chain | RunnablePassthrough.assign(**{name: ask})
    return chain
