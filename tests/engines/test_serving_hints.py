"""Tests of the hints of an `OpenAIServer`, which go only to servers that are declared to understand them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from support.api_server import ApiServer
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import EnginePool, accelerate
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.deployment.engine_factory import engines_here
from teola_plugin.engines.conformance import collect, ends
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.openai.server_requests import ServingHints, with_hints
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import UNKNOWN, Done, Generate, Message, Prompt, Request, Sampling, Warmup

SESSION = "x-dynamo-session-id"


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


def request(text: str = "hello", name: str = "r", **options: Any) -> Request:
    payload = Generate(Prompt((Message("user", text),)), Sampling(max_tokens=32))
    return Request(name, PrimitiveKind.PREFILLING, payload, **{"query": "q7", **options})


async def send(engine: OpenAIServer, *requests: Request) -> None:
    await engine.start()
    try:
        for one in requests:
            await collect(engine, [one])
    finally:
        await engine.stop()


def without(bodies: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in body.items() if name not in names} for body in bodies]


def session_headers(stub: OpenAIStub, name: str = SESSION) -> list[str | None]:
    return [{key.lower(): value for key, value in headers.items()}.get(name) for headers in stub.headers]


async def test_hints_are_not_sent_unless_declared(stub: OpenAIStub) -> None:
    await send(OpenAIServer(base_url=stub.base_url), request())
    [body] = stub.generations
    assert not {"priority", "nvext"} & body.keys()
    assert session_headers(stub) == [None]


async def test_vllm_gets_the_order_of_the_engine_scheduler(stub: OpenAIStub) -> None:
    await send(OpenAIServer(base_url=stub.base_url, hints="vllm"), request(priority=3), request(priority=9))
    assert [body["priority"] for body in stub.generations] == [3, 9]
    assert without(stub.generations, "priority")[0].keys() == without(stub.generations, "priority")[1].keys()


async def test_dynamo_gets_priority_length_and_session(stub: OpenAIStub) -> None:
    urgent, batch = request("one", depth=2), request("one", depth=2, objective="throughput", query="q8")
    await send(OpenAIServer(base_url=stub.base_url, hints="dynamo"), urgent, batch)
    first, second = [body["nvext"] for body in stub.generations]
    assert first == {"agent_hints": {"priority": 2}}, "the length of the first answer is not known before"
    assert second["agent_hints"]["priority"] == 1
    assert 1 <= second["agent_hints"]["osl"] <= 32
    ids = session_headers(stub)
    assert ids[0] != ids[1]
    assert str(ids[0]).endswith("-q7")


async def test_hints_change_no_other_field_of_the_request(stub: OpenAIStub) -> None:
    await send(OpenAIServer(base_url=stub.base_url), request())
    await send(OpenAIServer(base_url=stub.base_url, hints="dynamo", session_header="X-Session-ID"), request())
    plain, hinted = stub.generations
    assert without([hinted], "nvext") == [plain]
    assert session_headers(stub, "x-session-id")[0] is None
    assert session_headers(stub, "x-session-id")[1]


async def test_prefix_goes_to_the_replica_of_its_query(stub: OpenAIStub) -> None:
    engine = OpenAIServer(base_url=stub.base_url, hints="dynamo", prefix_caching=True)
    prompt = Prompt((Message("user", f"The beginning of a prompt. {UNKNOWN}"),))
    warmup = Request("w", PrimitiveKind.PARTIAL_PREFILLING, Warmup(prompt), query="q7", background=True)
    await send(engine, warmup)
    sent = [(body, header) for (_, body), header in zip(stub.requests, session_headers(stub), strict=True)]
    hinted = [(body["nvext"], header) for body, header in sent if "nvext" in body]
    assert [fields for fields, _ in hinted] == [{"agent_hints": {"priority": 0, "osl": 1}}]
    assert str(hinted[0][1]).endswith("-q7")


def test_expected_length_follows_answers_of_the_same_kind() -> None:
    hints = ServingHints("dynamo", None)

    def expected(**options: Any) -> Any:
        return hints.fields(request(**options))["nvext"]["agent_hints"].get("osl")

    hints.learn(request(), 0)
    assert expected() is None
    hints.learn(request(), 100)
    assert expected() == 100
    hints.learn(request(), 50)
    assert expected() == 90
    assert expected(app="other") is None
    assert expected(tenant="other") is None
    assert expected(depth=5) is None


def test_requests_of_no_query_have_no_session() -> None:
    hints = ServingHints(None, "X-Session-ID")
    assert hints.headers(request(query="")) == {}
    assert hints.fields(request()) == {}


def test_hint_fields_of_the_user_are_kept() -> None:
    hints = {"nvext": {"agent_hints": {"priority": 2, "osl": 8}}}
    own = {"model": "m", "nvext": {"agent_hints": {"osl": 99}, "annotations": ["x"]}}
    merged = with_hints(own, hints)
    assert merged == {"model": "m", "nvext": {"agent_hints": {"priority": 2, "osl": 99}, "annotations": ["x"]}}
    assert own["nvext"] == {"agent_hints": {"osl": 99}, "annotations": ["x"]}


def test_bound_model_sends_hints_with_its_own_request(stub: OpenAIStub) -> None:
    headers = {"X-Session-ID": "mine"}
    model = ChatOpenAI(base_url=stub.base_url, api_key=SecretStr("key"), model=MODEL, default_headers=headers)
    expected = model.invoke("hello").content
    engine = OpenAIServer(base_url=stub.base_url, model=MODEL, hints="dynamo", session_header="X-Session-ID")
    with EnginePool.local(llm=engine) as pool:
        assert accelerate(model, pool=pool, bind=[(model, "llm")]).invoke("hello").content == expected
    original, carried = stub.generations
    assert without([carried], "nvext") == [original]
    assert carried["nvext"]["agent_hints"]["priority"] == 2
    assert session_headers(stub, "x-session-id") == ["mine", "mine"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"hints": "dynamic"}, "dynamo"), ({"session_header": "X Session"}, "is no name of a header")],
)
def test_invalid_hint_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        OpenAIServer(base_url="http://localhost:1/v1", **options)


async def test_pool_file_declares_hints(stub: OpenAIStub) -> None:
    text = f"""
engines:
  llm:
    kind: openai
    base_url: {stub.base_url}
    model: {MODEL}
    options: {{hints: dynamo, session_header: X-Session-ID}}
"""
    replicas, _, _ = engines_here(PoolConfig.parse(text))
    [engine] = replicas["llm"]
    assert isinstance(engine, OpenAIServer)
    await send(engine, request())
    assert "nvext" in stub.generations[0]
    assert session_headers(stub, "x-session-id")[0]


@pytest.mark.vllm
@pytest.mark.parametrize("hints", ["vllm", "dynamo"])
async def test_vllm_server_answers_alike_with_hints(vllm_api: ApiServer, hints: str) -> None:
    answers = []
    for engine in (OpenAIServer(base_url=vllm_api.base_url), OpenAIServer(base_url=vllm_api.base_url, hints=hints)):
        await engine.start()
        try:
            one = request("What is a class?", priority=5)
            end = ends(await collect(engine, [one]), [one])[one.id]
        finally:
            await engine.stop()
        assert isinstance(end, Done)
        answers.append(end.value.text)
    assert answers[0] == answers[1]
