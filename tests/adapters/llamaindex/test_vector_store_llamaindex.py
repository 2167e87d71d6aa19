"""Tests of `TeolaVectorStore`: equal nodes, and the searches of LlamaIndex's own store, on fakes and PostgreSQL."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import ImageNode, IndexNode, Node, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    SimpleVectorStore,
    VectorStoreQuery,
)
from support.versions import needs_current_llama_index

from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore as LangChainStore
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaVectorStore
from teola_plugin.engines.fake import embed_words
from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import SearchVector
from teola_plugin.shims.llamaindex.records import is_older_than

WORDS = ["cat", "dog", "tea", "mat", "sun", "moon", "star", "rain", "snow", "wind"]


def node(i: int) -> TextNode:
    metadata = {"i": i, "word": WORDS[i], "odd": bool(i % 2), "share": i / 4, "tags": WORDS[: i % 3], "none": None}
    made = TextNode(id_=f"n{i}", text=f"the {WORDS[i]} number {i}", metadata=metadata)
    made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=f"doc{i % 3}", metadata={"deep": {"a": [1]}})
    made.excluded_llm_metadata_keys = ["share"]
    return made


def with_vector(one: Any) -> Any:
    return one.model_copy(update={"embedding": list(embed_words(one.get_content() or one.node_id, "document"))})


@pytest.fixture(scope="module", params=["fake", pytest.param("postgres", marks=pytest.mark.postgres)])
def engines(request) -> Iterator[EnginePool]:
    from teola_plugin.engines.fake import FakeEmbedder, FakeStore

    store = FakeStore() if request.param == "fake" else PgVectorEngine("store")
    with EnginePool.local({"store": store, "embedder": FakeEmbedder()}) as made:
        yield made


@pytest.fixture
def store(engines, collection):
    return TeolaVectorStore(pool=engines, collection=collection)


@pytest.fixture
def filled(store):
    assert store.add([with_vector(node(i)) for i in range(10)]) == [f"n{i}" for i in range(10)]
    return store


def question(k: int = 10, **options: Any) -> VectorStoreQuery:
    vector = list(embed_words("the cat number", "query"))
    return VectorStoreQuery(query_embedding=vector, query_str="the cat number", similarity_top_k=k, **options)


def test_store_returns_nodes_unchanged(store):
    given = [
        node(3),
        IndexNode(id_="index", text="see there", index_id="other", metadata={"a": 1}),
        ImageNode(id_="image", text="a picture", image_url="http://localhost/x.png"),
        Node(id_="plain", text_resource={"text": "of parts"}),
        TextNode(id_="odd", text=" é\n\u2028 ", metadata={"ü": "ß", "list": [1, {"b": None}]}, start_char_idx=3),
    ]
    ids = [one.node_id for one in given]
    store.add([with_vector(one) for one in given])
    assert store.get_nodes(ids) == given == asyncio.run(store.aget_nodes(ids))
    assert store.get_nodes(["odd", "nobody", "index"]) == [given[4], given[1]]
    found = store.query(question())
    assert sorted(found.nodes, key=lambda n: n.node_id) == sorted(given, key=lambda n: n.node_id)
    assert [one.node_id for one in found.nodes] == found.ids


FILTERS: dict[str, Any] = {
    "none": None,
    "empty": MetadataFilters(filters=[]),
    "equal": MetadataFilters(filters=[MetadataFilter(key="word", value="tea")]),
    "equal number": MetadataFilters(filters=[MetadataFilter(key="share", value=1)]),
    "equal to two": MetadataFilters(
        filters=[MetadataFilter(key="i", value=4), MetadataFilter(key="word", value="sun")],
    ),
    "equal to nothing": MetadataFilters(filters=[MetadataFilter(key="none", value=None)]),
    "missing key": MetadataFilters(filters=[MetadataFilter(key="nobody", value=1)]),
    "range": MetadataFilters(
        filters=[
            MetadataFilter(key="i", value=2, operator=FilterOperator.GT),
            MetadataFilter(key="i", value=7, operator=FilterOperator.LTE),
        ]
    ),
    "mixed": MetadataFilters(
        filters=[
            MetadataFilter(key="word", value="sun"),
            MetadataFilter(key="i", value=[1, 4], operator=FilterOperator.IN),
        ]
    ),
    "or": MetadataFilters(
        filters=[MetadataFilter(key="word", value="tea"), MetadataFilter(key="word", value="sun")],
        condition=FilterCondition.OR,
    ),
    "not": MetadataFilters(filters=[MetadataFilter(key="word", value="tea")], condition=FilterCondition.NOT),
    "unequal": MetadataFilters(filters=[MetadataFilter(key="word", value="tea", operator=FilterOperator.NE)]),
    "contains": MetadataFilters(filters=[MetadataFilter(key="tags", value="dog", operator=FilterOperator.CONTAINS)]),
    "text": MetadataFilters(filters=[MetadataFilter(key="word", value="UN", operator="text_match_insensitive")]),
    "is empty": MetadataFilters(filters=[MetadataFilter(key="tags", value=None, operator=FilterOperator.IS_EMPTY)]),
}
newer_filters = pytest.mark.skipif(is_older_than("0.14.16"), reason="LlamaIndex has had it since 0.14.16")
FILTER_NAMES = [pytest.param(name, marks=newer_filters if name in ("not", "text") else ()) for name in FILTERS]


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("name", FILTER_NAMES)
def test_searches_return_the_nodes_of_the_simple_store(filled, name, k):
    own = SimpleVectorStore()
    own.add([with_vector(node(i)) for i in range(10)])
    query = question(k, filters=FILTERS[name])
    found, wanted = filled.query(query), own.query(query)
    assert found == asyncio.run(filled.aquery(query))
    assert found.similarities == pytest.approx(wanted.similarities, abs=1e-5)
    ties = {
        round(s, 5) for s in wanted.similarities if [round(x, 5) for x in wanted.similarities].count(round(s, 5)) > 1
    }
    pairs = zip(found.ids, wanted.ids, wanted.similarities, strict=True)
    assert all(mine == its or round(s, 5) in ties or len(wanted.ids) == k for mine, its, s in pairs)


@pytest.mark.parametrize("name", FILTER_NAMES)
def test_get_nodes_applies_filters(filled, name):
    filters = FILTERS[name]
    wanted = set(filled.query(question(filters=filters)).ids)
    assert {one.node_id for one in filled.get_nodes(filters=filters)} == wanted
    some = [one.node_id for one in filled.get_nodes(["n2", "n4"], filters)]
    assert some == [i for i in ("n2", "n4") if i in wanted]


# ------------------------------------------------------------ values of unlike types

TYPED: dict[str, dict[str, Any]] = {
    "true": {"v": True},
    "false": {"v": False},
    "one": {"v": 1},
    "zero": {"v": 0.0},
    "two": {"v": 2},
    "digit": {"v": "1"},
    "half": {"v": 0.5},
    "big": {"v": 2**53 + 1},
    "list": {"v": [1]},
    "object": {"v": {"1": 1}},
    "text": {"v": "a"},
    "null": {"v": None},
    "missing": {},
}
_EVERY = set(TYPED)
_SAME_IN_PYTHON = {1: {"true", "one"}, 0: {"false", "zero"}, 2.0: {"two"}, "1": {"digit"}, "a": {"text"}}


def typed_nodes() -> list[Any]:
    return [with_vector(TextNode(id_=id, text=f"oats {id}", metadata=dict(meta))) for id, meta in TYPED.items()]


@pytest.fixture
def typed(store):
    store.add(typed_nodes())
    return store


def on_v(operator: Any, value: Any, condition: str = "and", *others: MetadataFilter) -> MetadataFilters:
    first = MetadataFilter(key="v", value=value, operator=operator)
    return MetadataFilters(filters=[first, *others], condition=condition)


@pytest.mark.parametrize("value", [1, 0, 1.0, 0.0, -0.0, "1", "a", 2**53 + 1, float(2**53), 0.5, float("inf")])
@pytest.mark.parametrize("operator", ["==", "in"])
def test_equality_finds_booleans_as_the_simple_store_does(typed, operator, value):
    plain = SimpleVectorStore()
    plain.add(typed_nodes())
    filters = on_v(operator, value if operator == "==" else [value])

    expected = sorted(plain.query(question(20, filters=filters)).ids)

    assert sorted(typed.query(question(20, filters=filters)).ids) == expected
    assert sorted(one.node_id for one in typed.get_nodes(filters=filters)) == expected
    assert sorted(one.node_id for one in typed.get_nodes(list(TYPED), filters)) == expected


@pytest.mark.parametrize(("value", "matches"), [(True, {"true", "one"}), (False, {"false", "zero"})])
def test_filter_with_assigned_boolean_finds_the_number_too(typed, value, matches):
    filters = MetadataFilters(filters=[MetadataFilter(key="v", value=0)])
    filters.filters[0].value = value  # which LlamaIndex checks only in the constructor

    assert set(typed.query(question(20, filters=filters)).ids) == matches


@pytest.mark.parametrize("value", [1, 0, "1"])
def test_unequal_and_not_in_find_the_complement_of_equality(typed, value):
    equal = {one.node_id for one in typed.get_nodes(filters=on_v("==", value))}

    for filters in (on_v("!=", value), on_v("nin", [value]), on_v("==", value, "not")):
        assert {one.node_id for one in typed.get_nodes(filters=filters)} == _EVERY - equal


@pytest.mark.parametrize(("value", "matches"), _SAME_IN_PYTHON.items())
def test_nodes_are_deleted_by_equality_with_booleans(typed, value, matches):
    typed.delete_nodes(filters=on_v("==", value))

    assert {one.node_id for one in typed.get_nodes()} == _EVERY - matches


@pytest.mark.parametrize("condition", ["and", "or", "not"])
def test_conditions_of_unlike_types_on_one_key_are_no_error(typed, condition):
    filters = on_v("==", 1, condition, MetadataFilter(key="v", value="1"))
    matches = {"and": set(), "or": {"true", "one", "digit"}, "not": _EVERY - {"true", "one", "digit"}}[condition]

    assert set(typed.query(question(20, filters=filters)).ids) == matches
    assert {one.node_id for one in typed.get_nodes(filters=filters)} == matches


@pytest.mark.parametrize(
    ("operator", "value", "matches"),
    [
        (">", 1, {"two", "big"}),
        ("<=", 0, {"false", "zero"}),
        (">=", "1", {"digit", "text"}),
        ("contains", 1, {"list"}),
        ("contains", "1", {"digit", "object"}),
        ("any", ["1", "x"], {"digit", "object"}),
        ("all", ["a"], {"text"}),
        pytest.param("text_match", "a", {"text"}, marks=needs_current_llama_index),
        pytest.param("text_match_insensitive", "A", {"text"}, marks=needs_current_llama_index),
        pytest.param("text_match", 1, set(), marks=needs_current_llama_index),
    ],
)
def test_values_that_cannot_be_compared_do_not_match(typed, operator, value, matches):
    assert set(typed.query(question(20, filters=on_v(operator, value))).ids) == matches


@pytest.mark.parametrize("operator", ["in", "nin", "any", "all"])
@pytest.mark.parametrize("condition", ["and", "or"])
def test_filter_operator_that_needs_a_list_raises(typed, operator, condition):
    with pytest.raises(RegistrationError, match=rf"'v' compares by '{operator}' with 5, which is no list.*value=\[5\]"):
        typed.query(question(filters=on_v(operator, 5, condition)))


def test_equality_filters_need_one_request(typed):
    for filters in (on_v("==", 1), on_v("!=", 0), on_v("in", [0, 1]), on_v("nin", [0.5])):
        assert typed.search_payload(question(filters=filters)) is not None


_SCALARS = st.sampled_from([0, 1, -1, 2, 0.0, 1.0, 0.5, 2**53 + 1, 1e30, "", "0", "1", "a", "A", "ab", "true"])
_METADATA = _SCALARS | st.none() | st.booleans() | st.lists(_SCALARS | st.booleans(), max_size=2)
_STRINGS = st.sampled_from(["", "0", "1", "a", "A", "ab", "true"])
_LISTS = st.lists(st.integers(-1, 2)) | st.lists(st.sampled_from([0.0, 1.0, 0.5])) | st.lists(_STRINGS, max_size=3)
_FILTERS = st.builds(
    MetadataFilter,
    key=st.sampled_from(["v", "w"]),
    value=_SCALARS,
    operator=st.sampled_from(["==", "!=", ">", "<", ">=", "<=", "contains", "text_match", "is_empty"]),
) | st.builds(
    MetadataFilter,
    key=st.sampled_from(["v", "w"]),
    value=_LISTS,
    operator=st.sampled_from(["in", "nin", "any", "all", "==", "!="]),
)


@needs_current_llama_index
def test_random_filters_find_the_nodes_of_the_simple_store(engines):
    names = (f"random {n}" for n in itertools.count())

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.dictionaries(st.sampled_from(["v", "w"]), _METADATA), min_size=1, max_size=4),
        st.lists(_FILTERS, min_size=1, max_size=3),
        st.sampled_from(FilterCondition),
    )
    def check(metadata: Any, filters: Any, condition: Any) -> None:
        store, plain = TeolaVectorStore(pool=engines, collection=next(names)), SimpleVectorStore()
        for each in (store, plain):
            each.add([with_vector(TextNode(id_=str(n), text="oats", metadata=m)) for n, m in enumerate(metadata)])
        query = question(9, filters=MetadataFilters(filters=filters, condition=condition))
        result = store.query(query)
        listed = store.get_nodes(filters=query.filters)
        store.clear()
        assert sorted(result.ids) == sorted(one.node_id for one in listed)
        try:
            expected = plain.query(query)
        except TypeError:  # a value that it cannot compare
            return
        assert sorted(result.ids) == sorted(expected.ids)

    check()


def test_queries_filter_by_document_and_node_ids(filled):
    assert set(filled.query(question(doc_ids=["doc1"])).ids) == {"n1", "n4", "n7"}
    assert set(filled.query(question(doc_ids=["doc1", "doc2"])).ids) == {f"n{i}" for i in (1, 4, 7, 2, 5, 8)}
    assert set(filled.query(question(node_ids=["n1", "n2", "n9"])).ids) == {"n1", "n2", "n9"}
    assert len(filled.query(question(2, node_ids=["n1", "n2", "n9"])).ids) == 2


def test_search_payload_has_vector_k_and_equality_filters(filled):
    query = question(3, filters=FILTERS["equal to two"])
    vector = tuple(query.query_embedding)
    wanted = SearchVector(filled.collection, vector, 3, (("i", 4), ("word", "sun")))
    assert filled.search_payload(query) == wanted
    assert filled.search_payload(question(3, doc_ids=["doc1"])).filter == (("ref_doc_id", "doc1"),)
    for sifted in ({"filters": FILTERS["or"]}, {"node_ids": ["n1"]}, {"doc_ids": ["doc1", "doc2"]}):
        assert filled.search_payload(question(3, **sifted)) is None


def test_unsupported_queries_and_nodes_without_embedding_raise(filled):
    with pytest.raises(RegistrationError, match="mode 'mmr'"):
        filled.query(question(mode="mmr"))
    with pytest.raises(RegistrationError, match="without an embedding"):
        filled.query(VectorStoreQuery(query_str="cat"))
    nested = MetadataFilters(filters=[MetadataFilters(filters=[MetadataFilter(key="i", value=1)])])
    with pytest.raises(ValueError, match="Nested"):
        filled.query(question(filters=nested))
    with pytest.raises(ValueError, match="embedding not set"):
        filled.add([node(1)])


def test_delete_removes_nodes_by_document_id_or_filter(filled):
    filled.delete("doc1")
    assert set(filled.query(question()).ids) == {f"n{i}" for i in (0, 2, 3, 5, 6, 8, 9)}
    asyncio.run(filled.adelete("doc2"))
    assert set(filled.query(question()).ids) == {"n0", "n3", "n6", "n9"}
    filled.delete_nodes(["n0", "nobody"])
    filled.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="word", value="wind")]))
    filled.delete_nodes()
    assert filled.count() == 2
    asyncio.run(filled.adelete_nodes(["n3"]))
    assert filled.query(question()).ids == ["n6"]
    filled.clear()
    assert filled.count() == 0 and filled.query(question()).ids == []
    filled.add([with_vector(node(1))])
    asyncio.run(filled.aclear())
    assert filled.get_nodes(["n1"]) == [] == filled.get_nodes(filters=FILTERS["none"])


def test_adding_a_node_again_replaces_it(filled):
    changed = with_vector(node(1)).model_copy(update={"metadata": {"new": True}})
    assert asyncio.run(filled.async_add([changed, with_vector(node(2))])) == ["n1", "n2"]
    assert filled.count() == 10
    assert filled.get_nodes(["n1"])[0].metadata == {"new": True}
    first, second = (with_vector(node(5)).model_copy(update={"metadata": {"v": v}}) for v in (1, 2))
    filled.add([first, second])
    assert filled.get_nodes(["n5"])[0].metadata == {"v": 2}
    assert filled.add([]) == []


def test_index_on_the_store_finds_inserted_and_deleted_nodes(engines, store):
    model = TeolaEmbedding(pool=engines)
    index = VectorStoreIndex(
        [node(i) for i in range(10)],
        embed_model=model,
        storage_context=StorageContext.from_defaults(vector_store=store),
    )
    found = index.as_retriever(similarity_top_k=3).retrieve("the tea number")
    assert found[0].node == node(2)
    assert asyncio.run(index.as_retriever(similarity_top_k=3).aretrieve("the tea number")) == found
    again = VectorStoreIndex.from_vector_store(store, embed_model=model)
    assert again.as_retriever(similarity_top_k=3).retrieve("the tea number") == found
    index.delete_ref_doc("doc2")
    assert node(2) not in [one.node for one in again.as_retriever(similarity_top_k=9).retrieve("the tea number")]
    index.insert_nodes([node(i) for i in (2, 5, 8)])
    assert again.as_retriever(similarity_top_k=3).retrieve("the tea number") == found


def test_index_with_index_nodes_finds_all_nodes(engines, store):
    """LlamaIndex keeps those in its own store too, and hands their ids to every search."""
    pointers = [IndexNode(id_=f"p{i}", text=f"the {WORDS[i]} pointer", index_id=f"n{i}") for i in range(3)]
    index = VectorStoreIndex(
        [node(i) for i in range(5)] + pointers,
        embed_model=TeolaEmbedding(pool=engines),
        storage_context=StorageContext.from_defaults(vector_store=store),
    )
    found = index.as_retriever(similarity_top_k=8).retrieve("the tea pointer")
    assert {one.node_id for one in found} == {*(f"n{i}" for i in range(5)), "p0", "p1", "p2"}


def test_store_reads_a_collection_filled_by_langchain(engines, collection):
    theirs = LangChainStore(pool=engines, embedding=TeolaEmbeddings(pool=engines), collection=collection)
    theirs.add_texts(["the cat sleeps"], [{"kind": "animal"}], ids=["a"])
    found = TeolaVectorStore(pool=engines, collection=collection).query(question())
    assert found.nodes == [TextNode(id_="a", text="the cat sleeps", metadata={"kind": "animal"})]


def test_collections_are_separate_and_copies_share_data(engines, filled, collection):
    other = TeolaVectorStore(pool=engines, collection=f"{collection}-other")
    assert other.query(question()).ids == []
    assert copy.deepcopy(filled).query(question()) == filled.query(question())
    assert filled.client is engines and filled.stores_text and filled.is_embedding_query
    with pytest.raises(RegistrationError, match="pickled"):
        pickle.dumps(filled)
    with pytest.raises(RegistrationError, match="engine"):
        TeolaVectorStore(pool=engines, engine="sore")


async def test_sync_store_calls_work_inside_a_running_loop(filled):
    assert filled.query(question()) == await filled.aquery(question())
    assert await filled.aget_nodes(["n1"]) == filled.get_nodes(["n1"])
