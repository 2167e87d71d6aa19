"""What the host does with vLLM for one request: generate, warm a prefix up, empty the prefix cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.vllm.cache import CachedPrefixes
from teola_plugin.engines.vllm.drafts.options import extra_args
from teola_plugin.engines.vllm.drafts.worker import FORGET
from teola_plugin.engines.vllm.link import Answer, Delta, Reset, Submit, Tell
from teola_plugin.engines.vllm.output import Output
from teola_plugin.engines.vllm.scheduler import KEY
from teola_plugin.engines.vllm.tokens import Encoded, PromptTokens
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.requests.payloads import Generate, Generation, Sampling, Warmed, Warmup
from teola_plugin.shims.vllm import streams
from teola_plugin.shims.vllm.llm import limits_of, token_prompt

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine
    from vllm.sampling_params import SamplingParams

_LAST = 1 << 40
"""Added to the priority of background work: after everything that somebody waits for."""


class PromptTooLong(Exception):
    """The prompt leaves no room for a single output token."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens; the model takes {limit} with its output (max_model_len).")
        self.tokens, self.limit = tokens, limit


class RequestRunner:
    """Runs requests. `send` takes what must reach the caller before a request's answer; `held` is told of prompts."""

    def __init__(
        self,
        llm: AsyncLLMEngine,
        send: Callable[[Delta], None],
        held: CachedPrefixes | None = None,
        *,
        drafts: bool = False,
    ) -> None:
        self._llm, self._send, self._held, self._drafts = llm, send, held, drafts
        self._tokens = PromptTokens(llm.get_tokenizer())
        limits = limits_of(llm)
        self._limit, self._block = limits.max_model_len, limits.block_size
        self._seldom = not streams.lacking()
        self._outputs: dict[int, Output] = {}
        self._generating = 0
        self._lengths: dict[int, tuple[str, int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def kv_tokens(self) -> dict[str, int]:
        """App -> tokens that its generations under way hold in the KV cache; those that wait for a place hold none."""
        found: dict[str, int] = {}
        for app, tokens in self._lengths.values():
            found[app] = found.get(app, 0) + tokens
        return found

    async def run(self, submit: Submit) -> Answer:
        """Raises `PromptTooLong`, `ValueError` for what vLLM cannot do, and vLLM's own errors."""
        match submit.payload:
            case Generate():
                return await self._generate(submit, submit.payload)
            case Warmup():
                return await self._warm_up(submit, submit.payload)
            case other:
                raise ValueError(f"an LLM takes Generate or Warmup, not {type(other).__name__}")

    async def reset(self, reset: Reset) -> Answer:
        """Empties the prefix cache; vLLM refuses while requests run, so this asks until they are done. Outputs to
        draft from are forgotten with it."""
        deadline = time.monotonic() + reset.timeout
        while await self._llm.reset_prefix_cache() is False:
            if time.monotonic() > deadline:
                return Answer(reset.id, False)
            await asyncio.sleep(0.01)
        if self._held is not None:
            self._held.cleared()  # vLLM itself tells with its next step
        if self._drafts:
            await self._llm.collective_rpc(FORGET, args=(None,))
        return Answer(reset.id, True)

    async def tell(self, tell: Tell) -> Answer:
        """A method of the worker, which is there where something is drafted; what the first worker returns."""
        found = await self._llm.collective_rpc(tell.method, args=(tell.argument,))
        return Answer(tell.id, found[0])

    async def _generate(self, submit: Submit, payload: Generate) -> Answer:
        """Output that would pass `max_model_len` ends there with finish reason `length`, as in vLLM itself."""
        written = Output(submit, self._send, self._llm, seldom=self._seldom)
        self._outputs[submit.id] = written
        try:
            return await self._write(submit, payload, written)
        finally:
            del self._outputs[submit.id]

    async def _write(self, submit: Submit, payload: Generate, written: Output) -> Answer:
        ids = self._checked(await self._tokens.whole(payload.prompt), submit)
        params = sampling_params(payload.sampling)
        if self._drafts and payload.sampling.greedy:
            params.extra_args = extra_args(submit.drafts, submit.app, submit.tenant)
        written.ask(ids, params)
        self._enter()
        try:
            async for output in self._stream(ids, params, submit, written.name):
                written.add(output)
                self._lengths[submit.id] = submit.app, len(ids) + written.tokens
        finally:
            self._lengths.pop(submit.id, None)
            self._leave()
        if written.reason not in ("stop", "length"):
            raise ValueError(f"vLLM ended the request with {written.reason!r}")
        drafted, accepted = written.verified if self._drafts else (0, 0)
        accepted = min(accepted, max(0, written.tokens - 1))  # vLLM counts those behind the end, too
        value = Generation(written.text, written.reason, len(ids), written.tokens, written.cached, drafted, accepted)
        told = {"first_token_s": written.first, "seconds": written.seconds, "preempted": written.preempted}
        return Answer(submit.id, value, told | {"drafted": drafted, "accepted": accepted}, written.cuts())

    def listen(self, wire: int) -> None:
        """Somebody reads that request from now on."""
        if (written := self._outputs.get(wire)) is not None:
            written.listen()

    async def _warm_up(self, submit: Submit, payload: Warmup) -> Answer:
        """Prefills whole blocks of the prefix; beside others in growing prefixes, so that they go on in between."""
        begun = time.perf_counter()
        ids = self._checked(await self._tokens.prefix(payload.prompt), submit)
        total = len(ids) // self._block * self._block
        chunk = max(self._block, submit.chunk // self._block * self._block)
        done = cached = 0
        while done < total:
            took, known = time.perf_counter(), cached == done
            done = min(total, done + chunk) if self._generating else total
            async for output in self._stream(ids[:done], _only_prefill(), submit, f"{submit.id}-{done}"):
                if known:  # so far all of it was there; of what is, vLLM computes the last block again
                    found = output.num_cached_tokens or 0
                    cached = done if found >= done - self._block else max(cached, found)
            if done < total:
                await self._give_way(time.perf_counter() - took)
        return Answer(submit.id, Warmed(done, cached), {"seconds": time.perf_counter() - begun})

    async def _give_way(self, seconds: float) -> None:
        """Leave the instance to the others for as long as the last chunk took from them, or until they are done."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            pass

    def _stream(self, ids: list[int], params: SamplingParams, submit: Submit, name: str) -> AsyncIterator[Any]:
        prompt = token_prompt(ids, submit.tenant)
        if submit.hints is not None:
            params.extra_args = {**(params.extra_args or {}), KEY: submit.hints}
        priority = submit.priority + (_LAST if submit.background else 0)
        return self._llm.generate(prompt, params, name, priority=priority)  # type: ignore[no-any-return]

    def _checked(self, encoded: Encoded, submit: Submit) -> list[int]:
        ids = encoded.ids
        if len(ids) >= self._limit:
            raise PromptTooLong(len(ids), self._limit)
        if self._held is not None and (ends := encoded.ends(self._block)) is not None:
            names = block_hashes(encoded.prompt.known_prefix(), tenant=submit.tenant)
            self._held.expect(ids, ends, names, submit.tenant)
        return ids

    def _enter(self) -> None:
        self._generating += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._generating -= 1
        if not self._generating:
            self._idle.set()


def sampling_params(sampling: Sampling) -> SamplingParams:
    """vLLM's form of `sampling`. Raises `ValueError` for values that vLLM refuses."""
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
    """One token is the least that vLLM accepts; it is thrown away."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
