"""Tests of stock objects of the user's on real engines and vLLM's own API server: they give what they give alone."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Callable, Iterator
from operator import itemgetter
from pydoc_data.topics import topics
from typing import Any
from uuid import UUID, uuid4

import chromadb
import pytest
from differential.recording import Recorder
from langchain_chroma import Chroma
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker, EmbeddingsFilter
from langchain_community.cross_encoders import HuggingFaceCrossEncoder
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import CommaSeparatedListOutputParser, JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_openai import ChatOpenAI
from langchain_qdrant import QdrantVectorStore
from support.api_server import MODEL, ApiServer
from support.own_leaves import Chat, Ledger

from teola_plugin import accelerate
from teola_plugin.adapters.demo_app import EXPAND, LIST_OF_QUESTIONS
from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.sentence_transformers import RerankingEngine
from teola_plugin.engines.sentence_transformers.embedding import EmbeddingEngine, packaged_minilm
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]
# The clients that plain objects keep for ever close their sockets when they are forgotten.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
_loop = asyncio.Runner()
"""One loop for all: the package `openai` keeps connections between calls."""
RULES = "Answer from the passages. Say so when they do not tell. " * 12
QUESTION = "When is the else clause of a try statement executed?"
TEXTS = [part for part in topics["compound"][:9000].split("\n\n") if len(part) > 80][:24]


@pytest.fixture(scope="module")
def pool(vllm_api: ApiServer) -> Iterator[EnginePool]:
    llm = OpenAIServer(base_url=vllm_api.base_url, model=MODEL, prefix_caching=True, priorities=True)
    with EnginePool.local(
        llm=llm,
        embedder=EmbeddingEngine("embedder", cores="0"),
        reranker=RerankingEngine("reranker", reranker_folder(), cores="0"),
    ) as made:
        yield made


@pytest.fixture
def chat(vllm_api: ApiServer) -> Callable[..., ChatOpenAI]:
    def make(**options: Any) -> ChatOpenAI:
        given = {"temperature": 0.0, "max_tokens": 12, "max_retries": 1, **options}
        return ChatOpenAI(base_url=vllm_api.base_url, api_key="none", model=MODEL, **given)

    return make


@pytest.fixture(scope="module")
def embeddings() -> HuggingFaceEmbeddings:
    return HuggingFaceEmbeddings(model_name=packaged_minilm())


@pytest.fixture(scope="module")
def scorer() -> HuggingFaceCrossEncoder:
    return HuggingFaceCrossEncoder(model_name=str(reranker_folder()))


def seen(value: Any) -> Any:
    """Return a result without what differs from call to call: ids, times, and how much of the prompt was cached."""
    if isinstance(value, BaseMessage):
        return type(value), seen(value.model_dump())
    if isinstance(value, dict):
        passing = ("id", "created", "cached_tokens", "created_cache_tokens", "cache_read")
        return {key: seen(inner) for key, inner in value.items() if key not in passing}
    return [seen(one) for one in value] if isinstance(value, list | tuple) else value


def answer_of(chain: Chain, way: str, given: Any) -> Any:
    """Return the result of a call or its error."""

    async def streamed() -> Any:
        return [chunk async for chunk in chain.astream(given)]

    def added(chunks: list[Any]) -> Any:
        """A server packs what it has at a time into a chunk, so two streams are cut at other places."""
        assert len(chunks) > 1
        return functools.reduce(operator.add, chunks)

    calls: dict[str, Callable[[], Any]] = {
        "invoke": lambda: chain.invoke(given),
        "ainvoke": lambda: _loop.run(chain.ainvoke(given)),
        "batch": lambda: chain.batch([given, given]),
        "stream": lambda: added(list(chain.stream(given))),
        "astream": lambda: added(_loop.run(streamed())),
    }
    try:
        return seen(calls[way]())
    except Exception as error:
        return type(error), str(error), getattr(error, "status_code", None)


WAYS = ["invoke", "ainvoke", "batch", "stream", "astream"]
SCHEMA = {"title": "Two", "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.mark.vllm
class TestChatOpenAI:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"stop": ["say"]},
            {"temperature": 0.8, "seed": 7},
            {"logprobs": True, "top_logprobs": 2},
            {"streaming": True},
            {"stream_usage": True},
            {"extra_body": {"min_tokens": 3}, "frequency_penalty": 0.3},
            {"max_tokens": 10**6},
            {"logit_bias": {"7": 200}},
        ],
        ids=lambda options: "-".join(options) or "default",
    )
    def test_bound_chat_model_equals_the_original(
        self, pool: EnginePool, chat: Callable[..., ChatOpenAI], way: str, options: dict[str, Any]
    ) -> None:
        model = chat(**options)
        chain = ChatPromptTemplate([("system", RULES), ("user", "{question}")]) | model
        plain = answer_of(chain, way, {"question": QUESTION})
        fast = accelerate(chain, pool=pool, bind=[(model, "llm")])
        assert answer_of(fast, way, {"question": QUESTION}) == plain

    @pytest.mark.parametrize("way", ["invoke", "ainvoke"])
    def test_arguments_bound_by_the_chain_are_sent(
        self, pool: EnginePool, chat: Callable[..., ChatOpenAI], way: str
    ) -> None:
        model = chat(max_tokens=40)
        prompt = ChatPromptTemplate.from_template("{question}")
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        for bound in (
            model.bind(stop=["say"]),
            model.with_structured_output(SCHEMA, method="json_schema"),
            model.with_structured_output(SCHEMA, method="json_schema", include_raw=True),
            model.bind_tools([tool]),
            model.bind_tools([tool], tool_choice="f"),
            model.with_config(tags=["t"]),
        ):
            chain = prompt | bound
            plain = answer_of(chain, way, {"question": QUESTION})
            fast = accelerate(chain, pool=pool, bind=[(model, "llm")])
            assert answer_of(fast, way, {"question": QUESTION}) == plain

    @pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
    def test_several_choices_equal_the_original(
        self, pool: EnginePool, chat: Callable[..., ChatOpenAI], way: str
    ) -> None:
        """This excludes streams: chunks of two answers come in any order, and LangChain adds them up as they come."""
        model = chat(n=2, temperature=0.8, seed=7)
        chain = ChatPromptTemplate.from_template("{question}") | model
        plain = answer_of(chain, way, {"question": QUESTION})
        assert answer_of(accelerate(chain, pool=pool, bind=[(model, "llm")]), way, {"question": QUESTION}) == plain

    def test_events_equal_those_of_the_original(self, pool: EnginePool, chat: Callable[..., ChatOpenAI]) -> None:
        model = chat(tags=["t"])
        chain = RunnablePassthrough.assign(a=ChatPromptTemplate.from_template("{question}") | model | StrOutputParser())

        def events(one: Chain) -> Any:
            recorder = Recorder()
            one.invoke({"question": QUESTION}, {"callbacks": [recorder]})
            return [(event[0], event[1], event[2]) for event in recorder.events]

        plain = events(chain)
        assert plain and events(accelerate(chain, pool=pool, bind=[(model, "llm")])) == plain

    def test_each_answer_takes_one_request(
        self, pool: EnginePool, chat: Callable[..., ChatOpenAI], vllm_api: ApiServer
    ) -> None:
        model = chat()
        one = ChatPromptTemplate.from_template("One: {question}") | model | StrOutputParser()
        two = ChatPromptTemplate.from_template("Two: {question}") | model | StrOutputParser()
        chain = RunnablePassthrough.assign(a=one).assign(b=two)
        fast = accelerate(chain, pool=pool, bind=[(model, "llm")])
        before = vllm_api.metric("vllm:request_success_total")
        for way in ("invoke", "ainvoke", "stream"):
            assert answer_of(fast, way, {"question": QUESTION})
        assert vllm_api.metric("vllm:request_success_total") - before == 6

    def test_mapped_list_of_a_model_equals_the_original(
        self, pool: EnginePool, chat: Callable[..., ChatOpenAI]
    ) -> None:
        model = chat(max_tokens=24)
        listed = ChatPromptTemplate.from_template("a, b, c. {question}") | model | CommaSeparatedListOutputParser()
        each = ChatPromptTemplate.from_template("{x}") | model
        chain = listed | (RunnableLambda(lambda x: {"x": x}) | each).map()
        fast = accelerate(chain, pool=pool, bind=[(model, "llm")])
        for way in ("invoke", "ainvoke"):
            assert answer_of(fast, way, {"question": QUESTION}) == answer_of(chain, way, {"question": QUESTION})

    def test_bound_model_falls_back_to_itself_if_engine_is_down(
        self, vllm_api: ApiServer, chat: Callable[..., ChatOpenAI]
    ) -> None:
        model = chat()
        chain = ChatPromptTemplate.from_template("{question}") | model
        with EnginePool.local(llm=OpenAIServer(base_url=vllm_api.base_url, prefix_caching=True)) as own:
            fast = accelerate(chain, pool=own, bind=[(model, "llm")])
            own.admin("llm", "stop").result(30)
            for way in ("invoke", "ainvoke", "stream", "astream"):
                assert answer_of(fast, way, {"question": QUESTION}) == answer_of(chain, way, {"question": QUESTION})

    def test_undeclared_server_gets_no_extra_request(
        self, vllm_api: ApiServer, chat: Callable[..., ChatOpenAI]
    ) -> None:
        model = chat()
        slow = RunnableLambda(lambda x: "passage " * 40)
        prompt = ChatPromptTemplate([("system", RULES), ("user", "{context} {question}")])
        chain = RunnablePassthrough.assign(context=slow) | prompt | model
        with EnginePool.local(llm=OpenAIServer(base_url=vllm_api.base_url)) as own:
            fast = accelerate(chain, pool=own, bind=[(model, "llm")])
            before = vllm_api.metric("vllm:request_success_total")
            answer = answer_of(fast, "invoke", {"question": QUESTION})
            assert vllm_api.metric("vllm:request_success_total") - before == 1
        assert answer == answer_of(chain, "invoke", {"question": QUESTION})

    def test_another_server_or_model_is_refused(self, pool: EnginePool, vllm_api: ApiServer) -> None:
        for model, message in (
            (
                ChatOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", model=MODEL),
                "talks to http://127.0.0.1:9/v1",
            ),
            (ChatOpenAI(base_url=vllm_api.base_url, api_key="none", model="other"), "asks for 'other'"),
        ):
            with pytest.raises(RegistrationError, match=message):
                accelerate(ChatPromptTemplate.from_template("{q}") | model, pool=pool, bind=[(model, "llm")])


def faiss(embeddings: Any) -> VectorStore:
    return FAISS.from_texts(TEXTS, embeddings, ids=[str(i) for i in range(len(TEXTS))])


def in_memory(embeddings: Any) -> VectorStore:
    return InMemoryVectorStore.from_texts(TEXTS, embeddings, ids=[str(i) for i in range(len(TEXTS))])


def chroma(embeddings: Any) -> VectorStore:
    client = chromadb.EphemeralClient()
    ids = [str(i) for i in range(len(TEXTS))]
    return Chroma.from_texts(TEXTS, embeddings, ids=ids, client=client, collection_name=f"texts-{uuid4()}")


def qdrant(embeddings: Any, **options: Any) -> VectorStore:
    ids = [str(UUID(int=i)) for i in range(len(TEXTS))]
    return QdrantVectorStore.from_texts(TEXTS, embeddings, ids=ids, location=":memory:", **options)


STORES = [faiss, in_memory, chroma, qdrant]
Made = Callable[[Callable[[Any], VectorStore]], VectorStore]


@pytest.fixture(scope="module")
def made(embeddings: HuggingFaceEmbeddings) -> Made:
    """Return the store of each kind.

    They are created once, because embedding takes a second; no test writes to them.
    """
    return functools.cache(lambda store: store(embeddings))


@pytest.mark.models
class TestEmbeddings:
    @pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
    @pytest.mark.parametrize("store", STORES)
    @pytest.mark.parametrize("search", [{"k": 3}, {"k": 2, "fetch_k": 9, "lambda_mult": 0.2}])
    def test_bound_embeddings_of_a_store_equal_the_original(
        self, models: EnginePool, embeddings: Any, made: Made, store: Any, search: dict[str, Any], way: str
    ) -> None:
        kind = "mmr" if "fetch_k" in search else "similarity"
        retriever = made(store).as_retriever(search_type=kind, search_kwargs=search)
        chain = RunnableLambda(itemgetter("question")) | retriever
        fast = accelerate(chain, pool=models, bind=[(embeddings, "embedder")])
        plain = answer_of(chain, way, {"question": QUESTION})
        assert answer_of(fast, way, {"question": QUESTION}) == plain and plain
        trace = fast.last_trace()
        assert trace is not None and "embedder" in {span.engine for span in trace.spans}

    @pytest.mark.parametrize("way", ["invoke", "ainvoke"])
    @pytest.mark.parametrize("store", STORES)
    def test_search_of_unbound_store_equals_the_original(self, made: Made, store: Any, way: str) -> None:
        """Nothing is on an engine: the store is searched while a model of the user's own answers something else."""
        slow = PromptTemplate.from_template("{question}") | Chat(ledger=Ledger(jitter=0.05)) | StrOutputParser()
        search = itemgetter("question") | made(store).as_retriever(search_kwargs={"k": 3})
        chain = RunnablePassthrough.assign(slow=slow).assign(found=search)
        fast = accelerate(chain)
        assert fast._prefetch_plan is not None
        plain = answer_of(chain, way, {"question": QUESTION})
        assert answer_of(fast, way, {"question": QUESTION}) == plain and len(plain["found"]) == 3

    def test_bound_embeddings_return_equal_vectors(self, models: EnginePool, embeddings: Any) -> None:
        from teola_plugin.adapters.langchain.binding.huggingface import embeddings_on

        texts = ["", "one line", "two\nlines", "word " * 400, "ünï 中文"]
        made = embeddings_on(embeddings, "embedder", models)
        for text, own in zip(texts, embeddings.embed_documents(texts), strict=True):
            assert made.embed_query(text) == pytest.approx(embeddings.embed_query(text), abs=1e-5)
            assert made.embed_documents([text])[0] == pytest.approx(own, abs=1e-5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"encode_kwargs": {"prompt": "query: "}}, r"puts 'query: ' before a document.*EmbeddingEngine\(prompts="),
            ({"query_encode_kwargs": {"prompt": "q: "}}, r"puts 'q: ' before a query, the engine ''"),
            ({"model_kwargs": {"truncate_dim": 8}}, r"model_kwargs \{'truncate_dim': 8\}.*options="),
            ({"encode_kwargs": {"precision": "int8"}}, "encodes with precision='int8'"),
            ({"multi_process": True}, "in many processes"),
        ],
    )
    def test_options_that_the_engine_cannot_match_are_refused(
        self, models: EnginePool, options: dict[str, Any], message: str
    ) -> None:
        other = HuggingFaceEmbeddings(model_name=packaged_minilm(), **options)
        chain = RunnablePassthrough() | InMemoryVectorStore(other).as_retriever()
        with pytest.raises(RegistrationError, match=message):
            accelerate(chain, pool=models, bind=[(other, "embedder")])

    def test_embeddings_with_matching_prompts_are_served(self, embeddings: Any) -> None:
        asks = HuggingFaceEmbeddings(model_name=packaged_minilm(), query_encode_kwargs={"prompt": "q: "})
        store = in_memory(asks)
        engine = EmbeddingEngine("embedder", prompts={"query": "q: "}, cores="0")
        with EnginePool.local(embedder=engine) as own:
            chain = RunnablePassthrough() | store.as_retriever()
            fast = accelerate(chain, pool=own, bind=[(asks, "embedder")])
            assert fast.invoke(QUESTION) == chain.invoke(QUESTION)

    @pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
    def test_store_with_overridden_search_is_served(self, models: EnginePool, embeddings: Any, way: str) -> None:
        class Other(InMemoryVectorStore):
            def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> Any:
                return super().similarity_search_with_score(*args, **kwargs)

        store = Other(embeddings)
        store.add_texts(["a primitive is a unit", "an engine"])
        chain = RunnableLambda(itemgetter("question")) | store.as_retriever(search_kwargs={"k": 1})
        fast = accelerate(chain, pool=models, bind=[(embeddings, "embedder")])

        assert answer_of(fast, way, {"question": QUESTION}) == answer_of(chain, way, {"question": QUESTION})
        assert "embedder" in {span.engine for span in fast.last_trace().spans}


@pytest.fixture(scope="module")
def models() -> Iterator[EnginePool]:
    with EnginePool.local(
        embedder=EmbeddingEngine("embedder", cores="0"),
        reranker=RerankingEngine("reranker", reranker_folder(), cores="0"),
    ) as made:
        yield made


def compressed(made: Made, scorer: Any) -> Chain:
    reranker = CrossEncoderReranker(model=scorer, top_n=3)
    base = made(faiss).as_retriever(search_kwargs={"k": 8})
    return ContextualCompressionRetriever(base_compressor=reranker, base_retriever=base)


@pytest.mark.models
class TestRerankers:
    @pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
    def test_reranker_in_a_compression_retriever_is_served(
        self, models: EnginePool, embeddings: Any, made: Made, scorer: Any, way: str
    ) -> None:
        chain = RunnableLambda(itemgetter("question")) | compressed(made, scorer)
        fast = accelerate(chain, pool=models, bind=[(embeddings, "embedder"), (scorer, "reranker")])
        plain = answer_of(chain, way, {"question": QUESTION})
        assert answer_of(fast, way, {"question": QUESTION}) == plain and plain
        trace = fast.last_trace()
        engines = {"embedder"} if way == "batch" else {"embedder", "reranker"}  # a batch has no ambient query
        assert trace is not None and engines <= {span.engine for span in trace.spans}

    def test_bound_cross_encoder_returns_equal_scores(self, models: EnginePool, scorer: Any) -> None:
        from teola_plugin.adapters.langchain.binding.huggingface import cross_encoder_on

        pairs = [(QUESTION, text) for text in TEXTS]
        assert cross_encoder_on(scorer, "reranker", models).score(pairs) == pytest.approx(scorer.score(pairs), abs=1e-5)

    def test_embeddings_of_a_filter_are_served(self, models: EnginePool, embeddings: Any, made: Made) -> None:
        chain = ContextualCompressionRetriever(
            base_compressor=EmbeddingsFilter(embeddings=embeddings, k=2),
            base_retriever=made(faiss).as_retriever(),
        )
        fast = accelerate(chain, pool=models, bind=[(embeddings, "embedder")])

        def texts(found: list[Document]) -> list[str]:
            return [document.page_content for document in found]

        assert texts(fast.invoke(QUESTION)) == texts(chain.invoke(QUESTION))
        assert chain.base_compressor.embeddings is embeddings, "the user's own objects stay as they are"

    def test_options_that_the_engine_cannot_match_are_refused(self, models: EnginePool, made: Made) -> None:
        other = HuggingFaceCrossEncoder(model_name=str(reranker_folder()), model_kwargs={"max_length": 64})
        with pytest.raises(
            RegistrationError, match=r"max_length=64, the engine at None.*RerankingEngine\(max_length=64"
        ):
            accelerate(compressed(made, other), pool=models, bind=[(other, "reranker")])


@pytest.mark.vllm
@pytest.mark.models
class TestTogether:
    def chain(self, model: Any, made: Made, scorer: Any) -> Chain:
        retriever = compressed(made, scorer)
        found = itemgetter("question") | retriever | (lambda docs: "\n\n".join(d.page_content for d in docs))
        prompt = ChatPromptTemplate([("system", RULES), ("user", "Passages:\n{context}\n\nQuestion: {question}")])
        return RunnablePassthrough.assign(context=found) | prompt | model

    @pytest.mark.parametrize("way", WAYS)
    def test_stock_rag_chain_equals_the_original(
        self, pool: EnginePool, chat: Callable[..., ChatOpenAI], embeddings: Any, made: Made, scorer: Any, way: str
    ) -> None:
        model = chat()
        chain = self.chain(model, made, scorer)
        plain = answer_of(chain, way, {"question": QUESTION})
        pool.reset()
        bind = [(model, "llm"), (embeddings, "embedder"), (scorer, "reranker")]
        fast = accelerate(chain, pool=pool, bind=bind)
        assert answer_of(fast, way, {"question": QUESTION}) == plain
        trace = fast.last_trace()
        assert trace is not None
        assert "PARTIAL_PREFILLING" in {span.kind for span in trace.spans}

    def test_warmed_prefix_is_cached_for_the_generation(
        self,
        pool: EnginePool,
        chat: Callable[..., ChatOpenAI],
        embeddings: Any,
        made: Made,
        scorer: Any,
        vllm_api: ApiServer,
    ) -> None:
        model = chat()
        bind = [(model, "llm"), (embeddings, "embedder"), (scorer, "reranker")]
        fast = accelerate(self.chain(model, made, scorer), pool=pool, bind=bind)
        pool.reset()
        before = vllm_api.metric("vllm:request_success_total")
        answer: AIMessage = fast.invoke({"question": QUESTION})
        assert vllm_api.metric("vllm:request_success_total") - before == 2, "one warm-up and one generation"
        usage = answer.usage_metadata
        assert usage is not None and usage["input_token_details"]["cache_read"] > 64

    @pytest.mark.parametrize("way", WAYS)
    def test_unbound_store_is_searched_while_the_model_streams(
        self, pool: EnginePool, chat: Callable[..., ChatOpenAI], made: Made, way: str
    ) -> None:
        """The store and its embeddings stay what they are; only the model is bound."""
        model = chat(max_tokens=96)
        shape = {"type": "json_schema", "json_schema": {"name": "questions", "schema": LIST_OF_QUESTIONS}}
        search = made(in_memory).as_retriever(search_kwargs={"k": 2})
        chain = EXPAND | model.bind(response_format=shape) | JsonOutputParser() | search.map()
        plain = answer_of(chain, way, {"question": QUESTION})
        fast = accelerate(chain, pool=pool, bind=[(model, "llm")], speculate="all")
        assert answer_of(fast, way, {"question": QUESTION}) == plain and plain
        if way in ("invoke", "ainvoke"):
            trace = fast.last_trace()
            assert trace is not None
            written = max(span.done or 0.0 for span in trace.spans if span.engine == "llm")
            searched = [span.begin for span in trace.spans if span.engine == "wrapped"]
            assert len(searched) >= 3 and min(searched) < written
