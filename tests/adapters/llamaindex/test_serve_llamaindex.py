"""`engines="auto"` for LlamaIndex objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import Document, PromptTemplate, SummaryIndex, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SentenceTransformerRerank
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from support.llamaindex_engines import own_loop
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import accelerate
from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

huggingface = pytest.importorskip("llama_index.embeddings.huggingface", reason="needs models")
HuggingFaceEmbedding = huggingface.HuggingFaceEmbedding
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
FACTS = ["lambs eat grass", "walls need lime", "a primitive is a step of a query", "moss grows in the shade"]
WAYS: dict[str, Callable[[Any], Any]] = {
    "query": lambda engine: engine.query("what is a primitive?"),
    "aquery": lambda engine: asyncio.run(engine.aquery("what is a primitive?")),
}


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIStub]:
    with openai_stub() as stub:
        yield stub


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    """Close the event loop in which LlamaIndex counts the tokens of a prompt, and which it leaves open."""
    with own_loop():
        yield


@pytest.fixture
def stub(server: OpenAIStub) -> OpenAIStub:
    server.requests.clear()
    return server


def llm_of(stub: OpenAIStub, **options: Any) -> OpenAILike:
    given = {"is_chat_model": True, "max_retries": 0, "temperature": 0.0, "api_base": stub.base_url, **options}
    return OpenAILike(model=MODEL, api_key="none", **given)


@pytest.fixture(scope="module")
def embedding() -> HuggingFaceEmbedding:
    given: dict[str, Any] = {"query_instruction": "query: ", "text_instruction": "passage: "}
    return HuggingFaceEmbedding(model_name=packaged_minilm(), device="cpu", **given)


@pytest.fixture(scope="module")
def index(embedding: HuggingFaceEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents([Document(text=fact) for fact in FACTS], embed_model=embedding)


@pytest.mark.models
@pytest.mark.parametrize("way", WAYS)
def test_engines_auto_serves_the_models_of_an_engine(stub: OpenAIStub, index: VectorStoreIndex, way: str) -> None:
    rerank = SentenceTransformerRerank(model=str(reranker_folder()), top_n=2, device="cpu")
    mode: Any = {"response_mode": "accumulate", "similarity_top_k": 3, "node_postprocessors": [rerank]}
    plain = index.as_query_engine(llm=llm_of(stub), **mode)
    wanted, sent = WAYS[way](plain), sorted(map(str, stub.requests))
    fast = accelerate(plain, engines="auto")
    session = fast.__teola_session__
    kinds = {type(one.obj).__name__ for one in session.serving.bound}
    assert kinds == {"OpenAILike", "HuggingFaceEmbedding", "SentenceTransformerRerank"}, fast.explain()
    stub.requests.clear()
    found = WAYS[way](fast)
    assert str(found) == str(wanted)
    assert [node.text for node in found.source_nodes] == [node.text for node in wanted.source_nodes]
    assert [node.score for node in found.source_nodes] == pytest.approx([node.score for node in wanted.source_nodes])
    assert sorted(map(str, stub.requests)) == sent, "the very requests of the plain object, and no other"
    explanation = fast.explain()
    assert (
        "prompts={'query': 'query: ', 'document': 'passage: '}" in explanation
        and "OpenAIServer(base_url=" in explanation
    )


def test_explain_names_models_without_an_engine(stub: OpenAIStub) -> None:
    there = llm_of(stub, api_base="https://api.openai.com/v1")
    for llm, reason in ((there, "is not known to be of this machine"), (MockLLM(), "no engine is made for a MockLLM")):
        index = SummaryIndex.from_documents([Document(text=fact) for fact in FACTS])
        fast = accelerate(index.as_query_engine(llm=llm), engines="auto")
        assert not fast.__teola_session__.serving.bound and reason in fast.explain()


def accumulate_slowly(index: VectorStoreIndex, llm: OpenAI) -> Any:
    """Return a query engine whose three calls the stub answers when it is told to."""
    template = PromptTemplate("slowly: {context_str} {query_str}")
    return index.as_query_engine(llm=llm, response_mode="accumulate", similarity_top_k=3, text_qa_template=template)


def check_three_calls_overlap(stub: OpenAIStub, engine: Any, expected: str) -> None:
    """Fail unless the server sees all three calls of a query before it answers one, and no other."""
    stub.requests.clear()
    stub.go.clear()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(engine.query, "what is a primitive?")
        try:
            assert becomes_true(lambda: len(stub.requests) == 3)
        finally:
            stub.go.set()
        assert str(answer.result(20)) == expected and len(stub.requests) == 3


def test_calls_of_a_served_llm_overlap_as_without_a_pool(stub: OpenAIStub, index: VectorStoreIndex) -> None:
    """Sync calls of a model that is only carried begin together: the server sees all of them before one is answered."""
    plain = accumulate_slowly(index, llm_of(stub))
    stub.go.set()
    expected = str(plain.query("what is a primitive?"))
    fast = accelerate(plain, engines="auto")
    for engine in (fast, accelerate(plain)):
        check_three_calls_overlap(stub, engine, expected)
    trace = fast.last_trace()
    assert trace is not None and len([span for span in trace.spans if span.engine.startswith("llm")]) == 3


class UsersOwnLLM(OpenAI):
    """A subclass of a user's own. Its provider methods are the public methods of `OpenAI`."""


def test_calls_overlap_and_are_sent_once_beside_a_subclass_of_the_llm(
    stub: OpenAIStub, index: VectorStoreIndex
) -> None:
    plain = accumulate_slowly(index, llm_of(stub))
    own = UsersOwnLLM(model="gpt-4o-mini", api_key="none", api_base=stub.base_url, max_retries=0, temperature=0.0)
    subclass = accumulate_slowly(index, own)
    stub.go.set()
    expected = str(plain.query("what is a primitive?"))
    of_subclass = accelerate(subclass, concurrent=[UsersOwnLLM])
    assert str(of_subclass.query("what is a primitive?")) == expected
    check_three_calls_overlap(stub, accelerate(plain), expected)
    stub.requests.clear()
    assert str(of_subclass.query("what is a primitive?")) == expected and len(stub.requests) == 3


def becomes_true(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + 4
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()
