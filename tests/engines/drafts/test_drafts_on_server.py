"""Tests of a stock `vllm serve` with the two flags of docs/drafts.md: it writes what a server without them writes."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines.drafts.draft_cases import DraftCase, cases, drafts_of_case
from support.api_server import MODEL, ApiServer, api_server
from support.private_names import ROOT

from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.graph import GAP, PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Generate, Message, Prompt, Request, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.long]
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def documented_flags() -> list[str]:
    text = (ROOT / "docs/drafts.md").read_text()
    command = re.search(r"^vllm serve my/model(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert command is not None
    return shlex.split(command[1].replace("\\\n", " "))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("drafting"), documented_flags()) as server:
        yield server


@asynccontextmanager
async def engine(server: ApiServer, **options: Any) -> AsyncIterator[OpenAIServer]:
    made = OpenAIServer(base_url=server.base_url, model=MODEL, **options)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def answered(llm: OpenAIServer, payload: Generate, drafts: Sequence[str] = (), **about: Any) -> Any:
    name = f"r{next(_numbers)}"
    async for result in llm.execute([Request(name, PrimitiveKind.PREFILLING, payload, drafts=tuple(drafts), **about)]):
        if isinstance(result, Failed):
            return repr(result.error)
        if isinstance(result, Done):
            return result.value.text, result.value.finish_reason, result.value.completion_tokens
    raise AssertionError(name)


_numbers = iter(range(1 << 30))


async def test_answers_equal_those_of_a_server_without_drafts(vllm_api: ApiServer, drafting: ApiServer) -> None:
    """Side by side, sampled ones with seeds among them, drafts of all kinds."""
    given = [case for case in cases(3, 120) if case.payload.sampling.greedy or case.payload.sampling.seed is not None]
    async with engine(vllm_api) as plain, engine(drafting, drafts=True) as drafted:
        wanted = [await answered(plain, case.payload) for case in given]

        async def one(case: DraftCase, text: Any) -> Any:
            drafts = drafts_of_case(case, text[0] if isinstance(text, tuple) else "")
            stream = len(drafts) % 2 == 0
            return await answered(drafted, case.payload, drafts, app="a", tenant="t", stream=stream)

        before, found = drafting.metric(ACCEPTED), []
        for at in range(0, len(given), 8):
            batch = zip(given[at : at + 8], wanted[at : at + 8], strict=True)
            found += await asyncio.gather(*(one(case, text) for case, text in batch))
    seeded = [case.payload.sampling.greedy for case in given]
    assert [f for f, g in zip(found, seeded, strict=True) if g] == [w for w, g in zip(wanted, seeded, strict=True) if g]
    assert drafting.metric(ACCEPTED) - before > 200


def generate(text: str, **sampling: Any) -> Generate:
    return Generate(Prompt((Message("user", text),)), Sampling(max_tokens=40, **sampling))


async def test_correct_labels_and_forms_are_accepted(drafting: ApiServer) -> None:
    async with engine(drafting, drafts=True) as llm:
        question = generate("Is the moon made of cheese?")
        text, _, tokens = await answered(llm, question)
        halves = text[: len(text) // 2] + GAP

        async def accepted(*drafts: str) -> float:
            before = drafting.metric(ACCEPTED)
            assert (await answered(llm, question, drafts))[0] == text
            return drafting.metric(ACCEPTED) - before

        alone = await accepted()
        assert await accepted("Certainly not." + GAP, text + GAP) >= max(alone, tokens - 3)
        assert await accepted("Certainly not." + GAP, halves) >= alone
        schema = {"type": "object", "properties": {"is": {"enum": [text]}}, "required": ["is"]}
        shaped = generate("Is the moon made of cheese?", json_schema=json.dumps(schema))
        assert json.loads((await answered(llm, shaped, [json.dumps({"is": text}) + GAP]))[0]) == {"is": text}


async def test_outputs_of_a_named_tenant_are_drafted_until_forgotten(drafting: ApiServer) -> None:
    async with engine(drafting, drafts=True) as llm:

        async def accepted(tenant: str, words: str = "") -> float:
            before = drafting.metric(ACCEPTED)
            question = Generate(Prompt(text=words or unlike_its_prompt), Sampling(max_tokens=24, ignore_eos=True))
            await answered(llm, question, tenant=tenant)
            return drafting.metric(ACCEPTED) - before

        prompts = ("Lambs", "def", "The sea is", "Once upon a time", "A class", "x = 3", "Why", "Numbers")
        gains = {words: (await accepted("one", words), await accepted("one", words)) for words in prompts}
        unlike_its_prompt, (first, again) = max(gains.items(), key=lambda gain: gain[1][1] - gain[1][0])
        assert again > first
        await llm.forget("one")
        assert await accepted("one") == first, "nothing is left of what was written"
        assert await accepted("one") == again
        assert await accepted("another") == await accepted("") == await accepted("") == first
        await llm.reset()
        assert await accepted("one") == first and await accepted("another") == first


@pytest.mark.parametrize("extra", [{"min_p": 0.1, "temperature": 0.7}, {"logit_bias": {"5": 1}}])
async def test_request_that_vllm_refuses_with_drafts_gets_400(drafting: ApiServer, extra: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, **extra}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{drafting.base_url}/chat/completions", json=body)
    assert answer.status_code == 400 and "speculative" in answer.text


async def test_server_answers_with_any_content_of_vllm_xargs(drafting: ApiServer) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "temperature": 0}
    async with httpx.AsyncClient() as client:
        answers = [
            await client.post(f"{drafting.base_url}/completions", json={**body, "vllm_xargs": given})
            for given in ({}, {"teola_drafts": "text"}, {"teola_drafts": [3, "a"]}, {"teola_app": 1, "x": [1]})
        ]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert "nothing is drafted" not in Path(drafting.log).read_text()
