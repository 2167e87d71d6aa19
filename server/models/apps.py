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
from teola_plugin.adapters.calls import Deadline, astreamed_in, interrupting
from teola_plugin.adapters.named_objects import load, object_named
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.usage import Tally, atallied, tallied
from teola_plugin.server.documents.parts import has_files
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.live_queries import RequestSession
from teola_plugin.server.models.app_inputs import AppProtocol, AppRequest, inputs_in_metadata, without_documents
from teola_plugin.server.models.app_protocols import CHAT_ENGINE, DEPLOYMENT, QUERY_ENGINE, is_pure, protocol_of
from teola_plugin.server.models.graphs import Stop, find_stop, has_checkpoints
from teola_plugin.server.queries.records import Record
from teola_plugin.server.settings import AppSettings
from teola_plugin.server.wire.answers import Answer, Delta, Deltas, Usage
from teola_plugin.server.wire.requests import ChatRequest
from teola_plugin.server.wire.sampling import check_no_tools

log = logging.getLogger("teola_plugin.server")
T = TypeVar("T")
THREAD = "thread_id"
"""The key of `metadata` that names a graph's conversation."""
CONFIG = "config"
"""The key of `metadata` that holds settings of a workflow, for this query alone."""
RESUME = "resume"
"""The key of `metadata` that holds the answer to the question that a graph has stopped to ask."""
CollectionRef = tuple[str, str]
"""(engine, collection)"""


def written_collections(fasts: Iterable[Any]) -> frozenset[CollectionRef]:
    """Return the collections that deployed workflows among these write into."""
    from teola_plugin.workflow import PER_QUERY, Indexing, Ingestion

    flows = [fast.workflow.flow for fast in fasts if protocol_of(fast) is DEPLOYMENT]
    writers = [one for flow in flows for one in flow.everything() if isinstance(one, Indexing | Ingestion)]
    return frozenset(collection for one in writers for collection in one.collections() if collection[1] != PER_QUERY)


def separate_tenants(apps: Iterable[PerTenantApp]) -> None:
    """Give each tenant its own copy of the collections that these apps write.

    A collection that no served workflow writes is the same for all tenants: it is what an app knows. One that some
    workflow writes holds what clients sent, and gets a name of the tenant's own in all workflows of the server.
    """
    apps = list(apps)
    collections = written_collections(app.fast for app in apps)
    for app in apps:
        app.collections = collections if protocol_of(app.fast) is DEPLOYMENT else frozenset()


def tenant_collection(collection: str, tenant: str) -> str:
    return f"{collection}@{hashlib.sha256(tenant.encode()).hexdigest()[:24]}"


@dataclass(slots=True, eq=False)
class PerTenantApp:
    """One app; if it is a deployed workflow, with the collections of each tenant. Used on the server's loop."""

    fast: Any
    collections: frozenset[CollectionRef] = frozenset()
    """Collections of which each tenant has a copy."""
    _by_tenant: dict[str, Any] = field(default_factory=dict)

    def for_tenant(self, tenant: str) -> Any:
        """Return the app on this tenant's collections."""
        if not self.collections:
            return self.fast
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = self.fast.in_collections(
                lambda engine, name: tenant_collection(name, tenant) if (engine, name) in self.collections else name
            )
        return self._by_tenant[tenant]

    async def forget(self, tenant: str) -> None:
        """Delete the tenant's collections. Raise what the store raises.

        Collections that all tenants share stay. A later request of the tenant begins with empty collections.
        """
        self._by_tenant.pop(tenant, None)
        for engine, name in self.collections:
            deleted = self.fast.pool.admin(engine, "delete_collection", tenant_collection(name, tenant))
            await asyncio.wrap_future(deleted)


@dataclass(frozen=True, slots=True)
class DocumentInput:
    """The input of an app that takes documents. `key`: its name; empty if the app takes no documents."""

    app: str
    key: str = ""
    form: str = "texts"
    """`texts`: a list of them; `text`: one; `documents`: texts with their names."""

    def add_to(self, value: Any, documents: Sequence[tuple[str, str]]) -> Any:
        """Return the app's input with documents, name and text each. Raise `HttpError`."""
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
        return {self.key: self._to_form(documents), **value}

    def check(self) -> None:
        """Raise `HttpError` if the app takes no documents.

        It is called for requests with documents: for submitted queries before they are accepted, and again when the
        app's input is built.
        """
        if not self.key:
            hint = "ask an app that does; or say which of its inputs they are (`documents:` in the app's settings)"
            message = f"the app {self.app!r} takes no documents."
            raise bad_request(message, hint, param="documents", code="unsupported")

    def _to_form(self, documents: Sequence[tuple[str, str]]) -> Any:
        """Return documents, given as names and texts, in the form in which the app takes them."""
        if self.form == "text":
            return "\n\n".join(text for _, text in documents)
        if self.form == "documents":
            return [{"text": text, "metadata": {"source": name}} for name, text in documents]
        return [text for _, text in documents]


def document_input(name: str, settings: AppSettings, protocol: AppProtocol, fast: Any) -> DocumentInput:
    """Return the input that takes documents: the one that the settings name, else a workflow's input of that kind.

    Raise `RegistrationError` for a name that does not fit.
    """
    if protocol is DEPLOYMENT:
        return _workflow_document_input(name, settings.documents, fast)
    if settings.documents and protocol in (QUERY_ENGINE, CHAT_ENGINE):
        raise RegistrationError(
            f"app {name!r}: documents names {settings.documents!r}, and its input is a text.",
            hint="leave it out: an engine of LlamaIndex has an index of its own",
        )
    return DocumentInput(name, settings.documents)


def _workflow_document_input(name: str, key: str, fast: Any) -> DocumentInput:
    """Return the input by which a deployed workflow takes documents; one with an empty key if it takes none.

    `key`: the input that the app's settings name; empty to find one by its kind. Raise `RegistrationError` for a name
    that is no input.
    """
    from teola_plugin.workflow.values import Kind

    forms = {Kind.DOCUMENTS: "documents", Kind.TEXT: "text"}
    inputs = {one.name: one.kind for one in fast.workflow.inputs}
    if key and key not in inputs:
        raise RegistrationError(
            f"app {name!r}: documents names {key!r}, which is no input of the workflow.",
            hint=f"its inputs are {', '.join(sorted(inputs)) or 'none'}",
        )
    key = key or next((input_name for input_name, kind in inputs.items() if kind is Kind.DOCUMENTS), "")
    return DocumentInput(name, key, forms.get(inputs[key], "texts") if key else "documents")


@dataclass(frozen=True, slots=True)
class App:
    """An app as a `ChatModel`. The app decides how it decodes, so parameters of decoding are ignored."""

    name: str
    settings: AppSettings
    fast: Any
    protocol: AppProtocol
    documents: DocumentInput
    per_tenant: PerTenantApp
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kind: str = "app"

    def details(self) -> dict[str, Any]:
        return {"root": self.name, "description": self.settings.description, "example": self.settings.example}

    def input_schemas(self) -> dict[str, Any]:
        """Return JSON schemas of a workflow's inputs and settings, and the name of the input that takes documents.

        `GET /v1/models/NAME` shows them. Other apps than deployed workflows have no schemas here, and those without
        documents no name; the result may be empty.
        """
        documents = {"documents": self.documents.key} if self.documents.key else {}
        if self.protocol is not DEPLOYMENT:
            return documents
        return {"inputs": self.fast.input_schema(), "settings": self.fast.config_schema(), **documents}

    def estimate_tokens(self, characters: int, max_answer_tokens: int | None, n: int) -> int:
        return characters // 4 + 256

    async def answer(self, body: ChatRequest, session: RequestSession) -> list[Answer]:
        """Run the app on a chat within the session's query, and return its one answer with the tokens that it has cost.

        Raise `HttpError` for what the app cannot take, and `QueryTimeout` at the query's deadline.
        """
        request, tally = self._request(body, session), listening_tally()
        with session.inside_query() as run:
            async with interrupting(Deadline.of(run)), self._turn():
                with tallied(tally):
                    fast = self.per_tenant.for_tenant(session.caller.tenant)
                    answer = await self.protocol.answer(fast, request, self.settings)
        return [_with_cost(answer, tally, session)]

    async def stream(self, body: ChatRequest, session: RequestSession) -> Deltas:
        """Run the app on a chat, and yield pieces of its text, then its end, which holds the whole answer.

        Raise `HttpError` for what the app cannot take, and `QueryTimeout` at the query's deadline.
        """
        request, run, text, tally = self._request(body, session), session.run, "", listening_tally()
        fast = self.per_tenant.for_tenant(session.caller.tenant)
        async with self._turn():
            pieces = astreamed_in(run, None, atallied(tally, self.protocol.stream(fast, request, self.settings)))
            async with aclosing(_until_deadline(pieces, Deadline.of(run))) as pieces_in_time:
                async for piece in pieces_in_time:
                    if isinstance(piece, Answer):
                        if rest := rest_of(piece.text, text, self.name):
                            yield Delta(text=rest)
                        yield Delta(end=_with_cost(piece, tally, session))
                        return
                    text += piece
                    yield Delta(text=piece)
        yield Delta(end=_with_cost(Answer(text), tally, session))

    def check(self, body: ChatRequest) -> None:
        """Raise `HttpError` or `RegistrationError` for what is known to be wrong before anything runs."""
        metadata = body.metadata or {}
        thread_name(metadata)
        if (inputs := inputs_in_metadata(body)) is not None and RESUME not in metadata:
            self.protocol.check_inputs(self.fast, inputs, self.settings)
        config = metadata.get(CONFIG)
        if self.protocol is DEPLOYMENT:
            self.fast.configured(config)
        elif config is not None:
            raise no_settings(self.name)
        if has_files(body):
            self.documents.check()

    def _turn(self) -> AbstractAsyncContextManager[Any]:
        return self.lock if self.protocol.one_at_a_time else nullcontext()

    def _request(self, body: ChatRequest, session: RequestSession) -> AppRequest:
        """Return the request to the app. Raise `HttpError` for what the app cannot take."""
        if (body.n or 1) > 1:
            raise bad_request(f"the app {self.name!r} gives one answer.", "leave n out", param="n", code="unsupported")
        check_no_tools(body, self.name)
        value, metadata, submitted = inputs_in_metadata(body), body.metadata or {}, session.submitted
        resume_values: tuple[Any, ...] = ()
        if RESUME in metadata:
            if not has_checkpoints(self.fast) or thread_name(metadata) is None:
                message = f"metadata.{RESUME} is for a thread of a graph with checkpoints."
                raise bad_request(message, f"name it in metadata.{THREAD}, or leave it out", param="metadata")
            resume_values = (metadata[RESUME],)
        else:
            chat, documents = without_documents(body)
            if value is None:
                value = self.protocol.to_input(self.fast, chat, self.settings)
            else:
                self.protocol.check_inputs(self.fast, value, self.settings)
            value = self.documents.add_to(value, documents)
        thread = thread_name(metadata)
        if thread is None:
            thread = session.query.id if submitted is None else submitted.id
        return AppRequest(
            value,
            self._thread(session.caller.tenant, thread),
            metadata.get(CONFIG),
            submitted,
            resume_values,
            session.query.add_part,
        )

    async def forget(self, tenant: str) -> None:
        """Delete what the app stores of a tenant, but for threads (see `Checkpoints`). Raise what its store raises.

        A chat engine that keeps its conversation in itself is reset, for which running calls of it are awaited.
        """
        await self.per_tenant.forget(tenant)
        if self.protocol.one_at_a_time:  # its memory is that of the last conversation, of whatever tenant
            async with self.lock:
                self.fast.reset()

    def is_repeatable(self, metadata: Mapping[str, Any]) -> bool:
        """Return True if a query with this metadata may be run again after a crash."""
        return self.settings.repeatable or is_pure(self.fast, metadata.get("config"))

    # ------------------------------------------------------------ checkpoints

    def _thread(self, tenant: str, name: str) -> str:
        return f"{self.threads_of(tenant)}{quote(self.name, safe='')}/{name}"

    @staticmethod
    def threads_of(tenant: str) -> str:
        """Return the beginning of the names of this tenant's threads, which no other tenant's have."""
        return f"{quote(tenant, safe='')}/"

    async def find_stop(self, record: Record) -> Stop | None:
        """Return where the graph of a submitted query is; None if it has not begun, as far as its checkpoints tell.

        A thread that the client named may have its last checkpoint from another query; that counts as not begun, too.
        """
        stop = await find_stop(self.fast, self.thread_of(record))
        return stop if stop is not None and stop.query == record.id else None

    def thread_of(self, record: Record) -> str:
        name = thread_name(record.body.get("metadata") or {})
        return self._thread(record.tenant, record.id if name is None else name)

    def names_thread(self, record: Record) -> bool:
        """Return True if the request named its thread, so that other requests may continue it."""
        return thread_name(record.body.get("metadata") or {}) is not None


def rest_of(answer: str, streamed: str, app: str) -> str:
    """Return the part of the whole answer's text that is not streamed yet.

    Where the streamed text is no beginning of the answer, it is empty and a warning is logged: what a client has
    received cannot be taken back.
    """
    if not answer.startswith(streamed):
        log.warning("app %s: what it streams is not the beginning of its answer", app)
        return ""
    return answer[len(streamed) :]


def thread_name(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of a graph's conversation, if a request gives it one. Raise `HttpError` for what is no name.

    None stands for a conversation of the request's own. Whole numbers are taken as texts; an empty text is refused.
    """
    name = metadata.get(THREAD)
    if name is None or (isinstance(name, str | int) and not isinstance(name, bool) and name != ""):
        return None if name is None else str(name)
    raise bad_request(f"metadata.{THREAD} is no name.", "give a text, or leave it out", param="metadata")


def _with_cost(answer: Answer, tally: Tally, session: RequestSession) -> Answer:
    """Charge the session for an answer, and return the answer with the tokens of its calls.

    `tally`: tokens of models that the app called, in the pool and outside. Those from outside are marked in the
    session's cost, because no trace of the pool counts them.
    """
    calls, usage, outside = tally.tokens, answer.usage, tally.elsewhere
    usage = Usage(usage.prompt + calls.prompt, usage.completion + calls.completion, usage.cached + calls.cached)
    session.add_cost(usage.total, outside_tokens=outside.prompt + outside.completion)
    return replace(answer, usage=usage)


def no_settings(model: str) -> HttpError:
    hint = "leave them out: only workflows have settings"
    return bad_request(f"the model {model!r} has no settings.", hint, param="settings", code="unsupported")


async def _until_deadline(pieces: AsyncGenerator[T, None], deadline: Deadline | None) -> AsyncGenerator[T, None]:
    """Yield the pieces that come before the deadline. Raise `QueryTimeout`."""
    async with aclosing(pieces):
        while True:
            async with interrupting(deadline):
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece


def app(name: str, settings: AppSettings, pool: EnginePool) -> App:
    """Import the object that the settings name, and accelerate it. Raise `RegistrationError` or `TraceError`."""
    target = load(settings.object, pool)
    fast = target.fast
    if fast is None and hasattr(target.plain, "deploy") and hasattr(target.plain, "lower"):
        fast = target.plain.deploy(pool, name=name, **target.arguments)
    if fast is None:
        bind = [(object_named(path), engine) for path, engine in settings.bind.items()]
        arguments: dict[str, Any] = {"pool": pool, "app": name}
        if bind:
            arguments["bind"] = bind
        if settings.read_only:
            arguments["read_only"] = settings.read_only
        if settings.prompt_cache:
            arguments["prompt_cache"] = True
        arguments |= target.arguments
        fast = accelerate(target.plain, **arguments)
    protocol = protocol_of(fast)
    if protocol is None:
        raise RegistrationError(
            f"app {name!r}: {settings.object} is a {type(target.plain).__qualname__}, which is no app.",
            hint="name a Runnable, a compiled graph, a query or chat engine, or a workflow",
        )
    return App(name, settings, fast, protocol, document_input(name, settings, protocol, fast), PerTenantApp(fast))
