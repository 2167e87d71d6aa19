"""Outputs of a request that nobody reads: its first token and its end, until somebody does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from teola_plugin.shims.vllm.versions import missing, unset

NEEDED = (
    "vllm.sampling_params:SamplingParams.stream_interval",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.update",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.get_next_output_text",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.output_token_ids",
)
_SELDOM = 1 << 30
"""Tokens between two outputs: more than any answer has."""


def lacking() -> tuple[str, ...]:
    """`NEEDED`, and attributes of `AsyncLLM`, `OutputProcessor` and `RequestState`, as in 0.32: what is not there.

    Without them every token of every request is an output, as vLLM does by itself."""
    names = missing(*NEEDED)
    if names:
        return names
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    return (
        *unset(AsyncLLM, "output_processor"),
        *unset(OutputProcessor, "request_states", "external_req_ids"),
        *unset(RequestState, "stream_interval", "sent_tokens_offset", "detokenizer"),
    )


def seldom(params: Any) -> None:
    """Have a request told of its first token, at once, and of its end: `SamplingParams.stream_interval`, as in 0.32."""
    params.stream_interval = _SELDOM


def every_token(llm: Any, name: str) -> list[int]:
    """Have a request that was made `seldom` told of every token from now on.

    Return the tokens that it has written since its first, whose text comes with the next: vLLM does not count them
    again. Empty for a request that is unknown, or has ended.

    `AsyncLLM.output_processor.external_req_ids` and `request_states`, of a `RequestState` its `stream_interval`,
    `sent_tokens_offset` and `detokenizer`, as in 0.32."""
    processor, untold = llm.output_processor, []
    for inner in processor.external_req_ids.get(name, ()):
        state = processor.request_states.get(inner)
        if state is not None and state.sent_tokens_offset:
            untold += state.detokenizer.output_token_ids[state.sent_tokens_offset :]
            state.stream_interval = 1
    return untold


def texts(tokenizer: Any, prompt: Sequence[int], params: Any, written: Sequence[int]) -> list[str]:
    """The text of each token as vLLM would have told of it: `IncrementalDetokenizer.from_new_request`, and of what it
    makes `update` and `get_next_output_text`, as in 0.32. What is held back for stop strings is not in it."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = SimpleNamespace(request_id="", prompt_token_ids=list(prompt), prompt_embeds=None, sampling_params=params)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    pieces = []
    for token in written:
        detokenizer.update([token], False)
        pieces.append(str(detokenizer.get_next_output_text(False, True)))
    return pieces
