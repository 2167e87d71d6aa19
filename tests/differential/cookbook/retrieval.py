"""Retrieval as in the cookbooks: the retrievers, compressors and chains of langchain_classic."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from differential.cookbook.bench import DOCUMENTS, Bench
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    HypotheticalDocumentEmbedder,
    LLMChain,
    RetrievalQA,
    SequentialChain,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.qa_with_sources.loading import load_qa_with_sources_chain
from langchain_classic.chains.summarize import load_summarize_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
    MultiVectorRetriever,
    ParentDocumentRetriever,
    RePhraseQueryRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    CrossEncoderReranker,
    DocumentCompressorPipeline,
    EmbeddingsFilter,
    LLMChainExtractor,
    LLMChainFilter,
)
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_text_splitters import CharacterTextSplitter

from benchmarks.langchain.cookbook import joined, reciprocal_rank_fusion

Chain = Runnable[Any, Any]
ASKED = "what does import say about naïve?"
QUESTION = {"question": ASKED}
TALK = {"input": "and what of yield?", "chat_history": [HumanMessage("tell me of import"), AIMessage("It imports.")]}


def ask(text: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_template(text)


def answered(b: Bench, retriever: Any) -> Chain:
    """Return a chain that answers from the retriever's documents."""
    given = {"context": retriever | joined, "question": RunnablePassthrough()}
    return given | ask("Use {context} to answer {question}") | b.llm | StrOutputParser()


def rag(b: Bench) -> Chain:
    return answered(b, b.retriever)


def rag_with_sources(b: Bench) -> Chain:
    from_docs = RunnablePassthrough.assign(context=lambda x: joined(x["context"])) | ask("{context} {question}") | b.llm
    return RunnableParallel({"context": b.retriever, "question": RunnablePassthrough()}).assign(
        answer=from_docs | StrOutputParser()
    )


def mmr(b: Bench) -> Chain:
    return answered(b, b.kit.store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 5}))


def several_queries(b: Bench) -> Chain:
    return MultiQueryRetriever.from_llm(
        b.retriever,
        b.kit.chat(12),
        PromptTemplate.from_template("Three versions of the question, one per line: {question}"),
    )


def several_queries_and_the_original(b: Bench) -> Chain:
    prompt = PromptTemplate.from_template("Three versions of the question, one per line: {question}")
    return answered(b, MultiQueryRetriever.from_llm(b.retriever, b.kit.chat(12), prompt, include_original=True))


def extractor(b: Bench) -> Chain:
    return ContextualCompressionRetriever(base_compressor=LLMChainExtractor.from_llm(b.llm), base_retriever=b.retriever)


def llm_filter(b: Bench) -> Chain:
    return ContextualCompressionRetriever(base_compressor=LLMChainFilter.from_llm(b.llm), base_retriever=b.retriever)


def embeddings_filter(b: Bench) -> Chain:
    near = EmbeddingsFilter(embeddings=b.embeddings, similarity_threshold=0.2)
    return answered(b, ContextualCompressionRetriever(base_compressor=near, base_retriever=b.retriever))


class Overlap(BaseCrossEncoder):
    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        return [float(len(set(a.split()) & set(b.split()))) for a, b in text_pairs]


def cross_encoder(b: Bench) -> Chain:
    best = CrossEncoderReranker(model=Overlap(), top_n=2)
    return answered(b, ContextualCompressionRetriever(base_compressor=best, base_retriever=b.retriever))


def reranked(b: Bench) -> Chain:
    return answered(b, ContextualCompressionRetriever(base_compressor=b.kit.reranker, base_retriever=b.retriever))


def compressor_pipeline(b: Bench) -> Chain:
    splitter = CharacterTextSplitter(chunk_size=40, chunk_overlap=0, separator=". ")
    near = EmbeddingsFilter(embeddings=b.embeddings, k=3)
    steps = DocumentCompressorPipeline(transformers=[splitter, near, b.kit.reranker])
    return ContextualCompressionRetriever(base_compressor=steps, base_retriever=b.retriever)


def parent_documents(b: Bench) -> Chain:
    parents = ParentDocumentRetriever(
        vectorstore=b.new_store("parents"),
        docstore=InMemoryStore(),
        child_splitter=CharacterTextSplitter(chunk_size=30, chunk_overlap=0, separator=". "),
    )
    parents.add_documents(DOCUMENTS, ids=[f"p{i}" for i in range(len(DOCUMENTS))])
    return answered(b, parents)


def several_vectors(b: Bench) -> Chain:
    """Return a retriever that searches summaries and returns documents."""
    found = MultiVectorRetriever(vectorstore=b.new_store("summaries"), docstore=InMemoryStore(), id_key="doc")
    summaries = [Document(d.page_content[:24], id=f"m{i}", metadata={"doc": f"p{i}"}) for i, d in enumerate(DOCUMENTS)]
    found.vectorstore.add_documents(summaries)
    found.docstore.mset([(f"p{i}", d) for i, d in enumerate(DOCUMENTS)])
    return answered(b, found)


def ensemble(b: Bench) -> Chain:
    return answered(b, EnsembleRetriever(retrievers=[b.retriever, b.kit.keywords], weights=[0.4, 0.6]))


def merger(b: Bench) -> Chain:
    return answered(b, MergerRetriever(retrievers=[b.retriever, b.kit.keywords]))


def rephrased(b: Bench) -> Chain:
    """Return a retriever without async code. Both sides must raise the same error."""
    return RePhraseQueryRetriever.from_llm(b.retriever, b.llm)


def hyde_embedder(b: Bench) -> Chain:
    hyde = HypotheticalDocumentEmbedder.from_llm(b.llm, b.embeddings, prompt_key="web_search")
    return RunnableLambda(hyde.embed_query) | (lambda vector: b.kit.store.similarity_search_by_vector(vector, k=2))


def hybrid(b: Bench) -> Chain:
    """Return a retriever that makes two searches and fuses them by reciprocal ranks."""
    both = {"dense": itemgetter("question") | b.retriever, "sparse": itemgetter("question") | b.kit.keywords}
    fused = RunnableLambda(lambda x: reciprocal_rank_fusion([x["dense"], x["sparse"]])[:3])
    return (
        RunnablePassthrough.assign(context=RunnableParallel(both) | fused | joined)
        | ask("{context}\n{question}")
        | b.llm
        | StrOutputParser()
    )


# ------------------------------------------------------------ chains of langchain_classic


def talk(system: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages(
        [("system", system), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )


def retrieval_chain(b: Bench) -> Chain:
    stuffed = create_stuff_documents_chain(b.llm, ask("Answer {input} by {context}"))
    return create_retrieval_chain(b.retriever, stuffed)


def history_aware(b: Bench) -> Chain:
    aware = create_history_aware_retriever(b.llm, b.retriever, talk("Make it a standalone question."))
    return create_retrieval_chain(aware, create_stuff_documents_chain(b.llm, talk("Use {context}.")))


def stuff(b: Bench) -> Chain:
    prompt = PromptTemplate.from_template("{source}: {page_content}")
    return create_stuff_documents_chain(b.llm, ask("Sum up: {context}"), document_prompt=prompt)


def map_reduce(b: Bench) -> Chain:
    return load_summarize_chain(b.llm, chain_type="map_reduce", return_intermediate_steps=True)


def refine(b: Bench) -> Chain:
    return load_summarize_chain(b.llm, chain_type="refine", return_intermediate_steps=True)


def retrieval_qa(b: Bench) -> Chain:
    return RetrievalQA.from_chain_type(b.llm, retriever=b.retriever, return_source_documents=True)


def retrieval_qa_refine(b: Bench) -> Chain:
    return RetrievalQA.from_chain_type(b.llm, chain_type="refine", retriever=b.retriever)


def qa_with_sources(b: Bench) -> Chain:
    return load_qa_with_sources_chain(b.llm, chain_type="stuff")


def conversational_chain(b: Bench) -> Chain:
    return ConversationalRetrievalChain.from_llm(b.llm, b.retriever)


def sequential_chain(b: Bench) -> Chain:
    play = LLMChain(llm=b.llm, prompt=PromptTemplate.from_template("A play named {title}"), output_key="play")
    review = LLMChain(llm=b.llm, prompt=PromptTemplate.from_template("Review of {play}"), output_key="review")
    return SequentialChain(chains=[play, review], input_variables=["title"], output_variables=["play", "review"])


SOME = DOCUMENTS[:3]
CHAINS: dict[str, tuple[Any, Any]] = {
    "rag": (rag, ASKED),
    "rag_with_sources": (rag_with_sources, ASKED),
    "mmr": (mmr, ASKED),
    "several_queries": (several_queries, ASKED),
    "several_queries_and_the_original": (several_queries_and_the_original, ASKED),
    "extractor": (extractor, ASKED),
    "llm_filter": (llm_filter, ASKED),
    "embeddings_filter": (embeddings_filter, ASKED),
    "cross_encoder": (cross_encoder, ASKED),
    "reranked": (reranked, ASKED),
    "compressor_pipeline": (compressor_pipeline, ASKED),
    "parent_documents": (parent_documents, ASKED),
    "several_vectors": (several_vectors, ASKED),
    "ensemble": (ensemble, ASKED),
    "merger": (merger, ASKED),
    "rephrased": (rephrased, ASKED),
    "hyde_embedder": (hyde_embedder, ASKED),
    "hybrid": (hybrid, QUESTION),
    "retrieval_chain": (retrieval_chain, {"input": ASKED}),
    "history_aware": (history_aware, TALK),
    "history_aware_at_first": (history_aware, {**TALK, "chat_history": []}),
    "stuff": (stuff, {"context": SOME}),
    "map_reduce_chain": (map_reduce, {"input_documents": SOME}),
    "refine_chain_with_steps": (refine, {"input_documents": SOME}),
    "retrieval_qa": (retrieval_qa, {"query": ASKED}),
    "retrieval_qa_refine": (retrieval_qa_refine, {"query": ASKED}),
    "qa_with_sources": (qa_with_sources, {"input_documents": SOME, "question": ASKED}),
    "conversational_chain": (conversational_chain, {"question": ASKED, "chat_history": [("hi", "hello")]}),
    "sequential_chain": (sequential_chain, {"title": "Import"}),
}
