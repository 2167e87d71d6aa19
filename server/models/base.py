"""What every model is, for the routes that send requests to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from teola_plugin.pool import EnginePool
from teola_plugin.server.live_queries import RequestSession
from teola_plugin.server.wire.answers import Answer, Deltas
from teola_plugin.server.wire.requests import ChatRequest, CompletionRequest

_PATH = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:")
_HUB_SNAPSHOT = re.compile(r"models--(.+)[/\\]snapshots[/\\][^/\\]+[/\\]*$")


def without_folders(text: str) -> str:
    """Return a path of this machine as its last name alone, and a name of Hugging Face's hub as it is."""
    if snapshot := _HUB_SNAPSHOT.search(text):
        return snapshot[1].replace("--", "/")
    if not _PATH.match(text) and not ("/" in text and Path(text).exists()):
        return text
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def shown_versions(pool: EnginePool) -> dict[str, dict[str, str]]:
    """Return what runs below each engine, without folders of this machine.

    By engine: the versions of its software, and its model under `model` where it has one. `GET /version` shows them to
    operators.
    """
    return {
        engine: {name: without_folders(value) for name, value in versions.items()}
        for engine, versions in pool.versions().items()
    }


def shown_model(pool: EnginePool, engine: str) -> str:
    """Return the name of the engine's model, without folders of this machine; empty where it has none."""
    return without_folders(pool.versions()[engine].get("model", ""))


class Model(Protocol):
    """A model that `/v1/models` lists."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """chat, embedding, reranking or app."""

    def details(self) -> dict[str, Any]:
        """Return what `/v1/models` says of it beyond its name."""

    def estimate_tokens(self, characters: int, max_answer_tokens: int | None, n: int) -> int:
        """Return about how many tokens a request costs, for the queue's bounds."""


class ChatModel(Model, Protocol):
    """A model that answers messages."""

    async def answer(self, body: ChatRequest, session: RequestSession) -> list[Answer]:
        """Return all choices. Raise `TeolaError`."""

    def stream(self, body: ChatRequest, session: RequestSession) -> Deltas:
        """Yield the deltas of all choices, each ended by its whole answer. Raise `TeolaError`."""


class TextModel(ChatModel, Protocol):
    """A model that also continues plain text."""

    async def complete(self, body: CompletionRequest, prompts: list[str], session: RequestSession) -> list[Answer]:
        """Return `n` answers for each prompt in turn."""

    def stream_completion(self, body: CompletionRequest, prompts: list[str], session: RequestSession) -> Deltas: ...
