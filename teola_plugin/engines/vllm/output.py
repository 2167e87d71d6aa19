"""What a request has written, and what of it has gone out: the first token always, the others where somebody reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.vllm.link import Delta, Submit
from teola_plugin.shims.vllm import drafts, stats, streams

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine
    from vllm.sampling_params import SamplingParams


class Output:
    """The output of one generation. `seldom` is True if vLLM can be told that nobody reads the pieces.

    A reader that comes later gets the same pieces as one from the start.
    """

    def __init__(self, submit: Submit, send: Callable[[Delta], None], llm: AsyncLLMEngine, *, seldom: bool) -> None:
        self._wire, self._read, self._late = submit.id, submit.stream, submit.late
        self._send, self._llm, self._can = send, llm, seldom
        self._begun = time.perf_counter()
        self._prompt: Sequence[int] = ()
        self._params: Any = None
        self._ids: list[int] = []
        self._held: list[Delta] = []
        """Pieces that were not sent, since nobody reads."""
        self._seldom = False
        self._sent = 0
        """Characters that went out."""
        self.text, self.tokens, self.cached, self.first = "", 0, 0, 0.0
        self.reason: str | None = None
        self.verified, self.preempted = (0, 0), 0

    @property
    def name(self) -> str:
        """The id of the request in vLLM."""
        return str(self._wire)

    @property
    def seconds(self) -> float:
        """Since it was asked for."""
        return time.perf_counter() - self._begun

    def ask(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Set how often vLLM reports on the request."""
        self._prompt, self._params = prompt, params
        self._seldom = self._can and not self._read
        if self._seldom:
            streams.seldom(params)

    def listen(self) -> None:
        """Somebody reads from now on."""
        self._read = True
        self._catch_up()
        for piece in self._held:
            self._say(piece)
        self._held = []

    def add(self, output: Any) -> None:
        """A `RequestOutput`: what is new, and of the last one how it ended."""
        piece = output.outputs[0]
        first = not self.tokens
        if first:
            self.first = self.seconds
            self.cached = output.num_cached_tokens or 0
        self.text += piece.text
        self._ids += piece.token_ids
        self.tokens += len(piece.token_ids)
        if first or self._read:  # the first piece goes out in any case: it ends the prefilling
            self._say(Delta(self._wire, self.text[self._sent :], len(piece.token_ids)))
        elif not self._seldom:
            self._held.append(Delta(self._wire, piece.text, len(piece.token_ids)))
        self._catch_up()
        self.reason = piece.finish_reason
        if self.reason is not None:
            self.preempted = stats.preemptions(output)
            self.verified = drafts.verified(piece)

    def cuts(self) -> tuple[int, ...]:
        """Characters of the pieces that its text would have come in; empty where nobody can come to read them."""
        if self._read or not self._late:
            return ()
        if self._seldom:
            return tuple(map(len, self._texts()))
        return (self._sent, *(len(piece.text) for piece in self._held))

    def _catch_up(self) -> None:
        """If somebody reads, and vLLM has told of the first token alone: what it has written meanwhile, and from now on
        every token."""
        if not (self._read and self._seldom and self.tokens):
            return
        self._seldom = False
        told = len(self._ids)
        untold = streams.every_token(self._llm, self.name)
        self._ids += untold
        self.tokens += len(untold)
        for text in self._texts()[told:]:
            self._say(Delta(self._wire, text, 1))

    def _texts(self) -> list[str]:
        return streams.texts(self._llm.get_tokenizer(), self._prompt, self._params, self._ids)

    def _say(self, piece: Delta) -> None:
        self._sent += len(piece.text)
        self._send(piece)
