"""What every model is, for those who route requests to it."""

from __future__ import annotations

from typing import Any, Protocol

from teola_plugin.server.visits import Visit
from teola_plugin.server.wire.answers import Answer, Deltas
from teola_plugin.server.wire.chat import ChatRequest, CompletionRequest


class Model(Protocol):
    """A name of `/v1/models`."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """chat, embedding, reranking or app."""

    def told(self) -> dict[str, Any]:
        """What `/v1/models` says of it beyond its name."""

    def tokens(self, text: int, answer: int | None, n: int) -> int:
        """Of a request with so many characters, for the queue's bounds."""


class ChatModel(Model, Protocol):
    """One that answers messages."""

    async def whole(self, body: ChatRequest, visit: Visit) -> list[Answer]:
        """All choices. Raises `TeolaError`."""

    def stream(self, body: ChatRequest, visit: Visit) -> Deltas:
        """News of all choices, each ended by its whole answer. Raises `TeolaError`."""


class TextModel(ChatModel, Protocol):
    """One that goes on with plain text, too."""

    async def complete(self, body: CompletionRequest, prompts: list[str], visit: Visit) -> list[Answer]:
        """`n` answers for each prompt in turn."""

    def stream_completion(self, body: CompletionRequest, prompts: list[str], visit: Visit) -> Deltas: ...
