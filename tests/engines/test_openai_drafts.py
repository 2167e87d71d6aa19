"""Tests of the draft texts that go to servers which are declared to draft, and to no others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import EnginePool
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.openai.wire import WirePrompt
from teola_plugin.graph import GAP, PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Generate, Message, Prompt, Request, Sampling

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"properties": {"city": {"type": "string"}}}}}
HI = Prompt((Message("user", "Hi"),))


@pytest.fixture
def vllm() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        made.kind = "vllm"
        yield made


async def sent_body(stub: OpenAIStub, payload: Generate, *, drafts: bool = True, **about: Any) -> dict[str, Any]:
    """Return the body of the request."""
    engine = OpenAIServer(base_url=stub.base_url, model=MODEL, drafts=drafts)
    await engine.start()
    try:
        async for result in engine.execute([Request("r", PrimitiveKind.PREFILLING, payload, **about)]):
            if isinstance(result, Failed):
                raise result.error
            assert isinstance(result, Done)
    finally:
        await engine.stop()
    return stub.requests[-1][1]


async def test_drafts_app_and_tenant_are_sent_to_vllm(vllm: OpenAIStub) -> None:
    body = await sent_body(vllm, Generate(HI), drafts=True, app="mine", tenant="t")
    assert body["vllm_xargs"] == {"teola_app": "mine", "teola_tenant": "t"}
    engine = OpenAIServer(base_url=vllm.base_url, model=MODEL, drafts=True)
    request = Request("r", PrimitiveKind.PREFILLING, Generate(HI), drafts=("an earlier answer", "YES" + GAP))
    await engine.start()
    assert [result async for result in engine.execute([request])]
    await engine.stop()
    assert vllm.requests[-1][1]["vllm_xargs"] == {"teola_drafts": ["an earlier answer", "YES" + GAP]}
    assert engine.profile.drafts == 16


@pytest.mark.parametrize("declared", [True, False])
async def test_drafts_are_not_sent_to_other_or_undeclared_servers(
    vllm: OpenAIStub, declared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.kind = "stub" if declared else "vllm"
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        assert "vllm_xargs" not in await sent_body(vllm, Generate(HI), drafts=declared, app="mine")
    assert ("says that it is stub instead of vLLM" in caplog.text) == declared


async def test_sampled_requests_are_sent_without_drafts(vllm: OpenAIStub) -> None:
    assert "vllm_xargs" not in await sent_body(vllm, Generate(HI, Sampling(temperature=0.7)), app="mine")


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({"tools": [TOOL]}, '{"name": "look_up", "arguments": {"city": "Rome"}}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x", "y"]}}}},
            '"x"' + GAP,
        ),
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, None),
        ({"vllm_xargs": {"own": 1}}, None),
    ],
)
async def test_carried_requests_get_drafts_from_their_content(
    vllm: OpenAIStub, more: dict[str, Any], first: str | None
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Rome"}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    request = {
        "model": MODEL,
        "messages": [*history, {"role": "tool", "content": "Sunny.", "tool_call_id": "1"}],
        **more,
    }
    body = await sent_body(vllm, Generate(WirePrompt.of({**request, "temperature": 0}, exact=False)), app="mine")
    arguments = body.pop("vllm_xargs")
    assert arguments.get("teola_drafts", [None])[0] == first
    assert arguments["teola_app"] == "mine" and arguments.get("own") == more.get("vllm_xargs", {}).get("own")
    assert body == {key: value for key, value in {**request, "temperature": 0}.items() if key != "vllm_xargs"}


def test_pool_forget_and_reset_are_sent_to_the_server(vllm: OpenAIStub) -> None:
    with EnginePool.local(llm=OpenAIServer(base_url=vllm.base_url, model=MODEL, drafts=True)) as pool:
        pool.reset()
        pool.forget("t")
    arguments = [body["vllm_xargs"] for path, body in vllm.requests if path.endswith("/completions")]
    assert arguments == [{"teola_forget_all": 1}, {"teola_forget_tenant": "t"}]
