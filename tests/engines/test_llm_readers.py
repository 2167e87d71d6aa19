"""Tests of requests without a reader on real vLLM: two outputs each, and a late reader gets all of the text.

The pieces may differ, because vLLM joins tokens when its front end is busy.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from teola_plugin.graph import PrimitiveKind as K
from teola_plugin.requests.payloads import Done, Generate, Message, Piece, Prompt, Request, Sampling

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

pytestmark = pytest.mark.vllm

_numbers = itertools.count(1)
CASES = {
    "greedy": Sampling(max_tokens=48, ignore_eos=True),
    "sampled": Sampling(max_tokens=40, temperature=0.9, seed=3),
    "a stop string": Sampling(max_tokens=48, stop=(" the context", "zzz")),
    "one token": Sampling(max_tokens=1),
}


def make_request(sampling: Sampling) -> Request:
    prompt = Prompt((Message("user", "Grüße, 東京 🙂: answer in many words, from the context."),))
    return Request(f"reader{next(_numbers)}", K.PREFILLING, Generate(prompt, sampling), late=True)


async def read_all(llm: SessionLlm, request: Request, listen_after: int | None = None) -> tuple[list[Piece], Done]:
    """Read requests to the end.

    `listen_after`: the step of other requests after which a reader comes; 0 is before all.
    """
    pieces, ended = list[Piece](), list[Done]()

    async def read() -> None:
        async for result in llm.engine.execute([request]):
            if isinstance(result, Piece):
                pieces.append(result)
            else:
                assert isinstance(result, Done)
                ended.append(result)

    reading = asyncio.create_task(read())
    if listen_after == 0:
        await asyncio.sleep(0)
    while listen_after and not pieces and not reading.done():
        await asyncio.sleep(0)
    if listen_after is not None:
        await asyncio.sleep(0.004 * listen_after)
        llm.engine.announce_reader(request.id)
        llm.engine.announce_reader("nobody's")
    await reading
    return pieces, ended[0]


def test_unread_request_sends_first_piece_and_end_only(session_llm: SessionLlm) -> None:
    request = make_request(CASES["greedy"])
    [first], done = session_llm.run(read_all(session_llm, request))
    streamed, same = session_llm.run(read_all(session_llm, replace(make_request(CASES["greedy"]), stream=True)))
    assert done.value == replace(same.value, cached_tokens=done.value.cached_tokens)
    assert first.tokens >= 1 and done.value.text.startswith(first.text) and len(streamed) > 4
    assert 0 < done.stats["first_token_s"] < done.stats["seconds"] / 4, "the first token is told when it is there"
    nobody, last = session_llm.run(read_all(session_llm, replace(make_request(CASES["greedy"]), late=False)))
    assert len(nobody) == 1 and last.cuts == () and done.cuts


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_late_reader_gets_the_whole_stream(session_llm: SessionLlm, case: Sampling) -> None:
    _, same = session_llm.run(read_all(session_llm, replace(make_request(case), stream=True)))
    for after in (0, 1, 5):
        pieces, done = session_llm.run(read_all(session_llm, make_request(case), after))
        assert done.value == replace(same.value, cached_tokens=done.value.cached_tokens)
        if len(pieces) > 1:  # it may have ended by then
            assert "".join(piece.text for piece in pieces) == done.value.text
            assert sum(piece.tokens for piece in pieces) == done.value.completion_tokens
    _, done = session_llm.run(read_all(session_llm, make_request(case)))
    assert len(done.cuts) == done.value.completion_tokens, "a piece for each token"
    assert 0 <= len(done.value.text) - sum(done.cuts) < 20, "but for what is held back for stop strings"
