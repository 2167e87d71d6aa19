"""Tests of the engine for OpenAI-compatible servers, on vLLM's own API server and on one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.api_server import MODEL, ApiServer

from teola_plugin.engines.conformance import EngineConformance, collect, ends
from teola_plugin.engines.model_cache import llm_folder
from teola_plugin.engines.openai import OpenAIServer, wire
from teola_plugin.engines.openai.http import refusal_in
from teola_plugin.engines.profiles import calibrate
from teola_plugin.errors import EngineError, EngineUnavailable, RequestTooLarge
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import (
    UNKNOWN,
    Done,
    Failed,
    Generate,
    Message,
    Piece,
    Prompt,
    Request,
    Sampling,
    Warmup,
)

K = PrimitiveKind
LONG = "A generator is a function that yields. " * 20


def chat(text: str, **options: Any) -> Generate:
    return Generate(Prompt((Message("user", text),)), Sampling(**{"max_tokens": 6, **options}))


def openai_request(text: str, **options: Any) -> Generate:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}
    prompt = wire.WirePrompt.of({**body, **options}, exact=False)
    return Generate(prompt, prompt.sampling)


async def results_of(engine: OpenAIServer, *payloads: Any, stream: bool = False) -> list[Any]:
    kinds = [K.PARTIAL_PREFILLING if isinstance(p, Warmup) else K.PREFILLING for p in payloads]
    batch = [Request(f"r{i}", k, p, stream=stream) for i, (k, p) in enumerate(zip(kinds, payloads, strict=True))]
    found = ends(await collect(engine, batch), batch)
    return [end.value if isinstance(end := found[r.id], Done) else end.error for r in batch]


@pytest.fixture
def url(vllm_api: ApiServer) -> str:
    return vllm_api.base_url


@pytest.mark.vllm
class TestOpenAIServer(EngineConformance):
    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> None:
        self.url = url

    async def make(self) -> OpenAIServer:
        return OpenAIServer(base_url=self.url, model=MODEL, prefix_caching=True, priorities=True)

    def payloads(self, kind: PrimitiveKind) -> list[Any]:
        if kind is K.PARTIAL_PREFILLING:
            return [Warmup(Prompt((Message("user", f"{LONG}{UNKNOWN}"),))), Warmup(Prompt(text="one two"))]
        if kind in (K.PREFILLING, K.FULL_PREFILLING):
            return [
                chat("What is a class?"),
                Generate(Prompt(text="def f("), Sampling(max_tokens=4)),
                openai_request("Hello?"),
            ]
        return []

    def bad_payload(self, kind: PrimitiveKind) -> Any:
        return chat("hello", temperature=-3.0)


@pytest.mark.vllm
class TestOnVllm:
    async def test_start_finds_the_only_model_and_its_length(self, url: str) -> None:
        engine = OpenAIServer(base_url=url + "/")
        await engine.start()
        try:
            assert (engine.model, engine.max_model_len) == (MODEL, 2048)
            versions = engine.versions()
            assert (versions["model"], versions["server"], versions["root"]) == (MODEL, "vllm", str(llm_folder()))
            assert not engine.profile.prefix_caching, "only where it is declared"
        finally:
            await engine.stop()

    async def test_wrong_model_raises_with_the_served_ones(self, url: str) -> None:
        with pytest.raises(EngineUnavailable, match=r"does not serve 'nope'; it has: demo"):
            await OpenAIServer(base_url=url, model="nope").start()

    async def test_warmed_prefix_is_cached_for_the_request(self, url: str) -> None:
        engine = OpenAIServer(base_url=url, prefix_caching=True)
        await engine.start()
        try:
            await engine.reset()
            [plain] = await results_of(engine, chat(LONG + "What is it?"))
            await engine.reset()
            [warmed] = await results_of(engine, Warmup(Prompt((Message("user", LONG + UNKNOWN),))))
            [generation] = await results_of(engine, chat(LONG + "What is it?"))
        finally:
            await engine.stop()
        assert plain.cached_tokens == 0 and plain.prompt_tokens > 100
        assert warmed.tokens <= plain.prompt_tokens
        assert generation.cached_tokens >= warmed.tokens - 64, "all but the last blocks"
        assert generation.text == plain.text

    async def test_dedicated_server_is_measured_once(
        self, url: str, vllm_api: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        measured, request_count = await self._measured(url, vllm_api)
        assert request_count > 10 and measured.is_measured(K.PREFILLING) and measured.is_measured(K.DECODING)
        assert measured.min_split_tokens == 48, "blocks of 32 tokens"
        kept, request_count = await self._measured(url, vllm_api)
        assert request_count == 0 and measured == kept

    async def _measured(self, url: str, vllm_api: ApiServer) -> tuple[EngineProfile, float]:
        """Return the kind of server that a new engine detects, and how many requests that took."""
        engine = OpenAIServer(base_url=url, prefix_caching=True)
        await engine.start()
        try:
            before = vllm_api.metric("vllm:request_success_total")
            found = await calibrate(engine)
            assert engine.versions()["version"]
            return found, vllm_api.metric("vllm:request_success_total") - before
        finally:
            await engine.stop()

    async def test_prefix_is_not_sent_unless_declared(self, url: str, vllm_api: ApiServer) -> None:
        engine = OpenAIServer(base_url=url)
        await engine.start()
        try:
            before = vllm_api.metric("vllm:request_success_total")
            [warmed] = await results_of(engine, Warmup(Prompt((Message("user", LONG + UNKNOWN),))))
            assert warmed.tokens == 0
            assert vllm_api.metric("vllm:request_success_total") == before
        finally:
            await engine.stop()

    @pytest.mark.parametrize("stop", [None, ["say"]])
    async def test_joined_stream_equals_whole_answer(self, url: str, stop: Any) -> None:
        engine = OpenAIServer(base_url=url, prefix_caching=True)
        await engine.start()
        more = {} if stop is None else {"stop": stop}
        try:
            await results_of(engine, openai_request(LONG, **more))  # from now on as much is cached for either
            [whole] = await results_of(engine, openai_request(LONG, **more))
            [joined] = await results_of(engine, openai_request(LONG, **more), stream=True)
        finally:
            await engine.stop()

        def seen(generation: Any) -> Any:
            data = json.loads(generation.response)
            return {**data, "id": "", "created": 0, "choices": [{**data["choices"][0], "stop_reason": None}]}

        assert seen(joined) == seen(whole)
        assert (joined.text, joined.finish_reason, joined.cached_tokens) == (
            whole.text,
            whole.finish_reason,
            whole.cached_tokens,
        )

    async def test_unread_request_is_sent_in_at_most_two_pieces(self, url: str) -> None:
        engine = OpenAIServer("llm", base_url=url)
        await engine.start()
        try:
            payload = chat("Say much.", max_tokens=40, ignore_eos=True)
            read = Request("read", K.PREFILLING, payload, stream=True)
            *pieces, done = [result async for result in engine.execute([replace(read, id="unread", unread=True)])]
            *streamed, same = [result async for result in engine.execute([read])]
        finally:
            await engine.stop()
        assert isinstance(done, Done) and isinstance(same, Done) and done.value.text == same.value.text
        assert len([one for one in pieces if isinstance(one, Piece) and one.text]) <= 2 < len(streamed)

    async def test_sampling_parameters_reach_the_server(self, url: str) -> None:
        engine = OpenAIServer(base_url=url)
        await engine.start()
        schema = json.dumps({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2})
        try:
            one, two, three, four, listed = await results_of(
                engine,
                chat("Tell me.", temperature=2.0, seed=1, ignore_eos=True, max_tokens=20),
                chat("Tell me.", temperature=2.0, seed=1, ignore_eos=True, max_tokens=20),
                chat("Tell me.", temperature=2.0, seed=2, ignore_eos=True, max_tokens=20),
                chat("Tell me.", ignore_eos=True, max_tokens=30),
                chat("Two numbers.", json_schema=schema, max_tokens=60),
            )
        finally:
            await engine.stop()
        assert one.text == two.text != three.text
        assert (four.completion_tokens, four.finish_reason) == (30, "length")
        assert len(json.loads(listed.text)) == 2

    async def test_refusal_of_server_fails_the_request_with_its_message(self, url: str) -> None:
        engine = OpenAIServer(base_url=url)
        await engine.start()
        try:
            large, wrong = await results_of(engine, chat("word " * 3000), openai_request("x", max_tokens=10**6))
        finally:
            await engine.stop()
        assert isinstance(large, RequestTooLarge) and "2048" in str(large)
        assert isinstance(wrong, EngineError) and "answered 400" in str(wrong) and "max_model_len" in str(wrong)
        refusal = refusal_in(wrong)
        assert refusal is not None and refusal.status == 400 and "max_model_len" in refusal.content

    async def test_cancelled_generation_ends_at_the_server(self, url: str, vllm_api: ApiServer) -> None:
        engine = OpenAIServer(base_url=url)
        await engine.start()
        endless = Request("endless", K.PREFILLING, chat("x", ignore_eos=True, max_tokens=1900), stream=True)
        try:
            async for result in engine.execute([endless]):
                if isinstance(result, Piece):
                    await engine.cancel("endless")
                else:
                    assert isinstance(result, Failed) and not result.error.retryable
            async with asyncio.timeout(30):
                while vllm_api.metric("vllm:num_requests_running"):
                    await asyncio.sleep(0.05)
        finally:
            await engine.stop()


Answer = tuple[int, str, float]


class Odd:
    """A server of our own whose answers a test decides: (status, content, seconds) by path."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {"/v1/models": (200, '{"data": [{"id": "m"}]}', 0.0)}
        self.requests: list[tuple[str, Any, str]] = []


@pytest.fixture
def odd() -> Iterator[tuple[Odd, str]]:
    state, over = Odd(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            state.requests.append((self.path, json.loads(body or "null"), self.headers.get("authorization") or ""))
            status, content, seconds = state.answers.get(self.path, (404, '{"detail": "Not Found"}', 0.0))
            over.wait(seconds)
            self.send_response(status)
            self.send_header("content-length", str(len(content.encode())))
            self.end_headers()
            self.wfile.write(content.encode())

        do_GET = do_POST = _answer

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield state, f"http://127.0.0.1:{server.server_port}/v1"
    over.set()
    server.shutdown()
    thread.join()
    server.server_close()


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("answer", "message", "again"),
    [
        ((500, '{"error": {"message": "on fire"}}', 0.0), "answered 500: on fire", True),
        ((429, '{"message": "slow down"}', 0.0), "answered 429: slow down", True),
        ((401, "no", 0.0), "answered 401: no.*api_key", False),
        ((400, '{"error": {"message": "maximum context length is 5"}}', 0.0), "context length is 5", False),
        ((200, '{"choices": []}', 0.0), "no completion", False),
        ((200, "<html>", 0.0), "no completion", False),
        ((200, "{}", 30.0), "did not answer in time.*timeout", False),
    ],
)
async def test_server_faults_are_reported_with_their_message(
    odd: tuple[Odd, str], answer: Answer, message: str, again: bool
) -> None:
    state, url = odd
    state.answers[CHAT] = answer
    seconds = answer[2]  # others answer at once, as far as the machine lets them
    engine = OpenAIServer(base_url=url, api_key="key", timeout=1.0 if seconds else 30.0)
    await engine.start()
    try:
        [error] = await results_of(engine, chat("hello"))
        [as_is] = await results_of(engine, openai_request("hello"))
    finally:
        await engine.stop()
    assert isinstance(error, EngineError) and re.search(message, str(error)), error
    assert error.retryable is again
    assert not as_is.retryable, "whoever sends a request of its own has its own rules"
    assert {given for _, _, given in state.requests} == {"Bearer key"}


async def test_server_without_tokenize_route_gets_no_prefixes(odd: tuple[Odd, str], caplog: Any) -> None:
    state, url = odd
    engine = OpenAIServer(base_url=url, prefix_caching=True)
    with caplog.at_level("WARNING"):
        await engine.start()
    try:
        assert not engine.profile.prefix_caching and "/tokenize is missing" in caplog.text
        request_count = len(state.requests)
        [warmed] = await results_of(engine, Warmup(Prompt(text=f"a{UNKNOWN}")))
        assert warmed.tokens == 0 and len(state.requests) == request_count
    finally:
        await engine.stop()


@pytest.fixture
async def slow(odd: tuple[Odd, str]) -> AsyncIterator[tuple[Odd, OpenAIServer]]:
    """Return a slow server that keeps prefixes, and its later requests."""
    state, url = odd
    reply = json.dumps({**json.loads(ONE_TOKEN), "usage": {"prompt_tokens": 3}})
    state.answers |= {"/tokenize": (200, '{"tokens": [1, 2, 3]}', 0.0), CHAT: (200, reply, 0.3)}
    engine = OpenAIServer(base_url=url, prefix_caching=True)
    await engine.start()
    state.requests.clear()
    yield state, engine
    await engine.stop()


COMPLETIONS = "/v1/completions"
ONE_TOKEN = json.dumps({"choices": [{"index": 0, "text": "x", "message": {"content": "x"}, "finish_reason": "length"}]})


def warm(name: str, text: str, tenant: str = "") -> Request:
    return Request(name, K.PARTIAL_PREFILLING, Warmup(Prompt((Message("user", text + UNKNOWN),))), tenant=tenant)


async def test_equal_concurrent_prefixes_are_sent_once(slow: tuple[Odd, OpenAIServer]) -> None:
    state, engine = slow
    batch = [warm("a", LONG), warm("b", LONG), warm("another's", LONG, tenant="t")]
    results = await collect(engine, batch)
    assert {r.request_id for r in results if isinstance(r, Done) and r.value.tokens == 3} == {r.id for r in batch}
    sent = [body for _, body, _ in state.requests]
    assert len(sent) == 2 and {body.get("cache_salt") for body in sent} == {None, "t"}
    assert all((body["messages"], body["max_tokens"]) == ([{"role": "user", "content": LONG}], 1) for body in sent)
    await collect(engine, [warm("later", LONG)])
    assert len(state.requests) == 3, "it may be forgotten by then"


async def test_cancelled_prefix_continues_for_other_requests(slow: tuple[Odd, OpenAIServer]) -> None:
    state, engine = slow
    first = asyncio.create_task(collect(engine, [warm("first", LONG)]))
    second = asyncio.create_task(collect(engine, [warm("second", LONG)]))
    await asyncio.sleep(0.1)
    await engine.cancel("first")
    [failed], [done] = await first, await second
    assert isinstance(failed, Failed) and isinstance(done, Done) and done.value.tokens == 3
    assert len(state.requests) == 1


async def test_prefix_is_skipped_while_its_prompt_runs(slow: tuple[Odd, OpenAIServer]) -> None:
    _, engine = slow
    whole = Request("whole", K.PREFILLING, openai_request(LONG + "What is it?"))
    results = await collect(engine, [whole, warm("its beginning", LONG), warm("another", "Something else. ")])
    tokens = {r.request_id: r.value.tokens for r in results if isinstance(r, Done) and r.request_id != "whole"}
    assert tokens == {"its beginning": 0, "another": 3}


@pytest.mark.parametrize(
    ("options", "is_measured"),
    [({}, False), ({"calibrate": True}, True), ({"prefix_caching": True, "calibrate": False}, False)],
)
async def test_server_is_measured_only_if_declared(
    odd: tuple[Odd, str], options: Any, is_measured: bool, caplog: Any
) -> None:
    state, url = odd
    state.answers |= {"/tokenize": (200, '{"tokens": [1]}', 0.0), COMPLETIONS: (200, ONE_TOKEN, 0.0)}
    engine = OpenAIServer(base_url=url, **options)
    await engine.start()
    try:
        with caplog.at_level("WARNING"):
            profile = await calibrate(engine, fresh=True)
    finally:
        await engine.stop()
    assert any(path == COMPLETIONS for path, _, _ in state.requests) is is_measured
    assert not profile.curves and ("does not tell how many tokens" in caplog.text) is is_measured


@pytest.mark.parametrize(
    ("options", "is_dedicated", "paths"),
    [
        ({}, False, ["/v1/models"]),
        ({"model": "echo", "check": False}, False, []),
        ({"dedicated": True, "calibrate": False}, True, ["/v1/models", "/tokenize", CHAT, CHAT]),
        ({"dedicated": True, "prefix_caching": False}, True, ["/v1/models"]),
        ({"prefix_caching": True, "calibrate": False}, True, ["/v1/models", "/tokenize", CHAT, CHAT]),
    ],
    ids=str,
)
async def test_extra_requests_go_only_to_declared_dedicated_server(
    odd: tuple[Odd, str], options: Any, is_dedicated: bool, paths: list[str]
) -> None:
    state, url = odd
    state.answers |= {"/tokenize": (200, '{"tokens": [1]}', 0.0), CHAT: (200, ONE_TOKEN, 0.0)}
    engine = OpenAIServer(base_url=url, **options)
    await engine.start()
    try:
        await calibrate(engine, fresh=True)
        [warmed] = await collect(engine, [warm("its beginning", LONG)])
    finally:
        await engine.stop()
    assert engine.profile.dedicated is is_dedicated and isinstance(warmed, Done)
    sent = [path for path, _, _ in state.requests if path not in ("/version", "/metrics")]
    assert sent[: len(paths)] == paths
    assert (len(sent) > len(paths)) is engine.profile.prefix_caching, "a prefix goes to a server that keeps it"


async def test_stream_that_breaks_off_fails_the_request(odd: tuple[Odd, str]) -> None:
    state, url = odd
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "Hel"}}]})
    state.answers[CHAT] = (200, f'data: {chunk}\n\ndata: {{"error": {{"message": "out of memory"}}}}\n\n', 0.0)
    engine = OpenAIServer(base_url=url)
    await engine.start()
    try:
        [error] = await results_of(engine, chat("hello"), stream=True)
    finally:
        await engine.stop()
    assert isinstance(error, EngineError) and "broke off: out of memory" in str(error)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((200, '{"data": [{"id": "a"}, {"id": "b"}]}', 0.0), "several models, or none; it has: a, b"),
        ((401, "who are you", 0.0), "answered 401: who are you"),
    ],
)
async def test_unusable_model_lists_raise_at_start(odd: tuple[Odd, str], models: Answer, message: str) -> None:
    odd[0].answers["/v1/models"] = models
    with pytest.raises(EngineUnavailable, match=message):
        await OpenAIServer(base_url=odd[1]).start()


async def test_start_without_a_server_raises() -> None:
    with pytest.raises(EngineUnavailable, match=r"no server answers at http://127.0.0.1:9/v1.*start the server"):
        await OpenAIServer(base_url="http://127.0.0.1:9/v1").start()


def test_prefix_ends_at_the_unknown_part_of_a_prompt() -> None:
    blocks = [{"type": "text", "text": f"a {UNKNOWN} b"}, {"type": "text", "text": "c"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": blocks},
        {"role": "user", "content": "z"},
    ]
    path, body = wire.prefix(wire.WirePrompt.of({"model": "m", "messages": messages, "top_p": 0.5}, exact=False), "m")
    known = {"role": "user", "content": [{"type": "text", "text": "a "}]}
    assert (path, body) == ("chat/completions", {"model": "m", "messages": [messages[0], known]})
    assert wire.prefix(Prompt(text=f"x{UNKNOWN}y"), "m") == ("completions", {"model": "m", "prompt": "x"})


def test_whole_answer_split_into_chunks_joins_to_itself() -> None:
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    whole = {
        "id": "1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "usage": {"prompt_tokens": 3},
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
    }
    chunks = wire.Chunks()
    for chunk in wire.chunks_of(json.dumps(whole)):
        chunks.add(chunk)
    assert "".join(map(chunks.text, wire.chunks_of(json.dumps(whole)))) == "Hello"
    assert json.loads(chunks.response(whole)) == whole
