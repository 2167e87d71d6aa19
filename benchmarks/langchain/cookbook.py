"""Patterns of the public LangChain cookbooks, written as they are there, over the objects of a `Kit`.

Each is a function from a kit to a Runnable; `PATTERNS` has what to call it with and whether anything can be gained.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, TypedDict

from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory

from benchmarks.langchain.kits import Kit
from benchmarks.rag.apps import document
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore

Chain = Runnable[Any, Any]

ANSWER, QUERIES, PASSAGE = 12, 24, 30
"""Tokens: an answer, three questions together, a hypothetical passage."""
RULES = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you do not know the answer, just say that you do not know. Use three sentences at most, keep the "
    "answer concise, name the passage that each statement comes from, and do not use anything else that you know."
)
ASKED = "What does the report say about the terms that would have to change first, and what are its reasons?"


def ask(text: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_template(text)


def joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(d.page_content for d in documents)


def unique_union(found: Sequence[Sequence[Document]]) -> list[Document]:
    return list({d.page_content: d for documents in found for d in documents}.values())


def reciprocal_rank_fusion(results: list[list[Document]], k: int = 60) -> list[Document]:
    scores: dict[str, float] = {}
    known: dict[str, Document] = {}
    for documents in results:
        for rank, one in enumerate(documents):
            known.setdefault(one.page_content, one)
            scores[one.page_content] = scores.get(one.page_content, 0.0) + 1 / (rank + k)
    return [known[text] for text, _ in sorted(scores.items(), key=lambda x: x[1], reverse=True)]


RAG = RULES + "\n\nContext: {context}\n\nQuestion: {question}\n\nAnswer:"
SEVERAL = (
    "You are an AI language model assistant. Your task is to generate three different versions of the given user "
    "question to retrieve relevant documents from a vector database. By generating multiple perspectives on the user "
    "question, your goal is to help the user overcome some of the limitations of the distance-based similarity search. "
    "Provide these alternative questions one per line. Original question: {question}"
)


def generate_queries(kit: Kit) -> Chain:
    return ask(SEVERAL) | kit.chat(QUERIES) | StrOutputParser() | (lambda text: text.split("\n"))


def retriever(kit: Kit, k: int = 4) -> Any:
    return kit.store.as_retriever(search_kwargs={"k": k})


# ------------------------------------------------------------ query translation


def naive_rag(kit: Kit) -> Chain:
    context = itemgetter("question") | retriever(kit) | joined
    given = {"context": context, "question": itemgetter("question")}
    return given | ask("{context}\n\nQuestion: {question}") | kit.chat(ANSWER) | StrOutputParser()


def rag_with_sources(kit: Kit) -> Chain:
    answer = RunnablePassthrough.assign(context=lambda x: joined(x["context"])) | ask(RAG) | kit.chat(ANSWER)
    return RunnableParallel(context=itemgetter("question") | retriever(kit), question=itemgetter("question")).assign(
        answer=answer | StrOutputParser()
    )


def multi_query(kit: Kit) -> Chain:
    context = generate_queries(kit) | retriever(kit).map() | unique_union | joined
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def rag_fusion(kit: Kit) -> Chain:
    context = generate_queries(kit) | retriever(kit).map() | reciprocal_rank_fusion | (lambda found: joined(found[:5]))
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def multi_query_retriever(kit: Kit) -> Chain:
    """The class of langchain_classic, with the original question among the queries."""
    from langchain_classic.retrievers import MultiQueryRetriever

    prompt = PromptTemplate.from_template(SEVERAL)
    several = MultiQueryRetriever.from_llm(retriever(kit), kit.chat(QUERIES), prompt, include_original=True)
    context = itemgetter("question") | several | joined
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def hyde(kit: Kit) -> Chain:
    passage = ask("Please write a scientific paper passage to answer the question\nQuestion: {question}\nPassage:")
    hypothetical = passage | kit.chat(PASSAGE) | StrOutputParser()
    return (
        RunnablePassthrough.assign(context=hypothetical | retriever(kit) | joined)
        | ask(RAG)
        | kit.chat(ANSWER)
        | StrOutputParser()
    )


def step_back(kit: Kit) -> Chain:
    example = ChatPromptTemplate.from_messages([("human", "{input}"), ("ai", "{output}")])
    shown = [
        {"input": "Could the members of The Police perform lawful arrests?", "output": "what can The Police do?"},
        {"input": "Jan Sindel was born in what country?", "output": "what is Jan Sindel's personal history?"},
    ]
    few = FewShotChatMessagePromptTemplate(example_prompt=example, examples=shown)
    system = (
        "You are an expert at world knowledge. Your task is to step back and paraphrase a question to a more generic "
        "step-back question, which is easier to answer. Here are a few examples:"
    )
    prompt = ChatPromptTemplate.from_messages([("system", system), few, ("user", "{question}")])
    generic = prompt | kit.chat(QUERIES) | StrOutputParser()
    respond = ask(RULES + "\n\n# {normal_context}\n# {step_back_context}\n\n# Original Question: {question}\n# Answer:")
    return (
        RunnablePassthrough.assign(generic=generic)
        | {
            "normal_context": RunnableLambda(lambda x: x["question"]) | retriever(kit) | joined,
            "step_back_context": itemgetter("generic") | retriever(kit) | joined,
            "question": lambda x: x["question"],
        }
        | respond
        | kit.chat(ANSWER)
        | StrOutputParser()
    )


# ------------------------------------------------------------ decomposition, correction


def decomposition(kit: Kit) -> Chain:
    """Each sub-question is answered by itself, then the answers are put together."""
    split = ask(
        "You are a helpful assistant that generates multiple sub-questions related to an input question. The goal is "
        "to break down the input into a set of sub-problems that can be answered in isolation. Output three questions "
        "as a JSON list of strings.\n\nQuestion: {question}"
    )
    one = {"context": retriever(kit) | joined, "question": RunnablePassthrough()} | ask(RAG) | kit.chat(ANSWER)
    return (
        RunnablePassthrough.assign(questions=split | kit.chat(QUERIES) | JsonOutputParser())
        | RunnablePassthrough.assign(answers=itemgetter("questions") | (one | StrOutputParser()).map())
        | RunnablePassthrough.assign(context=lambda x: "\n\n".join(x["answers"]))
        | ask("Here is a set of answers: {context}\n\nUse these to synthesize an answer to the question: {question}")
        | kit.chat(ANSWER)
        | StrOutputParser()
    )


GRADE = (
    "You are a grader assessing relevance of a retrieved document to a user question. If the document contains "
    "keywords or semantic meaning related to the question, grade it as relevant. Give a binary score 'yes' or 'no'."
    "\n\nRetrieved document: {document}\n\nUser question: {question}"
)


def corrective(kit: Kit) -> Chain:
    """Grade what was found; unless all is relevant, rewrite the question and add what a web search finds."""
    grade = ask(GRADE) | kit.chat(1) | StrOutputParser()
    rewrite = ask("Look at the input and formulate an improved question: {question}") | kit.chat(QUERIES)
    more = RunnablePassthrough.assign(web=rewrite | StrOutputParser() | kit.web)
    elsewhere = more | RunnablePassthrough.assign(context=lambda x: joined([*_relevant(x), *x["web"]]))
    kept = RunnablePassthrough.assign(context=lambda x: joined(_relevant(x)))
    return (
        RunnablePassthrough.assign(found=itemgetter("question") | retriever(kit))
        | RunnablePassthrough.assign(grades=RunnableLambda(_pairs) | grade.map())
        | RunnableBranch((lambda x: len(_relevant(x)) == len(x["found"]), kept), elsewhere)
        | ask(RAG)
        | kit.chat(ANSWER)
        | StrOutputParser()
    )


def _pairs(state: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"document": d.page_content, "question": state["question"]} for d in state["found"]]


def _relevant(state: Mapping[str, Any]) -> list[Document]:
    return [d for d, grade in zip(state["found"], state["grades"], strict=True) if grade == "yes"]


def guarded(kit: Kit) -> Chain:
    """Is the question allowed? Then retrieve and answer; steps one after the other, as `assign`s."""
    judge = ask("Is this question allowed by the house rules? Say 'yes' or 'no' and nothing else.\n{question}")
    answer = ask(RAG) | kit.chat(ANSWER) | StrOutputParser()
    return (
        RunnablePassthrough.assign(allowed=judge | kit.chat(2) | StrOutputParser())
        | RunnablePassthrough.assign(context=itemgetter("question") | retriever(kit) | joined)
        | RunnablePassthrough.assign(answer=answer)
    )


def routed(kit: Kit) -> Chain:
    """A model says what the question is about; a function returns the chain for it."""
    classify = ask("Is the question below about the report? Answer 'yes' or 'no'.\n{question}") | kit.chat(2)
    about = RunnablePassthrough.assign(context=itemgetter("question") | retriever(kit) | joined) | ask(RAG)
    other = RunnablePassthrough.assign(context=itemgetter("question") | kit.keywords | joined) | ask(RAG)
    answers = {"yes": about | kit.chat(ANSWER) | StrOutputParser(), "no": other | kit.chat(ANSWER) | StrOutputParser()}
    topic = {"topic": classify | StrOutputParser(), "question": itemgetter("question")}
    return topic | RunnableLambda(lambda x: answers[x["topic"]])


# ------------------------------------------------------------ retrieval


def hybrid(kit: Kit) -> Chain:
    """Dense and keyword search one after the other, as `assign`s; fused, reranked, answered."""
    return (
        RunnablePassthrough.assign(dense=itemgetter("question") | retriever(kit))
        | RunnablePassthrough.assign(sparse=itemgetter("question") | kit.keywords)
        | RunnablePassthrough.assign(keywords=ask("Keywords of: {question}") | kit.chat(ANSWER) | StrOutputParser())
        | RunnablePassthrough.assign(more=itemgetter("keywords") | kit.keywords)
        | RunnablePassthrough.assign(
            context=lambda x: joined(reciprocal_rank_fusion([x["dense"], x["sparse"], x["more"]])[:4])
        )
        | ask(RAG)
        | kit.chat(ANSWER)
        | StrOutputParser()
    )


def ensemble(kit: Kit) -> Chain:
    from langchain_classic.retrievers import EnsembleRetriever

    both = EnsembleRetriever(retrievers=[retriever(kit), kit.keywords], weights=[0.5, 0.5])
    context = itemgetter("question") | both | (lambda found: joined(found[:4]))
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def merged_searches(kit: Kit) -> Chain:
    """Three retrievers, one after the other in sync code."""
    from langchain_classic.retrievers import MergerRetriever

    merger = MergerRetriever(retrievers=[retriever(kit), kit.keywords, kit.web])
    context = itemgetter("question") | merger | (lambda found: joined(found[:4]))
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def queries_times_searches(kit: Kit) -> Chain:
    """Several queries, each asked of an ensemble."""
    from langchain_classic.retrievers import EnsembleRetriever, MultiQueryRetriever

    three = EnsembleRetriever(retrievers=[retriever(kit), kit.keywords, kit.web], weights=[0.4, 0.3, 0.3])
    several = MultiQueryRetriever.from_llm(three, kit.chat(QUERIES), PromptTemplate.from_template(SEVERAL))
    context = itemgetter("question") | several | (lambda found: joined(found[:6]))
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def extraction(kit: Kit) -> Chain:
    """What matters of each passage, by a model."""
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_classic.retrievers.document_compressors import LLMChainExtractor

    extractor = LLMChainExtractor.from_llm(kit.chat(ANSWER))
    found = ContextualCompressionRetriever(base_compressor=extractor, base_retriever=retriever(kit))
    context = itemgetter("question") | found | joined
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def relevance_filter(kit: Kit) -> Chain:
    """A model says of each passage whether it matters."""
    from langchain_classic.output_parsers import BooleanOutputParser
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_classic.retrievers.document_compressors import LLMChainFilter

    prompt = PromptTemplate(
        template="Is the context relevant? Say 'yes' or 'no' and nothing else.\n{context}\n{question}",
        input_variables=["context", "question"],
        output_parser=BooleanOutputParser(true_val="yes", false_val="no"),
    )
    found = ContextualCompressionRetriever(
        base_compressor=LLMChainFilter.from_llm(kit.chat(2), prompt), base_retriever=retriever(kit)
    )
    context = itemgetter("question") | found | joined
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def compression(kit: Kit) -> Chain:
    """Many candidates, reranked."""
    from langchain_classic.retrievers import ContextualCompressionRetriever

    best = ContextualCompressionRetriever(base_compressor=kit.reranker, base_retriever=retriever(kit, 16))
    context = itemgetter("question") | best | joined
    return {"context": context, "question": itemgetter("question")} | ask(RAG) | kit.chat(ANSWER) | StrOutputParser()


def upload(kit: Kit) -> Chain:
    """A document comes with the question: index, expand, search with each, rerank, answer."""
    return (
        RunnablePassthrough.assign(indexed=itemgetter("document") | _indexer(kit))
        | RunnablePassthrough.assign(queries=generate_queries(kit))
        | RunnablePassthrough.assign(
            found=itemgetter("queries") | kit.uploads.as_retriever(search_kwargs={"k": 8}).map()
        )
        | RunnablePassthrough.assign(union=lambda x: unique_union(x["found"]))
        | RunnablePassthrough.assign(context=_reranked(kit) | joined)
        | ask(RAG)
        | kit.chat(ANSWER)
        | StrOutputParser()
    )


def _indexer(kit: Kit) -> Chain:
    from langchain_text_splitters import CharacterTextSplitter

    splitter = CharacterTextSplitter(separator="\n\n", chunk_size=1300, chunk_overlap=0)
    if isinstance(kit.uploads, TeolaVectorStore):
        return TeolaIndexer(store=kit.uploads, splitter=splitter)

    async def aindex(text: str) -> int:
        return len(await kit.uploads.aadd_texts(splitter.split_text(text)))

    return RunnableLambda(lambda text: len(kit.uploads.add_texts(splitter.split_text(text))), afunc=aindex)


def _reranked(kit: Kit) -> Chain:
    async def arerank(x: dict[str, Any]) -> list[Document]:
        return list(await kit.reranker.acompress_documents(x["union"], x["question"]))

    return RunnableLambda(lambda x: list(kit.reranker.compress_documents(x["union"], x["question"])), afunc=arerank)


# ------------------------------------------------------------ conversation


def conversational(kit: Kit) -> Chain:
    """History-aware retrieval, and a history that is kept."""
    from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    standalone = "Given a chat history and the latest user question, formulate a standalone question."
    aware = create_history_aware_retriever(kit.chat(QUERIES), retriever(kit), _talk(standalone))
    answer = create_stuff_documents_chain(kit.chat(ANSWER), _talk(RULES + "\n\n{context}"))
    return RunnableWithMessageHistory(
        create_retrieval_chain(aware, answer),
        lambda session_id: InMemoryChatMessageHistory(messages=list(SPOKEN)),
        input_messages_key="input",
        history_messages_key="chat_history",
        output_messages_key="answer",
    ).with_config(configurable={"session_id": "one"})


SPOKEN = (HumanMessage("What is the report about?"), AIMessage("It is about terms, and about the reasons for them."))


def _talk(system: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages(
        [("system", system), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )


# ------------------------------------------------------------ many documents


def map_reduce(kit: Kit) -> Chain:
    """Search, summarise each passage, combine."""
    each = ask("Write a concise summary of the following: {document}") | kit.chat(ANSWER) | StrOutputParser()
    return (  # type: ignore[no-any-return]
        itemgetter("question")
        | retriever(kit, 6)
        | (lambda found: [{"document": d.page_content} for d in found])
        | each.map()
        | (lambda summaries: {"summaries": "\n".join(summaries)})
        | ask("The following is a set of summaries: {summaries}\nDistill it into a final, consolidated summary.")
        | kit.chat(ANSWER)
        | StrOutputParser()
    )


def map_reduce_chain(kit: Kit) -> Chain:
    """`load_summarize_chain` of langchain_classic over what was found."""
    from langchain_classic.chains.summarize import load_summarize_chain

    model = kit.chat(ANSWER).model_copy(update={"custom_get_token_ids": lambda text: list(range(len(text) // 4))})
    summary = load_summarize_chain(model, chain_type="map_reduce")
    return {"input_documents": itemgetter("question") | retriever(kit, 6)} | summary | itemgetter("output_text")  # type: ignore[no-any-return]


def refine(kit: Kit) -> Chain:
    """An answer from the first passage, refined with each of the others."""
    better = (
        RULES + "\n\nThe question is: {question}\n\nRefine the existing answer with this passage: {passage}\n\n"
        "The existing answer: {answer}\n\nRefined answer:"
    )
    chain = (
        RunnablePassthrough.assign(found=itemgetter("question") | retriever(kit, 3))
        | RunnablePassthrough.assign(passage=lambda x: x["found"][0].page_content)
        | RunnablePassthrough.assign(answer=ask(RULES + "{question}\n{passage}") | kit.chat(ANSWER) | StrOutputParser())
    )
    for i in (1, 2):
        chain = (
            chain
            | RunnablePassthrough.assign(passage=_passage(i))
            | RunnablePassthrough.assign(answer=ask(better) | kit.chat(ANSWER) | StrOutputParser())
        )
    return chain | itemgetter("answer")


def _passage(i: int) -> Callable[[dict[str, Any]], str]:
    return lambda x: str(x["found"][i].page_content)


def refine_chain(kit: Kit) -> Chain:
    """`load_summarize_chain` of langchain_classic over what was found."""
    from langchain_classic.chains.summarize import load_summarize_chain

    summary = load_summarize_chain(kit.chat(ANSWER), chain_type="refine")
    return {"input_documents": itemgetter("question") | retriever(kit, 3)} | summary | itemgetter("output_text")  # type: ignore[no-any-return]


def aspects(kit: Kit) -> Chain:
    """One text, read for several aspects by one `assign` after the other."""
    chain: Chain = RunnablePassthrough.assign(context=itemgetter("question") | retriever(kit, 2) | joined)
    for name in ("summary", "tone", "risks"):
        prompt = ask(f"Give the {name} of the following text, in one sentence: {{context}}")
        chain = chain | RunnablePassthrough.assign(**{name: prompt | kit.chat(ANSWER) | StrOutputParser()})
    return chain | ask("Report: {summary} {tone} {risks}") | kit.chat(ANSWER) | StrOutputParser()


# ------------------------------------------------------------ nothing to gain


def chat(kit: Kit) -> Chain:
    return ask("Tell me a joke about {question}") | kit.chat(2 * ANSWER) | StrOutputParser()


class _State(TypedDict):
    question: str
    seen: Annotated[list[str], operator.add]


def agent_loop(kit: Kit) -> Chain:
    """A graph: the model asks for a search until it has three; its nodes are plain functions."""
    from langgraph.graph import END, START, StateGraph

    think = ask("Question: {question}\nSeen: {seen}\nWhat to search for next?") | kit.chat(ANSWER) | StrOutputParser()
    search = retriever(kit, 1)

    async def act(state: _State) -> dict[str, Any]:
        return {"seen": [joined(await search.ainvoke(await think.ainvoke(dict(state))))]}

    def act_sync(state: _State) -> dict[str, Any]:
        return {"seen": [joined(search.invoke(think.invoke(dict(state))))]}

    graph = StateGraph(_State)
    graph.add_node("act", RunnableLambda(act_sync, afunc=act))
    graph.add_edge(START, "act")
    graph.add_conditional_edges("act", lambda state: END if len(state["seen"]) > 2 else "act")
    return graph.compile() | (lambda state: state["seen"])


@dataclass(frozen=True)
class Pattern:
    make: Callable[[Kit], Chain]
    gain: bool = True
    """False where every step needs the whole of the one before."""
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def given(self) -> dict[str, Any]:
        return {"question": ASKED, **dict(self.more)}


PATTERNS: dict[str, Pattern] = {
    "multi-query": Pattern(multi_query),
    "multi-query retriever": Pattern(multi_query_retriever),
    "RAG-fusion": Pattern(rag_fusion),
    "HyDE": Pattern(hyde),
    "step-back": Pattern(step_back),
    "decomposition": Pattern(decomposition),
    "corrective": Pattern(corrective),
    "guarded": Pattern(guarded),
    "routed": Pattern(routed),
    "hybrid": Pattern(hybrid),
    "ensemble": Pattern(ensemble),
    "merged searches": Pattern(merged_searches),
    "queries times searches": Pattern(queries_times_searches),
    "compression": Pattern(compression),
    "extraction": Pattern(extraction),
    "relevance filter": Pattern(relevance_filter),
    "upload": Pattern(upload, more=(("document", document(chunks=120)),)),
    "conversational": Pattern(conversational, more=(("input", ASKED),)),
    "map-reduce": Pattern(map_reduce),
    "map-reduce chain": Pattern(map_reduce_chain),
    "refine": Pattern(refine),
    "refine chain": Pattern(refine_chain),
    "aspects": Pattern(aspects),
    "RAG with sources": Pattern(rag_with_sources),
    "naive RAG": Pattern(naive_rag, gain=False),
    "chat": Pattern(chat, gain=False),
    "agent loop": Pattern(agent_loop, gain=False),
}
