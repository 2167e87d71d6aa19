"""Tests of `TeolaVectorStore` and its retriever on the fake store, and in LangChain's test suites on PostgreSQL."""

from __future__ import annotations

import copy
import itertools

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaRetriever, TeolaVectorStore
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.graph import Query
from teola_plugin.requests.payloads import Hit

_names = (f"collection{i}" for i in itertools.count())
DOCUMENTS = [
    Document(id="cat", page_content="the cat sleeps on the mat", metadata={"kind": "animal", "deep": {"a": [1, None]}}),
    Document(id="dog", page_content="the dog barks at the postman", metadata={"kind": "animal", "legs": 4}),
    Document(id="tea", page_content="green tea is brewed at low heat", metadata={"kind": "drink", "share": 0.5}),
    Document(id="mat", page_content="the cat sleeps on the red mat", metadata={"kind": "thing"}),
]


@pytest.fixture
def store(pool):
    return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=next(_names))


@pytest.fixture
def filled(store):
    assert store.add_documents(DOCUMENTS) == ["cat", "dog", "tea", "mat"]
    return store


async def test_store_returns_documents_unchanged(filled):
    found = filled.similarity_search("the cat sleeps", k=4)
    assert sorted(found, key=lambda d: d.id) == sorted(DOCUMENTS, key=lambda d: d.id)
    assert found[0].id in {"cat", "mat"}
    assert await filled.asimilarity_search("the cat sleeps", k=4) == found
    vector = filled.embeddings.embed_query("the cat sleeps")
    assert filled.similarity_search_by_vector(vector, k=4) == found
    assert await filled.asimilarity_search_by_vector(vector, k=4) == found
    assert filled.get_by_ids(["tea"]) == [DOCUMENTS[2]] == await filled.aget_by_ids(["tea"])


async def test_scored_search_returns_descending_scores(filled):
    scored = filled.similarity_search_with_score("green tea", k=4)
    assert scored[0][0].id == "tea" and [s for _, s in scored] == sorted((s for _, s in scored), reverse=True)
    assert await filled.asimilarity_search_with_score("green tea", k=4) == scored
    relevance = filled.similarity_search_with_relevance_scores("green tea", k=4)
    assert [r for _, r in relevance] == [min(1.0, max(0.0, s)) for _, s in scored]
    assert len(filled.similarity_search_with_relevance_scores("green tea", k=4, score_threshold=0.5)) == 1


def test_search_filters_by_metadata_equality(filled):
    assert {d.id for d in filled.similarity_search("x", filter={"kind": "animal"})} == {"cat", "dog"}
    assert [d.id for d in filled.similarity_search("x", filter={"kind": "animal", "legs": 4})] == ["dog"]
    assert filled.similarity_search("x", filter={"kind": "none"}) == []
    with pytest.raises(RegistrationError, match=r"filter key 'legs' holds dict .*only equality"):
        filled.similarity_search("x", filter={"legs": {"$gt": 2}})
    with pytest.raises(RegistrationError, match=r"unknown argument of search 'filters'.*did you mean 'filter'"):
        filled.similarity_search("x", filters={})


TYPED = {"true": True, "one": 1, "float": 1.0, "digit": "1", "text": "a", "null": None, "list": [1]}


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ({"v": True}, {"true"}),
        ({"v": 1}, {"one", "float"}),
        ({"v": "1"}, {"digit"}),
        ({"v": None}, {"null", "missing"}),
        ({"v": {"$eq": 1.0}}, {"one", "float"}),
        ({"v": {"$ne": 1}}, {"true", "digit", "text", "null", "list", "missing"}),
        ({"v": {"$in": [True, "a"]}}, {"true", "text"}),
        ({"v": {"$nin": ["a", None]}}, {"true", "one", "float", "digit", "list"}),
        ({"v": {"$ne": "a", "$in": ["a", "1"]}}, {"digit"}),
        ({"$and": [{"v": 1}, {"v": {"$ne": True}}]}, {"one", "float"}),
        ({"$and": [{"v": 1}, {"v": "1"}]}, set()),
        ({}, {*TYPED, "missing"}),
    ],
)
def test_filters_match_by_json_types(store, wanted, ids):
    store.add_texts([f"text {id}" for id in TYPED], [{"v": value} for value in TYPED.values()], ids=list(TYPED))
    store.add_texts(["without"], ids=["missing"])

    documents = store.similarity_search("text", k=20, filter=wanted)

    assert {document.id for document in documents} == ids


@pytest.mark.parametrize(
    "wanted",
    [
        *({"v": {"$gt": 1}}, {"v": [1]}, {"v": {"$in": 1}}, {"v": {"$in": [[1]]}}, {"v": {}}, {"v": float("nan")}),
        {"$or": [{"v": 1}]},
        {"$and": {"v": 1}},
    ],
)
def test_filter_that_is_no_equality_raises_and_names_the_key(store, wanted):
    with pytest.raises(RegistrationError, match=r"filter key '[$\w]+' holds .*only equality is supported.*\$in"):
        store.similarity_search("x", filter=wanted)


@pytest.mark.parametrize("wanted", [lambda document: True, "v = 1", [("v", 1)]])
def test_filter_that_is_no_dict_raises(store, wanted):
    with pytest.raises(RegistrationError, match=r"the filter is a \w+, but .*give a dict"):
        store.similarity_search("x", filter=wanted)


async def test_content_ids_make_adding_idempotent(store):
    first = store.add_texts(["a", "b", "a"], [{"n": 1}, {"n": 1}, {"n": 1}])
    assert first[0] == first[2] != first[1] and store.count() == 2
    assert await store.aadd_texts(["b"], [{"n": 1}]) == [first[1]] and store.count() == 2
    assert store.add_texts(["a"], [{"n": 2}]) != first[:1] and store.count() == 3
    assert store.add_texts(["old", "new"], ids=["same", "same"]) == ["same", "same"]
    assert store.get_by_ids(["same"])[0].page_content == "new"
    assert store.add_texts([]) == []


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, float("nan"), object(), b"x"])
def test_metadata_that_is_not_json_raises_and_names_the_key(store, value):
    with pytest.raises(TeolaError, match=r"metadata key 'bad' holds .*Next: store strings"):
        store.add_texts(["a"], [{"good": 1, "bad": value}])
    with pytest.raises(RegistrationError, match="1 texts, 2 metadatas, 1 ids"):
        store.add_texts(["a"], [{}, {}])
    assert store.count() == 0


async def test_delete_removes_given_ids_or_all_rows(filled):
    assert filled.delete(["cat", "unknown"]) and filled.count() == 3
    assert await filled.adelete(["dog"]) and filled.count() == 2
    assert filled.delete() and filled.count() == 0
    assert filled.similarity_search("the cat") == []


async def test_marginal_relevance_search_prefers_diverse_documents(filled):
    plain = [d.id for d in filled.similarity_search("the cat sleeps on the mat", k=2)]
    diverse = filled.max_marginal_relevance_search("the cat sleeps on the mat", k=2, lambda_mult=0.1)
    assert set(plain) == {"cat", "mat"} and {d.id for d in diverse} != {"cat", "mat"}
    assert await filled.amax_marginal_relevance_search("the cat sleeps on the mat", k=2, lambda_mult=0.1) == diverse


async def test_store_works_with_any_embeddings(pool):
    given = {"embedding": DeterministicFakeEmbedding(size=8), "pool": pool}
    store = TeolaVectorStore.from_texts(["a", "b"], collection=next(_names), ids=["1", "2"], **given)
    assert store.similarity_search("b", k=2) == await store.asimilarity_search("b", k=2)
    assert store.as_retriever().__teola_leaf__({}) is None
    documents = [Document(id="x", page_content="x", metadata={"a": 1})]
    other = await TeolaVectorStore.afrom_documents(documents, collection=next(_names), **given)
    assert await other.aget_by_ids(["x"]) == documents
    assert copy.deepcopy(other).pool is pool


# ------------------------------------------------------------ the retriever


async def test_retriever_applies_search_options(filled):
    retriever = filled.as_retriever(search_kwargs={"k": 1, "filter": {"kind": "drink"}})
    assert isinstance(retriever, TeolaRetriever)
    assert retriever.invoke("the cat") == [DOCUMENTS[2]] == await retriever.ainvoke("the cat")
    assert len(retriever.invoke("the cat", k=3, filter=None)) == 3
    strict = filled.as_retriever(search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.5})
    assert [d.id for d in strict.invoke("green tea")] == ["tea"]


def test_retriever_leaf_describes_the_search(filled):
    retriever = filled.as_retriever(search_kwargs={"k": 2, "filter": {"b": 1, "a": "x"}})
    leaf = retriever.__teola_leaf__({"k": 3})
    assert (leaf.store, leaf.embedder, leaf.collection) == ("store", "embedder", filled.collection)
    assert (leaf.k, leaf.filter) == (3, (("a", "x"), ("b", 1)))
    hits = (Hit("i", "text", {"n": 1}, 0.5),)
    assert leaf.documents(hits) == [Document(id="i", page_content="text", metadata={"n": 1})]
    assert retriever.__teola_leaf__({"fetch_k": 3}) is None
    assert filled.as_retriever(search_type="mmr").__teola_leaf__({}) is None
    assert filled.as_retriever(search_kwargs={"filter": {"a": [1]}}).__teola_leaf__({}) is None


def test_retriever_call_joins_the_query_of_its_callbacks(filled, pool, monkeypatch):
    from langchain_core.callbacks import UsageMetadataCallbackHandler

    class Handler(UsageMetadataCallbackHandler):
        teola_run = pool.runtime.watch(Query())

    seen = []
    real = pool.call
    monkeypatch.setattr(pool, "call", lambda *a, run=None, **k: seen.append(run) or real(*a, **k))
    filled.as_retriever().invoke("the cat", {"callbacks": [Handler()]})
    filled.as_retriever().invoke("the cat")
    assert seen == [Handler.teola_run, Handler.teola_run, None, None]


# ------------------------------------------------------------ LangChain's own suites


class TestOnFakes(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, pool):
        return TeolaVectorStore(pool=pool, embedding=self.get_embeddings(), collection=next(_names))


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use(self, filled):
        type(self).store = filled

    @property
    def retriever_constructor(self):
        return lambda k=4: self.store.as_retriever(search_kwargs={"k": k})

    @property
    def retriever_constructor_params(self):
        return {}

    @property
    def retriever_query_example(self):
        return "the cat"
