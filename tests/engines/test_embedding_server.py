"""Tests of the engines for servers that embed and rerank, with a fake server for each protocol."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from support.embedding_stub import (
    DIMENSIONS,
    MODEL,
    EmbeddingStub,
    embedding_stub,
    embeddings_reply,
    score_of,
    vector_of,
)

from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.deployment.engine_factory import engines_here
from teola_plugin.engines import EmbeddingServer, RerankingServer
from teola_plugin.engines.conformance import EngineConformance, collect, ends
from teola_plugin.engines.openai.embedding_server import WireEmbedding, embeds_in_tei_form
from teola_plugin.engines.openai.envelope import Envelope
from teola_plugin.engines.openai.http import refusal_in
from teola_plugin.errors import ConfigError, EngineError, EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, EmbedText, Request, ScorePair

K = PrimitiveKind
TEXTS = ("A cat sleeps.", "Tea is brewed at low heat.", "", "Ünïcode 中文")
FORMS = ("openai", "vllm", "tei", "llama.cpp", "cohere")


@pytest.fixture
def stub() -> Iterator[EmbeddingStub]:
    with embedding_stub() as server:
        yield server


async def outcomes(engine: Any, *payloads: Any) -> list[Any]:
    """Return the value, or the error, of each payload in one batch of a started engine."""
    kind = next(iter(engine.kinds))
    batch = [Request(f"request{number}", kind, payload) for number, payload in enumerate(payloads)]
    end_by_id = ends(await collect(engine, batch), batch)
    return [end.value if isinstance(end := end_by_id[one.id], Done) else end.error for one in batch]


async def started(engine: Any, *payloads: Any) -> list[Any]:
    """Return the outcomes of payloads on an engine that is started for them."""
    await engine.start()
    try:
        return await outcomes(engine, *payloads)
    finally:
        await engine.stop()


def carried(inputs: Any, key: str = "one", **fields: Any) -> WireEmbedding:
    envelope = Envelope.of("http://x/v1/embeddings", (), [("authorization", f"Bearer {key}")])
    return WireEmbedding.of({"input": inputs, "model": MODEL, "encoding_format": "float", **fields}, envelope)


def carried_in_tei_form(stub: EmbeddingStub, inputs: list[str], key: str = "one", **fields: Any) -> WireEmbedding:
    envelope = Envelope.of(stub.url, (), [("authorization", f"Bearer {key}")])
    return WireEmbedding.of({"inputs": inputs, **fields}, envelope, stub.url)


# ------------------------------------------------------------ the contract of engines


class EmbeddingConformance(EngineConformance):
    form: Any = "openai"
    encoding: Any = "float"

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with embedding_stub(self.form) as self.stub:
            yield

    async def make(self) -> EmbeddingServer:
        return EmbeddingServer(base_url=self.stub.base_url, model=MODEL, encoding=self.encoding)

    def payloads(self, kind: PrimitiveKind) -> list[Any]:
        return [*(EmbedText(text, role) for text in TEXTS for role in ("query", "document")), carried(["a", "b"])]


class TestOpenAIForm(EmbeddingConformance):
    def bad_payload(self, kind: PrimitiveKind) -> Any:
        return EmbedText("refuse this")


class TestBase64(EmbeddingConformance):
    encoding = "base64"


class TestTei(EmbeddingConformance):
    form = "tei"

    def payloads(self, kind: PrimitiveKind) -> list[Any]:
        return [*super().payloads(kind), carried_in_tei_form(self.stub, ["a", "b"])]


class TestLlamaCpp(EmbeddingConformance):
    form = "llama.cpp"


class RerankingConformance(EngineConformance):
    form: Any = "cohere"
    version = "/v2"

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with embedding_stub(self.form) as self.stub:
            yield

    async def make(self) -> RerankingServer:
        return RerankingServer(base_url=f"{self.stub.url}{self.version}", model=MODEL)

    def payloads(self, kind: PrimitiveKind) -> list[Any]:
        return [ScorePair(query, text) for query in ("what sleeps?", "tea?") for text in TEXTS]


class TestCohereForm(RerankingConformance):
    pass


class TestVllmForm(RerankingConformance):
    form, version = "vllm", "/v1"


class TestTeiForm(RerankingConformance):
    form, version = "tei", ""


# ------------------------------------------------------------ what is sent


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_engine_returns_vectors_of_the_server(stub: EmbeddingStub, encoding: Any) -> None:
    engine = EmbeddingServer(base_url=stub.base_url, encoding=encoding)
    vectors = await started(engine, *map(EmbedText, TEXTS))
    assert [vector.tolist() for vector in vectors] == [vector_of(text) for text in TEXTS]
    assert engine.dimension == DIMENSIONS
    assert engine.versions()["model"] == MODEL


async def test_waiting_requests_are_merged_into_one_http_request(stub: EmbeddingStub) -> None:
    engine = EmbeddingServer(base_url=stub.base_url)
    await engine.start()
    try:
        calls = [
            collect(engine, [Request(f"query{number}", K.EMBEDDING, EmbedText(f"text {number}"))])
            for number in range(5)
        ]
        ended = await asyncio.gather(*calls)
    finally:
        await engine.stop()
    assert stub.inputs == [[f"text {number}" for number in range(5)]]
    assert [results[-1].value.tolist() for results in ended] == [vector_of(f"text {number}") for number in range(5)]


async def test_no_http_request_has_more_inputs_than_the_limit(stub: EmbeddingStub) -> None:
    await started(EmbeddingServer(base_url=stub.base_url, max_inputs=3), *(EmbedText(str(n)) for n in range(8)))
    assert sorted(map(len, stub.inputs)) == [2, 3, 3]


async def test_requests_waiting_for_a_connection_are_merged(stub: EmbeddingStub) -> None:
    stub.delay_s = 0.05
    engine = EmbeddingServer(base_url=stub.base_url, max_connections=1)
    await engine.start()
    try:
        first = asyncio.create_task(outcomes(engine, EmbedText("first")))
        await asyncio.sleep(0.02)
        later = []
        for number in range(4):
            request = Request(f"later{number}", K.EMBEDDING, EmbedText(str(number)))
            later.append(asyncio.create_task(collect(engine, [request])))
            await asyncio.sleep(0.002)
        await asyncio.gather(first, *later)
    finally:
        await engine.stop()
    assert stub.inputs == [["first"], ["0", "1", "2", "3"]]


async def test_prompts_and_dimensions_are_sent(stub: EmbeddingStub) -> None:
    prompts = {"query": "query: ", "document": "passage: "}
    engine = EmbeddingServer(base_url=stub.base_url, prompts=prompts, dimensions=4, api_key="secret")
    vectors = await started(engine, EmbedText("a"), EmbedText("a", "document"))
    assert [vector.tolist() for vector in vectors] == [vector_of("query: a", 4), vector_of("passage: a", 4)]
    assert stub.log[0][1]["dimensions"] == 4
    assert stub.headers[0]["authorization"] == "Bearer secret"
    assert engine.prompt_of("query") == "query: "


async def test_tei_server_reports_model_and_input_limit() -> None:
    with embedding_stub("tei") as stub:
        engine = EmbeddingServer(base_url=stub.base_url)
        await started(engine, *(EmbedText(str(number)) for number in range(6)))
    assert engine.versions() == {"model": MODEL, "server": "text-embeddings-inference", "version": "1.8.0"}
    assert sorted(map(len, stub.inputs)) == [2, 4]


async def test_llama_cpp_server_reports_its_dimension() -> None:
    with embedding_stub("llama.cpp") as stub:
        engine = EmbeddingServer(base_url=stub.base_url)
        await engine.start()
        await engine.stop()
    assert engine.dimension == DIMENSIONS


@pytest.mark.parametrize(("form", "version"), [("cohere", "/v2"), ("vllm", "/v1"), ("tei", ""), ("tei", "/v1")])
async def test_engine_returns_scores_of_the_server(form: Any, version: str) -> None:
    pairs = [ScorePair(query, text) for query in ("one", "two") for text in TEXTS]
    with embedding_stub(form) as stub:
        base_url = stub.url if form == "tei" else f"{stub.url}{version}"
        engine = RerankingServer(base_url=base_url, model=MODEL)
        scores = await started(engine, *pairs)
    assert scores == [score_of(pair.query, pair.text) for pair in pairs]
    assert sorted(body["query"] for _, body in stub.log) == ["one", "two"]


# ------------------------------------------------------------ requests of clients


async def test_single_client_request_is_forwarded_unchanged(stub: EmbeddingStub) -> None:
    [answer] = await started(EmbeddingServer(base_url=stub.base_url), carried("one text", key="k", user="me"))
    body = {"input": "one text", "model": MODEL, "encoding_format": "float", "user": "me"}
    assert stub.log == [("/v1/embeddings", body)]
    assert stub.headers[0]["authorization"] == "Bearer k"
    assert '"usage"' in answer.response


async def test_equal_requests_of_clients_are_one_http_request(stub: EmbeddingStub) -> None:
    import json

    payloads = [carried(["a", "b"]), carried("c"), carried(["d"], dimensions=4), carried(["e"], key="other")]
    answers = await started(EmbeddingServer(base_url=stub.base_url), *payloads)
    replies = [json.loads(answer.response) for answer in answers]
    assert sorted(stub.inputs) == [["a", "b", "c"], ["d"], ["e"]]
    assert [[entry["embedding"] for entry in reply["data"]] for reply in replies] == [
        [vector_of("a"), vector_of("b")],
        [vector_of("c")],
        [vector_of("d", 4)],
        [vector_of("e")],
    ]
    assert [[entry["index"] for entry in reply["data"]] for reply in replies] == [[0, 1], [0], [0], [0]]
    assert replies[0]["usage"]["prompt_tokens"] + replies[1]["usage"]["prompt_tokens"] == 3


async def test_token_lists_and_texts_are_not_mixed(stub: EmbeddingStub) -> None:
    await started(EmbeddingServer(base_url=stub.base_url), carried([[1, 2], [3]]), carried([4, 5]), carried("text"))
    assert sorted(map(str, stub.inputs)) == ["[[1, 2], [3], [4, 5]]", "text"]


async def test_refusal_reaches_only_the_client_whose_input_is_refused(stub: EmbeddingStub) -> None:
    good, bad = carried(["a"]), carried(["refuse"])
    answers = await started(EmbeddingServer(base_url=stub.base_url), good, bad)
    refusal = refusal_in(answers[1])
    assert '"data"' in answers[0].response
    assert refusal is not None
    assert refusal.status == 400
    assert stub.inputs == [["a", "refuse"], ["a"], ["refuse"]]


async def test_carried_request_is_not_retried_after_429(stub: EmbeddingStub) -> None:
    stub.replace = lambda path, body: (429, {"retry-after": "0"}, {"error": {"message": "slow down"}})
    [error] = await started(EmbeddingServer(base_url=stub.base_url), carried(["a"]))
    assert isinstance(error, EngineError)
    assert not error.retryable
    assert len(stub.log) == 1


# ------------------------------------------------------------ failures


async def test_text_that_is_refused_fails_alone(stub: EmbeddingStub) -> None:
    engine = EmbeddingServer(base_url=stub.base_url)
    values = await started(engine, EmbedText("a"), EmbedText("refuse"), EmbedText("b"))
    assert values[0].tolist() == vector_of("a")
    assert values[2].tolist() == vector_of("b")
    assert "it refuses" in str(values[1])


def _reply_with(vectors: list[Any]) -> Any:
    data = [{"object": "embedding", "index": number, "embedding": one} for number, one in enumerate(vectors)]
    return lambda path, body: (200, {}, {"object": "list", "data": data, "model": MODEL})


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0]], "it has 1 vectors for 2 texts"),
        ([[1.0], [1.0, 2.0]], "its vectors have 1 and 2 dimensions"),
        ([[1.0], "%"], "an embedding is neither a list of numbers nor float32 in base64"),
        ([[1.0], ["a"]], "an embedding is neither a list of numbers nor float32 in base64"),
    ],
)
async def test_malformed_embedding_reply_fails_the_request(
    stub: EmbeddingStub, vectors: list[Any], message: str
) -> None:
    stub.replace = _reply_with(vectors)
    errors = await started(EmbeddingServer(base_url=stub.base_url), EmbedText("a"), EmbedText("b"))
    assert all(message in str(error) for error in errors)
    assert not any(error.retryable for error in errors)
    assert len(stub.log) == 1


async def test_vectors_of_unexpected_dimension_fail_the_request(stub: EmbeddingStub) -> None:
    engine = EmbeddingServer(base_url=stub.base_url, dimensions=8)
    stub.replace = _reply_with([[1.0, 2.0]])
    [error] = await started(engine, EmbedText("a"))
    assert "its vectors have 2 dimensions, not 8" in str(error)


async def test_vectors_are_ordered_by_their_index(stub: EmbeddingStub) -> None:
    def shuffled(path: str, body: dict[str, Any]) -> Any:
        status, headers, reply = embeddings_reply(body)
        return status, headers, {**reply, "data": reply["data"][::-1]}

    stub.replace = shuffled
    vectors = await started(EmbeddingServer(base_url=stub.base_url), EmbedText("a"), EmbedText("b"))
    assert [vector.tolist() for vector in vectors] == [vector_of("a"), vector_of("b")]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([{"index": 0, "relevance_score": 0.5}], "it has 1 scores for 2 texts"),
        ([{"index": 0, "relevance_score": 1}, {"index": 2, "relevance_score": 1}], "a result has the index 2"),
        ([{"index": 0, "relevance_score": "high"}], "the score 'high'"),
    ],
)
async def test_malformed_scores_fail_the_request(stub: EmbeddingStub, results: Any, message: str) -> None:
    stub.replace = lambda path, body: (200, {}, {"results": results})
    engine = RerankingServer(base_url=stub.base_url, model=MODEL)
    errors = await started(engine, ScorePair("q", "a"), ScorePair("q", "b"))
    assert all(message in str(error) for error in errors)


async def test_busy_server_is_retried_after_its_delay(stub: EmbeddingStub) -> None:
    refusals = iter([(429, {"retry-after-ms": "20"}, {}), (503, {"retry-after-ms": "20"}, {})])
    stub.replace = lambda path, body: next(refusals, None)
    [vector] = await started(EmbeddingServer(base_url=stub.base_url), EmbedText("a"))
    assert vector.tolist() == vector_of("a")
    assert len(stub.log) == 3


async def test_request_fails_if_server_stays_busy(stub: EmbeddingStub) -> None:
    stub.replace = lambda path, body: (429, {"retry-after-ms": "1"}, {"error": {"message": "slow down"}})
    [error] = await started(EmbeddingServer(base_url=stub.base_url), EmbedText("a"))
    assert "slow down" in str(error)
    assert len(stub.log) == 4


async def test_fewer_connections_are_used_after_a_refusal(stub: EmbeddingStub) -> None:
    stub.delay_s = 0.1
    engine = EmbeddingServer(base_url=stub.base_url, max_inputs=1, max_connections=4)
    await engine.start()
    try:
        refusals = iter([(429, {"retry-after-ms": "1"}, {})])
        stub.replace = lambda path, body: next(refusals, None)
        await outcomes(engine, EmbedText("a"))
        stub.most_at_once = 0
        await outcomes(engine, *(EmbedText(str(number)) for number in range(2)))
        assert stub.most_at_once == 2
        await outcomes(engine, *(EmbedText(str(number)) for number in range(12)))
    finally:
        await engine.stop()
    assert stub.most_at_once == 4, "it recovers with each answer"


async def test_cancelled_request_closes_its_http_request(stub: EmbeddingStub) -> None:
    stub.delay_s = 5.0
    engine = EmbeddingServer(base_url=stub.base_url)
    await engine.start()
    try:
        call = asyncio.create_task(outcomes(engine, EmbedText("a")))
        while not stub.log:
            await asyncio.sleep(0.005)
        await engine.cancel("request0")
        [error] = await asyncio.wait_for(call, 1)
        await asyncio.sleep(0)
        assert "was cancelled" in str(error)
        assert engine.load().requests == 0
    finally:
        await asyncio.wait_for(engine.stop(), 1)


async def test_wrong_model_raises_with_the_served_ones(stub: EmbeddingStub) -> None:
    with pytest.raises(EngineUnavailable, match=f"does not serve 'nope'; it has: {MODEL}"):
        await EmbeddingServer(base_url=stub.base_url, model="nope").start()


async def test_server_without_model_list_requires_a_model_name() -> None:
    with embedding_stub("cohere") as stub, pytest.raises(EngineUnavailable, match="does not say which model it serves"):
        await RerankingServer(base_url=f"{stub.url}/v2").start()


async def test_start_without_a_server_raises() -> None:
    with pytest.raises(EngineUnavailable, match=r"no server answers at http://127\.0\.0\.1:9/v1"):
        await EmbeddingServer(base_url="http://127.0.0.1:9/v1").start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'"),
        ({"encoding": "int8"}, "encoding is 'int8'"),
        ({"dimensions": 0}, "dimensions is 0"),
        ({"max_inputs": 0}, "max_inputs is 0"),
        ({"max_connections": "many"}, "max_connections is 'many'"),
        ({"prompts": {"passage": "p"}}, "prompts has passage"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingServer(**{"base_url": "http://localhost/v1", **options})


def test_engines_are_created_from_a_pool_file() -> None:
    text = """
engines:
  embedder: {kind: embedding_server, base_url: "http://localhost:1/v1", model: m, options: {encoding: base64}}
  reranker: {kind: reranking_server, base_url: "http://localhost:2", model: r, options: {form: tei}}
"""
    engines, _, _ = engines_here(PoolConfig.parse(text))
    [embedder], [reranker] = engines["embedder"], engines["reranker"]
    assert isinstance(embedder, EmbeddingServer)
    assert (embedder.base_url, embedder.model, embedder.encoding) == ("http://localhost:1/v1", "m", "base64")
    assert isinstance(reranker, RerankingServer)
    assert (reranker.base_url, reranker.model, reranker.form) == ("http://localhost:2", "r", "tei")


def test_unknown_server_forms_raise() -> None:
    with pytest.raises(ConfigError, match="form is 'jina'"):
        RerankingServer(base_url="http://localhost/v1", form="jina")  # type: ignore[arg-type]


def test_api_keys_are_not_in_repr() -> None:
    payload = carried(["a"], key="secret-key")
    assert "secret" not in repr(payload)
    assert pickle.loads(pickle.dumps(payload)) == payload


# ------------------------------------------------------------ requests in TEI's form


def single_connection(stub: EmbeddingStub) -> EmbeddingServer:
    return EmbeddingServer(base_url=stub.base_url, model=MODEL, max_connections=1, check=False)


async def test_requests_in_tei_form_share_an_http_request() -> None:
    with embedding_stub("tei") as stub:
        payloads = [carried_in_tei_form(stub, inputs) for inputs in (["a"], ["b", "c"], ["d"])]
        answers = await started(single_connection(stub), *payloads)
        assert stub.log == [("/", {"inputs": ["a", "b", "c", "d"]})]
    expected = [[vector_of("a")], [vector_of("b"), vector_of("c")], [vector_of("d")]]
    assert [json.loads(answer.response) for answer in answers] == expected


async def test_requests_in_tei_form_stay_apart_if_their_key_or_arguments_differ() -> None:
    with embedding_stub("tei") as stub:
        payloads = [
            carried_in_tei_form(stub, ["a"]),
            carried_in_tei_form(stub, ["b"], truncate=True),
            carried_in_tei_form(stub, ["c"], key="two"),
            carried(["d"]),
        ]
        await started(single_connection(stub), *payloads)
        bodies = [(path, body.get("inputs", body.get("input"))) for path, body in stub.log]
    assert bodies == [("/", ["a"]), ("/", ["b"]), ("/", ["c"]), ("/v1/embeddings", ["d"])]


@pytest.mark.parametrize("status", [400, 413, 422, 500])
async def test_request_in_tei_form_that_the_server_refuses_fails_alone(status: int) -> None:
    with embedding_stub("tei") as stub:
        stub.replace = lambda path, body: (status, {}, {"error": "no"}) if "bad" in body["inputs"] else None
        payloads = [carried_in_tei_form(stub, [text]) for text in ("a", "bad", "b", "c")]
        answers = await started(single_connection(stub), *payloads)
    assert [json.loads(answers[number].response) for number in (0, 2, 3)] == [[vector_of(one)] for one in "abc"]
    assert refusal_in(answers[1]).status == status


@pytest.mark.parametrize("reply", [{"error": "none"}, [[1.0]], "text"])
async def test_answer_in_tei_form_that_cannot_be_divided_is_asked_for_one_by_one(reply: Any) -> None:
    with embedding_stub("tei") as stub:
        stub.replace = lambda path, body: (200, {}, reply) if len(body["inputs"]) > 1 else None
        payloads = [carried_in_tei_form(stub, [text]) for text in "ab"]
        answers = await started(single_connection(stub), *payloads)
    assert [json.loads(answer.response) for answer in answers] == [[vector_of("a")], [vector_of("b")]]


@pytest.mark.parametrize("base_url", ["http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"])
def test_addresses_at_which_tei_embeds_in_its_own_form(base_url: str) -> None:
    embedding = ["http://x:1", "http://x:1/", "http://x:1/embed", "http://key@x:1/embed?version=2"]
    other = ["http://x:1/v1", "http://x:1/embeddings", "http://x:1/embed_all", "http://x:2", "http://x:1/a/embed"]
    assert all(embeds_in_tei_form(url, base_url) for url in embedding)
    assert not any(embeds_in_tei_form(url, base_url) for url in other)
