"""Apps as models: objects of LangChain, LangGraph and LlamaIndex that the settings name, accelerated on the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from teola_plugin.adapters import accelerate
from teola_plugin.adapters.calls import astreamed_in
from teola_plugin.adapters.named_objects import load, named
from teola_plugin.adapters.terms import Deadline, interrupting
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.server.documents.parts import has_files
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.models.app_inputs import answer_of, given_inputs, without_documents
from teola_plugin.server.models.document_input import DocumentInput, document_input
from teola_plugin.server.models.ways import DEPLOYMENT, Asked, Way, way_of
from teola_plugin.server.settings import AppSettings
from teola_plugin.server.visits import Visit
from teola_plugin.server.wire.answers import Answer, Delta, Deltas
from teola_plugin.server.wire.chat import ChatRequest

T = TypeVar("T")
THREAD = "thread_id"
"""The key of `metadata` that names a graph's conversation."""
CONFIG = "config"
"""The key of `metadata` that holds settings of a workflow, for this query alone."""


@dataclass(frozen=True, slots=True)
class App:
    """See `ChatModel`. Its answer is the app's own; parameters of decoding are the app's to decide, and not taken."""

    name: str
    settings: AppSettings
    fast: Any
    way: Way
    takes: DocumentInput
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kind: str = "app"

    def told(self) -> dict[str, Any]:
        return {"root": self.name, "description": self.settings.description}

    def tokens(self, text: int, answer: int | None, n: int) -> int:
        return text // 4 + 256

    async def whole(self, body: ChatRequest, visit: Visit) -> list[Answer]:
        asked = self._input(body, visit)
        with visit.inside() as run:
            async with interrupting(Deadline.of(run)), self._turn():
                value = await self.way.whole(self.fast, asked)
        return [answer_of(value, self.settings.output)]

    async def stream(self, body: ChatRequest, visit: Visit) -> Deltas:
        asked, run, text = self._input(body, visit), visit.run, ""
        async with self._turn():
            pieces = astreamed_in(run, None, self.way.stream(self.fast, asked, self.settings))
            async with aclosing(_timely(pieces, Deadline.of(run))) as found:
                async for piece in found:
                    if isinstance(piece, Answer):
                        yield Delta(end=piece)
                        return
                    text += piece
                    yield Delta(text=piece)
        yield Delta(end=Answer(text))

    def check(self, body: ChatRequest) -> None:
        """Raises `HttpError`, `RegistrationError` for what is known to be wrong before anything runs."""
        config = (body.metadata or {}).get(CONFIG)
        if self.way is DEPLOYMENT:
            self.fast.configured(config)
        elif config is not None:
            raise no_settings(self.name)
        if has_files(body):
            self.takes.check()

    def _turn(self) -> AbstractAsyncContextManager[Any]:
        return self.lock if self.way.alone else nullcontext()

    def _input(self, body: ChatRequest, visit: Visit) -> Asked:
        """Raises `HttpError` for what the app cannot be given."""
        if (body.n or 1) > 1:
            raise bad_request(f"the app {self.name!r} gives one answer.", "leave n out", param="n", code="unsupported")
        if body.tools:
            hint = "leave them out: an app has its own"
            raise bad_request(f"the app {self.name!r} takes no tools.", hint, param="tools", code="unsupported")
        found = given_inputs(body)
        asked, documents = without_documents(body)
        value = self.way.given(self.fast, asked, self.settings) if found is None else found
        value = self.takes.given(value, documents)
        thread = str((body.metadata or {}).get(THREAD) or visit.query.id)
        return Asked(value, f"{visit.caller.tenant}/{thread}", (body.metadata or {}).get(CONFIG))


def no_settings(model: str) -> HttpError:
    hint = "leave them out: only workflows have settings"
    return bad_request(f"the model {model!r} has no settings.", hint, param="settings", code="unsupported")


async def _timely(pieces: AsyncGenerator[T, None], deadline: Deadline | None) -> AsyncGenerator[T, None]:
    """The pieces, as long as there is time. Raises `QueryTimeout`."""
    async with aclosing(pieces):
        while True:
            async with interrupting(deadline):
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece


def app(name: str, settings: AppSettings, pool: EnginePool) -> App:
    """Imports the object and accelerates it. Raises `RegistrationError`, `TraceError`."""
    target = load(settings.object, pool)
    fast = target.fast
    if fast is None and hasattr(target.plain, "deploy") and hasattr(target.plain, "lower"):
        fast = target.plain.deploy(pool, name=name, **target.arguments)
    if fast is None:
        bind = [(named(path), engine) for path, engine in settings.bind.items()]
        arguments = {"pool": pool, "app": name, **({"bind": bind} if bind else {}), **target.arguments}
        fast = accelerate(target.plain, **arguments)
    way = way_of(fast)
    if way is None:
        raise RegistrationError(
            f"app {name!r}: {settings.object} is a {type(target.plain).__qualname__}, which is no app.",
            hint="name a Runnable, a compiled graph, a query or chat engine, or a workflow",
        )
    return App(name, settings, fast, way, document_input(name, settings, way, fast))
