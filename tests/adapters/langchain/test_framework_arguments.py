"""Tests that pool-backed objects take all arguments that LangChain's base classes document or its code passes."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.example_selectors import MaxMarginalRelevanceExampleSelector, SemanticSimilarityExampleSelector
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore

from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.errors import RegistrationError

_names = (f"arguments {n}" for n in itertools.count())
DOCUMENTS = [
    Document(f"{'cat ' * n}sleeps on the {word}", id=word, metadata={"n": n, "word": word})
    for n, word in enumerate(["mat", "red mat", "sofa", "warm sofa", "roof"], 1)
]


@pytest.fixture
def store(pool):
    return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=next(_names))


@pytest.fixture
def plain(pool):
    return InMemoryVectorStore(TeolaEmbeddings(pool=pool))


@pytest.fixture
def stores(store, plain):
    """Return a store of the pool and LangChain's own store, with the same documents."""
    for each in (store, plain):
        each.add_documents(DOCUMENTS)
    return store, plain


# ------------------------------------------------------------ what LangChain's own code passes

CALLERS = ["langchain_core.indexing", "langchain_core.vectorstores", "langchain_core.example_selectors"]
CALLERS += ["langchain_classic.retrievers", "langchain_classic.chains", "langchain_classic.memory"]
WRITES = {"add_documents", "aadd_documents", "add_texts", "aadd_texts"}
SEARCHES = {"similarity_search", "similarity_search_with_score", "similarity_search_with_relevance_scores"}
SEARCHES |= {"max_marginal_relevance_search"}
SEARCHES |= {f"a{name}" for name in SEARCHES}
VALUES: dict[str, Any] = {
    "batch_size": 2,
    "current_time": 1.5,
    "fetch_k": 4,
    "ids": ["one"],
    "k": 2,
    "metadatas": [{"a": 1}],
    "texts": ["one"],
}


def passed_keywords() -> list[tuple[str, str]]:
    """Return the methods of stores that LangChain's own code calls, each with the names of its keyword arguments."""
    pairs: set[tuple[str, str]] = set()
    folders = [Path(str(importlib.import_module(package).__file__)).parent for package in CALLERS]
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                pairs |= {(node.func.attr, one.arg) for one in node.keywords if one.arg is not None}
    return [*sorted(pair for pair in pairs if pair[0] in WRITES | SEARCHES), ("add_documents", "current_time")]


def test_indexing_api_passes_batch_size_to_add_documents() -> None:
    assert {("add_documents", "batch_size"), ("aadd_documents", "batch_size")} <= set(passed_keywords())


@pytest.mark.parametrize(("name", "keyword"), passed_keywords())
def test_store_accepts_keywords_that_langchain_passes(store: Any, name: str, keyword: str) -> None:
    first = "sleeps" if name in SEARCHES else ["one"] if name.endswith("texts") else [Document("one")]
    arguments = [] if keyword == "texts" else [first]

    result = getattr(store, name)(*arguments, **{keyword: VALUES[keyword]})

    result = asyncio.run(result) if inspect.iscoroutine(result) else result
    assert result == ([] if name in SEARCHES else ["one"] if keyword == "ids" else [store.similarity_search("o")[0].id])


# ------------------------------------------------------------ the indexing API

EDITIONS = [
    [Document(f"page {n} of edition {e}", metadata={"source": f"book {n % 2}"}) for n in range(5)] for e in (1, 2)
]


@pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
@pytest.mark.parametrize("batch_size", [1, 2, 100])
@pytest.mark.parametrize("more", [{}, {"force_update": True}, {"upsert_kwargs": {"vector_field": "v"}}], ids=str)
def test_indexing_gives_the_results_of_the_in_memory_store(
    store: Any, plain: Any, cleanup: Any, batch_size: int, more: dict[str, Any]
) -> None:
    def history(each: Any, *, is_async: bool) -> list[Any]:
        records = InMemoryRecordManager("books")
        records.create_schema()
        options: dict[str, Any] = {"source_id_key": "source", "key_encoder": "sha256", "batch_size": batch_size, **more}
        results: list[Any] = []
        for documents in (EDITIONS[0], EDITIONS[0][:2], EDITIONS[1] + EDITIONS[1][:1]):
            arguments = (documents, records, each)
            if is_async:
                results.append(asyncio.run(aindex(*arguments, cleanup=cleanup, **options)))
            else:
                results.append(index(*arguments, cleanup=cleanup, **options))
            results.append(sorted((one.id, one.page_content) for one in each.similarity_search("page", k=50)))
        return results

    assert history(store, is_async=False) == history(plain, is_async=False)
    store.delete()
    plain.store.clear()
    assert history(store, is_async=True) == history(plain, is_async=True)


# ------------------------------------------------------------ writing


@pytest.mark.parametrize(
    "arguments",
    [
        *({"batch_size": 1}, {"ids": None}, {"ids": []}, {"ids": [f"i{n}" for n in range(5)]}, {"current_time": 3}),
        {"vector_field": "v", "refresh": True},
    ],
    ids=str,
)
async def test_adding_documents_gives_the_ids_of_the_in_memory_store(
    store: Any, plain: Any, arguments: dict[str, Any]
) -> None:
    ids = store.add_documents(DOCUMENTS, **arguments)

    assert ids == plain.add_documents(DOCUMENTS, **arguments)
    assert ids == await store.aadd_documents(DOCUMENTS, **arguments)
    assert store.get_by_ids(ids) == plain.get_by_ids(ids)


@pytest.mark.parametrize("arguments", [{"metadatas": []}, {"metadatas": None, "ids": []}, {"batch_size": 4}], ids=str)
async def test_texts_without_metadata_are_added(store: Any, arguments: dict[str, Any]) -> None:
    [id] = store.add_texts(["one"], **arguments)

    assert [id] == await store.aadd_texts(iter(["one"]), **arguments)
    assert store.get_by_ids([id]) == [Document("one", id=id)]


@pytest.mark.parametrize(
    ("name", "near"), [("metadata", "metadatas"), ("id", "ids"), ("namespace", ""), ("embeddings", ""), ("where", "")]
)
def test_adding_raises_for_arguments_that_would_change_rows(store: Any, name: str, near: str) -> None:
    for call in (lambda: store.add_texts(["one"], **{name: []}), lambda: store.add_documents(DOCUMENTS, **{name: []})):
        with pytest.raises(RegistrationError, match=rf"unknown argument of add_texts '{name}'.*{near}"):
            call()
    assert store.count() == 0


async def test_delete_by_ids_ignores_arguments_that_select_no_rows(stores: Any) -> None:
    store, _ = stores

    assert store.delete(["mat"], batch_size=2)
    assert await store.adelete(ids=["sofa"], refresh=True)
    assert store.delete([])
    assert store.count() == 3


@pytest.mark.parametrize("arguments", [{"filter": {"n": 1}}, {"ids": ["mat"], "filter": {"n": 2}}, {"batch_size": 1}])
def test_delete_raises_for_arguments_that_may_restrict_it(stores: Any, arguments: dict[str, Any]) -> None:
    store, _ = stores

    with pytest.raises(RegistrationError, match="unknown argument of delete"):
        store.delete(**arguments)
    assert store.count() == len(DOCUMENTS)


async def test_store_constructors_take_arguments_of_class_and_of_adding(pool: Any) -> None:
    embeddings = TeolaEmbeddings(pool=pool)
    options = {"pool": pool, "collection": next(_names), "batch_size": 2}

    first = TeolaVectorStore.from_documents(DOCUMENTS, embeddings, **options)
    second = await TeolaVectorStore.afrom_texts(["more"], embeddings, [{"a": 1}], ids=["more"], **options)

    assert first.count() == len(DOCUMENTS) + 1
    assert second.get_by_ids(["more"]) == [Document("more", id="more", metadata={"a": 1})]
    with pytest.raises(RegistrationError, match="did you mean 'collection'"):
        TeolaVectorStore.from_texts(["a"], embeddings, pool=pool, colection="books")


@pytest.mark.parametrize("selector", [SemanticSimilarityExampleSelector, MaxMarginalRelevanceExampleSelector])
async def test_example_selectors_select_as_with_the_in_memory_store(pool: Any, selector: Any) -> None:
    examples = [{"question": document.page_content} for document in DOCUMENTS]
    embeddings = TeolaEmbeddings(pool=pool)
    query = {"question": "cat sleeps on the sofa"}

    own = selector.from_examples(examples, embeddings, TeolaVectorStore, k=2, pool=pool, collection=next(_names))
    plain = selector.from_examples(examples, embeddings, InMemoryVectorStore, k=2)

    assert own.select_examples(query) == plain.select_examples(query) == await own.aselect_examples(query)


# ------------------------------------------------------------ searching

OPTIONS: list[dict[str, Any]] = [
    *(
        {},
        {"k": 2},
        {"k": 0},
        {"k": 50},
        {"fetch_k": 3},
        {"lambda_mult": 0.1},
        {"k": 2, "fetch_k": 4, "lambda_mult": 0.9},
    ),
    {"score_threshold": 0.5},
]
BY_TEXT = ["similarity_search", "similarity_search_with_score", "max_marginal_relevance_search"]
BY_VECTOR = ["similarity_search_by_vector", "max_marginal_relevance_search_by_vector"]
QUERY = "cat cat sleeps on a warm roof"


def without_rounding(results: Any) -> Any:
    return [(one[0], pytest.approx(one[1])) if isinstance(one, tuple) else one for one in results]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", [*BY_TEXT, *BY_VECTOR])
async def test_searches_return_the_documents_of_the_in_memory_store(
    stores: Any, name: str, options: dict[str, Any]
) -> None:
    store, plain = stores
    query = QUERY if name in BY_TEXT else store.embeddings.embed_query(QUERY)

    results = getattr(store, name)(query, **options)

    assert results == without_rounding(getattr(plain, name)(query, **options))
    assert results == await getattr(store, f"a{name}")(query, **options)


@pytest.mark.parametrize("options", [option for option in OPTIONS if "k" not in option or option["k"]], ids=str)
@pytest.mark.parametrize("search_type", ["similarity", "mmr"])
async def test_retrievers_accept_the_options_of_every_search(stores: Any, search_type: str, options: Any) -> None:
    own, plain = (each.as_retriever(search_type=search_type, search_kwargs=options) for each in stores)

    documents = own.invoke(QUERY)

    assert documents == plain.invoke(QUERY) == await own.ainvoke(QUERY)
    assert stores[0].search(QUERY, search_type, **options) == documents
    assert await stores[0].asearch(QUERY, search_type, **options) == documents


async def test_score_threshold_keeps_documents_with_higher_scores(stores: Any) -> None:
    store, _ = stores
    scored = store.similarity_search_with_score(QUERY, 5)
    threshold = scored[2][1]

    relevant = store.similarity_search_with_relevance_scores(QUERY, 5, score_threshold=threshold, fetch_k=9)

    assert relevant == [pair for pair in scored if pair[1] >= threshold]
    options = {"k": 5, "score_threshold": threshold}
    assert await store.asimilarity_search_with_relevance_scores(QUERY, **options) == relevant
    retriever = store.as_retriever(search_type="similarity_score_threshold", search_kwargs=options)
    assert retriever.invoke(QUERY) == [document for document, _ in relevant]


@pytest.mark.parametrize("wanted", [{"word": "sofa"}, {"n": {"$in": [1, 3]}}])
def test_every_search_applies_the_filter(stores: Any, wanted: dict[str, Any]) -> None:
    store, plain = stores
    allowed = {"sofa"} if "word" in wanted else {"mat", "sofa"}

    for name in (*BY_TEXT, *BY_VECTOR):
        query = QUERY if name in BY_TEXT else store.embeddings.embed_query(QUERY)
        expected = getattr(plain, name)(query, filter=lambda document: document.id in allowed)
        assert getattr(store, name)(query, filter=wanted) == without_rounding(expected)


def test_unknown_arguments_of_a_search_are_refused(stores: Any) -> None:
    store, _ = stores
    for name in (*BY_TEXT, *BY_VECTOR):
        query = QUERY if name in BY_TEXT else store.embeddings.embed_query(QUERY)
        with pytest.raises(RegistrationError, match="unknown argument of search 'where'"):
            getattr(store, name)(query, where={"n": 1})
