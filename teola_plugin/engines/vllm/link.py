"""The wire between a `VllmEngine` and its host process: pickled frames, each with its length before it.

Both ends are this package in the same version, on one machine, over a private socket pair.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.graph import EngineProfile
from teola_plugin.graph.prefix_blocks import PrefixEvents
from teola_plugin.requests.payloads import Request

_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Setup:
    """First frame to the host: what to start."""

    name: str
    model: str
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    tell_cache: bool = False
    """True if events of the prefix cache are to be reported."""
    scheduler: str = ""
    """Name of a scheduler class (see `scheduler`); "" for vLLM's own."""
    drafts: Drafts | None = None
    """The options of drafting; None for no drafts."""
    drafts_on_cuda: bool = False
    """True if `drafts` hold on CUDA, too, where they turn asynchronous scheduling off."""


@dataclass(frozen=True, slots=True)
class Ready:
    """First frame from the host: limits in tokens and requests, and versions of what runs."""

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    cache_tokens: int
    device: str
    versions: Mapping[str, str] = field(default_factory=dict)
    tells_cache: bool = False
    """True if events of the prefix cache will be reported."""
    drafts: int = 0
    """Maximum number of drafted tokens of a greedy request; 0 for no drafts."""
    lacking: tuple[str, ...] = ()
    """Features that are off because this vLLM is not as expected, with the reasons."""

    def limited(self, profile: EngineProfile) -> EngineProfile:
        """Return the profile within these limits."""
        return replace(
            profile,
            max_batch=self.max_batched_tokens,
            max_efficient_batch=self.max_batched_tokens,
            max_requests=self.max_num_seqs,
            max_request_size=self.max_model_len,
            min_split_tokens=max(profile.min_split_tokens, self.block_size),
            cache_tokens=self.cache_tokens,
            drafts=self.drafts,
            device=self.device,
            # A CPU's step lasts as long as all of its tokens; a GPU's decoding leaves it time to prefill beside.
            interference=1.0 if self.device.startswith("cpu") else 0.3,
        )


@dataclass(frozen=True, slots=True)
class NotReady:
    """Sent instead of `Ready`: the reason why the engine did not start."""

    reason: str
    hint: str = ""
    settings: bool = False
    """True if the reason is the user's settings."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """A payload as bytes, to be read on its own."""

    content: bytes

    @staticmethod
    def of(payload: Any) -> Pickled:
        """Pickle a payload. Raises exceptions of pickle."""
        return Pickled(pickle.dumps(payload, pickle.HIGHEST_PROTOCOL))

    def load(self) -> Any:
        return pickle.loads(self.content)


@dataclass(frozen=True, slots=True)
class Submit:
    """A request with a payload (`Generate` or `Warmup`). Its answers carry `id`."""

    id: int
    payload: Any
    """`Pickled` in transit, so that one that the host cannot read fails alone."""
    priority: int = 0
    tenant: str = ""
    stream: bool = False
    background: bool = False
    chunk: int = 256
    """Number of tokens that a warm-up may prefill at once while other requests run."""
    hints: tuple[str, int, str] | None = None
    """Query, depth and objective, for a scheduler class of ours (`scheduler.Hints`)."""
    app: str = ""
    drafts: tuple[str, ...] = ()
    """Texts that the answer may repeat."""
    late: bool = False
    """True if a reader may come later."""

    @staticmethod
    def of(number: int, request: Request, *, chunk: int, hints: bool) -> Submit:
        """Create the frame of a request. Raises exceptions of pickle for the payload."""
        return Submit(
            number,
            Pickled.of(request.payload),
            request.priority,
            request.tenant,
            request.stream,
            request.background,
            chunk,
            (request.query, request.depth, request.objective) if hints else None,
            request.app,
            request.drafts,
            request.late,
        )


@dataclass(frozen=True, slots=True)
class Abort:
    id: int


@dataclass(frozen=True, slots=True)
class Listen:
    """A request that was submitted without `stream` has a reader now."""

    id: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Empty the prefix cache. The answer is `RequestAnswer(id, True)` once it is empty, False if it was never idle."""

    id: int
    timeout: float = 30.0


@dataclass(frozen=True, slots=True)
class CallProposer:
    """A call of a method of the worker that concerns drafts; the `RequestAnswer` is its result."""

    id: int
    method: str
    argument: Any


@dataclass(frozen=True, slots=True)
class Ping:
    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Shut down and leave."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly decoded text of a request."""

    id: int
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """The value of a request; ends it."""

    id: int
    value: Any
    stats: Mapping[str, float] = field(default_factory=dict)
    cuts: tuple[int, ...] = ()
    """See `Done.cuts`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a request failed; ends it. `tokens` and `limit` are set if it is too large."""

    id: int
    reason: str
    hint: str = ""
    tokens: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """The message that the host sends in one tick of its loop.

    `kv_used` is a share, 0 to 1. `kv_tokens` are the tokens of running generations by app; None if not reported.
    """

    items: tuple[Delta | RequestAnswer | Refusal, ...]
    kv_used: float = 0.0
    cache: PrefixEvents = ()
    kv_tokens: Mapping[str, int] | None = None


class Link:
    """One end of the wire. Frames keep their order; `receive` raises `EOFError` when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, sock: socket.socket) -> Link:
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, frame: object) -> None:
        """Queue a frame; never blocks. A frame to an end that is gone is dropped; `receive` raises then."""
        if self._writer.is_closing():
            return
        body = pickle.dumps(frame, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> Any:
        """Return the next frame. Raise EOFError when the other end is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the other end of the link is gone") from error

    async def flushed(self) -> None:
        await self._writer.drain()

    async def close(self) -> None:
        """Close this end; frames that are queued are sent first. Ignore an end that is gone."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass
