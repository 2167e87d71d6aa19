"""Tests of `OpenAIEmbeddings` and `HuggingFaceEndpointEmbeddings` on an `EmbeddingServer`.

They are bound by `bind=` and by `engines="auto"`. The vectors, requests and errors are those of the object itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import huggingface_hub
import openai
import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from pydantic import ValidationError
from support.embedding_stub import MODEL, EmbeddingStub, embedding_stub, vector_of

from teola_plugin import accelerate
from teola_plugin.adapters.automatic_engines import PROCESS
from teola_plugin.engines import EmbeddingServer
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
TEXTS = ["lambs eat oats", "walls need lime\nand sand", "moss grows in the shade", "", "a primitive is a step"]


@pytest.fixture
def stub() -> Iterator[EmbeddingStub]:
    with embedding_stub() as server:
        yield server


@pytest.fixture
def pool(stub: EmbeddingStub) -> Iterator[EnginePool]:
    with EnginePool.local([EmbeddingServer(base_url=stub.base_url, model=MODEL)]) as engines:
        yield engines


class Characters:
    """A tokenizer with a token for each character."""

    def encode_ordinary(self, text: str) -> list[int]:
        return [ord(character) for character in text]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda name: Characters())


def embeddings(stub: EmbeddingStub, **options: Any) -> OpenAIEmbeddings:
    settings = {"model": MODEL, "max_retries": 0, "check_embedding_ctx_length": False, **options}
    return OpenAIEmbeddings(base_url=stub.base_url, api_key="mine", **settings)  # type: ignore[arg-type]


async def _on_loop(model: Any, texts: list[str]) -> Any:
    return await model.aembed_documents(texts), [await model.aembed_query(text) for text in texts]


def _in_thread(model: Any, texts: list[str]) -> Any:
    return model.embed_documents(texts), [model.embed_query(text) for text in texts]


WAYS: dict[str, Callable[[Any, list[str]], Any]] = {
    "sync": _in_thread,
    "async": lambda model, texts: asyncio.run(_on_loop(model, texts)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dimensions": {"dimensions": 4},
    "batches": {"chunk_size": 2},
    "floats": {"model_kwargs": {"encoding_format": "float"}},
    "tokens": {"check_embedding_ctx_length": True},
    "long texts": {"check_embedding_ctx_length": True, "embedding_ctx_length": 8, "chunk_size": 3},
    "headers and query": {"default_headers": {"x-team": "farm"}, "default_query": {"version": "2"}},
}


def logged(stub: EmbeddingStub) -> list[Any]:
    """Return the requests that the server received, with the headers that the user's client decides."""
    rows = zip(stub.log, stub.headers, strict=True)
    return [(path, body, headers["authorization"], headers.get("x-team")) for (path, body), headers in rows]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_bound_remote_embeddings_send_the_requests_of_the_original(
    options: str, way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    model = embeddings(stub, **OPTIONS[options])
    expected = WAYS[way](model, TEXTS)
    original_log = logged(stub)
    stub.log.clear()
    stub.headers.clear()
    bound = pool.bound(model, "embedder")
    assert WAYS[way](bound, TEXTS) == expected
    assert logged(stub) == original_log


def index_and_search(store: InMemoryVectorStore) -> Any:
    def run(question: str) -> list[str]:
        store.add_documents([Document(text) for text in TEXTS])
        return [one.page_content for one in store.similarity_search(question, k=2)]

    return RunnableLambda(run)


@pytest.mark.parametrize("how", ["bind", "auto"])
def test_app_with_remote_embedding_engine_sends_the_same_requests(
    how: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    model = embeddings(stub)
    expected = index_and_search(InMemoryVectorStore(model)).invoke("lambs eat oats")
    original_log = logged(stub)
    stub.log.clear()
    stub.headers.clear()
    app = index_and_search(InMemoryVectorStore(model))
    options: Any = {"pool": pool, "bind": [(model, "embedder")]} if how == "bind" else {"engines": "auto"}
    fast = accelerate(app, **options)
    assert fast.invoke("lambs eat oats") == expected
    assert logged(stub) == original_log
    assert logged(stub)[0][2] == "Bearer mine"


def test_explain_names_the_remote_embedding_engine(stub: EmbeddingStub) -> None:
    model = embeddings(stub)
    fast = accelerate(index_and_search(InMemoryVectorStore(model)), engines="auto")
    assert f"engine 'embedder', {stub.base_url}" in fast.explain() or stub.base_url in fast.explain()
    assert "EmbeddingServer(base_url=" in fast.explain(details=True)
    assert PROCESS.pool is not None


def test_embeddings_of_a_public_address_are_not_served() -> None:
    model = OpenAIEmbeddings(api_key="mine", model=MODEL)  # type: ignore[arg-type]
    fast = accelerate(index_and_search(InMemoryVectorStore(model)), engines="auto")
    assert "api.openai.com/v1 is not known to be of this machine or a private network" in fast.explain(details=True)


def test_concurrent_queries_share_an_embedding_request(stub: EmbeddingStub) -> None:
    stub.delay_s = 0.1
    engine = EmbeddingServer(base_url=stub.base_url, model=MODEL, max_connections=1)
    with EnginePool.local([engine]) as pool:
        bound = pool.bound(embeddings(stub), "embedder")
        vectors: dict[str, Any] = {}

        def call(text: str) -> None:
            vectors[text] = bound.embed_query(text)

        threads = [threading.Thread(target=call, args=(f"text {number}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert vectors == {f"text {number}": vector_of(f"text {number}") for number in range(6)}
    assert len(stub.log) <= 3


@pytest.mark.parametrize("way", WAYS)
def test_bound_remote_embeddings_raise_the_errors_of_the_original(
    way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    model = embeddings(stub)
    bound = pool.bound(model, "embedder")
    with pytest.raises(openai.BadRequestError) as original:
        WAYS[way](model, ["refuse"])
    with pytest.raises(openai.BadRequestError) as carried:
        WAYS[way](bound, ["refuse"])
    assert carried.value.message == original.value.message
    assert carried.value.body == original.value.body


@pytest.mark.parametrize("way", WAYS)
def test_rate_limited_embedding_request_is_retried(way: str, stub: EmbeddingStub, pool: EnginePool) -> None:
    refusals = iter([(429, {"retry-after-ms": "5"}, {"error": {"message": "slow down"}})])
    stub.replace = lambda path, body: next(refusals, None)
    bound = pool.bound(embeddings(stub, max_retries=2), "embedder")
    assert WAYS[way](bound, ["a"]) == ([vector_of("a")], [vector_of("a")])
    assert len(stub.log) == 3


def test_binding_embeddings_of_another_server_or_model_raises(stub: EmbeddingStub, pool: EnginePool) -> None:
    elsewhere = OpenAIEmbeddings(base_url="http://localhost:1/v1", api_key="mine", model=MODEL)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match=r"it talks to http://localhost:1/v1"):
        pool.bound(elsewhere, "embedder")
    with pytest.raises(RegistrationError, match=r"it asks for 'other'") as error:
        pool.bound(embeddings(stub, model="other"), "embedder")
    assert "EmbeddingServer(model='other'" in str(error.value)


def test_binding_local_embeddings_to_a_server_raises(pool: EnginePool) -> None:
    huggingface = pytest.importorskip("langchain_huggingface")
    from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

    local = huggingface.HuggingFaceEmbeddings(model_name=packaged_minilm())
    with pytest.raises(RegistrationError, match="computes in this process"):
        pool.bound(local, "embedder")


def test_fields_set_later_on_bound_embeddings_apply_to_calls(stub: EmbeddingStub, pool: EnginePool) -> None:
    model = embeddings(stub)
    fast = accelerate(RunnableLambda(lambda text: model.embed_query(text)), pool=pool, bind=[(model, "embedder")])
    assert fast.invoke("a") == vector_of("a")
    model.dimensions = 4
    assert fast.invoke("a") == vector_of("a", 4)


# ------------------------------------------------------------ HuggingFaceEndpointEmbeddings, in the form of TEI


@pytest.fixture
def tei() -> Iterator[EmbeddingStub]:
    with embedding_stub("tei") as server:
        yield server


@pytest.fixture
def tei_pool(tei: EmbeddingStub) -> Iterator[EnginePool]:
    with EnginePool.local([EmbeddingServer(base_url=tei.base_url)]) as engines:
        yield engines


def endpoint(url: str, client_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return embeddings of a server at an address: by `model=` up to langchain-huggingface 1.2.1, then by clients."""
    pytest.importorskip("huggingface_hub", minversion="1.0")
    cls = pytest.importorskip("langchain_huggingface").HuggingFaceEndpointEmbeddings
    settings = {"huggingfacehub_api_token": "mine", **options}
    try:
        model = cls(model=url, **settings)
    except ValidationError:
        model = cls(model="a/model", **settings)
    for name, client in (
        ("client", huggingface_hub.InferenceClient),
        ("async_client", huggingface_hub.AsyncInferenceClient),
    ):
        if client_options is not None or getattr(model, name).model != url:
            setattr(model, name, client(base_url=url, token="mine", **(client_options or {})))
    return model


ENDPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "root": ("", {}, {}),
    "slash": ("/", {}, {}),
    "embed": ("/embed", {}, {}),
    "arguments": ("", {}, {"model_kwargs": {"truncate": True, "normalize": False, "prompt_name": "query"}}),
    "headers": ("/embed?version=2", {"headers": {"x-team": "farm"}, "cookies": {"barn": "1"}, "timeout": 30}, {}),
}
"""Path of the address, options of the clients, options of the embeddings."""


def tei_requests(server: EmbeddingStub) -> list[Any]:
    """Return the requests that the server received, and forget them. Headers of the connection are left out."""
    of_connection = ("accept-encoding", "connection", "content-length", "host")
    rows = [
        (path, body, {name: value for name, value in headers.items() if name not in of_connection})
        for (path, body), headers in zip(server.log, server.headers, strict=True)
    ]
    for _, _, headers in rows:
        headers["x-amzn-trace-id"] = str(len(headers["x-amzn-trace-id"]))  # a number of its own for each request
    server.log.clear()
    server.headers.clear()
    return rows


def count_engine_calls(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with each request that the engine carries."""
    calls: list[Any] = []
    engine_call = pool.call

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return engine_call(*args, **kwargs)

    monkeypatch.setattr(pool, "call", call)
    return calls


@pytest.mark.filterwarnings("ignore:Setting per-request cookies:DeprecationWarning")  # of huggingface_hub, on a loop
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ENDPOINTS)
def test_bound_endpoint_embeddings_send_the_requests_of_the_original(
    case: str, way: str, tei: EmbeddingStub, tei_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, client_options, options = ENDPOINTS[case]
    model = endpoint(tei.url + path, client_options, **options)
    expected = WAYS[way](model, TEXTS)
    original_requests = tei_requests(tei)
    calls = count_engine_calls(tei_pool, monkeypatch)
    bound = tei_pool.bound(model, "embedder")
    assert WAYS[way](bound, TEXTS) == expected
    assert tei_requests(tei) == original_requests
    assert len(calls) == len(original_requests) == 1 + len(TEXTS)
    assert original_requests[0][1]["inputs"][1] == "walls need lime and sand"
    assert original_requests[0][2]["authorization"] == "Bearer mine"


@pytest.mark.parametrize("how", ["bind", "auto"])
def test_app_with_endpoint_embeddings_sends_the_same_requests(
    how: str, tei: EmbeddingStub, tei_pool: EnginePool
) -> None:
    model = endpoint(tei.url)
    expected = index_and_search(InMemoryVectorStore(model)).invoke("lambs eat oats")
    original_requests = tei_requests(tei)
    app = index_and_search(InMemoryVectorStore(model))
    options: Any = {"pool": tei_pool, "bind": [(model, "embedder")]} if how == "bind" else {"engines": "auto"}
    fast = accelerate(app, **options)
    assert fast.invoke("lambs eat oats") == expected
    assert tei_requests(tei) == original_requests
    if how == "auto":
        assert f"EmbeddingServer(base_url={tei.url!r})" in fast.explain(details=True)


def test_automatic_engine_of_a_pool_serves_endpoint_embeddings(tei: EmbeddingStub, tei_pool: EnginePool) -> None:
    fast = accelerate(index_and_search(InMemoryVectorStore(endpoint(tei.url))), engines="auto", pool=tei_pool)
    assert "HuggingFaceEndpointEmbeddings" in fast.explain(details=True)
    assert "left as it is" not in fast.explain(details=True)


def test_concurrent_endpoint_queries_share_a_request(tei: EmbeddingStub) -> None:
    tei.delay_s = 0.1
    engine = EmbeddingServer(base_url=tei.url, model=MODEL, max_connections=1)
    with EnginePool.local([engine]) as pool:
        bound = pool.bound(endpoint(tei.url), "embedder")
        vectors: dict[str, Any] = {}

        def call(text: str) -> None:
            vectors[text] = bound.embed_query(text)

        threads = [threading.Thread(target=call, args=(f"text {number}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert vectors == {f"text {number}": vector_of(f"text {number}") for number in range(6)}
    assert len(tei.log) < 6


REFUSALS: dict[str, tuple[int, dict[str, str], Any]] = {
    "too long": (413, {}, {"error": "Input validation error", "error_type": "Validation"}),
    "invalid": (422, {"x-error-message": "too many"}, {"error": "batch size 5 > 4", "error_type": "Validation"}),
    "overloaded": (429, {}, {"error": "Model is overloaded", "error_type": "Overloaded"}),
    "bad": (400, {}, {"error": "no"}),
    "broken": (500, {}, {"message": "no error field"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_bound_endpoint_embeddings_raise_the_errors_of_the_original(
    refusal: str, way: str, tei: EmbeddingStub, tei_pool: EnginePool
) -> None:
    status, headers, content = REFUSALS[refusal]
    tei.replace = lambda path, body: (status, {"x-request-id": "request-1", **headers}, content)
    model = endpoint(tei.url)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as original:
        WAYS[way](model, ["a"])
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as carried:
        WAYS[way](tei_pool.bound(model, "embedder"), ["a"])
    assert type(carried.value) is type(original.value)
    assert carried.value.args == original.value.args
    assert str(carried.value) == str(original.value)
    assert carried.value.response.status_code == status
    assert carried.value.server_message == original.value.server_message
    first, second = tei_requests(tei)
    assert second == first


@pytest.mark.parametrize("way", WAYS)
def test_slow_or_missing_server_of_endpoint_embeddings_fails_as_the_original(
    way: str, tei: EmbeddingStub, tei_pool: EnginePool
) -> None:
    tei.delay_s = 1.0
    slow = endpoint(tei.url, {"timeout": 0.2})
    for one in (slow, tei_pool.bound(slow, "embedder")):
        with pytest.raises(httpx.ReadTimeout):
            WAYS[way](one, ["a"])
    with embedding_stub("tei") as stopped:
        missing = endpoint(stopped.url)
    with EnginePool.local([EmbeddingServer(base_url=stopped.url, model=MODEL, check=False)]) as pool:
        for one in (missing, pool.bound(missing, "embedder")):
            with pytest.raises(httpx.ConnectError):
                WAYS[way](one, ["a"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reply", [{"vectors": []}, "text", [[1, 2], ["x"]]])
def test_unusable_answer_to_endpoint_embeddings_fails_as_the_original(
    reply: Any, way: str, tei: EmbeddingStub, tei_pool: EnginePool
) -> None:
    tei.replace = lambda path, body: (200, {}, reply)
    model = endpoint(tei.url)
    with pytest.raises(Exception) as original:  # whatever numpy raises
        WAYS[way](model, ["a"])
    with pytest.raises(type(original.value)) as carried:
        WAYS[way](tei_pool.bound(model, "embedder"), ["a"])
    assert str(carried.value) == str(original.value)


@pytest.mark.parametrize("way", WAYS)
def test_offline_mode_refuses_endpoint_embeddings_as_the_original(
    way: str, tei: EmbeddingStub, tei_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endpoint(tei.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for one in (model, tei_pool.bound(model, "embedder")):
        with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled, match="offline mode is enabled"):
            WAYS[way](one, ["a"])
    assert tei.log == []


def test_http_client_of_the_user_sends_requests_of_endpoint_embeddings(
    tei: EmbeddingStub, tei_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endpoint(tei.url)

    def add_key(request: httpx.Request) -> None:
        request.headers["x-key"] = "secret"

    with httpx.Client(event_hooks={"request": [add_key]}) as own:
        monkeypatch.setattr("huggingface_hub.get_session", lambda: own)
        calls = count_engine_calls(tei_pool, monkeypatch)
        assert tei_pool.bound(model, "embedder").embed_query("a") == vector_of("a")
    assert calls == []
    assert tei.headers[0]["x-key"] == "secret"


def test_model_named_in_a_call_goes_past_the_engine(
    tei: EmbeddingStub, tei_pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedding_stub("tei") as other:
        calls = count_engine_calls(tei_pool, monkeypatch)
        model = endpoint(tei.url, model_kwargs={"model": other.url})
        assert tei_pool.bound(model, "embedder").embed_query("a") == vector_of("a")
        assert len(other.log) == 1
    assert calls == []
    assert tei.log == []


def hub_model(**options: Any) -> Any:
    pytest.importorskip("huggingface_hub", minversion="1.0")
    cls = pytest.importorskip("langchain_huggingface").HuggingFaceEndpointEmbeddings
    return cls(huggingfacehub_api_token="mine", **options)


def two_servers() -> Any:
    model = endpoint("http://localhost:1")
    model.async_client = huggingface_hub.AsyncInferenceClient(base_url="http://localhost:2")
    return model


def own_client() -> Any:
    class Client(huggingface_hub.InferenceClient):
        """A client of the user's, which may send requests elsewhere."""

    model = endpoint("http://localhost:1")
    model.client = Client(base_url="http://localhost:1")
    return model


NOT_CARRIED: dict[str, tuple[Callable[[], Any], str]] = {
    "model of the hub": (lambda: hub_model(model="a/model"), "it names a model on Hugging Face's hub"),
    "provider": (lambda: hub_model(model="a/model", provider="sambanova"), "it names a model on Hugging Face's hub"),
    "two servers": (two_servers, "its two clients talk to different addresses"),
    "own client": (own_client, "not an InferenceClient of huggingface_hub 1 or newer"),
}


@pytest.mark.parametrize("case", NOT_CARRIED)
def test_endpoint_embeddings_that_no_engine_can_carry_are_refused(case: str, tei_pool: EnginePool) -> None:
    make_model, reason = NOT_CARRIED[case]
    model = make_model()
    with pytest.raises(RegistrationError, match=reason):
        tei_pool.bound(model, "embedder")
    fast = accelerate(index_and_search(InMemoryVectorStore(model)), engines="auto")
    assert reason in " ".join(fast.explain(details=True).split())


def test_binding_endpoint_embeddings_of_another_server_raises(tei_pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match=r"it talks to http://localhost:1/embed, the engine") as error:
        tei_pool.bound(endpoint("http://localhost:1/embed"), "embedder")
    assert "EmbeddingServer(base_url='http://localhost:1')" in str(error.value)


def test_endpoint_embeddings_of_a_public_address_are_not_served() -> None:
    fast = accelerate(index_and_search(InMemoryVectorStore(endpoint("https://x.endpoints.example"))), engines="auto")
    assert "x.endpoints.example is not known to be of this machine" in fast.explain(details=True)


def test_clients_set_later_on_bound_endpoint_embeddings_apply_to_calls(
    tei: EmbeddingStub, tei_pool: EnginePool
) -> None:
    model = endpoint(tei.url)
    app = RunnableLambda(lambda text: model.embed_query(text))
    fast = accelerate(app, pool=tei_pool, bind=[(model, "embedder")])
    assert fast.invoke("a") == vector_of("a")
    with embedding_stub("tei") as other:
        model.client = huggingface_hub.InferenceClient(base_url=other.url)
        assert fast.invoke("a") == vector_of("a")
        assert len(other.log) == 1
    assert len(tei.log) == 1
