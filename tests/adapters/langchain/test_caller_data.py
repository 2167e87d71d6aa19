"""Tests that any text is accepted, and that results belong to the caller alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langchain_text_splitters import CharacterTextSplitter
from support.openai_stub import MODEL, openai_stub
from support.recording import record

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.llm import TeolaLLM
from teola_plugin.adapters.langchain.rows import to_documents
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.adapters.snapshots import data_key
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import UNKNOWN, Chunk, Generate

_names = (f"owned{i}" for i in itertools.count())
ODD = f"an icon {UNKNOWN} of a font"


# ------------------------------------------------------------ the character that stands for unknown slots


@tool(ODD)
def odd(x: int) -> int:
    """Described."""
    return x


ASKED: dict[str, Any] = {
    "text": ODD,
    "only it": UNKNOWN,
    "messages": [SystemMessage(ODD), HumanMessage("and"), AIMessage(ODD), HumanMessage(ODD)],
}


@pytest.mark.parametrize("name", ASKED)
def test_models_accept_prompts_with_any_character(name: str, fakes: EnginePool) -> None:
    for model in (ChatTeola(pool=fakes, max_tokens=4), TeolaLLM(pool=fakes, max_tokens=4)):
        whole = model.invoke(ASKED[name])
        chunks: Any = list(model.stream(ASKED[name]))
        text = "".join(getattr(one, "content", one) for one in chunks)
        assert text == getattr(whole, "content", whole) != ""


def test_tool_descriptions_accept_any_character(fakes: EnginePool) -> None:
    assert ChatTeola(pool=fakes, max_tokens=4).bind_tools([odd]).invoke(ODD).content


def test_server_engine_accepts_prompts_with_any_character() -> None:
    with openai_stub() as stub:
        server = OpenAIServer(base_url=stub.base_url, model=MODEL, prefix_caching=True, calibrate=False)
        with EnginePool.local(llm=server) as pool:
            assert ODD in str(ChatTeola(pool=pool).invoke(ODD).content)


def test_partial_prefilling_keeps_prompts_with_any_character() -> None:
    llm = FakeLLM()
    with EnginePool.local([llm, FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        first = ChatPromptTemplate.from_template(f"{ODD} {{question}}") | ChatTeola(pool=pool, max_tokens=4)
        later = RunnableLambda(lambda x: x["first"].content + UNKNOWN)
        last = ChatPromptTemplate.from_messages(
            [("system", f"{'rules ' * 80}{ODD}"), ("human", f"{{question}} {UNKNOWN} {{found}}")]
        )
        chain = RunnablePassthrough.assign(first=first) | RunnablePassthrough.assign(found=later)
        chain = chain | last | ChatTeola(pool=pool, max_tokens=4)
        seen = record(llm)
        given = {"question": ODD}
        plain = chain.invoke(given).content
        expected_payloads = [request.payload for request in seen]
        seen.clear()
        fast = accelerate(chain)
        assert fast.invoke(given).content == plain
        made = [request.payload for request in seen if isinstance(request.payload, Generate)]
        assert sorted(map(repr, made)) == sorted(map(repr, expected_payloads))


# ------------------------------------------------------------ what was chunked


def _index(pool: EnginePool, **options: Any) -> TeolaIndexer:
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=next(_names))
    return TeolaIndexer(store=store, **options)


def test_documents_changed_in_place_are_chunked_again(fakes: EnginePool) -> None:
    index, given = _index(fakes), Document("a text", metadata={"where": {"page": 1, "tags": ["a"]}})
    before = index.chunk(given)
    given.metadata["where"]["tags"].append("b")
    after = index.chunk(given)
    assert before[0].metadata == {"where": {"page": 1, "tags": ["a"]}}
    assert after[0].metadata == {"where": {"page": 1, "tags": ["a", "b"]}} and after[0].id != before[0].id


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ([1], [True]), ({"a": 0}, {"a": False})])
def test_documents_with_equal_looking_metadata_are_chunked_separately(one: Any, other: Any, fakes: EnginePool) -> None:
    index = _index(fakes)
    for value in (one, other):
        [chunk] = index.chunk(Document("a text", metadata={"value": value}))
        assert data_key(chunk.metadata["value"]) == data_key(value)


def test_changed_splitter_chunks_the_text_again(fakes: EnginePool) -> None:
    index = _index(fakes, splitter=CharacterTextSplitter(separator=" ", chunk_size=5, chunk_overlap=0))
    assert [chunk.text for chunk in index.chunk("one two")] == ["one", "two"]
    index.splitter._chunk_size = 50
    assert [chunk.text for chunk in index.chunk("one two")] == ["one two"]
    index.splitter = CharacterTextSplitter(separator="w", chunk_size=3, chunk_overlap=0)
    assert len(index.chunk("one two")) == 2


def test_equal_documents_are_chunked_once(fakes: EnginePool) -> None:
    index = _index(fakes)
    documents = [Document(f"text {i}", metadata={"at": [i, {"x": None}]}) for i in range(3)]
    assert index.chunk(documents) is index.chunk([one.model_copy(deep=True) for one in documents])


# ------------------------------------------------------------ what was found


def test_documents_of_one_row_share_no_metadata() -> None:
    row = Chunk("a", "text", {"where": {"tags": ["a"]}, "n": 1})
    [first], [second] = to_documents([row]), to_documents([row])
    first.metadata["where"]["tags"].append("mine")
    assert second.metadata == row.metadata == {"where": {"tags": ["a"]}, "n": 1}


@pytest.mark.parametrize("accelerated", [False, True])
def test_changes_to_retrieved_documents_do_not_reach_the_next_search(accelerated: bool, fakes: EnginePool) -> None:
    store = _index(fakes).store
    store.add_texts(["a cat"], [{"where": {"tags": ["a"]}}])

    def change(found: list[Document]) -> list[Document]:
        found[0].metadata["where"]["tags"].append("mine")
        return store.similarity_search("cat") + store.get_by_ids([str(found[0].id)])

    chain = store.as_retriever() | RunnableLambda(change)
    found = (accelerate(chain) if accelerated else chain).invoke("cat")
    assert [one.metadata["where"]["tags"] for one in found] == [["a"], ["a"]]
