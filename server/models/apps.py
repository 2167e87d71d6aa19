"""Apps as models: objects of LangChain, LangGraph and LlamaIndex that the settings name, accelerated on the pool."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import quote

from teola_plugin.adapters import accelerate
from teola_plugin.adapters.app_frameworks import listening_tally
from teola_plugin.adapters.calls import astreamed_in
from teola_plugin.adapters.named_objects import load, object_named
from teola_plugin.adapters.terms import Deadline, interrupting
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.usage import Tally, atallied, tallied
from teola_plugin.server.documents.parts import has_files
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.live_queries import Visit
from teola_plugin.server.models.app_inputs import Asked, Way, given_inputs, without_documents
from teola_plugin.server.models.app_protocols import CHAT_ENGINE, DEPLOYMENT, QUERY_ENGINE, pure, way_of
from teola_plugin.server.models.graphs import Stop, has_checkpoints, stopped, waits
from teola_plugin.server.queries.records import Record
from teola_plugin.server.settings import AppSettings
from teola_plugin.server.wire.answers import Answer, Delta, Deltas, Usage
from teola_plugin.server.wire.requests import ChatRequest
from teola_plugin.server.wire.sampling import check_no_tools

Place = tuple[str, str]
"""(engine, collection)"""


def written(fasts: Iterable[Any]) -> frozenset[Place]:
    """Collections that deployed workflows among these write into."""
    from teola_plugin.workflow import PER_QUERY, Indexing, Ingestion

    flows = [fast.workflow.flow for fast in fasts if way_of(fast) is DEPLOYMENT]
    writers = [one for flow in flows for one in flow.everything() if isinstance(one, Indexing | Ingestion)]
    return frozenset(place for one in writers for place in one.collections() if place[1] != PER_QUERY)


def part_tenants(apps: Iterable[TenantsOwn]) -> None:
    """Each tenant has its own of what these apps write."""
    every = list(apps)
    places = written(one.fast for one in every)
    for one in every:
        one.places = places if way_of(one.fast) is DEPLOYMENT else frozenset()


def own_name(collection: str, tenant: str) -> str:
    return f"{collection}@{hashlib.sha256(tenant.encode()).hexdigest()[:24]}"


@dataclass(slots=True, eq=False)
class TenantsOwn:
    """One deployed workflow, as each tenant has it. Lives on the server's loop."""

    fast: Any
    places: frozenset[Place] = frozenset()
    """Collections that each tenant has of its own."""
    _made: dict[str, Any] = field(default_factory=dict)

    def of(self, tenant: str) -> Any:
        """The workflow in this tenant's collections."""
        if not self.places:
            return self.fast
        if tenant not in self._made:
            self._made[tenant] = self.fast.in_collections(
                lambda engine, name: own_name(name, tenant) if (engine, name) in self.places else name
            )
        return self._made[tenant]

    async def forget(self, tenant: str) -> None:
        """Deletes the tenant's collections. Raises what the store raises."""
        self._made.pop(tenant, None)
        for engine, name in self.places:
            deleted = self.fast.pool.admin(engine, "delete_collection", own_name(name, tenant))
            await asyncio.wrap_future(deleted)


@dataclass(frozen=True, slots=True)
class DocumentInput:
    """`key`: of the app's input; empty where it takes no documents."""

    app: str
    key: str = ""
    form: str = "texts"
    """`texts`: a list of them; `text`: one; `documents`: texts with their names."""

    def given(self, value: Any, documents: Sequence[tuple[str, str]]) -> Any:
        """The app's input with documents, name and text each. Raises `HttpError`."""
        if documents:
            self.check()
        if not self.key or (not documents and self.form != "texts"):
            return value
        if not isinstance(value, Mapping):
            raise bad_request(f"the input of {self.app!r} is no object.", "give one", param="inputs")
        if documents and self.key in value:
            raise bad_request(
                f"inputs has {self.key!r}, and documents are given, too.", "give one of both", param="inputs"
            )
        return {self.key: self._formed(documents), **value}

    def check(self) -> None:
        """Raises `HttpError` where documents cannot be taken."""
        if not self.key:
            raise self._takes_none()

    def _formed(self, documents: Sequence[tuple[str, str]]) -> Any:
        if self.form == "text":
            return "\n\n".join(text for _, text in documents)
        if self.form == "documents":
            return [{"text": text, "metadata": {"source": name}} for name, text in documents]
        return [text for _, text in documents]

    def _takes_none(self) -> HttpError:
        hint = "ask an app that does; or say which of its inputs they are (`documents:` in the app's settings)"
        return bad_request(f"the app {self.app!r} takes no documents.", hint, param="documents", code="unsupported")


def document_input(name: str, settings: AppSettings, way: Way, fast: Any) -> DocumentInput:
    """Of a workflow the input whose kind is documents, unless the settings name one. Raises `RegistrationError`."""
    if way is DEPLOYMENT:
        return _of_workflow(name, settings.documents, fast)
    if settings.documents and way in (QUERY_ENGINE, CHAT_ENGINE):
        raise RegistrationError(
            f"app {name!r}: documents names {settings.documents!r}, and its input is a text.",
            hint="leave it out: an engine of LlamaIndex has an index of its own",
        )
    return DocumentInput(name, settings.documents)


def _of_workflow(name: str, key: str, fast: Any) -> DocumentInput:
    from teola_plugin.workflow.values import Kind

    forms = {Kind.DOCUMENTS: "documents", Kind.TEXT: "text"}
    inputs = {one.name: one.kind for one in fast.workflow.inputs}
    if key and key not in inputs:
        raise RegistrationError(
            f"app {name!r}: documents names {key!r}, which is no input of the workflow.",
            hint=f"its inputs are {', '.join(sorted(inputs)) or 'none'}",
        )
    found = key or next((one for one, kind in inputs.items() if kind is Kind.DOCUMENTS), "")
    return DocumentInput(name, found, forms.get(inputs[found], "texts") if found else "documents")


log = logging.getLogger("teola_plugin.server")
T = TypeVar("T")
THREAD = "thread_id"
"""The key of `metadata` that names a graph's conversation."""
CONFIG = "config"
"""The key of `metadata` that holds settings of a workflow, for this query alone."""
RESUME = "resume"
"""The key of `metadata` that holds what a graph has stopped to ask for."""


@dataclass(frozen=True, slots=True)
class App:
    """See `ChatModel`. Its answer is the app's own; parameters of decoding are the app's to decide, and not taken."""

    name: str
    settings: AppSettings
    fast: Any
    way: Way
    takes: DocumentInput
    own: TenantsOwn
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kind: str = "app"

    def told(self) -> dict[str, Any]:
        return {"root": self.name, "description": self.settings.description, "example": self.settings.example}

    def form(self) -> dict[str, Any]:
        """JSON schemas of what a workflow is asked with, and the input that documents are."""
        documents = {"documents": self.takes.key} if self.takes.key else {}
        if self.way is not DEPLOYMENT:
            return documents
        return {"inputs": self.fast.input_schema(), "settings": self.fast.config_schema(), **documents}

    def tokens(self, text: int, answer: int | None, n: int) -> int:
        return text // 4 + 256

    async def whole(self, body: ChatRequest, visit: Visit) -> list[Answer]:
        asked, tally = self._input(body, visit), listening_tally()
        with visit.inside() as run:
            async with interrupting(Deadline.of(run)), self._turn():
                with tallied(tally):
                    answer = await self.way.whole(self.own.of(visit.caller.tenant), asked, self.settings)
        return [_costing(answer, tally, visit)]

    async def stream(self, body: ChatRequest, visit: Visit) -> Deltas:
        asked, run, text, tally = self._input(body, visit), visit.run, "", listening_tally()
        fast = self.own.of(visit.caller.tenant)
        async with self._turn():
            pieces = astreamed_in(run, None, atallied(tally, self.way.stream(fast, asked, self.settings)))
            async with aclosing(_timely(pieces, Deadline.of(run))) as found:
                async for piece in found:
                    if isinstance(piece, Answer):
                        if rest := rest_of(piece.text, text, self.name):
                            yield Delta(text=rest)
                        yield Delta(end=_costing(piece, tally, visit))
                        return
                    text += piece
                    yield Delta(text=piece)
        yield Delta(end=_costing(Answer(text), tally, visit))

    def check(self, body: ChatRequest) -> None:
        """Raises `HttpError`, `RegistrationError` for what is known to be wrong before anything runs."""
        metadata = body.metadata or {}
        thread_name(metadata)
        if (inputs := given_inputs(body)) is not None and RESUME not in metadata:
            self.way.check(self.fast, inputs, self.settings)
        config = metadata.get(CONFIG)
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
        check_no_tools(body, self.name)
        found, said, kept = given_inputs(body), body.metadata or {}, visit.kept
        told = self._told(said)
        if found is not None and not told:
            self.way.check(self.fast, found, self.settings)
        asked, documents = without_documents(body)
        value = self.way.given(self.fast, asked, self.settings) if found is None and not told else found
        value = value if told else self.takes.given(value, documents)
        name = thread_name(said)
        if name is None:
            name = visit.query.id if kept is None else kept.id
        return Asked(
            value,
            self._thread(visit.caller.tenant, name),
            said.get(CONFIG),
            kept,
            told,
            visit.query.ran,
        )

    def _told(self, said: Mapping[str, Any]) -> tuple[Any, ...]:
        """What its thread is told, if that is what the request is for. Raises `HttpError`."""
        if RESUME not in said:
            return ()
        if not has_checkpoints(self.fast) or thread_name(said) is None:
            message = f"metadata.{RESUME} is for a thread of a graph with checkpoints."
            raise bad_request(message, f"name it in metadata.{THREAD}, or leave it out", param="metadata")
        return (said[RESUME],)

    async def forget(self, tenant: str) -> None:
        """What it keeps itself of a tenant; its threads are `Checkpoints`' to drop. Raises what its store raises."""
        await self.own.forget(tenant)
        if self.way.alone:  # its memory is that of the last conversation, whose ever that was
            async with self.lock:
                self.fast.reset()

    def repeatable(self, said: Mapping[str, Any]) -> bool:
        """Whether a query may be begun again after a crash. `said`: its metadata."""
        return self.settings.repeatable or pure(self.fast, said.get("config"))

    # ------------------------------------------------------------ checkpoints

    def _thread(self, tenant: str, name: str) -> str:
        return f"{self.threads_of(tenant)}{quote(self.name, safe='')}/{name}"

    @staticmethod
    def threads_of(tenant: str) -> str:
        """What names of a tenant's threads begin with, and those of nobody else."""
        return f"{quote(tenant, safe='')}/"

    async def stopped(self, record: Record) -> Stop | None:
        """Where the graph of a submitted query is; None where it has not begun, as far as its checkpoints tell."""
        found = await stopped(self.fast, self.thread_of(record))
        return found if found is not None and found.query == record.id else None

    def thread_of(self, record: Record) -> str:
        name = thread_name(record.body.get("metadata") or {})
        return self._thread(record.tenant, record.id if name is None else name)

    def names_thread(self, record: Record) -> bool:
        """Whether its thread is one that others may go on with."""
        return thread_name(record.body.get("metadata") or {}) is not None

    def waits(self, stop: Stop, approved: str) -> bool:
        """See `graphs.waits`."""
        return waits(self.fast, stop, approved)


def rest_of(answer: str, streamed: str, app: str) -> str:
    """Return the part of the whole answer's text that is not streamed yet."""
    if not answer.startswith(streamed):
        log.warning("app %s: what it streams is not the beginning of its answer", app)
        return ""
    return answer[len(streamed) :]


def thread_name(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of a graph's conversation, if a request gives it one. Raise `HttpError` for what is no name."""
    name = metadata.get(THREAD)
    if name is None or (isinstance(name, str | int) and not isinstance(name, bool) and name != ""):
        return None if name is None else str(name)
    raise bad_request(f"metadata.{THREAD} is no name.", "give a text, or leave it out", param="metadata")


def _costing(answer: Answer, tally: Tally, visit: Visit) -> Answer:
    """With the tokens of its calls."""
    found, own, outside = tally.tokens, answer.usage, tally.elsewhere
    usage = Usage(own.prompt + found.prompt, own.completion + found.completion, own.cached + found.cached)
    visit.cost(usage.total, elsewhere=outside.prompt + outside.completion)
    return replace(answer, usage=usage)


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
        bind = [(object_named(path), engine) for path, engine in settings.bind.items()]
        arguments = {"pool": pool, "app": name, **({"bind": bind} if bind else {}), **target.arguments}
        fast = accelerate(target.plain, **arguments)
    way = way_of(fast)
    if way is None:
        raise RegistrationError(
            f"app {name!r}: {settings.object} is a {type(target.plain).__qualname__}, which is no app.",
            hint="name a Runnable, a compiled graph, a query or chat engine, or a workflow",
        )
    return App(name, settings, fast, way, document_input(name, settings, way, fast), TenantsOwn(fast))
