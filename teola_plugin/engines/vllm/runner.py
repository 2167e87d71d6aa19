"""The requests that the host runs in vLLM: generate, warm a prefix up, empty the prefix cache.

Prompts become token ids here, whole or up to the first unknown slot: the tokenizer is in the engine's host.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from teola_plugin.engines.vllm.cache import CachedPrefixes
from teola_plugin.engines.vllm.drafts.options import extra_args
from teola_plugin.engines.vllm.drafts.worker import FORGET
from teola_plugin.engines.vllm.link import CallProposer, Delta, RequestAnswer, Reset, Submit
from teola_plugin.engines.vllm.scheduler import KEY
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.requests.payloads import (
    UNKNOWN,
    Generate,
    Generation,
    Prompt,
    Sampling,
    Warmed,
    Warmup,
    lone_surrogate,
)
from teola_plugin.shims.vllm import drafts, stats, streams
from teola_plugin.shims.vllm.llm import limits_of, token_prompt

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine
    from vllm.sampling_params import SamplingParams


_LONG_TEXT = 20_000
"""Characters from which tokenising goes to a thread: about 5 ms of work, more than a token stream should wait."""
_MAX_UNSTABLE = 8
"""Maximum number of tokens at the end of a prefix that count as unstable."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The ids of a prompt, or of its beginning."""

    prompt: Prompt
    text: str
    """The prompt as the chat template renders it."""
    ids: list[int]
    encoding: Any = None
    """The encoding of a fast tokenizer, which knows the positions of tokens in the text; None for others."""

    def ends(self, block: int) -> list[int] | None:
        """Return the characters of `prompt.flat()` before the end of each block of tokens; None if unknown."""
        if self.encoding is None:
            return None
        return block_ends(self.prompt, self.text, self.encoding, len(self.ids), block)


class PromptTokens:
    """The token ids that vLLM's own front ends would make of a prompt.

    Messages go through the tokenizer's chat template; plain text, and messages where there is no template, are
    encoded with the tokenizer's usual special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    async def encode_whole(self, prompt: Prompt) -> EncodedPrompt:
        """Encode a whole prompt, every character as it is. Raise ValueError if the template refuses it."""
        text, special = self.render(prompt)
        return await _run_encoder(len(text), lambda: self._encode(prompt, text, text, special))

    async def encode_prefix(self, prompt: Prompt) -> EncodedPrompt:
        """Return the tokens before the first placeholder, without the last ones that more text could change.

        The result is always a correct prefix, only more or less long: a full prefilling sends all token ids of the
        prompt, and finds as many blocks cached as agree.
        """
        text, special = self.render(prompt)
        known_text, unknown, _ = text.partition(UNKNOWN)
        return await _run_encoder(
            len(known_text), lambda: self._encode(prompt, text, known_text, special, stable=bool(unknown))
        )

    def render(self, prompt: Prompt) -> tuple[str, bool]:
        """Return the prompt's text, and if special tokens are still to be added (a chat template writes its own)."""
        if not prompt.messages or not self._has_template:
            return prompt.flat(), True
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        tools = {"tools": json.loads(prompt.tools)} if prompt.tools else {}
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools)
        except Exception as error:  # jinja's errors: templates raise for roles that they do not know
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return str(text), False

    def _encode(self, prompt: Prompt, text: str, part: str, special: bool, *, stable: bool = False) -> EncodedPrompt:
        """Encode a part of a text. With `stable`, leave its last word out: more text may extend it."""
        try:
            return self._encode_part(prompt, text, part, special, stable)
        except Exception as error:  # tokenizers do not name the fault
            if fault := lone_surrogate(part):
                raise UnicodeError(fault) from error
            raise

    def _encode_part(self, prompt: Prompt, text: str, part: str, special: bool, stable: bool) -> EncodedPrompt:
        """Encode a part of a text; with `stable`, leave out its last tokens, which more text could change."""
        if self._fast is None:
            ids = list(self._tokenizer.encode(part, add_special_tokens=special))
            return EncodedPrompt(prompt, text, ids[:-_MAX_UNSTABLE] if stable else ids)
        encoding = self._fast.encode(part, add_special_tokens=special)  # stateless: safe from several threads
        ids = list(encoding.ids)
        return EncodedPrompt(prompt, text, ids[: _stable_length(encoding.word_ids)] if stable else ids, encoding)


def _stable_length(words: Sequence[int | None]) -> int:
    """Return the number of tokens before the last word; a special token (None) is a boundary and stays."""
    keep = len(words)
    if not keep or words[-1] is None:
        return keep
    while keep and len(words) - keep < _MAX_UNSTABLE and words[keep - 1] == words[-1]:
        keep -= 1
    return keep


async def _run_encoder(characters: int, encode: Callable[[], EncodedPrompt]) -> EncodedPrompt:
    return encode() if characters < _LONG_TEXT else await asyncio.to_thread(encode)


class TextSpan(NamedTuple):
    """The same text in what a chat template rendered and in the flat text."""

    rendered: int
    flat: int
    length: int


def block_ends(prompt: Prompt, rendered: str, encoding: Any, count: int, block: int) -> list[int] | None:
    """Return the characters of the flat text before the end of each whole block of the first `count` tokens.

    `encoding` is that of `rendered`, by a fast tokenizer. None if the template changes the text of a message.
    """
    spans = _spans(prompt, rendered)
    if spans is None:
        return None
    ends, at = [], 0
    for last in range(block - 1, count, block):
        characters = encoding.token_to_chars(last)  # None for tokens without text
        if characters is not None:
            at = max(at, _flat_position(spans, characters[1]))
        ends.append(at)
    return ends


def _spans(prompt: Prompt, rendered: str) -> list[TextSpan] | None:
    """Return the spans of messages. Text that a template writes between them belongs to the message before."""
    flat = prompt.flat()
    if rendered == flat:
        return [TextSpan(0, 0, len(flat))]
    spans, end = [], 0
    start = len(flat) - len(Prompt(prompt.messages).flat())  # after the tools
    for message in prompt.messages:
        start += len(message.role) + 2
        text = message.content.strip()  # as most templates do
        at = rendered.find(text, end)
        if at < 0:
            return None
        spans.append(TextSpan(at, start + message.content.find(text), len(text)))
        end, start = at + len(text), start + len(message.content) + 1
    return spans


def _flat_position(spans: Sequence[TextSpan], rendered: int) -> int:
    """Return the number of characters of the flat text that come before a position in the rendered text."""
    before = [span for span in spans if span.rendered <= rendered]
    if not before:
        return 0
    last = before[-1]
    return last.flat + min(last.length, rendered - last.rendered)


_BACKGROUND_PRIORITY = 1 << 40
"""Added to the priority of background work: it comes after all requests that a caller waits for."""


class PromptTooLong(Exception):
    """The prompt leaves no room for a single output token."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens; the model takes {limit} with its output (max_model_len).")
        self.tokens, self.limit = tokens, limit


class RequestRunner:
    """A runner of requests. `send` takes pieces before a request's answer; `prefixes` records the prompts."""

    def __init__(
        self,
        llm: AsyncLLMEngine,
        send: Callable[[Delta], None],
        prefixes: CachedPrefixes | None = None,
        *,
        drafts: bool = False,
    ) -> None:
        self._llm, self._send, self._prefixes, self._drafts = llm, send, prefixes, drafts
        self._tokens = PromptTokens(llm.get_tokenizer())
        limits = limits_of(llm)
        self._limit, self._block = limits.max_model_len, limits.block_size
        self._can_report_rarely = not streams.lacking()
        self._outputs: dict[int, Output] = {}
        self._generating = 0
        self._lengths: dict[int, tuple[str, int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def kv_tokens(self) -> dict[str, int]:
        """Return the tokens that generations hold in the KV cache, by app; those that wait for a slot hold none."""
        by_app: dict[str, int] = {}
        for app, tokens in self._lengths.values():
            by_app[app] = by_app.get(app, 0) + tokens
        return by_app

    async def run(self, submit: Submit) -> RequestAnswer:
        """Run a request. Raises `PromptTooLong`, `ValueError` for what vLLM cannot do, and vLLM's own errors."""
        match submit.payload:
            case Generate():
                return await self._generate(submit, submit.payload)
            case Warmup():
                return await self._warm_up(submit, submit.payload)
            case other:
                raise ValueError(f"an LLM takes Generate or Warmup, not {type(other).__name__}")

    async def reset(self, reset: Reset) -> RequestAnswer:
        """Empty the prefix cache, and forget outputs to draft from.

        vLLM refuses while requests run, so this tries again until they are done.
        """
        deadline = time.monotonic() + reset.timeout
        while await self._llm.reset_prefix_cache() is False:
            if time.monotonic() > deadline:
                return RequestAnswer(reset.id, False)
            await asyncio.sleep(0.01)
        if self._prefixes is not None:
            self._prefixes.cleared()  # vLLM's own event comes with its next step
        if self._drafts:
            await self._llm.collective_rpc(FORGET, args=(None,))
        return RequestAnswer(reset.id, True)

    async def call_proposer(self, call_proposer: CallProposer) -> RequestAnswer:
        """Call a method of the worker that concerns drafts. Return the result of the first worker."""
        values = await self._llm.collective_rpc(call_proposer.method, args=(call_proposer.argument,))
        return RequestAnswer(call_proposer.id, values[0])

    async def _generate(self, submit: Submit, payload: Generate) -> RequestAnswer:
        """Generate. Output that would pass `max_model_len` ends there with finish reason `length`, as in vLLM."""
        request_output = Output(submit, self._send, self._llm, merges_unread=self._can_report_rarely)
        self._outputs[submit.id] = request_output
        try:
            return await self._stream_output(submit, payload, request_output)
        finally:
            del self._outputs[submit.id]

    async def _stream_output(self, submit: Submit, payload: Generate, request_output: Output) -> RequestAnswer:
        """Run a generation in vLLM, sending its pieces on, and return the answer with its value and figures.

        Raise `PromptTooLong`, and ValueError if vLLM ends the request for another reason than `stop` or `length`.
        """
        ids = self._check_length(await self._tokens.encode_whole(payload.prompt), submit)
        params = sampling_params(payload.sampling)
        if self._drafts and payload.sampling.greedy:
            params.extra_args = extra_args(submit.drafts, submit.app, submit.tenant)
        request_output.set_reporting(ids, params)
        self._begin_generation()
        try:
            async for output in self._stream(ids, params, submit, request_output.name):
                request_output.add(output)
                self._lengths[submit.id] = submit.app, len(ids) + request_output.tokens
        finally:
            self._lengths.pop(submit.id, None)
            self._end_generation()
        if request_output.reason not in ("stop", "length"):
            raise ValueError(f"vLLM ended the request with {request_output.reason!r}")
        drafted, accepted = request_output.verified if self._drafts else (0, 0)
        accepted = min(accepted, max(0, request_output.tokens - 1))  # vLLM counts those after the end, too
        value = Generation(
            request_output.text,
            request_output.reason,
            len(ids),
            request_output.tokens,
            request_output.cached,
            drafted,
            accepted,
            request_output.stop_sequence,
        )
        stats = {
            "first_token_s": request_output.first,
            "seconds": request_output.seconds,
            "preempted": request_output.preempted,
        }
        return RequestAnswer(
            submit.id, value, stats | {"drafted": drafted, "accepted": accepted}, request_output.cuts()
        )

    def announce_reader(self, wire: int) -> None:
        """Send the pieces of a request from now on."""
        if (request_output := self._outputs.get(wire)) is not None:
            request_output.announce_reader()

    async def _warm_up(self, submit: Submit, payload: Warmup) -> RequestAnswer:
        """Prefill whole blocks of a prefix. While others run, in growing prefixes, so that they go on in between."""
        start = time.perf_counter()
        ids = self._check_length(await self._tokens.encode_prefix(payload.prompt), submit)
        total = len(ids) // self._block * self._block
        chunk = max(self._block, submit.chunk // self._block * self._block)
        done = cached = 0
        while done < total:
            chunk_start, all_cached = time.perf_counter(), cached == done
            done = min(total, done + chunk) if self._generating else total
            async for output in self._stream(ids[:done], _only_prefill(), submit, f"{submit.id}-{done}"):
                if all_cached:  # all of it was cached so far; vLLM computes the last cached block again
                    cached_tokens = output.num_cached_tokens or 0
                    cached = done if cached_tokens >= done - self._block else max(cached, cached_tokens)
            if done < total:
                await self._give_way(time.perf_counter() - chunk_start)
        return RequestAnswer(submit.id, Warmed(done, cached), {"seconds": time.perf_counter() - start})

    async def _give_way(self, seconds: float) -> None:
        """Leave the replica to the others for as long as the last chunk took from them, or until they are done."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            pass

    def _stream(self, ids: list[int], params: SamplingParams, submit: Submit, name: str) -> AsyncIterator[Any]:
        """Submit token ids to vLLM with the request's priority and hints, and return the stream of its outputs."""
        prompt = token_prompt(ids, submit.tenant)
        if submit.hints is not None:
            params.extra_args = {**(params.extra_args or {}), KEY: submit.hints}
        priority = submit.priority + (_BACKGROUND_PRIORITY if submit.background else 0)
        return self._llm.generate(prompt, params, name, priority=priority)  # type: ignore[no-any-return]

    def _check_length(self, encoded: EncodedPrompt, submit: Submit) -> list[int]:
        """Return a prompt's token ids, and announce its blocks to the record of the prefix cache. Raise
        `PromptTooLong`."""
        ids = encoded.ids
        if len(ids) >= self._limit:
            raise PromptTooLong(len(ids), self._limit)
        if self._prefixes is not None and (ends := encoded.ends(self._block)) is not None:
            names = block_hashes(encoded.prompt.known_prefix(), tenant=submit.tenant)
            self._prefixes.expect(ids, ends, names, submit.tenant)
        return ids

    def _begin_generation(self) -> None:
        self._generating += 1
        self._idle.clear()

    def _end_generation(self) -> None:
        """Count a generation that has ended; after the last one, warm-ups that gave way go on."""
        self._generating -= 1
        if not self._generating:
            self._idle.set()


def sampling_params(sampling: Sampling) -> SamplingParams:
    """Return vLLM's form of `sampling`. Raises `ValueError` for values that vLLM refuses."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    schema = StructuredOutputsParams(json=sampling.json_schema) if sampling.json_schema else None
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        ignore_eos=sampling.ignore_eos,
        structured_outputs=schema,
        output_kind=RequestOutputKind.DELTA,
    )


def _only_prefill() -> SamplingParams:
    """Return the parameters for one token, the least that vLLM accepts; it is discarded."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


class Output:
    """The output of one generation. `merges_unread` is True if vLLM can merge pieces that nobody reads.

    A reader that comes later gets the same pieces as one from the start.
    """

    def __init__(
        self, submit: Submit, send: Callable[[Delta], None], llm: AsyncLLMEngine, *, merges_unread: bool
    ) -> None:
        self._wire, self._read, self._late = submit.id, submit.stream, submit.late
        self._send, self._llm, self._can_report_rarely = send, llm, merges_unread
        self._start = time.perf_counter()
        self._prompt: Sequence[int] = ()
        self._params: Any = None
        self._ids: list[int] = []
        self._unsent_pieces: list[Delta] = []
        """Pieces that were not sent, as the stream has no reader."""
        self._reports_rarely = False
        self._sent_characters = 0
        """Number of characters that were sent."""
        self.text, self.tokens, self.cached, self.first = "", 0, 0, 0.0
        self.reason: str | None = None
        self.stop_sequence = ""
        self.verified, self.preempted = (0, 0), 0

    @property
    def name(self) -> str:
        """The id of the request in vLLM."""
        return str(self._wire)

    @property
    def seconds(self) -> float:
        """The seconds since the request arrived."""
        return time.perf_counter() - self._start

    def set_reporting(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Set how often vLLM reports on the request."""
        self._prompt, self._params = prompt, params
        self._reports_rarely = self._can_report_rarely and not self._read
        if self._reports_rarely:
            streams.seldom(params)

    def announce_reader(self) -> None:
        """Send the pieces from now on, beginning with those that were not sent."""
        self._read = True
        self._catch_up()
        for piece in self._unsent_pieces:
            self._send_piece(piece)
        self._unsent_pieces = []

    def add(self, output: Any) -> None:
        """Add a `RequestOutput`: new text, and in the last one the reason of the end."""
        piece = output.outputs[0]
        first = not self.tokens
        if first:
            self.first = self.seconds
            self.cached = output.num_cached_tokens or 0
        self.text += piece.text
        self._ids += piece.token_ids
        self.tokens += len(piece.token_ids)
        if first or self._read:  # the first piece is always sent: it ends the prefilling
            self._send_piece(Delta(self._wire, self.text[self._sent_characters :], len(piece.token_ids)))
        elif not self._reports_rarely:
            self._unsent_pieces.append(Delta(self._wire, piece.text, len(piece.token_ids)))
        self._catch_up()
        self.reason = piece.finish_reason
        if self.reason is not None:
            self.stop_sequence = piece.stop_reason if isinstance(piece.stop_reason, str) else ""  # else a token's id
            self.preempted = stats.preemptions(output)
            self.verified = drafts.verified(piece)

    def cuts(self) -> tuple[int, ...]:
        """Return the lengths of the pieces of the text; () if no reader can come later."""
        if self._read or not self._late:
            return ()
        if self._reports_rarely:
            return tuple(map(len, self._texts()))
        return (self._sent_characters, *(len(piece.text) for piece in self._unsent_pieces))

    def _catch_up(self) -> None:
        """If there is a reader and vLLM has reported the first token only: send what it has written meanwhile.

        From now on vLLM reports every token.
        """
        if not (self._read and self._reports_rarely and self.tokens):
            return
        self._reports_rarely = False
        reported = len(self._ids)
        missing = streams.every_token(self._llm, self.name)
        self._ids += missing
        self.tokens += len(missing)
        for text in self._texts()[reported:]:
            self._send_piece(Delta(self._wire, text, 1))

    def _texts(self) -> list[str]:
        return streams.texts(self._llm.get_tokenizer(), self._prompt, self._params, self._ids)

    def _send_piece(self, piece: Delta) -> None:
        self._sent_characters += len(piece.text)
        self._send(piece)
